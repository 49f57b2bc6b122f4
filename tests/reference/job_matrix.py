"""The settings that may change how a job is computed, and a small set of jobs in which each pair of their values occurs.

All combinations would be millions of jobs. The pairs show faults that need one or two settings.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from collapipe.models.families import FAMILIES

Case = Mapping[str, Any]
"""A level for each factor."""

FACTORS: Mapping[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "task": ("classification", "ner", "translation", "causal_lm", "instruction"),
    "cut": ("equal", "unequal", "every host"),
    "devices": (1, 2, 4),
    "moved": (False, True),
    "clusters": (1, 3),
    "lora": (None, "all", "middle", "embedding", "saved"),
    "base": ("float32", "bfloat16", "float16", "nf4"),
    "half_blocks": (False, True),
    "slices": (1, 3),
    "dropout": (True, False),
    "recompute": (False, True),
    "split_backward": (False, True),
    "update_per": ("mini_batch", "micro_batch"),
    "optimizer": ("adamw", "sgd"),
    "decay": ("constant", "linear", "inverse_sqrt"),
    "clip_norm": (0.1, 0.0),
    "label_smoothing": (0.0, 0.1),
    "freeze_embeddings": (False, True),
    "micro_batches": ("4", "1", "1 in flight"),
}
"""Each factor and its levels. The devices are those of the first cluster; each other cluster has up to two."""

_TASKS = {
    **dict.fromkeys(("bert", "distilbert", "roberta"), ("classification", "ner")),
    **dict.fromkeys(("marian", "bart"), ("translation",)),
}
_LANGUAGE_TASKS = ("causal_lm", "instruction")
_EMBED_TOKENS = ("llama", "mistral", "qwen2", "qwen3")
_DROPOUTS = {
    **dict.fromkeys(("bert", "roberta"), ("hidden_dropout_prob", "attention_probs_dropout_prob")),
    "distilbert": ("dropout", "attention_dropout", "seq_classif_dropout"),
    **dict.fromkeys(("marian", "bart"), ("dropout", "attention_dropout", "activation_dropout")),
    "gpt2": ("attn_pdrop", "embd_pdrop", "resid_pdrop"),
}
"""The settings of dropout; those of the other families are `attention_dropout`."""


class Rule(NamedTuple):
    """A reason why some levels cannot meet."""

    reason: str
    factors: tuple[str, ...]
    allows: Callable[..., bool]
    """Takes the levels of the factors."""


RULES = (
    Rule(
        "the family does not have the task",
        ("family", "task"),
        lambda family, task: task in _TASKS.get(family, _LANGUAGE_TASKS),
    ),
    Rule(
        "without LoRA, all weights are trained, which needs float32",
        ("lora", "base"),
        lambda lora, base: lora is not None or base == "float32",
    ),
    Rule(
        "only some families name their embedding embed_tokens, and only gpt2 its last layer ln_f",
        ("family", "lora"),
        lambda family, lora: {"embedding": family in _EMBED_TOKENS, "saved": family == "gpt2"}.get(
            lora, True
        ),
    ),
    Rule(
        "LoRA also trains whole modules here, and a base of 16 bits does not allow that",
        ("lora", "base"),
        lambda lora, base: lora != "saved" or base not in ("bfloat16", "float16"),
    ),
    Rule(
        "with classification and NER, LoRA also trains whole modules, and a base of 16 bits does not allow that",
        ("task", "base"),
        lambda task, base: (
            task not in ("classification", "ner") or base not in ("bfloat16", "float16")
        ),
    ),
    Rule(
        "only in language models, tokens do not depend on later ones",
        ("task", "slices"),
        lambda task, slices: task in _LANGUAGE_TASKS or slices == 1,
    ),
    Rule(
        "no plan can be predicted for slices with an update for each micro-batch",
        ("slices", "update_per"),
        lambda slices, update_per: slices == 1 or update_per == "mini_batch",
    ),
    Rule(
        "one device has one segment, which is equal and cannot move",
        ("cut", "devices", "moved"),
        lambda cut, devices, moved: (
            devices > 1 or cut == "every host" or (cut == "equal" and not moved)
        ),
    ),
    Rule(
        "a cut by hand holds for all clusters, and only the first one has more than two devices",
        ("clusters", "cut", "devices", "moved"),
        lambda clusters, cut, devices, moved: (
            clusters == 1 or devices <= 2 or (cut == "equal" and not moved)
        ),
    ),
    Rule(
        "only language models can freeze their embedding",
        ("task", "freeze_embeddings"),
        lambda task, freeze: not freeze or task in _LANGUAGE_TASKS,
    ),
    Rule(
        "LoRA freezes embeddings by itself",
        ("lora", "freeze_embeddings"),
        lambda lora, freeze: lora is None or not freeze,
    ),
)


def is_valid(case: Case) -> bool:
    """Returns whether no rule forbids the levels that a case has so far."""
    return not any(_forbids(rule, case) for rule in RULES)


def _forbids(rule: Rule, case: Case) -> bool:
    known = all(factor in case for factor in rule.factors)
    return known and not rule.allows(*(case[factor] for factor in rule.factors))


def all_pairs() -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Yields each pair of levels of two factors."""
    for first, second in itertools.combinations(FACTORS, 2):
        for levels in itertools.product(FACTORS[first], FACTORS[second]):
            yield (first, levels[0]), (second, levels[1])


