"""What the messages of a control unit about its round may contain."""

from typing import Any

from collapipe.evaluation import ROWS, compute_metrics
from collapipe.rpc import MOST_OF_FP32, MOST_TOLD, SHOWN, impossible_value
from collapipe.v1 import control_unit_pb2, job_pb2, plan_pb2

_MOST_BYTES = 1 << 18
"""Largest message, without losses. A hundred units and a hundred devices need a tenth of it."""
_BYTES_OF_STEP = 32
"""What each step of the optimizer adds to that: its loss and its gradient norm take 16 bytes. A step may be a micro-batch."""
_BYTES_OF_LABEL = 150
"""What each label adds: three counts with their names."""
_MOST_GROWTH = 100
"""How many times the rows that a cluster has loaded it may train on later, because its files may grow."""
_OF_FP32 = dict.fromkeys(("loss", "losses", "gradient_norms"), MOST_OF_FP32)


def mistake_in(
    response: control_unit_pb2.RunRoundResponse,
    request: control_unit_pb2.RunRoundRequest,
    task_kind: str,
    num_rows: int,
) -> str:
    """Returns what cannot be true in a message about a round, in words; empty if nothing is wrong.

    Args:
        num_rows: Training rows that the cluster has loaded.
    """
    most_steps = request.local_steps * max(1, request.plan.num_micro_batches)
    most_bytes = _MOST_BYTES + _BYTES_OF_STEP * most_steps + _BYTES_OF_LABEL * len(request.labels)
    if response.ByteSize() > most_bytes:
        return f"a message of {response.ByteSize()} bytes, over the limit of {most_bytes}"
    match response.WhichOneof("event"):
        case "progress":
            told = response.progress
            return _impossible(told) or _stage(told.stages, request.plan)
        case "evaluation":
            if not request.evaluate:
                return "an evaluation that was not asked for"
            return _counts(dict(response.evaluation.sums), task_kind)
        case "prepared":
            return _result(response.prepared, request, num_rows)
    return ""


def _counts(sums: dict[str, float], task_kind: str) -> str:
    if not sums:
        return ""
    if sums.get(ROWS, 0.0) <= 0 or not all(0 <= each <= MOST_TOLD for each in sums.values()):
        return f"the counts {str(sums)[:SHOWN]}, which must be 0 to {MOST_TOLD:g}, with a number of rows above 0"
    try:
        compute_metrics(task_kind, sums)
    except (LookupError, ArithmeticError, ValueError) as error:
        return (
            f"the counts {str(sums)[:SHOWN]}, from which the metric cannot be computed ({error!r})"
        )
    return ""


def _result(
    prepared: control_unit_pb2.RoundPrepared,
    request: control_unit_pb2.RunRoundRequest,
    num_rows: int,
) -> str:
    state, summary, plan = prepared.state, prepared.summary, request.plan
    trained = max(state.num_samples, state.cursor.num_rows)
    if trained > _MOST_GROWTH * max(num_rows, 1):
        return f"{trained} training rows, but it has loaded {num_rows}, and may have {_MOST_GROWTH} times as many"
    expected = plan.cluster_index, [unit.unit_index for unit in request.base.units]
    found = state.cluster_index, [unit.unit_index for unit in state.units]
    if found != expected:
        return (
            f"the state of cluster {found[0]} with units {str(found[1])[:SHOWN]}, but its round has cluster {expected[0]} with units "
            f"{str(expected[1])[:SHOWN]}"
        )
    for unit in state.units:
        for digest in (unit.weights_digest, unit.optimizer_digest, unit.frozen_digest):
            if digest and (len(digest) != 64 or digest.strip("0123456789abcdef")):
                return f"{digest[:SHOWN]!r} as a digest of unit {unit.unit_index}, which must be a SHA-256"
    if summary.local_steps > request.local_steps:
        return (
            f"{summary.local_steps} trained mini-batches, but the round has {request.local_steps}"
        )
    most_steps = request.base.step_index + len(summary.losses)
    if not request.base.step_index <= state.step_index <= most_steps:
        return (
            f"{state.step_index} optimizer steps of the job, but there were {request.base.step_index} before the round and "
            f"{most_steps} after it"
        )
    return _impossible(prepared) or _stage(
        [*summary.stages, *summary.pushed, *summary.fetched], plan
    )


def _impossible(told: job_pb2.RoundProgress | control_unit_pb2.RoundPrepared) -> str:
    return impossible_value(told, _OF_FP32, most_characters=_MOST_BYTES)


def _stage(measured: Any, plan: plan_pb2.Plan) -> str:
    """Says which host in measurements of hosts has no stage."""
    hosts = {stage.host_id for stage in plan.stages}
    wrong = next((one.host_id for one in measured if one.host_id not in hosts), None)
    if wrong is None:
        return ""
    return f"a measurement of {wrong[:SHOWN]!r}, which has no stage in its plan"
