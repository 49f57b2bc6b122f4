"""The mathematics of design/dssra.md: numpy and cvxpy only. No network, no torch, no clock, no files.

Reading order: `problem` says what is decided about, `prediction` what a decision leads to, `strategies` who decides.
"""

from collapipe.allocation.prediction import RoundPrediction, predict, violations
from collapipe.allocation.problem import (
    ClusterPlan,
    ClusterProblem,
    Convergence,
    Host,
    LinkPlan,
    ModelCost,
    Radio,
    RoundPlan,
    RoundProblem,
    Segment,
    StagePlan,
    Wire,
)
from collapipe.allocation.queues import VirtualQueue
from collapipe.allocation.strategies import Strategy, strategy_for

__all__ = [
    "ClusterPlan",
    "ClusterProblem",
    "Convergence",
    "Host",
    "LinkPlan",
    "ModelCost",
    "Radio",
    "RoundPlan",
    "RoundPrediction",
    "RoundProblem",
    "Segment",
    "StagePlan",
    "Strategy",
    "VirtualQueue",
    "Wire",
    "predict",
    "strategy_for",
    "violations",
]