def pairs_of(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Returns the pairs of levels that a case has."""
    return set(itertools.combinations(case.items(), 2))


def complete(case: Case, missing: Iterable[Any] = ()) -> dict[str, Any] | None:
    """Chooses a level for every factor that the case lacks, so that no rule forbids it. Returns `None` if that is impossible.

    Args:
        case: The levels that are given.
        missing: Pairs of levels. A level that makes more of them is preferred.
    """
    if not is_valid(case):
        return None
    factor = next((factor for factor in FACTORS if factor not in case), None)
    if factor is None:
        return {factor: case[factor] for factor in FACTORS}
    chosen = set(case.items())
    gains = dict.fromkeys(FACTORS[factor], 0)
    for pair in missing:
        for one, other in (pair, pair[::-1]):
            if one[0] == factor and other in chosen:
                gains[one[1]] += 1
    for level in sorted(gains, key=lambda level: -gains[level]):
        if found := complete({**case, factor: level}, missing):
            return found
    return None


def pairwise() -> list[dict[str, Any]]:
    """Makes cases that have each pair of levels that the rules allow. It makes the same cases each time.

    Jobs with slices are compared less strictly. So all other pairs occur in cases without slices.
    """
    cases = []
    for slices in FACTORS["slices"]:
        # A dictionary, because a set has another order in each process
        missing = dict.fromkeys(
            pair for pair in all_pairs() if dict(pair).get("slices", FACTORS["slices"][0]) == slices
        )
        while missing:
            pair = next(iter(missing))
            case = complete({"slices": slices, **dict(pair)}, missing)
            del missing[pair]
            if case is not None:
                cases.append(case)
                for made in pairs_of(case):
                    missing.pop(made, None)
    return cases


def name_of(case: Case) -> str:
    """Names the levels of a case that are not the first ones."""
    parts = [str(case["family"]), str(case["task"])]
    for factor, levels in list(FACTORS.items())[2:]:
        if case[factor] != levels[0]:
            parts.append(factor if case[factor] is True else f"{factor}={case[factor]}")
    return ", ".join(parts)


def arguments(case: Case) -> dict[str, Any]:
    """Returns the arguments of `make_job` for a case. All blocks find a host."""
    devices, cut = case["devices"], case["cut"]
    num_hosts = devices + 2 if cut == "every host" else devices
    num_blocks = 3 if num_hosts <= 3 else 8
    if case["half_blocks"]:
        num_blocks = 3 if num_hosts <= 5 else 4
    num_segments = num_blocks * (2 if case["half_blocks"] else 1)
    schedule: dict[str, Any] = {"sequence_slices": [case["slices"]]}
    if case["micro_batches"] == "1":
        schedule["num_micro_batches"] = 1
    elif case["micro_batches"] == "1 in flight":
        schedule["in_flight"] = 1
    if cut != "equal" or case["moved"]:
        segments = _segments(cut, num_hosts, num_segments)
        moved = _without_ends(segments) if cut == "every host" else _moved(segments)
        rows = [segments, moved] if case["moved"] else [segments]
        schedule |= {"strategy": "manual", "segments": rows}
    return {
        "family": case["family"],
        "kind": case["task"],
        "num_blocks": num_blocks,
        "half_blocks": case["half_blocks"],
        "freeze_embeddings": case["freeze_embeddings"],
        "num_rows": (21,) if case["clusters"] == 1 else (14, 21, 33),
        "devices_per_cluster": [devices, *[min(devices, 2)] * 2][: case["clusters"]],
        "model_config": _model_config(case),
        "base_dtype": "float32" if case["base"] == "nf4" else case["base"],
        "base_quantisation": "nf4" if case["base"] == "nf4" else None,
        "lora": _lora(case["lora"]),
        "schedule": schedule,
        "training": {
            "recompute": case["recompute"],
            "split_backward": case["split_backward"],
            "update_per": case["update_per"],
            "optimizer": case["optimizer"],
            "decay": case["decay"],
            "warm_up_steps": 0 if case["decay"] == "constant" else 2,
            "clip_norm": case["clip_norm"],
            "label_smoothing": case["label_smoothing"],
            **({"momentum": 0.9, "learning_rate": 0.1} if case["optimizer"] == "sgd" else {}),
        },
    }


def _segments(cut: str, num_hosts: int, num_segments: int) -> list[int]:
    """Divides blocks among hosts. The first host of an unequal cut has all that the others leave."""
    if cut == "unequal":
        return [num_segments - num_hosts + 1, *[1] * (num_hosts - 1)]
    each, more = divmod(num_segments, num_hosts)
    return [each + (index < more) for index in range(num_hosts)]


def _moved(segments: list[int]) -> list[int]:
    """Moves a block from the host with the most to the last one, or to the second if that has the most."""
    most = segments.index(max(segments))
    target = len(segments) - 1 if most != len(segments) - 1 else 1
    moved = list(segments)
    moved[most] -= 1
    moved[target] += 1
    return moved


def _without_ends(segments: list[int]) -> list[int]:
    """Moves all blocks of the first and of the last host to their neighbours."""
    first, *middle, last = segments
    middle[0] += first
    middle[-1] += last
    return [0, *middle, 0]


def _model_config(case: Case) -> dict[str, Any]:
    names = _DROPOUTS.get(case["family"], ("attention_dropout",))
    if case["family"] == "distilbert" and case["task"] == "ner":
        names = names[:2]
    config: dict[str, Any] = {} if case["dropout"] else dict.fromkeys(names, 0.0)
    if case["family"] in ("mistral", "qwen2", "qwen3"):
        config["sliding_window"] = 4
    if case["family"] in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": True, "max_window_layers": 1}
    return config


def _lora(level: str | None) -> dict[str, Any] | None:
    if level is None:
        return None
    if level == "all":
        return {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.1, "use_rslora": True}
    if level == "embedding":
        return {"target_modules": ["q_proj", "v_proj", "embed_tokens"], "lora_dropout": 0.1}
    if level == "saved":
        return {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "modules_to_save": ["ln_f"]}
    attention = r"(query|q_lin|q_proj|c_attn)"
    return {
        "target_modules": rf".*(layer|layers|h)\.[12]\..*{attention}",
        "averaging": "product",  # averages the product of the matrices A and B, not each matrix
    }
