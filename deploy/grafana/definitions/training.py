"""How the job goes: what it learns, how fast, and where the time of a round is."""

from definitions.elements import (
    BYTES_PER_SECOND,
    COUNT,
    IN_CLUSTER,
    NONE,
    PERCENT,
    SAMPLES_PER_SECOND,
    SECONDS,
    STAGE,
    Definition,
    answer,
    graph,
)

TRAINING = Definition(
    uid="collapipe-training",
    title="CollaPipe: training",
    description="Loss, metric, speed, and where the time of a round is.",
    answers=[
        answer(
            "Longest part of a round",
            (
                f"topk(1, max by (cluster, phase) (collapipe_round_phase_seconds{{{IN_CLUSTER}}}))",
                "{{phase}}, cluster {{cluster}}",
            ),
            SECONDS,
            "Of the last committed round. configure: weights move to where the plan wants them (a slow network, or plans "
            "that change too often). train: see the slowest stage. gather: weights return for averaging. evaluate: "
            "measuring the model.",
        ),
        answer(
            "Slowest stage",
            (
                f"topk(1, stage:busy_seconds:rate1m{{{IN_CLUSTER}}} + stage:update_seconds:rate1m{{{IN_CLUSTER}}})",
                STAGE,
            ),
            PERCENT,
            "The stage that computes the largest share of the time: the others wait for it. Near 100 %: the pipeline is as "
            "fast as this host. Far below: links or hand-overs hold the job back (dashboards Links and Pipeline).",
            decimals=0,
        ),
        answer(
            "Speed",
            (f"sum(cluster:trained_samples:rate1m{{{IN_CLUSTER}}})", "samples"),
            SAMPLES_PER_SECOND,
            "Rows trained a second by all chosen clusters together, over one minute; 0 while weights are gathered.",
            names=False,
        ),
        answer(
            "Rounds as predicted",
            ("job:prediction_error:ratio_increase30m", "error"),
            PERCENT,
            "Mean distance of the predicted from the observed time of a round. Plans are chosen by predictions: above 30 % "
            "(red) they are guesses, so look at Scheduler.",
            thresholds=[(0.15, "orange"), (0.3, "red")],
            names=False,
            no_value="no round predicted yet",
            decimals=0,
        ),
    ],
    panels=[
        graph(
            "Loss",
            [
                (
                    f"max by (cluster) (collapipe_training_loss{{{IN_CLUSTER}}})",
                    "cluster {{cluster}}",
                )
            ],
            NONE,
            "Of the last mini-batch. Falls in the long run; clusters that part from each other have unlike data.",
            least=None,
        ),
        graph(
            "Metric on held-out data",
            [
                (
                    f"max by (cluster, metric) (collapipe_evaluation_metric{{{IN_CLUSTER}}})",
                    "{{metric}}",
                )
            ],
            NONE,
            "Of the global model, after rounds that measure (training.evaluate_every). Accuracy and F1 are at most 1, BLEU 100.",
            steps=True,
        ),
        graph(
            "Round time, predicted and observed",
            [
                ("max(collapipe_round_predicted_seconds) > 0", "predicted"),
                ("max(collapipe_round_observed_seconds) > 0", "observed"),
            ],
            SECONDS,
            "Of the last round that was predicted from measurements. Together: the scheduler knows this world. Apart: it has "
            "just changed, or is not what the model of a round takes it for.",
            steps=True,
        ),
        graph(
            "Parts of the last round",
            [
                (
                    f"sum by (phase) (max by (cluster, phase) (collapipe_round_phase_seconds{{{IN_CLUSTER}}}))",
                    "{{phase}}",
                )
            ],
            SECONDS,
            "Summed over the chosen clusters, which work at the same time. What is not `train` is the price of moving weights "
            "and measuring.",
            stacked=True,
            steps=True,
        ),
        graph(
            "Speed of each cluster",
            [
                (
                    f"sum by (cluster) (rate(collapipe_trained_samples_total{{{IN_CLUSTER}}}[$__rate_interval]))",
                    "cluster {{cluster}}",
                )
            ],
            SAMPLES_PER_SECOND,
            "Rows trained a second. Gaps are hand-overs between rounds; a cluster that is slower than the others makes them wait "
            "at the end of a round.",
        ),
        graph(
            "Rounds",
            [
                (
                    "sum by (outcome) (increase(collapipe_round_seconds_count[$__rate_interval]))",
                    "{{outcome}}",
                )
            ],
            COUNT,
            "Rounds that ended, by how. An aborted one is lost work: its reason is in `collapipe status`.",
            bars=True,
        ),
        graph(
            "Averaging",
            [
                (
                    "sum(increase(collapipe_aggregation_seconds_sum[5m])) "
                    "/ (sum(increase(collapipe_aggregation_seconds_count[5m])) > 0)",
                    "a round",
                )
            ],
            SECONDS,
            "Mean time of five minutes to collect the clusters' weights at the edge server, average and commit them.",
        ),
        graph(
            "Weights on the move",
            [
                (
                    'sum by (service) (rate(collapipe_blob_bytes_total{way="received"}[$__rate_interval]))',
                    "to {{service}}",
                )
            ],
            BYTES_PER_SECOND,
            "Weights and optimizer states that hosts fetch. Peaks at the ends of rounds are averaging; others are blocks that "
            "change hands.",
        ),
    ],
)
