"""Reads the decisions of rounds that the scheduler has recorded as JSON."""

from collections.abc import Mapping
from typing import Any

from collapipe.v1 import plan_pb2


def prediction_of(decision: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the prediction of a round. It is empty without a decision, or if speeds were guessed for it."""
    found: dict[str, Any] = {} if decision.get("guessed") else decision.get("prediction", {})
    return found


def prediction_of_plan(decision: Mapping[str, Any], plan: plan_pb2.Plan) -> dict[str, Any]:
    """Returns what is predicted of a cluster. Its `stages` have no `memory_bytes` if nobody has measured activations.

    It is empty for a cluster that kept the result of an earlier attempt: it keeps its plan, too, and the decision has another one.
    """
    clusters, index = prediction_of(decision).get("clusters", ()), plan.cluster_index
    found: dict[str, Any] = clusters[index] if index < len(clusters) else {}
    stages = found.get("stages", ())
    hosts = [stage.host_id for stage in plan.stages]
    if not found or [stage["host_id"] for stage in stages] != hosts:
        return {}
    model = decision.get("question", {}).get("problem", {}).get("model", {})
    if model.get("block_stash_bytes"):
        return found
    # The predicted memory would be that of the weights alone.
    return {**found, "stages": [{**stage, "memory_bytes": None} for stage in stages]}
