"""The metrics of tasks, from counts and sums over held-out rows.

Each cluster counts on its own held-out rows (`collapipe.tasks`), and the scheduler adds what the clusters counted. So a
metric is that of all rows together, however they are divided. This module imports no torch, because the scheduler uses it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from collapipe.v1 import job_pb2

ROWS = "rows"
"""Number of held-out rows. It is among the sums of every task."""
HASHES, HASH_SQUARES = "hashes", "hash_squares"
"""The sums of short hashes of all translations, and of their squares."""
TRUE, PREDICTED, RIGHT = "true", "predicted", "right"
"""With `of_class`: how many rows have a class, get it, and both."""
BLEU_ORDERS = range(1, 5)
"""Lengths of the n-grams that BLEU counts."""
BLEU_TOKENIZERS = "13a", "zh", "char"
"""The tokenizers of `sacrebleu` with which every cluster counts. All rows together decide whose counts are taken."""
HAN, KANA, HANGUL, UNSPACED, WORDS = WRITINGS = "han", "kana", "hangul", "unspaced", "words"
"""The writings of reference translations: characters of Chinese, of Japanese alone, words in Korean letters, characters of other
writings without spaces between words, and all other words."""
_LEAST_KANA = 0.1
"""Japanese has at least this share of kana among its characters, and Chinese has none."""

_DEFINITIONS = {
    "accuracy": "the share of rows that get their own label",
    "macro_f1": "the mean over labels of F1, for each label that a row has or gets; labels without a training row count as one",
    "largest_class": "the share of rows with the most frequent label, which is the accuracy of always giving that label",
    "entity_f1": "F1 of all entities (micro average) by seqeval in its default mode, as by conlleval: an I- tag without its B- begins an "
    "entity, too",
    "strict_entity_f1": "F1 of all entities (micro average) by seqeval in its strict mode for the scheme IOB2: only a B- tag begins an entity",
    "perplexity": "e to the power of the mean loss of a token",
    "token_accuracy": "the share of tokens that are the most probable ones after the right tokens before them",
    "exact_match": "the share of rows whose whole answer, with its end token, is what greedy decoding gives",
}
"""What each metric is. That of BLEU also depends on the counts."""


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
        definitions=_define_metrics(kind, sums),
    )


def measured_seconds(summary: job_pb2.RoundSummary) -> float:
    """Returns how long a round took a cluster, its evaluation included."""
    return (
        summary.configure_seconds
        + summary.evaluation_seconds
        + summary.training_seconds
        + summary.gather_seconds
    )


def evaluation_delay(summaries: Sequence[job_pb2.RoundSummary]) -> float:
    """Returns by how many seconds the evaluation delayed a round, given its clusters that are not late."""
    if not summaries:
        return 0.0
    return max(map(measured_seconds, summaries)) - max(
        measured_seconds(summary) - summary.evaluation_seconds for summary in summaries
    )


def of_class(count: str, class_id: int) -> str:
    """Returns the name of a count of one class: `TRUE`, `PREDICTED` or `RIGHT`."""
    return f"{count}:{class_id}"


def of_tokenizer(tokenizer: str, count: str) -> str:
    """Returns the name of a count of BLEU with one of `BLEU_TOKENIZERS`."""
    return f"{tokenizer}:{count}"


def bleu_tokenizer(sums: Sums) -> str:
    """Chooses one of `BLEU_TOKENIZERS` by the counts of `WRITINGS`.

    It is what the documentation of `sacrebleu` advises, with "char" for Japanese and Korean. The tokenizers for these need
    packages that each host would have to have.
    """
    counts = [sums[writing] for writing in WRITINGS]
    han, kana, hangul, unspaced, _ = counts
    if 2 * (han + kana + hangul + unspaced) <= sum(counts):
        return "13a"
    is_chinese = han > hangul + unspaced and kana < _LEAST_KANA * (han + kana)
    return "zh" if is_chinese else "char"


def _define_metrics(kind: str, sums: Sums) -> dict[str, str]:
    """Says what each metric is, by its name."""
    if kind == "translation":
        from sacrebleu import __version__

        signature = (
            f"nrefs:1|case:mixed|eff:no|tok:{bleu_tokenizer(sums)}|smooth:exp|version:{__version__}"
        )
        return {"bleu": f"by sacrebleu, 0 to 100, with the signature {signature}"}
    return {name: _DEFINITIONS[name] for name in compute_metrics(kind, sums)}


def _is_one_answer(kind: str, sums: Sums) -> bool:
    """Returns whether a model gives all rows the same answer although that is wrong for some."""
    if kind == "ner":
        return not sums["predicted"] and sums["true"] > 0
    if sums[ROWS] < 2:
        return False
    if kind == "classification":
        given = [name for name in sums if name.startswith(f"{PREDICTED}:") and sums[name]]
        return len(given) == 1 and _accuracy(sums)["accuracy"] < 1
    if kind != "translation":
        return False
    # Equal numbers are those without a variance. Only sums can be added over clusters.
    return int(sums[ROWS]) * int(sums[HASH_SQUARES]) == int(sums[HASHES]) ** 2


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
    classes = {name.partition(":")[2] for name in sums if ":" in name}
    right, predicted, true = (
        {each: sums.get(f"{count}:{each}", 0.0) for each in classes}
        for count in (RIGHT, PREDICTED, TRUE)
    )
    scores = [_f1(right[each], predicted[each], true[each]) for each in classes]
    return {
        "accuracy": sum(right.values()) / sums[ROWS],
        "macro_f1": math.fsum(scores) / len(scores),
        "largest_class": max(true.values()) / sums[ROWS],
    }


def _f1(right: float, predicted: float, true: float) -> float:
    """Returns F1, 0 if there is nothing to find and nothing was found."""
    return 2 * right / (predicted + true) if predicted + true else 0.0


def _entity_f1(sums: Sums) -> dict[str, float]:
    """F1 of all entities together, whatever their type, as `seqeval` finds them in both of its modes."""
    lenient, strict = (
        [sums[prefix + count] for count in (RIGHT, PREDICTED, TRUE)] for prefix in ("", "strict_")
    )
    return {"entity_f1": _f1(*lenient), "strict_entity_f1": _f1(*strict)}


def _bleu(sums: Sums) -> dict[str, float]:
    """BLEU of all rows, 0 to 100, with the smoothing that `sacrebleu` has by default."""
    # Imported here, because only translations need it.
    from sacrebleu.metrics.bleu import BLEU

    tokenizer = bleu_tokenizer(sums)
    right, total = (
        [int(sums[of_tokenizer(tokenizer, f"{what}_{order}")]) for order in BLEU_ORDERS]
        for what in ("right", "total")
    )
    length, wanted_length = (
        int(sums[of_tokenizer(tokenizer, name)]) for name in ("length", "reference_length")
    )
    score = BLEU.compute_bleu(right, total, length, wanted_length, smooth_method="exp").score
    return {"bleu": score}


def _perplexity(sums: Sums) -> dict[str, float]:
    """E to the power of the mean loss of a measured token, NaN if none was measured, and the share of right tokens."""
    num_measured = sums["measured_tokens"]
    return {
        "perplexity": _exp(sums["loss"] / num_measured) if num_measured else math.nan,
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


def _exp(power: float) -> float:
    """Returns e to a power, or infinity if that is too large for a number."""
    try:
        return math.exp(power)
    except OverflowError:
        return math.inf
