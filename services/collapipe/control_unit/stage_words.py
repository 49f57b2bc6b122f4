"""Says what the stages of a cluster wait for, and why an attempt ends because of them."""

from collections.abc import Sequence

from collapipe.errors import AttemptFailedError, CollapipeError, PeerLostError
from collapipe.job_life.stage_progress import Hangs, StagePhase, StageProgress, Stalled

_PHASES = {
    StagePhase.CONFIGURING: "configuring stages",
    StagePhase.EVALUATING: "the evaluation",
    StagePhase.GENERATING: "the answers",
    StagePhase.FINISHING: "finishing the round",
    StagePhase.COPYING: "copying optimizer states",
}


def listed(host_ids: Sequence[str]) -> str:
    """Writes "a", "a and b" or "a, b and c"."""
    *first, last = host_ids
    return f"{', '.join(first)} and {last}" if first else last


def hosts_do(host_ids: Sequence[str], verb: str) -> str:
    """Writes "a waits", or "a and b wait"."""
    return f"{listed(host_ids)} {verb}{'s' * (len(host_ids) == 1)}"


def _phase(progress: StageProgress) -> str:
    if progress.phase is StagePhase.TRAINING:
        return f"step {progress.step_index}"
    return _PHASES[progress.phase]


def what_stages_wait_for(progress: StageProgress, now: float) -> str:
    """Returns what every stage waited for at the last look; empty while some stage computes and is not slow.

    Args:
        now: On the clock of `progress`.
    """
    phase = _phase(progress)
    if progress.computing and progress.is_slow(now):
        return (
            f"{phase}: {hosts_do(progress.computing, 'compute')} slowly: nothing has moved for "
            f"{progress.computed_seconds(now):.0f} s, and the round is given up after {progress.limit_seconds:.0f} s"
        )
    if not all(seen.waits_to for seen in progress.hosts.values()):
        return ""
    # A person wants to know the hosts that wait for something else than a command of this control unit.
    tasks: dict[str, list[str]] = {}
    for host_id, seen in progress.hosts.items():
        if not seen.is_idle:
            tasks.setdefault(seen.waits_to, []).append(host_id)
    told = [f"{hosts_do(host_ids, 'wait')} to {task}" for task, host_ids in tasks.items()]
    return f"{phase}: {'; '.join(told)}" if told else phase


def error_that_ends(trouble: Stalled | Hangs, progress: StageProgress) -> CollapipeError:
    """Returns the error with which an attempt ends whose stages are stalled or hang."""
    phase = _phase(progress)
    if isinstance(trouble, Hangs):
        message = (
            f"{listed(trouble.host_ids)} computed for more than {progress.limit_seconds:.0f} s ({phase}) while nothing "
            "moved: a processor hangs, or is far slower than before"
        )
        # If it was another one of several, the next attempt blames that one.
        return PeerLostError(trouble.host_ids[-1], message)
    waits = (f"{host_id} waits to {seen.waits_to}" for host_id, seen in progress.hosts.items())
    return AttemptFailedError(
        f"nothing has moved for {progress.silence_seconds:g} s, although all hosts answer ({phase}: {'; '.join(waits)}): a "
        "message was lost, or a host hangs. If this comes back, restart the host for which the others wait"
    )
