"""The answer of a strategy."""

from dataclasses import dataclass

from collapipe.allocation.round_model.prediction import RoundPrediction
from collapipe.allocation.round_model.problem import RoundPlan


@dataclass(frozen=True)
class Decision:
    """The plans of a round, and why the strategy chose them.

    Args:
        kept: Why the plans are not the best ones: "hysteresis", "solver_failed" or "solver_slow". Empty if
            they are.
        notes: Further sentences for the log.
    """

    plans: RoundPlan
    prediction: RoundPrediction
    kept: str = ""
    notes: tuple[str, ...] = ()
