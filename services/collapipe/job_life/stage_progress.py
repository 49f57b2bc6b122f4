"""Decides whether the stages of a cluster make progress in a round.

If all stages wait and nothing moves, a message was lost, or a host hangs. If some compute for far longer than before while nothing
moves, a processor hangs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

_TIMES_THE_LONGEST_STEP = 10
_LEAST_SILENCES = 6
"""A stage may compute for at least this many times the allowed silence."""
_TIMES_THE_PREDICTION = 30
_FIRST_STEP_SECONDS = 3600.0
"""How long a stage may compute before any step of the round is done, if nothing is predicted. A single host that runs all units
receives nothing during a whole step."""
_SLOW_SHARE = 1 / 3
"""A stage is shown as slow after this share of the time that it may compute."""


class StagePhase(Enum):
    """What the stages of a cluster are doing together."""

    CONFIGURING = auto()
    EVALUATING = auto()
    TRAINING = auto()
    GENERATING = auto()
    FINISHING = auto()
    """The stages push their weights."""
    COPYING = auto()
    """The control unit copies the optimizer states of a candidate."""


@dataclass(frozen=True)
class HostSeen:
    """What a stage did when the control unit last looked.

    Args:
        waits_to: What its host waits for; empty if it computes.
        is_idle: Whether it waits for a command of the control unit.
    """

    waits_to: str
    is_idle: bool = False


@dataclass(frozen=True)
class Stalled:
    """All stages wait, and nothing moves."""


@dataclass(frozen=True)
class Hangs:
    """Some hosts compute for too long."""

    host_ids: tuple[str, ...]


@dataclass(frozen=True)
class StageProgress:
    """What the stages of one cluster do while a round runs. Times are in seconds from any fixed start.

    Args:
        silence_seconds: How long nothing may change while all stages wait.
        predicted_step_seconds: The predicted time of a training step; 0 without a prediction.
        changed_at: Since when all stages have waited and nothing has changed.
        moved_at: Since when stages have computed and no bytes have arrived.
        phase: What the stages are doing.
        step_index: The training step that began last, if the phase is training.
        is_working: Whether micro-batches are under way, and the control unit waits for the stages.
        hosts: What the last look has found, by host id.
        received_bytes: Bytes that have arrived over all links, so that a slow link counts as progress.
        step_began_at: When the present training step began; `None` before the first one. An evaluation comes before it, and may
            take any time.
        longest_step_seconds: `None` before a step has ended.
    """

    silence_seconds: float
    predicted_step_seconds: float
    changed_at: float
    moved_at: float
    phase: StagePhase = StagePhase.CONFIGURING
    step_index: int = 0
    is_working: bool = False
    hosts: Mapping[str, HostSeen] = field(default_factory=dict)
    received_bytes: int = 0
    step_began_at: float | None = None
    longest_step_seconds: float | None = None

    @property
    def computing(self) -> tuple[str, ...]:
        """The hosts that compute while micro-batches are under way."""
        if not self.is_working:
            return ()
        return tuple(host_id for host_id, seen in self.hosts.items() if not seen.waits_to)

    @property
    def limit_seconds(self) -> float:
        """How long stages may compute while nothing moves."""
        if self.longest_step_seconds is None:
            return first_limit_seconds(self.silence_seconds, self.predicted_step_seconds)
        most = _TIMES_THE_LONGEST_STEP * self.longest_step_seconds
        return max(_LEAST_SILENCES * self.silence_seconds, most)

    def computed_seconds(self, now: float) -> float:
        """Returns how long stages have computed while nothing moved; 0 before the first step."""
        return 0.0 if self.step_began_at is None else now - self.moved_at

    def is_slow(self, now: float) -> bool:
        """Returns whether stages have computed for so long that a person should see it."""
        return self.computed_seconds(now) > _SLOW_SHARE * self.limit_seconds

    def trouble(self, now: float) -> Stalled | Hangs | None:
        """Returns why the round has to end; `None` if it need not."""
        if now - self.changed_at > self.silence_seconds:
            return Stalled()
        if self.computed_seconds(now) > self.limit_seconds:
            return Hangs(self.computing)
        return None


def first_limit_seconds(silence_seconds: float, predicted_step_seconds: float) -> float:
    """Returns how long stages may compute while nothing moves, before a step of the round is done. The arguments are those of
    `StageProgress`."""
    most = _TIMES_THE_PREDICTION * predicted_step_seconds or _FIRST_STEP_SECONDS
    return max(_LEAST_SILENCES * silence_seconds, most)


def begin(silence_seconds: float, predicted_step_seconds: float, now: float) -> StageProgress:
    """Returns the state when a round begins."""
    return StageProgress(silence_seconds, predicted_step_seconds, changed_at=now, moved_at=now)


def enter(progress: StageProgress, phase: StagePhase) -> StageProgress:
    """Returns the state when a phase other than training begins."""
    return replace(progress, phase=phase)


def enter_step(progress: StageProgress, step_index: int, now: float) -> StageProgress:
    """Returns the state when the micro-batches of a training step are about to be sent."""
    entered = replace(progress, phase=StagePhase.TRAINING, step_index=step_index)
    return entered if progress.step_began_at is not None else _time_step(entered, now)


def work(progress: StageProgress, now: float) -> StageProgress:
    """Returns the state when the control unit begins to wait for stages that have micro-batches."""
    return replace(progress, is_working=True, changed_at=now, moved_at=now)


def rest(progress: StageProgress) -> StageProgress:
    """Returns the state when the control unit does not wait for the stages any more."""
    return replace(progress, is_working=False)


def end_step(progress: StageProgress, now: float) -> StageProgress:
    """Returns the state when all stages have ended a training step. The next one counts from now on."""
    began, longest = progress.step_began_at, progress.longest_step_seconds
    if began is not None:
        progress = replace(progress, longest_step_seconds=max(longest or 0.0, now - began))
    return _time_step(progress, now)


def see(
    progress: StageProgress, hosts: Mapping[str, HostSeen], received_bytes: int, now: float
) -> StageProgress:
    """Returns the state after a look at the stages. The arguments are those of `StageProgress`."""
    has_moved = received_bytes != progress.received_bytes
    has_changed = has_moved or hosts != progress.hosts
    seen = replace(progress, hosts=hosts, received_bytes=received_bytes)
    if has_changed or seen.computing or not seen.is_working:
        seen = replace(seen, changed_at=now)
    if has_moved or not seen.computing:
        seen = replace(seen, moved_at=now)
    return seen


def _time_step(progress: StageProgress, now: float) -> StageProgress:
    return replace(progress, step_began_at=now, changed_at=now, moved_at=now)
