"""Tests that jobs become configurations, and that errors name the mistake and the remedy."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from collapipe.errors import InvalidInputError
from collapipe.job import FAMILIES, ModelConfig, TaskConfig
from collapipe.models import ModelAdapter, adapter_for, create_config_json
from collapipe.models.families import FAMILIES as MODEL_FAMILIES
from collapipe.models.families import adapter_class

NER = TaskConfig(kind="ner")
TRANSLATION = TaskConfig(kind="translation", max_new_tokens=33)
LABELS = ["O", "B-place"]

MakeTokenizer = Callable[[str], Tokenizer]


def test_configuration_is_canonical_and_complete(tokenizer: Tokenizer) -> None:
    model = ModelConfig(family="bert", config={"hidden_dropout_prob": 0.25})
    config_json = create_config_json(model, NER, LABELS, tokenizer)
    assert config_json == create_config_json(model, NER, LABELS, tokenizer)
    values = json.loads(config_json)
    assert values["hidden_dropout_prob"] == 0.25
    assert values["id2label"] == {"0": "O", "1": "B-place"}
    assert values["vocab_size"] == tokenizer.get_vocab_size()
    assert (values["pad_token_id"], values["bos_token_id"], values["eos_token_id"]) == (0, 1, 2)
    adapter = adapter_for("bert", "ner", config_json)
    assert (adapter.num_blocks, adapter.num_units) == (4, 6)
    assert adapter.config.id2label == {0: "O", 1: "B-place"}


def test_default_translator_is_small_with_its_own_special_tokens(
    make_tokenizer: MakeTokenizer,
) -> None:
    model = ModelConfig(family="marian")
    config_json = create_config_json(model, TRANSLATION, [], make_tokenizer("marian"))
    adapter = adapter_for("marian", "translation", config_json)
    config = adapter.config
    assert (config.d_model, config.encoder_layers, config.decoder_layers) == (256, 3, 3)
    assert config.scale_embedding and not config.share_encoder_decoder_embeddings
    assert (config.decoder_start_token_id, config.forced_eos_token_id) == (0, 2)
    generation = adapter.build_model().generation_config
    assert (generation.max_new_tokens, generation.num_beams) == (33, 1)
    assert (generation.pad_token_id, generation.eos_token_id) == (0, 2)


@pytest.mark.parametrize(
    ("family", "override", "key"),
    [
        ("distilbert", {"num_hidden_layers": 2}, "n_layers"),
        ("bart", {"hidden_size": 32}, "d_model"),
    ],
)
def test_override_by_either_of_two_names_replaces_the_default(
    make_tokenizer: MakeTokenizer, family: str, override: dict[str, int], key: str
) -> None:
    task = TRANSLATION if family == "bart" else NER
    model = ModelConfig(family=family, config=override)
    values = json.loads(create_config_json(model, task, LABELS, make_tokenizer(family)))
    assert values[key] == next(iter(override.values()))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"hiden_size": 8}, "'hiden_size'.*'hidden_size'"),
        ({"zzz": 8}, "'zzz'.*hidden_size"),
        ({"vocab_size": 8}, r"model\.config\.vocab_size"),
        ({"is_decoder": True}, r"model\.config\.is_decoder"),
        ({"hidden_size": "big"}, "hidden_size.*big"),
        ({"hidden_size": 30}, "hidden.size.*30.*4"),
        ({"hidden_act": "gelo"}, "gelo"),
        ({"max_position_embeddings": 100}, r"task\.max_length is 128.*100 "),
    ],
)
def test_bad_override_is_refused(
    tokenizer: Tokenizer, override: dict[str, object], message: str
) -> None:
    model = ModelConfig(family="bert", config=override)
    with pytest.raises(InvalidInputError, match=message):
        create_config_json(model, NER, LABELS, tokenizer)


CAUSAL_LM = TaskConfig(kind="causal_lm")
LONG = TaskConfig(kind="translation", max_new_tokens=2000)


@pytest.mark.parametrize(
    ("family", "task", "settings", "message"),
    [
        ("marian", LONG, {}, r"task\.max_new_tokens is 2000"),
        # Positions start behind the id of padding.
        ("roberta", NER, {"config": {"max_position_embeddings": 128}}, " 127 tokens"),
        ("bert", NER, {"freeze_embeddings": True}, r"model\.freeze_embeddings"),
        (
            "gpt2",
            CAUSAL_LM,
            {"freeze_embeddings": True, "lora": {"modules_to_save": ["lm_head"]}},
            r"model\.lora ",
        ),
        (
            "gpt2",
            CAUSAL_LM,
            {"freeze_embeddings": True, "lora": {"target_modules": ["wte"]}},
            r"model\.lora ",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_family_are_refused(
    make_tokenizer: MakeTokenizer,
    family: str,
    task: TaskConfig,
    settings: dict[str, Any],
    message: str,
) -> None:
    model = ModelConfig.model_validate({"family": family, **settings})
    with pytest.raises(InvalidInputError, match=message):
        create_config_json(model, task, LABELS, make_tokenizer(family))


def test_single_label_and_tokenizer_without_a_padding_token_are_refused(
    tokenizer: Tokenizer,
) -> None:
    with pytest.raises(InvalidInputError, match=r" 1 .*\(O\).* 2"):
        create_config_json(ModelConfig(family="bert"), NER, ["O"], tokenizer)
    bare = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    with pytest.raises(InvalidInputError, match=r"'\[PAD\]', .*'bert'"):
        create_config_json(ModelConfig(family="bert"), NER, LABELS, bare)


def test_clients_know_the_tasks_of_each_family() -> None:
    assert {family: adapter_class(family).model_classes.keys() for family in MODEL_FAMILIES} == {
        family: dict.fromkeys(tasks).keys() for family, tasks in FAMILIES.items()
    }


@pytest.mark.parametrize(
    ("family", "task", "named"),
    [
        ("t5", "ner", "bert, .*, gpt2"),
        ("bert", "translation", "translation.* marian, bart"),
        ("marian", "ner", "ner.* bert, .*, roberta"),
        ("gpt2", "ner", "ner.* bert, .*, roberta"),
        ("bert", "causal_lm", "causal_lm.* gpt2, .*, qwen3"),
    ],
)
def test_family_that_cannot_do_the_task_is_refused(family: str, task: str, named: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'{family}'.*{named}"):
        adapter_for(family, task, "{}")


@pytest.mark.parametrize(
    ("family", "task", "config_json"),
    [
        ("bert", "ner", "{"),
        ("bert", "ner", "[]"),
        ("bert", "ner", '{"hidden_size": -1}'),
        ("marian", "translation", "{}"),
    ],
)
def test_unusable_configuration_is_refused(family: str, task: str, config_json: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{family} model "):
        adapter_for(family, task, config_json)


def test_configuration_that_ties_units_is_refused(
    make_config_json: Callable[..., str],
) -> None:
    values = json.loads(make_config_json("marian", "translation"))
    values["share_encoder_decoder_embeddings"] = True
    with pytest.raises(InvalidInputError, match="_embeddings = True"):
        adapter_for("marian", "translation", json.dumps(values))


def test_whole_model_uses_the_attention_of_the_units(adapter: ModelAdapter) -> None:
    assert adapter.build_model().config._attn_implementation == "sdpa"
