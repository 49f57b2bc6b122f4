"""Strategies: one module each, all of one form."""

from collections.abc import Callable, Sequence

from collapipe.allocation.placement import Placement, PlacementProblem
from collapipe.allocation.strategies.manual import place_manually
from collapipe.allocation.strategies.pipeline import place_equally
from collapipe.allocation.strategies.proportional import place_proportionally
from collapipe.errors import InvalidInputError

Strategy = Callable[[PlacementProblem], Placement]


def strategy_for(name: str, segments: Sequence[Sequence[int]] = ()) -> Strategy:
    """Finds a strategy.

    Args:
        name: `pipeline`, `proportional` or `manual`.
        segments: For `manual`: blocks of each device, one list a round.

    Raises:
        InvalidInputError: There is none of that name.
    """
    strategies: dict[str, Strategy] = {
        "pipeline": place_equally,
        "proportional": place_proportionally,
        "manual": lambda problem: place_manually(problem, segments),
    }
    if name not in strategies:
        raise InvalidInputError(
            f"there is no strategy {name!r}: use one of {', '.join(strategies)}"
        )
    return strategies[name]
