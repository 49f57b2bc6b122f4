"""What every stage does with its time."""

from definitions.elements import (
    BYTES,
    BYTES_PER_SECOND,
    COUNT,
    IN_CLUSTER,
    PERCENT,
    SECONDS,
    STAGE,
    Definition,
    answer,
    graph,
)

_OF_STAGE = "sum by (cluster, stage, service)"


def _rate(metric: str) -> str:
    return f"rate({metric}{{{IN_CLUSTER}}}[$__rate_interval])"


PIPELINE = Definition(
    uid="collapipe-pipeline",
    title="CollaPipe: pipeline",
    description="What every stage does with its time: computing, waiting, sending, updating.",
    answers=[
        answer(
            "Slowest stage",
            (
                f"topk(1, stage:busy_seconds:rate1m{{{IN_CLUSTER}}} + stage:update_seconds:rate1m{{{IN_CLUSTER}}})",
                STAGE,
            ),
            PERCENT,
            "Computes the largest share of the time, so the others wait for it. Near 100 %: only less work there, or a faster "
            "device, makes the job faster.",
            decimals=0,
        ),
        answer(
            "Bubble ratio of the worst cluster",
            (
                f"topk(1, cluster:bubble:ratio_rate1m{{{IN_CLUSTER}}})",
                "cluster {{cluster}}",
            ),
            PERCENT,
            "Share of their mini-batches that the stages of a cluster wait, of the worst one. Some is the pipeline filling and "
            "emptying: (K-1)/(M+K-1) with K stages and M micro-batches. More: unlike stages, or full links.",
            thresholds=[(0.4, "orange"), (0.7, "red")],
            decimals=0,
        ),
        answer(
            "Fullest way out of a stage",
            (f"topk(1, stage:sending_seconds:rate1m{{{IN_CLUSTER}}})", STAGE),
            PERCENT,
            "Share of the time in which a stage has a frame on its way to the network, of the busier direction. Near 100 %: "
            "the link there holds the job back (dashboard Links).",
            thresholds=[(0.5, "orange"), (0.8, "red")],
            decimals=0,
        ),
        answer(
            "Slowest micro-batch",
            (f"topk(1, stage:micro_batch_seconds:ratio_increase1m{{{IN_CLUSTER}}})", STAGE),
            SECONDS,
            "Forward and backward pass of one micro-batch at the stage where it takes longest: a pipeline that is full "
            "finishes one in this time.",
        ),
    ],
    panels=[
        graph(
            "Computing",
            [
                (
                    f"{_OF_STAGE} ({_rate('collapipe_stage_forward_seconds_sum')} "
                    f"+ {_rate('collapipe_stage_backward_seconds_sum')})",
                    STAGE,
                )
            ],
            PERCENT,
            "Share of the time in which a stage runs forward and backward passes. The highest line is the bottleneck; lines "
            "close together are a balanced plan.",
            most=1.0,
        ),
        graph(
            "Waiting",
            [
                (
                    f"max by (cluster, stage, service) (stage:waiting_seconds:rate1m{{{IN_CLUSTER}}})",
                    STAGE,
                )
            ],
            PERCENT,
            "Share of the time in which a stage waits for a neighbour. All wait long: links. All but one: that one. Over a minute, "
            "for it is counted at the ends of mini-batches, which slow devices take long for.",
            most=1.0,
        ),
        graph(
            "Sending",
            [
                (
                    f"sum by (service, direction) ({_rate('collapipe_stage_sending_seconds_total')})",
                    "{{service}} {{direction}}",
                )
            ],
            PERCENT,
            "Share of the time in which a frame of a stage is on its way to the network: encoded, paced, waiting for room. "
            "Other threads do it while the stage computes. What the network has taken into its buffers counts as sent: a "
            "link that is shaped behind them shows at its receiver (dashboard Links).",
            most=1.0,
        ),
        graph(
            "Updating",
            [(f"{_OF_STAGE} ({_rate('collapipe_stage_update_seconds_total')})", STAGE)],
            PERCENT,
            "Share of the time in the optimizer. Nobody else can work on the stage meanwhile.",
        ),
        graph(
            "Bubble ratio",
            [
                (
                    f"max by (cluster) (cluster:bubble:ratio_rate1m{{{IN_CLUSTER}}})",
                    "cluster {{cluster}}",
                )
            ],
            PERCENT,
            "Share of their mini-batches that all stages of a cluster together wait.",
            most=1.0,
            thresholds=[(0.7, "red")],
        ),
        graph(
            "Time of a micro-batch",
            [
                (
                    f"max by (cluster, stage, service) (stage:micro_batch_seconds:ratio_increase1m{{{IN_CLUSTER}}})",
                    STAGE,
                )
            ],
            SECONDS,
            "Forward and backward pass. A step up is a device that became slower, or was given more blocks.",
        ),
        graph(
            "Micro-batches in flight",
            [
                (
                    f"max by (cluster, stage, service) (collapipe_stage_in_flight{{{IN_CLUSTER}}})",
                    STAGE,
                ),
                (
                    f"max by (cluster) (collapipe_planned_micro_batches{{{IN_CLUSTER}}})",
                    "planned, cluster {{cluster}}",
                ),
            ],
            COUNT,
            "Most that a stage held at once, beside how many a mini-batch has. Fewer than the stages behind it: it drains "
            "before the gradients return.",
            steps=True,
        ),
        graph(
            "Stash",
            [
                (
                    f"max by (cluster, stage, service) (collapipe_stage_stash_bytes{{{IN_CLUSTER}}})",
                    STAGE,
                )
            ],
            BYTES,
            "Largest memory of activations that wait for their gradients. More micro-batches or training.recompute make it smaller.",
            steps=True,
        ),
        graph(
            "Activations and gradients sent",
            [
                (
                    'sum by (service, direction) (rate(collapipe_link_bytes_total{way="sent", '
                    f"{IN_CLUSTER}}}[$__rate_interval]))",
                    "{{service}} {{direction}}",
                )
            ],
            BYTES_PER_SECOND,
            "Before any codec. Forward and backward are alike; the middle of a pipeline sends the same everywhere.",
            span=24,
        ),
    ],
)
