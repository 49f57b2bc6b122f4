"""The dashboard of the scheduler: its decisions, and what they rest on."""

from definitions.elements import (
    COUNT,
    IN_CLUSTER,
    NONE,
    PERCENT,
    SECONDS,
    Definition,
    answer,
    by_cluster,
    graph,
    round_time,
)

_SOLVE = "collapipe_plan_solve_seconds"


def _solve_quantile(quantile: float) -> str:
    return f"histogram_quantile({quantile:g}, sum by (le) (rate({_SOLVE}_bucket[5m])))"


SCHEDULER = Definition(
    uid="collapipe-scheduler",
    title="CollaPipe: scheduler",
    description="What the scheduler decides: segments, moves and energy queues, and how good its predictions are.",
    answers=[
        answer(
            "Largest segment",
            ("topk(1, max by (host) (collapipe_placed_blocks))", "{{host}}"),
            "suffix: blocks",
            "The device with the most blocks, which should be the fastest device. Segments over time shows how it got them.",
        ),
        answer(
            "Largest backlog",
            ("topk(1, max by (host) (collapipe_backlog))", "{{host}}"),
            "suffix: rounds",
            "Energy that a device has used beyond its long-term budget, in budgets of one round. If it grows without end, the "
            "plan must become slower or the budget larger.",
            thresholds=[(1, "orange"), (10, "red")],
            no_value="no energy budgets",
        ),
        answer(
            "Time to decide",
            (
                f"sum(increase({_SOLVE}_sum[10m])) / (sum(increase({_SOLVE}_count[10m])) > 0)",
                "a round",
            ),
            SECONDS,
            "Mean over ten minutes. Every round begins with this time. From one second on, the panel is orange.",
            thresholds=[(1, "orange"), (5, "red")],
            names=False,
        ),
        answer(
            "Rounds without a new decision",
            (
                'sum(increase(collapipe_plans_kept_total{reason!="hysteresis"}[10m])) '
                "+ sum(increase(collapipe_plans_infeasible_total[10m]))",
                "rounds",
            ),
            COUNT,
            "Rounds of the last ten minutes without telemetry, without a solution in time, or without any feasible plan. They "
            "ignore everything that changed since the previous plan.",
            thresholds=[(0.5, "red")],
            names=False,
            decimals=0,
        ),
    ],
    panels=[
        graph(
            "Segments over time",
            ("max by (host) (collapipe_placed_blocks)", "{{host}}"),
            "suffix: blocks",
            "Blocks of each device, stacked. The sum is the number of blocks of the model, times the number of clusters. A growing "
            "band took its blocks from a shrinking one.",
            stacked=True,
            steps=True,
        ),
        round_time(),
        graph(
            "Backlog of the energy queues",
            ("max by (host) (collapipe_backlog)", "{{host}}"),
            "suffix: rounds",
            "Backlog in budgets of one round. While it is bounded, every device keeps its long-term budget. If it rises without "
            "end, the alert BacklogGrowing fires.",
            steps=True,
            no_value="no device has an energy budget",
        ),
        graph(
            "Terms of the objective",
            ("max by (part) (collapipe_objective)", "{{part}}"),
            NONE,
            "The scheduler minimises the sum. `penalty` is the weighted time of a round, and `drift` is the weight of the energy "
            "queues. If drift is larger than penalty, energy decides instead of speed.",
            stacked=True,
            steps=True,
        ),
        graph(
            "Moved blocks",
            by_cluster(
                f"increase(collapipe_moved_blocks_total{{{IN_CLUSTER}}}[$__rate_interval])", "sum"
            ),
            "suffix: blocks",
            "Each move takes time, because weights are transferred. If blocks move in every round, raise schedule.hysteresis.",
            bars=True,
        ),
        graph(
            "Kept plans",
            [
                (
                    "sum by (reason) (increase(collapipe_plans_kept_total[$__rate_interval]))",
                    "{{reason}}",
                ),
                ("sum(increase(collapipe_plans_infeasible_total[$__rate_interval]))", "infeasible"),
            ],
            COUNT,
            "hysteresis means that a new plan would not have saved enough time, which is the ordinary case. With any other reason, "
            "the scheduler could not find a better plan and kept the old one.",
            bars=True,
        ),
        graph(
            "Time to decide, median and worst",
            [(_solve_quantile(0.5), "median"), (_solve_quantile(0.95), "95 %")],
            SECONDS,
            "Over five minutes, as precise as the buckets of the histogram. It grows with the number of devices and blocks.",
        ),
        graph(
            "Prediction error",
            ("job:prediction_error:ratio_increase30m", "mean over half an hour"),
            PERCENT,
            "Difference between the predicted and the observed time of a round, divided by the observed time.",
            thresholds=[(0.3, "red")],
        ),
        graph(
            "Micro-batches of a mini-batch",
            by_cluster(f"collapipe_planned_micro_batches{{{IN_CLUSTER}}}"),
            COUNT,
            "More micro-batches fill the pipeline better, but each has a fixed cost. The scheduler chooses their number anew in "
            "every round.",
            steps=True,
        ),
        graph(
            "Failed telemetry queries",
            (
                "sum by (source) (increase(collapipe_telemetry_failures_total[$__rate_interval]))",
                "{{source}}",
            ),
            COUNT,
            "Queries to the telemetry source without an answer. While they fail, rounds keep their plan.",
            bars=True,
            no_value="no query has failed",
        ),
    ],
)
