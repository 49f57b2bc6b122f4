"""Makes jobs that train in a second, on random rows of different lengths."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from collapipe.job import JobConfig

WORDS = [
    *("road", "river", "stone", "cloud", "lamp", "green", "quiet", "seven", "paper", "window"),
    *("under", "bright", "north", "glass", "winter", "song", "table", "yellow", "train", "garden"),
]
CLASSES = ("place", "thing", "weather")

_LAYERS = {
    "bert": "num_hidden_layers",
    "distilbert": "n_layers",
    "marian": "encoder_layers",
    "gpt2": "n_layer",
    "llama": "num_hidden_layers",
}
"""The setting of each architecture for its number of blocks."""
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "bert": {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24},
    "distilbert": {"dim": 16, "n_heads": 2, "hidden_dim": 24},
    "marian": {
        "d_model": 16,
        "decoder_layers": 2,
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 24),
        **dict.fromkeys(("attention_dropout", "activation_dropout"), 0.1),
    },
    "gpt2": {"n_embd": 16, "n_head": 2, "n_inner": 24, "n_positions": 40},
    "llama": {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "attention_dropout": 0.1,
    },
}


def make_job(
    folder: Path,
    family: str = "bert",
    kind: str = "classification",
    *,
    num_blocks: int = 3,
    half_blocks: bool = False,
    freeze_embeddings: bool = False,
    num_rows: Sequence[int] = (21,),
    num_held_out: int = 4,
    model_config: Mapping[str, Any] | None = None,
    lora: Mapping[str, Any] | None = None,
    base_dtype: str = "float32",
    base_quantisation: str | None = None,
    training: Mapping[str, Any] | None = None,
    schedule: Mapping[str, Any] | None = None,
    **job: Any,
) -> JobConfig:
    """Writes the data of a job and returns the job: 2 rounds of 2 mini-batches of 4 micro-batches.

    Args:
        folder: Directory for the data.
        kind: The task.
        num_blocks: Layers of the encoder.
        num_rows: Training rows of each cluster.
        num_held_out: Rows of the held-out file.
        model_config: Overrides of the model's configuration.
        lora: The section `model.lora`, if the job has it.
        base_dtype: Type of the frozen weights.
        base_quantisation: How hosts keep them.
        training: Overrides of the training section.
        schedule: Overrides of the schedule section.
        job: Overrides of keys outside the sections.
    """
    train = [write_rows(folder, kind, f"train-{i}", count) for i, count in enumerate(num_rows)]
    if kind == "translation":
        architecture = "marian"
    elif kind in ("causal_lm", "instruction"):
        architecture = "gpt2" if family == "gpt2" else "llama"
    else:
        architecture = "distilbert" if family == "distilbert" else "bert"
    config = {**_CONFIGS[architecture], _LAYERS[architecture]: num_blocks}
    if architecture != "gpt2":
        config["max_position_embeddings"] = 40
    document = {
        "seed": 7,
        "clusters": len(num_rows),
        "task": {"kind": kind, "max_length": 8 if kind == "causal_lm" else 32, "max_new_tokens": 4},
        "data": {"train": train, "held_out": write_rows(folder, kind, "held-out", num_held_out)},
        "model": {
            "family": family,
            "vocabulary_size": 300,
            "half_blocks": half_blocks,
            "freeze_embeddings": freeze_embeddings,
            "config": {**config, **(model_config or {})},
            "base_dtype": base_dtype,
            **({} if base_quantisation is None else {"base_quantisation": base_quantisation}),
            **({} if lora is None else {"lora": lora}),
        },
        "training": {
            "rounds": 2,
            "local_steps": 2,
            "mini_batch": 8,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "clip_norm": 0.1,  # so low that every step clips
            "evaluate_every": 0,
            "replicate_every": 1,
            **(training or {}),
        },
        "schedule": {"num_micro_batches": 4, "silence_seconds": 60, **(schedule or {})},
        **job,
    }
    return JobConfig.from_dict(document, "a tiny job")


def write_rows(folder: Path, kind: str, name: str, count: int) -> str:
    """Writes random rows in the format of the task. Returns the value for `data.train`."""
    draw = random.Random(f"{kind}/{name}")
    sentences = [draw.choices(WORDS, k=draw.randint(1, 7)) for _ in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "translation":
        source, target = folder / f"{name}.en", folder / f"{name}.de"
        source.write_text("".join(" ".join(words) + "\n" for words in sentences))
        target.write_text("".join(" ".join(words[::-1]).upper() + "\n" for words in sentences))
        return f"{source},{target}"
    if kind == "ner":
        path = folder / f"{name}.conll"
        path.write_text("\n".join("".join(map(_tagged, words)) for words in sentences))
        return str(path)
    if kind == "causal_lm":
        path = folder / f"{name}.txt"
        path.write_text("".join(" ".join(words) + "\n" for words in sentences))
        return str(path)
    path = folder / f"{name}.jsonl"
    if kind == "instruction":
        answers = [
            {"prompt": f"{' '.join(words)}:", "completion": " ".join(words[:2])}
            for words in sentences
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in answers))
        return str(path)
    rows = [
        {"text": " ".join(words), "label": CLASSES[number % len(CLASSES)]}
        for number, words in enumerate(sentences)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def _tagged(word: str) -> str:
    tag = {"r": "B-place", "g": "B-thing"}.get(word[0], "O")
    return f"{word} {tag}\n"
