"""Solves for bandwidth shares alone, like `allocate` where it has no power to choose."""

from dataclasses import replace

import numpy as np

from collapipe.allocation.round_model.prediction import predict
from collapipe.allocation.round_model.problem import RoundPlan, RoundProblem
from collapipe.allocation.search.bandwidth import Allocation, solve_shares
from collapipe.allocation.search.shared_links import shared_links


def share_at_given_powers(problem: RoundProblem, plans: RoundPlan) -> Allocation:
    """Finds the shares that minimise docs/scheduling.md (13) with the powers of the plans."""
    links = shared_links(problem, plans)
    assert links is not None
    watts, shares = links.powers(plans), links.equal_shares()
    none = np.zeros(0)
    start = links.point(shares, watts, none, none)
    solved, prices = solve_shares(links, start, np.zeros_like(links.radio))
    found = links.applied(plans, replace(solved, watts=watts))
    return Allocation(found, predict(problem, found), prices)
