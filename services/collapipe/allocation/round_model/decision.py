"""The answer of a strategy."""

from dataclasses import dataclass

from collapipe.allocation.round_model.prediction import RoundPrediction
from collapipe.allocation.round_model.problem import RoundPlan


@dataclass(frozen=True)
class Decision:
    """The plans of a round, and why the strategy chose them.

    Args:
        kept: Why the strategy did not take the best plan that it could search for: "hysteresis",
            "solver_failed" or "solver_slow". Empty if it did.
        notes: Further sentences for the log.
    """

    plans: RoundPlan
    prediction: RoundPrediction
    kept: str = ""
    notes: tuple[str, ...] = ()
