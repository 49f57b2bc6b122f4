"""Trial rounds, in which a baseline finds its best number of micro-batches before the first round.

A baseline cannot choose M (docs/scheduling.md, "Strategies"). For a fair comparison it gets the M that suits
it best.
"""

from collapipe.allocation import decide_round, violations
from collapipe.allocation.round_model.problem import RoundPlan, RoundProblem
from collapipe.errors import InfeasibleError
from collapipe.simulation.outcome import run_round
from collapipe.simulation.scenario import Scenario
from collapipe.simulation.simulated_system import SimulatedSystem

_NUM_TRIALS = 4
_FIRST_TRIAL = 1_000_000_000
"""Round index of the first trial. No real round has such an index, so trials draw conditions of their own."""


def micro_batch_options(
    scenario: Scenario, system: SimulatedSystem, strategy: str
) -> tuple[int, ...]:
    """Returns the values of M that a strategy may use.

    `dssra` may use all values of the scenario. A baseline uses the value with the shortest trials.

    Raises:
        InfeasibleError: A baseline has no feasible plan with any M.
    """
    options = scenario.training.micro_batch_options
    if strategy == "dssra" or len(options) == 1:
        return options
    conditions = [system.draw(_FIRST_TRIAL + trial) for trial in range(_NUM_TRIALS)]
    seconds: dict[int, float] = {}
    reason = ""
    for option in options:
        try:
            total = 0.0
            for drawn in conditions:
                problem = system.problem(drawn, micro_batch_options=(option,))
                plans = decide_round(problem, strategy).plans
                check_feasible(problem, plans)
                total += run_round(problem, plans, forward_share=system.forward_share).seconds
            seconds[option] = total
        except InfeasibleError as error:
            reason = str(error)
    if not seconds:
        raise InfeasibleError(reason)
    return (min(seconds, key=seconds.__getitem__),)


def check_feasible(problem: RoundProblem, plans: RoundPlan) -> None:
    """Raises `InfeasibleError` if plans break a limit: baselines respect only some of them."""
    broken = violations(problem, plans)
    if broken:
        raise InfeasibleError("; ".join(broken))
