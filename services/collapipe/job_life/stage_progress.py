"""Decides whether the stages of a cluster make progress in a round.

If all stages wait and nothing moves, a message was lost, or a host hangs. If some compute for far longer than before while nothing
moves, a processor hangs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_TIMES_THE_LONGEST_STEP = 10
_LEAST_SILENCES = 6
"""A stage may compute for at least this many times the allowed silence."""
_TIMES_THE_PREDICTION = 30
_FIRST_STEP_SECONDS = 3600.0
"""How long a stage may compute before any step of the round is done, if nothing is predicted. A single host that runs all units
receives nothing during a whole step."""
_SLOW_SHARE = 1 / 3
"""A stage is shown as slow after this share of the time that it may compute."""


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
        changed_at: The last time at which something had changed, a stage computed, or no micro-batch was under way.
        moved_at: The last time at which bytes had arrived, or no stage computed.
        is_working: Whether micro-batches are under way.
        waits: What each host waits for, by host id. The text is empty if the host computes.
        received_bytes: Bytes that have arrived over all links, so that a slow link counts as progress.
        step_began_at: When the present training step began; `None` before the first one. An evaluation comes before it, and may
            take any time.
        longest_step_seconds: `None` before a step has ended.
    """

    silence_seconds: float
    predicted_step_seconds: float
    changed_at: float
    moved_at: float
    is_working: bool = False
    waits: Mapping[str, str] = field(default_factory=dict)
    received_bytes: int = 0
    step_began_at: float | None = None
    longest_step_seconds: float | None = None

    @property
    def computing(self) -> tuple[str, ...]:
        """The hosts that compute while micro-batches are under way."""
        return tuple(id for id, task in self.waits.items() if not task) if self.is_working else ()

    @property
    def limit_seconds(self) -> float:
        """How long stages may compute while nothing moves."""
        if self.longest_step_seconds is None:
            most = _TIMES_THE_PREDICTION * self.predicted_step_seconds or _FIRST_STEP_SECONDS
        else:
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


def begin(silence_seconds: float, predicted_step_seconds: float, now: float) -> StageProgress:
    """Returns the state when a round begins."""
    return StageProgress(silence_seconds, predicted_step_seconds, changed_at=now, moved_at=now)


def begin_steps(progress: StageProgress, now: float) -> StageProgress:
    """Returns the state when the first training step begins."""
    return replace(progress, step_began_at=now, changed_at=now, moved_at=now)


def end_step(progress: StageProgress, now: float) -> StageProgress:
    """Returns the state when a training step has ended, and the next one begins."""
    began, longest = progress.step_began_at, progress.longest_step_seconds
    if began is not None:
        progress = replace(progress, longest_step_seconds=max(longest or 0.0, now - began))
    return begin_steps(progress, now)


def see(
    progress: StageProgress,
    waits: Mapping[str, str],
    received_bytes: int,
    now: float,
    *,
    is_working: bool,
) -> StageProgress:
    """Returns the state after a look at the stages. The arguments are those of `StageProgress`."""
    has_moved = received_bytes != progress.received_bytes
    has_changed = has_moved or waits != progress.waits
    seen = replace(progress, waits=waits, received_bytes=received_bytes, is_working=is_working)
    if has_changed or seen.computing or not is_working:
        seen = replace(seen, changed_at=now)
    if has_moved or not seen.computing:
        seen = replace(seen, moved_at=now)
    return seen
