"""Strategies: one module each, all of one form."""

from collections.abc import Callable, Sequence

from collapipe.allocation.round_model.problem import RoundPlan, RoundProblem
from collapipe.allocation.strategies.balanced import place_on_the_fewest, place_proportionally
from collapipe.allocation.strategies.complete_plan import PlaceCluster, complete
from collapipe.allocation.strategies.manual import place_manually
from collapipe.allocation.strategies.pipeline import place_equally
from collapipe.allocation.strategies.whole import place_centrally, place_on_one_device
from collapipe.errors import InvalidInputError

Strategy = Callable[[RoundProblem], RoundPlan]


def strategy_for(name: str, segments: Sequence[Sequence[int]] = ()) -> Strategy:
    """Finds a strategy.

    Args:
        name: As in the job file: `schedule.strategy`. `dssra` is `collapipe.allocation.search.dssra.decide`, whose answer
            also says why a plan was kept; here it answers the plan alone.
        segments: For `manual`: blocks of each device, one list a round.

    Raises:
        InvalidInputError: There is none of that name.
    """
    placements: dict[str, PlaceCluster] = {
        "pipeline": place_equally,
        "titanic": place_on_the_fewest,
        "vanilla_fl": place_on_one_device,
        "centralized": place_centrally,
        "proportional": place_proportionally,
        "manual": lambda problem, cluster: place_manually(problem, cluster, segments),
    }
    if name == "dssra":
        return _decide_jointly
    if name not in placements:
        raise InvalidInputError(
            f"there is no strategy {name!r}: use one of dssra, {', '.join(placements)}"
        )
    place = placements[name]
    return lambda problem: complete(
        problem, [place(problem, cluster) for cluster in problem.clusters]
    )


def _decide_jointly(problem: RoundProblem) -> RoundPlan:
    # cvxpy takes a second to import: only who needs it waits
    from collapipe.allocation.search.dssra import decide

    previous = [cluster.previous for cluster in problem.clusters]
    in_force = tuple(plan for plan in previous if plan is not None)
    return decide(problem, in_force if len(in_force) == len(previous) else None).plans
