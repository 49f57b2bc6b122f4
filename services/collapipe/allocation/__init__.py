"""The mathematics of design/dssra.md: numpy and cvxpy only. No network, no torch, no clock, no files.

Reading order: `problem` says what is decided about, `prediction` what a decision leads to, `strategies` who decides.
"""

from collapipe.allocation.round_model.prediction import RoundPrediction, predict, violations
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
from collapipe.allocation.round_model.virtual_queue import VirtualQueue
from collapipe.allocation.strategies import Strategy, strategy_for

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
    "Strategy",
    "VirtualQueue",
    "WiredLink",
    "predict",
    "strategy_for",
    "violations",
]
