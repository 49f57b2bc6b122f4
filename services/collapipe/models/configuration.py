"""Makes the configuration of a job's model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collapipe.errors import InvalidInputError
from collapipe.job import LABELLING_TASKS, ModelConfig, TaskConfig
from collapipe.mistakes import suggest_key
from collapipe.models.adapter import ModelAdapter
from collapipe.models.families import adapter_class_for
from collapipe.pretrained_directories import pretrained_directory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DECIDED = {
    "vocab_size",
    "decoder_vocab_size",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "forced_eos_token_id",
    "is_encoder_decoder",
    "tie_word_embeddings",
    "use_cache",
    "is_decoder",
}
"""Keys that a job cannot override: their values follow from the vocabulary or from how models are cut."""


def create_config_json(
    model: ModelConfig, task: TaskConfig, labels: Sequence[str], tokenizer: "Tokenizer"
) -> str:
    """Makes the complete configuration of `transformers`, from which every host builds its units.

    It starts from the configuration of the pretrained directory, or from the defaults of the family. For
    `translation`, it has the additional key "max_new_tokens", for half blocks "half_blocks", for frozen embeddings
    "freeze_embeddings", for a quantised base "base_quantisation", and for LoRA "lora".

    Args:
        labels: Names of the labels in the order of their ids. Empty for a task without labels.

    Raises:
        InvalidInputError: A setting of the job is not possible.
    """
    adapter = adapter_class_for(model.family, task.kind)
    overrides = _checked_overrides(adapter, model.config)
    if model.pretrained is None:
        values = {**adapter.defaults, **adapter.vocabulary_values(tokenizer)}
    else:
        values = _pretrained_values(adapter, pretrained_directory(model.pretrained))
    values |= overrides | dict(adapter.fixed) | _label_values(task, labels)
    values |= {"dtype": model.base_dtype, "problem_type": None, "architectures": None}
    config = adapter.read_config(values)
    _check_sizes(adapter, config, task, tokenizer)
    document = config.to_dict()
    if task.kind == "translation":
        document["max_new_tokens"] = task.max_new_tokens
    if model.half_blocks:
        document["half_blocks"] = True
    if model.freeze_embeddings:
        if not adapter.may_freeze_embeddings:
            raise InvalidInputError(
                f"model.freeze_embeddings is set, but family {adapter.family!r} has no output layer that could be a copy "
                "of its embedding: remove the setting"
            )
        document["freeze_embeddings"] = True
    if model.base_quantisation is not None:
        document["base_quantisation"] = model.base_quantisation
    if model.lora is not None:
        document["lora"] = model.lora.model_dump()
    config_json = json.dumps(document, sort_keys=True)
    adapter(task.kind, config_json)  # finds mistakes now: it builds the model without memory
    return config_json


def _checked_overrides(adapter: type[ModelAdapter], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the overrides under the names by which the configuration stores them."""
    synonyms = adapter.config_class.attribute_map
    decided = _DECIDED | set(adapter.fixed)
    known = (set(vars(adapter.config_class)["__annotations__"]) | set(synonyms)) - decided
    for key in overrides:
        if key in decided:
            raise InvalidInputError(
                f"model.config.{key} cannot be set: it follows from the tokenizer and the task; "
                "remove it"
            )
        if key not in known:
            raise InvalidInputError(
                f"model.config: unknown key {key!r} of family {adapter.family!r}; "
                f"{suggest_key(key, sorted(known))}"
            )
    return {synonyms.get(key, key): value for key, value in overrides.items()}


def _pretrained_values(adapter: type[ModelAdapter], directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInputError(f"{path}: is not valid JSON: {error}; copy it again") from error
    family = values.get("model_type")
    if family != adapter.family:
        raise InvalidInputError(
            f"{directory}: holds a model of family {family!r}, but model.family is "
            f"{adapter.family!r}; set model.family to the directory's, or give another directory"
        )
    return values | {"_name_or_path": ""}


def _label_values(task: TaskConfig, labels: Sequence[str]) -> dict[str, Any]:
    if task.kind not in LABELLING_TASKS:
        return {}
    if len(labels) < 2:
        raise InvalidInputError(
            f"the data has {len(labels)} different labels ({', '.join(labels)}): {task.kind} needs "
            "at least 2; check data.train and data.label_column"
        )
    return {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        "num_labels": len(labels),
    }


def _check_sizes(
    adapter: type[ModelAdapter], config: Any, task: TaskConfig, tokenizer: "Tokenizer"
) -> None:
    size = tokenizer.get_vocab_size()
    if size > config.vocab_size:
        raise InvalidInputError(
            f"the tokenizer has {size} tokens, but the model only {config.vocab_size}: use the "
            "tokenizer of the pretrained directory"
        )
    limit = adapter.max_length(config)
    lengths = {"max_length": task.max_length}
    if task.kind == "translation":
        lengths["max_new_tokens"] = task.max_new_tokens
    for name, length in lengths.items():
        if length > limit:
            raise InvalidInputError(
                f"task.{name} is {length}, but the model has positions for {limit} tokens: lower "
                "it, or raise model.config.max_position_embeddings (not for pretrained models)"
            )
