"""The metrics of tasks, from counts and sums over held-out rows.

Each cluster counts on its own held-out rows (`collapipe.tasks`), and the scheduler adds what the clusters counted. So a
metric is that of all rows together, however they are divided. This module imports no torch, because the scheduler uses it.
"""

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np

from collapipe.v1 import job_pb2

ROWS = "rows"
"""Number of held-out rows. It is among the sums of every task."""
LABELS, LABEL_SQUARES = "predicted_labels", "predicted_label_squares"
"""The sums of the numbers of all predicted classes, or of short hashes of all translations, and of their squares."""
BLEU_ORDERS = range(1, 5)
"""Lengths of the n-grams that BLEU counts."""

Sums = Mapping[str, float]
"""Counts and sums by name. They differ by task, and those of several clusters are added."""


def add_sums(clusters: Iterable[Sums]) -> dict[str, float]:
    """Adds the sums of clusters. Their order does not matter."""
    terms: dict[str, list[float]] = {}
    for sums in clusters:
        for name, value in sums.items():
            terms.setdefault(name, []).append(value)
    return {name: math.fsum(values) for name, values in terms.items()}


def compute_metrics(kind: str, sums: Sums) -> dict[str, float]:
    """Computes the metrics of a task. The first one is its main metric.

    Args:
        kind: The kind of the task.
        sums: Those of at least one row.
    """
    return _METRICS[kind](sums)


def make_evaluation(kind: str, sums: Sums, num_rounds: int) -> job_pb2.Evaluation:
    """Returns the metrics of a task as a message.

    Args:
        num_rounds: Committed rounds of the evaluated model.
    """
    (metric, value), *others = compute_metrics(kind, sums).items()
    return job_pb2.Evaluation(
        num_rounds=num_rounds,
        metric=metric,
        value=value,
        other_metrics=dict(others),
        num_rows=int(sums[ROWS]),
        one_answer=_is_one_answer(kind, sums),
    )


def _is_one_answer(kind: str, sums: Sums) -> bool:
    """Returns whether a model gives all rows the same answer although that is wrong for some."""
    if kind == "ner":
        return not sums["predicted"] and sums["true"] > 0
    if LABEL_SQUARES not in sums or sums[ROWS] < 2 or sums.get("right") == sums[ROWS]:
        return False
    # Equal numbers are those without a variance. Only sums can be added over clusters.
    return int(sums[ROWS]) * int(sums[LABEL_SQUARES]) == int(sums[LABELS]) ** 2


def first_places(places: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns the first place of each label, given labels with places "FILE:LINE"; each cluster knows those of its own rows."""
    first: dict[str, str] = {}
    for label, place in sorted(places, key=lambda each: _line_of(each[1])):
        first.setdefault(label, place)
    return first


def _line_of(place: str) -> tuple[int, str]:
    """Returns a key that orders the lines of places. Whatever a host sends as a place has one."""
    line = place.rpartition(":")[2]
    return len(line), line


def _accuracy(sums: Sums) -> dict[str, float]:
    return {"accuracy": sums["right"] / sums[ROWS]}


def _entity_f1(sums: Sums) -> dict[str, float]:
    """F1 of all entities together, whatever their type; 0 if there are none."""
    num_entities = sums["true"] + sums["predicted"]
    return {"entity_f1": 2 * sums["right"] / num_entities if num_entities else 0.0}


def _bleu(sums: Sums) -> dict[str, float]:
    """BLEU of all rows, 0 to 100, with the smoothing that `sacrebleu` has by default."""
    # Imported here, because only translations need it.
    from sacrebleu.metrics.bleu import BLEU

    right, total = (
        [int(sums[f"{what}_{order}"]) for order in BLEU_ORDERS] for what in ("right", "total")
    )
    lengths = int(sums["length"]), int(sums["reference_length"])
    return {"bleu": BLEU.compute_bleu(right, total, *lengths, smooth_method="exp").score}


def _perplexity(sums: Sums) -> dict[str, float]:
    """E to the power of the mean loss of a measured token, NaN if none was measured, and the share of right tokens."""
    num_measured = sums["measured_tokens"]
    return {
        "perplexity": float(np.exp(sums["loss"] / num_measured)) if num_measured else math.nan,
        "token_accuracy": sums["right_tokens"] / sums["tokens"],
    }


def _exact_match(sums: Sums) -> dict[str, float]:
    return {"exact_match": sums["right"] / sums[ROWS], **_perplexity(sums)}


_METRICS: Mapping[str, Callable[[Sums], dict[str, float]]] = {
    "classification": _accuracy,
    "ner": _entity_f1,
    "translation": _bleu,
    "causal_lm": _perplexity,
    "instruction": _exact_match,
}
