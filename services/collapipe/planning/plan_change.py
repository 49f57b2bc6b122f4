"""Says in words how the plans of a round differ from those of the round before."""

import math
from collections.abc import Iterator

from collapipe.allocation import ClusterPlan, predict
from collapipe.planning.decisions import RoundDecision, host_by_block
from collapipe.unit_names import unit_words

_MOST_CHANGES = 3


def say_change(decision: RoundDecision) -> str:
    """Returns what has changed and why; empty if the plans are the same or there were none before."""
    problem = decision.question.problem
    changes = [
        f"cluster {index}: {change}" if len(problem.clusters) > 1 else change
        for index, cluster in enumerate(problem.clusters)
        if cluster.previous is not None
        for change in _changes(cluster.previous, decision.plans[index])
    ]
    if not changes:
        return ""
    more = f"; {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
    return f"{'; '.join(changes[:_MOST_CHANGES])}{more} ({_why(decision)})"


def _changes(before: ClusterPlan, after: ClusterPlan) -> Iterator[str]:
    held = host_by_block(before)
    moves: dict[tuple[str, str], list[int]] = {}
    for block, host in host_by_block(after).items():
        if block in held and held[block] != host:
            moves.setdefault((held[block], host), []).append(block)
    for (one, other), blocks in moves.items():
        yield f"{other} takes {_block_words(blocks)} from {one}"
    if after.num_micro_batches != before.num_micro_batches:
        yield f"{after.num_micro_batches} micro-batches instead of {before.num_micro_batches}"
    codecs = [[link.codec for link in plan.links] for plan in (before, after)]
    if len(codecs[0]) == len(codecs[1]) and codecs[0] != codecs[1]:
        yield f"codecs {', '.join(codecs[1])} instead of {', '.join(codecs[0])}"


def _block_words(blocks: list[int]) -> str:
    """Names blocks that follow each other. Block i is unit i + 1, and is followed by another unit."""
    return unit_words(blocks[0] + 1, blocks[-1] + 2, blocks[-1] + 3)


def _why(decision: RoundDecision) -> str:
    problem = decision.question.problem
    gone = {
        stage.host_id
        for cluster in problem.clusters
        if cluster.previous is not None
        for stage in cluster.previous.stages
        if stage.host_id not in cluster.hosts
    }
    if gone:
        return f"{', '.join(sorted(gone)[:_MOST_CHANGES])} takes no part now"
    now = decision.prediction.round_seconds
    if decision.guessed or not math.isfinite(now):
        return "speeds or links are not measured yet"
    told = f"predicted: {now:.3g} s for the round"
    if problem.previous is None:
        return told
    before = predict(problem, problem.previous).round_seconds
    saves = now < before < math.inf
    return f"{told}, {before:.3g} s without this change" if saves else told
