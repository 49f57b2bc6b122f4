"""The mathematics of docs/scheduling.md: pure functions, without network, torch or files.

Reading order:

1. `round_model`: the problem of a round, the plan that answers it, and what the plan leads to.
2. `strategies`: the function that decides a round with the strategy of a given name, and the baselines.
3. `search`: the strategy `dssra`, which searches for the plan with the best prediction.
"""

from collapipe.allocation.round_model.limits import violations
from collapipe.allocation.round_model.prediction import RoundPrediction, predict
from collapipe.allocation.round_model.problem import (
    ClusterPlan,
    ClusterProblem,
    Convergence,
    Host,
    LinkPlan,
    ModelCost,
    RadioLink,
    RoundPlan,
    RoundProblem,
    Segment,
    StagePlan,
    WiredLink,
)
from collapipe.allocation.round_model.virtual_queue import backlogs_after
from collapipe.allocation.strategies.decide import decide_round, reference_seconds

__all__ = [
    "ClusterPlan",
    "ClusterProblem",
    "Convergence",
    "Host",
    "LinkPlan",
    "ModelCost",
    "RadioLink",
    "RoundPlan",
    "RoundPrediction",
    "RoundProblem",
    "Segment",
    "StagePlan",
    "WiredLink",
    "backlogs_after",
    "decide_round",
    "predict",
    "reference_seconds",
    "violations",
]
