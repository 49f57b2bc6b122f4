"""What the scheduler decides, and on what."""

from definitions.elements import (
    COUNT,
    IN_CLUSTER,
    NONE,
    PERCENT,
    SECONDS,
    Definition,
    answer,
    graph,
)

SCHEDULER = Definition(
    uid="collapipe-scheduler",
    title="CollaPipe: scheduler",
    description="What the scheduler decides: segments, moves, energy queues, and how good its predictions are.",
    answers=[
        answer(
            "Largest segment",
            ("topk(1, max by (host) (collapipe_placed_blocks))", "{{host}}"),
            "suffix: blocks",
            "The device that runs most blocks of the model. Is it the fastest one? Segments over time shows how that came.",
        ),
        answer(
            "Largest backlog",
            ("topk(1, max by (host) (collapipe_backlog))", "{{host}}"),
            "suffix: rounds",
            "By how many rounds' energy budgets a device is over what it may use in the long run. Growing: the plan must become "
            "slower, or the budget larger.",
            thresholds=[(1, "orange"), (10, "red")],
            no_value="no energy budgets",
        ),
        answer(
            "Time to decide",
            (
                "sum(increase(collapipe_plan_solve_seconds_sum[10m])) "
                "/ (sum(increase(collapipe_plan_solve_seconds_count[10m])) > 0)",
                "a round",
            ),
            SECONDS,
            "Mean of ten minutes. It passes before every round: orange from one second on.",
            thresholds=[(1, "orange"), (5, "red")],
            names=False,
        ),
        answer(
            "Rounds decided blindly",
            (
                'sum(increase(collapipe_plans_kept_total{reason!="hysteresis"}[10m])) '
                "+ sum(increase(collapipe_plans_infeasible_total[10m]))",
                "rounds",
            ),
            COUNT,
            "Of the last ten minutes: no telemetry, or no solution in time, or none at all. What has changed since the last "
            "plan is not used.",
            thresholds=[(0.5, "red")],
            names=False,
            decimals=0,
        ),
    ],
    panels=[
        graph(
            "Segments over time",
            [("max by (host) (collapipe_placed_blocks)", "{{host}}")],
            "suffix: blocks",
            "Blocks that each device runs, stacked: the sum is the model, on all clusters. A band that grows took blocks from one that "
            "shrinks.",
            stacked=True,
            steps=True,
        ),
        graph(
            "Round time, predicted and observed",
            [
                ("max(collapipe_round_predicted_seconds) > 0", "predicted"),
                ("max(collapipe_round_observed_seconds) > 0", "observed"),
            ],
            SECONDS,
            "Of the last round that was predicted from measurements. After a change of the world they part for one round, and "
            "meet again.",
            steps=True,
        ),
        graph(
            "Backlog of the energy queues",
            [("max by (host) (collapipe_backlog)", "{{host}}")],
            "suffix: rounds",
            "In rounds' budgets. Bounded: every device keeps its budget in the long run. Rising without end: BacklogGrowing.",
            steps=True,
        ),
        graph(
            "Parts of the objective",
            [("max by (part) (collapipe_objective)", "{{part}}")],
            NONE,
            "What is minimised: `penalty` is the weighted time of a round, `drift` what the energy queues weigh. Drift above penalty: "
            "energy decides, not speed.",
            stacked=True,
            steps=True,
        ),
        graph(
            "Blocks that changed hands",
            [
                (
                    f"sum by (cluster) (increase(collapipe_moved_blocks_total{{{IN_CLUSTER}}}[$__rate_interval]))",
                    "cluster {{cluster}}",
                )
            ],
            "suffix: blocks",
            "Each move costs time to carry weights. Moves in every round: raise schedule.hysteresis.",
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
            "hysteresis: a new plan would not have paid off, which is the ordinary case. All others: the old plan ran because "
            "nothing better could be decided.",
            bars=True,
        ),
        graph(
            "Time to decide, median and worst",
            [
                (
                    "histogram_quantile(0.5, sum by (le) (rate(collapipe_plan_solve_seconds_bucket[5m])))",
                    "median",
                ),
                (
                    "histogram_quantile(0.95, sum by (le) (rate(collapipe_plan_solve_seconds_bucket[5m])))",
                    "95 %",
                ),
            ],
            SECONDS,
            "Over five minutes; within the buckets of the histogram. Grows with devices times blocks.",
        ),
        graph(
            "Prediction error",
            [("job:prediction_error:ratio_increase30m", "mean of half an hour")],
            PERCENT,
            "Distance of the predicted from the observed time of a round, over the observed.",
            thresholds=[(0.3, "red")],
        ),
        graph(
            "Micro-batches of a mini-batch",
            [
                (
                    f"max by (cluster) (collapipe_planned_micro_batches{{{IN_CLUSTER}}})",
                    "cluster {{cluster}}",
                )
            ],
            COUNT,
            "More of them fill the pipeline better and cost more overhead: the scheduler weighs it anew every round.",
            steps=True,
        ),
        graph(
            "Telemetry that failed",
            [
                (
                    "sum by (source) (increase(collapipe_telemetry_failures_total[$__rate_interval]))",
                    "{{source}}",
                )
            ],
            COUNT,
            "Questions to the source of telemetry without an answer. Above 0, rounds keep their plan.",
            bars=True,
        ),
    ],
)
