"""The dashboard of the training: what the model learns, how fast, and where the time of a round goes."""

from definitions.elements import (
    BYTES_PER_SECOND,
    COUNT,
    IN_CLUSTER,
    NONE,
    PERCENT,
    SAMPLES_PER_SECOND,
    SECONDS,
    Definition,
    answer,
    by_cluster,
    graph,
    round_time,
    slowest_stage,
)

_AGGREGATION = "collapipe_aggregation_seconds"
_PHASES = f"max by (cluster, phase) (collapipe_round_phase_seconds{{{IN_CLUSTER}}})"

TRAINING = Definition(
    uid="collapipe-training",
    title="CollaPipe: training",
    description="Loss, metric and speed, and where the time of a round goes.",
    answers=[
        answer(
            "Longest phase of a round",
            (f"topk(1, {_PHASES})", "{{phase}}, cluster {{cluster}}"),
            SECONDS,
            "The longest phase of the last committed round. configure: weights move to their devices, which is slow on a slow "
            "network and frequent if plans change often. train: see the slowest stage. gather: weights return for averaging. "
            "evaluate: the model is measured.",
        ),
        slowest_stage(),
        answer(
            "Speed",
            (f"sum(cluster:trained_samples:rate1m{{{IN_CLUSTER}}})", "samples"),
            SAMPLES_PER_SECOND,
            "Samples that all chosen clusters together train per second, averaged over one minute. It is 0 while weights are "
            "gathered.",
            names=False,
        ),
        answer(
            "Prediction error",
            ("job:prediction_error:ratio_increase30m", "error"),
            PERCENT,
            "Mean difference between the predicted and the observed time of a round. The scheduler chooses plans by predictions, so "
            "above 30 % (red) its choices are bad (dashboard Scheduler).",
            thresholds=[(0.15, "orange"), (0.3, "red")],
            names=False,
            no_value="no round predicted yet",
            decimals=0,
        ),
    ],
    panels=[
        graph(
            "Loss",
            by_cluster(f"collapipe_training_loss{{{IN_CLUSTER}}}"),
            NONE,
            "Loss of the last mini-batch, which should fall in the long run. If clusters differ, their data differ.",
            least=None,
        ),
        graph(
            "Metric on held-out data",
            ("max by (metric) (collapipe_job_metric)", "{{metric}}"),
            NONE,
            "Metric of the global model on the held-out rows of all clusters, after rounds with an evaluation (training.evaluate_every). Accuracy and F1 are at most 1, "
            "BLEU is at most 100. Of perplexity, less is better.",
            steps=True,
        ),
        round_time(),
        graph(
            "Phases of the last round",
            (f"sum by (phase) ({_PHASES})", "{{phase}}"),
            SECONDS,
            "Sum over the chosen clusters, which work at the same time. All phases except `train` are the cost of moving weights and "
            "evaluating.",
            stacked=True,
            steps=True,
        ),
        graph(
            "Speed of each cluster",
            by_cluster(
                f"rate(collapipe_trained_samples_total{{{IN_CLUSTER}}}[$__rate_interval])", "sum"
            ),
            SAMPLES_PER_SECOND,
            "Samples trained per second. The gaps are transfers of weights between rounds. The other clusters wait for a slow cluster "
            "at the end of a round.",
        ),
        graph(
            "Rounds",
            (
                "sum by (outcome) (increase(collapipe_round_seconds_count[$__rate_interval]))",
                "{{outcome}}",
            ),
            COUNT,
            "Rounds that ended, by outcome. The work of an aborted round is lost; `collapipe status` shows the reason.",
            bars=True,
        ),
        graph(
            "Aggregation",
            (
                f"sum(increase({_AGGREGATION}_sum[5m])) / (sum(increase({_AGGREGATION}_count[5m])) > 0)",
                "a round",
            ),
            SECONDS,
            "Mean time, over five minutes, in which the edge server collects the weights of the clusters, averages and commits them.",
        ),
        graph(
            "Weights transferred",
            (
                'sum by (service) (rate(collapipe_blob_bytes_total{way="received"}[$__rate_interval]))',
                "to {{service}}",
            ),
            BYTES_PER_SECOND,
            "Weights and optimizer states that hosts fetch. Peaks at the ends of rounds are averaging. Other peaks are blocks that "
            "move to another device.",
        ),
    ],
)
