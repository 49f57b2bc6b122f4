"""The model of a round: what is decided about, and what a decision leads to.

`collapipe.allocation.search` is the other half of `allocation`: it finds good decisions with this model.

Reading order:

1. `problem`: hosts, links, the model and the limits of a round; the plan that answers them.
2. `prediction`: delay, energy, memory and objective of a plan. `limits` checks a plan.
3. `in_flight_windows`: the default in-flight windows.
4. `virtual_queue`: how energy budgets carry over from round to round.
5. `decision`: the answer of a strategy.
6. `convergence_fit`: the constants of the convergence term, fitted to recorded runs.
"""
