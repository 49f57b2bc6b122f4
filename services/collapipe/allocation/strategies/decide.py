"""Decides a round with the strategy of a given name, for the scheduler and for the simulator."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from collapipe.allocation.round_model.decision import Decision
from collapipe.allocation.round_model.limits import violations
from collapipe.allocation.round_model.prediction import predict
from collapipe.allocation.round_model.problem import RoundProblem
from collapipe.allocation.strategies.balanced import (
    place_on_the_best_number,
    place_on_the_fewest,
    place_proportionally,
)
from collapipe.allocation.strategies.complete_plan import PlaceCluster, Stages, complete
from collapipe.allocation.strategies.equal_segments import place_equally
from collapipe.allocation.strategies.manual import place_manually
from collapipe.allocation.strategies.whole_model import place_centrally, place_on_one_device
from collapipe.errors import InfeasibleError, InvalidInputError


def decide_round(
    problem: RoundProblem,
    strategy: str,
    *,
    segments: Sequence[Sequence[int]] = (),
    hysteresis: float = 0.05,
    time_limit_seconds: float | None = None,
) -> Decision:
    """Decides one round.

    Args:
        strategy: Name as in the job file, `schedule.strategy`.
        segments: For `manual`: blocks of each device, one list for each round.
        hysteresis: For `dssra`: share of the penalty that a new placement has to save.
        time_limit_seconds: For `dssra`. `None` means no limit.

    Raises:
        InvalidInputError: No strategy has this name, or `segments` does not fit.
        InfeasibleError: The strategy finds no plan within the limits.
    """
    if strategy == "dssra":
        # Importing cvxpy takes a second, which only this strategy should cost.
        from collapipe.allocation.search.dssra import decide

        return decide(
            problem,
            problem.previous,
            hysteresis=hysteresis,
            time_limit_seconds=time_limit_seconds,
        )
    placements: dict[str, Callable[[RoundProblem], Sequence[Stages]]] = {
        "pipeline": _in_each_cluster(place_equally),
        "titanic": _in_each_cluster(place_on_the_fewest),
        "titanic_best": place_on_the_best_number,
        "vanilla_fl": _in_each_cluster(place_on_one_device),
        "centralized": _in_each_cluster(place_centrally),
        "proportional": _in_each_cluster(place_proportionally),
        "manual": _in_each_cluster(
            lambda problem, cluster: place_manually(problem, cluster, segments)
        ),
    }
    if strategy not in placements:
        raise InvalidInputError(
            f"there is no strategy {strategy!r}: use one of dssra, {', '.join(placements)}"
        )
    found: list[Decision] = []
    for recompute in problem.recompute_options:
        fixed = replace(problem, recompute_options=(recompute,))
        try:
            plans = complete(fixed, placements[strategy](fixed))
        except InfeasibleError:
            if not found and recompute == problem.recompute_options[-1]:
                raise
        else:
            found.append(Decision(plans, predict(problem, plans)))
    return min(
        found, key=lambda one: (len(violations(problem, one.plans)), one.prediction.objective)
    )


def _in_each_cluster(place: PlaceCluster) -> Callable[[RoundProblem], Sequence[Stages]]:
    return lambda problem: [place(problem, cluster) for cluster in problem.clusters]


def reference_seconds(problem_for: Callable[[str], RoundProblem]) -> float | None:
    """Returns tau_ref of docs/scheduling.md (13), the scale of V: the predicted round time of `pipeline`.

    If `pipeline` has no plan, `proportional` stands in for it. If that has none, either, returns `None`.
    `problem_for` returns the problem of a nominal round for a strategy, and may raise `InfeasibleError`.
    """
    for strategy in ("pipeline", "proportional"):
        try:
            decision = decide_round(problem_for(strategy), strategy)
        except InfeasibleError:
            continue
        seconds = decision.prediction.round_seconds
        if seconds > 0 and math.isfinite(seconds):
            return seconds
    return None
