"""The dashboard of the pipelines: what every stage does with its time."""

from definitions.elements import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    IN_CLUSTER,
    PERCENT,
    SECONDS,
    STAGE,
    Definition,
    Query,
    answer,
    by_cluster,
    graph,
    slowest_stage,
)


def _rate(metric: str) -> str:
    return f"rate({metric}{{{IN_CLUSTER}}}[$__rate_interval])"


def _by_stage(function: str, expression: str) -> Query:
    return f"{function} by (cluster, stage, service) ({expression})", STAGE


PIPELINE = Definition(
    uid="collapipe-pipeline",
    title="CollaPipe: pipeline",
    description="What every stage does with its time: computing, waiting, sending, updating.",
    answers=[
        slowest_stage(),
        answer(
            "Bubble ratio of the worst cluster",
            (f"topk(1, cluster:bubble:ratio_rate1m{{{IN_CLUSTER}}})", "cluster {{cluster}}"),
            PERCENT,
            "Share of the time of its mini-batches that the stages of a cluster wait, for the worst cluster. A part of it is the "
            "pipeline filling and emptying: (K-1)/(M+K-1) with K stages and M micro-batches. More than that comes from unequal "
            "stages or full links.",
            thresholds=[(0.4, "orange"), (0.7, "red")],
            decimals=0,
        ),
        answer(
            "Busiest sender",
            (f"topk(1, stage:sending_seconds:rate1m{{{IN_CLUSTER}}})", STAGE),
            PERCENT,
            "Share of the time in which a stage sends, in its busier direction. Near 100 %, its outgoing link holds the job back "
            "(dashboard Links).",
            thresholds=[(0.5, "orange"), (0.8, "red")],
            decimals=0,
        ),
        answer(
            "Slowest micro-batch",
            (f"topk(1, stage:micro_batch_seconds:ratio_increase1m{{{IN_CLUSTER}}})", STAGE),
            SECONDS,
            "Forward and backward pass of one micro-batch at the stage where they take longest. A full pipeline finishes one "
            "micro-batch in this time.",
        ),
    ],
    panels=[
        graph(
            "Computing",
            _by_stage(
                "sum",
                f"{_rate('collapipe_stage_forward_seconds_sum')} + {_rate('collapipe_stage_backward_seconds_sum')}",
            ),
            PERCENT,
            "Share of the time in which a stage runs forward and backward passes. The stage with the highest line is the "
            "bottleneck. If all lines are close together, the plan is balanced.",
            most=1.0,
        ),
        graph(
            "Waiting",
            _by_stage("max", f"stage:waiting_seconds:rate1m{{{IN_CLUSTER}}}"),
            PERCENT,
            "Share of the time in which a stage waits for a neighbour. If all stages wait long, the links are slow. If all but one "
            "wait, that stage is slow. The average is over a minute, because stages count waiting at the end of a mini-batch.",
            most=1.0,
        ),
        graph(
            "Sending",
            (
                f"sum by (service, direction) ({_rate('collapipe_stage_sending_seconds_total')})",
                "{{service}} {{direction}}",
            ),
            PERCENT,
            "Share of the time in which a frame of a stage is encoded, paced or waits for a buffer of the network. Other threads "
            "do this while the stage computes. A frame counts as sent when the network has buffered it. A slow network behind "
            "the buffers shows at the receiver (dashboard Links).",
            most=1.0,
        ),
        graph(
            "Updating",
            _by_stage("sum", _rate("collapipe_stage_update_seconds_total")),
            PERCENT,
            "Share of the time in the optimizer. The stage does nothing else meanwhile.",
        ),
        graph(
            "Bubble ratio",
            by_cluster(f"cluster:bubble:ratio_rate1m{{{IN_CLUSTER}}}"),
            PERCENT,
            "Share of the time of its mini-batches that all stages of a cluster together wait.",
            most=1.0,
            thresholds=[(0.7, "red")],
        ),
        graph(
            "Time of a micro-batch",
            _by_stage("max", f"stage:micro_batch_seconds:ratio_increase1m{{{IN_CLUSTER}}}"),
            SECONDS,
            "Forward and backward pass. After a step up, the device is slower or has more blocks.",
        ),
        graph(
            "Micro-batches in flight",
            [
                _by_stage("max", f"collapipe_stage_in_flight{{{IN_CLUSTER}}}"),
                (
                    f"max by (cluster) (collapipe_planned_micro_batches{{{IN_CLUSTER}}})",
                    "planned, cluster {{cluster}}",
                ),
            ],
            COUNT,
            "Most micro-batches that a stage held at once, and the number in a mini-batch. A stage that holds fewer than the "
            "stages behind it has nothing to do before the activation gradients return.",
            steps=True,
        ),
        graph(
            "Stash",
            _by_stage("max", f"collapipe_stage_stash_bytes{{{IN_CLUSTER}}}"),
            BYTES,
            "Largest memory of activations that wait for their gradients. More micro-batches, or training.recompute, make it "
            "smaller.",
            steps=True,
        ),
        graph(
            "Activations and gradients sent",
            (
                'sum by (service, direction) (rate(collapipe_link_bytes_total{way="sent", '
                f"{IN_CLUSTER}}}[$__rate_interval]))",
                "{{service}} {{direction}}",
            ),
            BYTES_PER_SECOND,
            "Bytes before any codec. Activations and their gradients have the same size, at every link of a pipeline.",
            span=24,
        ),
    ],
)
