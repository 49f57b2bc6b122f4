"""Makes the configuration of a job's model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from collapipe.errors import InvalidInputError
from collapipe.job import LABELLING_TASKS, LANGUAGE_TASKS, ModelConfig, TaskConfig
from collapipe.mistakes import suggest_key
from collapipe.models.adapter import ModelAdapter
from collapipe.models.configuration_ranges import (
    MOST_PARAMETERS,
    READ_SETTINGS,
    ROTARY_RANGES,
)
from collapipe.models.families import adapter_class_for
from collapipe.models.generation_settings import (
    read_generation_settings,
    settings_after_training,
)
from collapipe.models.lora import ALL_LINEAR, matching_modules
from collapipe.pretrained_directories import pretrained_directory, pretrained_values

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
    model: ModelConfig,
    task: TaskConfig,
    labels: Sequence[str],
    tokenizer: "Tokenizer",
    declared: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Makes the complete configuration of `transformers`, from which every host builds its units.

    It starts from the configuration of the pretrained directory, or from the defaults of the family. For
    `translation`, it has the additional key "max_new_tokens", for half blocks "half_blocks", for frozen embeddings
    "freeze_embeddings", for a quantised base "base_quantisation", and for LoRA "lora". For a pretrained model that generates, it
    has "generation", the settings of `generation_config.json`.

    Args:
        labels: Names of the labels in the order of their ids. Empty for a task without labels.
        declared: The special tokens that the vocabulary names, by role. The others are those of the family.

    Raises:
        InvalidInputError: A setting of the job is not possible.
    """
    adapter = adapter_class_for(model.family, task.kind)
    generation: dict[str, Any] = {}
    overrides = _checked_overrides(adapter, model.config)
    if model.pretrained is None:
        values = {**adapter.defaults, **adapter.vocabulary_values(tokenizer)}
    else:
        directory = pretrained_directory(model.pretrained)
        ids = _special_token_ids(adapter, tokenizer, declared)
        values = _with_vocabulary(task, _pretrained_values(adapter, directory), ids)
        if task.kind not in LABELLING_TASKS:
            generation = settings_after_training(
                read_generation_settings(directory),
                values["eos_token_id"],
                ids.get("pad_token"),
                translates=task.kind == "translation",
            )
    values |= overrides | dict(adapter.fixed) | _label_values(task, labels)
    values |= {"dtype": model.base_dtype, "problem_type": None, "architectures": None}
    config = adapter.read_config(values)
    _check_sizes(adapter, config, task, tokenizer)
    document = config.to_dict()
    if task.kind == "translation":
        document["max_new_tokens"] = task.max_new_tokens
    if generation:
        document["generation"] = generation
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
        pattern = model.lora.target_modules
        if isinstance(pattern, str) and pattern != ALL_LINEAR:
            bare = adapter(task.kind, json.dumps({**document, "lora": None}))
            document["lora"]["target_modules"] = matching_modules(bare.meta_model, pattern)
    config_json = json.dumps(document, sort_keys=True)
    # This finds mistakes now: it builds the model without memory.
    built = adapter(task.kind, config_json)
    num_parameters = sum(each.numel() for each in built.meta_model.parameters())
    if num_parameters > MOST_PARAMETERS:
        raise InvalidInputError(
            f"the model has {num_parameters:.3g} parameters, but may have at most {MOST_PARAMETERS:.3g}: lower the sizes in "
            "model.config, or use a smaller pretrained model"
        )
    return config_json


def _checked_overrides(adapter: type[ModelAdapter], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the overrides under the names by which the configuration stores them."""
    synonyms = adapter.config_class.attribute_map
    decided = _DECIDED | set(adapter.fixed)
    named = set(vars(adapter.config_class)["__annotations__"])
    # `transformers` takes settings of other tasks, too, and ignores them.
    known = {
        key for key in named | set(synonyms) if synonyms.get(key, key) in READ_SETTINGS
    } - decided
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
    rotary = overrides.get("rope_parameters")
    for key in rotary if isinstance(rotary, dict) else ():
        if key not in ROTARY_RANGES and key != "rope_type":
            raise InvalidInputError(
                f"model.config.rope_parameters: unknown key {key!r}; {suggest_key(key, ['rope_type', *sorted(ROTARY_RANGES)])}"
            )
    return {synonyms.get(key, key): value for key, value in overrides.items()}


def _pretrained_values(adapter: type[ModelAdapter], directory: Path) -> dict[str, Any]:
    values = pretrained_values(directory)
    family = values.get("model_type")
    if family != adapter.family:
        raise InvalidInputError(
            f"{directory}: holds a model of family {family!r}, but model.family is "
            f"{adapter.family!r}; set model.family to the directory's, or give another directory"
        )
    return values | {"_name_or_path": ""}


def _special_token_ids(
    adapter: type[ModelAdapter], tokenizer: "Tokenizer", declared: Mapping[str, str]
) -> dict[str, int]:
    """Returns the ids of the special tokens that the vocabulary has, by role."""
    ids = {
        role: tokenizer.token_to_id(token)
        for role, token in adapter.roles_in(tokenizer, declared).items()
    }
    return {role: number for role, number in ids.items() if number is not None}


def _with_vocabulary(
    task: TaskConfig, values: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, Any]:
    """Returns the values of a pretrained configuration, with the special tokens that the training uses."""
    changed = dict(values)
    if task.kind not in LABELLING_TASKS:
        changed["eos_token_id"] = end_id = ids.get("eos_token", values.get("eos_token_id"))
        if changed.get("forced_eos_token_id") is not None:
            changed["forced_eos_token_id"] = end_id
    if (changed.get("pad_token_id") or 0) < 0:
        # Some directories write -1 for none. A language model needs none, because a mask covers padding.
        changed["pad_token_id"] = None if task.kind in LANGUAGE_TASKS else ids.get("pad_token")
    return changed


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
    # A tokenizer may leave out ids, and its special tokens around a text may have ids of their own.
    largest = max([*tokenizer.get_vocab().values(), *tokenizer.encode("a").ids])
    rows = min(config.vocab_size, getattr(config, "decoder_vocab_size", None) or config.vocab_size)
    if largest >= rows:
        raise InvalidInputError(
            f"the tokenizer has token ids up to {largest} (for example {tokenizer.id_to_token(largest)!r}), but the embedding "
            f"of the model has {rows} rows, for ids up to {rows - 1}: use the tokenizer of the pretrained directory, or resize "
            "the embedding with resize_token_embeddings of transformers"
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
