"""Tests that jobs become configurations, and that errors name the mistake and the remedy."""

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models

from collapipe.errors import InvalidInputError
from collapipe.job import FAMILIES, LoraConfig, ModelConfig, TaskConfig
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
        ({"hiden_size": 8}, "unknown key 'hiden_size'.*did you mean 'hidden_size'"),
        ({"zzz": 8}, "unknown key 'zzz'.*known keys: .*hidden_size"),
        ({"vocab_size": 8}, "model.config.vocab_size cannot be set"),
        ({"is_decoder": True}, "model.config.is_decoder cannot be set"),
        ({"hidden_size": "big"}, "hidden_size.*big"),
        ({"hidden_size": 30}, r"hidden.size.*30.*4"),
        ({"hidden_act": "gelo"}, "gelo"),
        ({"max_position_embeddings": 100}, "task.max_length is 128.*100 tokens"),
    ],
)
def test_bad_override_is_refused(
    tokenizer: Tokenizer, override: dict[str, object], message: str
) -> None:
    model = ModelConfig(family="bert", config=override)
    with pytest.raises(InvalidInputError, match=message):
        create_config_json(model, NER, LABELS, tokenizer)


def test_long_translation_is_refused(make_tokenizer: MakeTokenizer) -> None:
    task = TaskConfig(kind="translation", max_new_tokens=2000)
    with pytest.raises(InvalidInputError, match="task.max_new_tokens is 2000"):
        create_config_json(ModelConfig(family="marian"), task, [], make_tokenizer("marian"))


def test_roberta_positions_start_behind_the_padding_id(make_tokenizer: MakeTokenizer) -> None:
    model = ModelConfig(family="roberta", config={"max_position_embeddings": 128})
    with pytest.raises(InvalidInputError, match="positions for 127 tokens"):
        create_config_json(model, NER, LABELS, make_tokenizer("roberta"))


def test_frozen_embeddings_are_refused_for_a_family_without_an_output_layer(
    tokenizer: Tokenizer,
) -> None:
    with pytest.raises(InvalidInputError, match=r"model\.freeze_embeddings .* remove the setting"):
        create_config_json(
            ModelConfig(family="bert", freeze_embeddings=True), NER, LABELS, tokenizer
        )


@pytest.mark.parametrize("lora", [{"modules_to_save": ["lm_head"]}, {"target_modules": ["wte"]}])
def test_frozen_embeddings_that_lora_would_change_are_refused(
    make_tokenizer: MakeTokenizer, lora: dict[str, list[str]]
) -> None:
    model = ModelConfig(family="gpt2", freeze_embeddings=True, lora=LoraConfig(**lora))
    with pytest.raises(InvalidInputError, match=r"model\.lora changes the embedding or the output"):
        create_config_json(model, TaskConfig(kind="causal_lm"), [], make_tokenizer("gpt2"))


def test_single_label_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidInputError, match="1 different labels .*O.* at least 2"):
        create_config_json(ModelConfig(family="bert"), NER, ["O"], tokenizer)


def test_tokenizer_without_a_padding_token_is_refused() -> None:
    bare = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    with pytest.raises(InvalidInputError, match=r"no '\[PAD\]', the pad_token of family 'bert'"):
        create_config_json(ModelConfig(family="bert"), NER, LABELS, bare)


def test_clients_know_the_tasks_of_each_family() -> None:
    assert {family: adapter_class(family).model_classes.keys() for family in MODEL_FAMILIES} == {
        family: dict.fromkeys(tasks).keys() for family, tasks in FAMILIES.items()
    }


def test_unknown_family_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="'t5'.*bert, distilbert, roberta, marian, bart, gpt2"
    ):
        adapter_for("t5", "ner", "{}")


@pytest.mark.parametrize(
    ("family", "task", "remedy"),
    [
        ("bert", "translation", "marian, bart"),
        ("marian", "ner", "bert, distilbert, roberta"),
        ("gpt2", "ner", "bert, distilbert, roberta"),
        ("bert", "causal_lm", "gpt2, llama, mistral, qwen2, qwen3"),
    ],
)
def test_family_that_cannot_do_the_task_is_refused(family: str, task: str, remedy: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{family}.*{task}.*use one of {remedy}"):
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
    with pytest.raises(
        InvalidInputError, match=f"{family} model (cannot be built|is not valid JSON)"
    ):
        adapter_for(family, task, config_json)


def test_configuration_that_ties_units_is_refused(
    make_config_json: Callable[..., str],
) -> None:
    values = json.loads(make_config_json("marian", "translation"))
    values["share_encoder_decoder_embeddings"] = True
    with pytest.raises(InvalidInputError, match="share_encoder_decoder_embeddings = True"):
        adapter_for("marian", "translation", json.dumps(values))


def test_whole_model_uses_the_attention_of_the_units(adapter: ModelAdapter) -> None:
    assert adapter.build_model().config._attn_implementation == "sdpa"


def test_only_the_modelling_code_of_the_family_is_imported() -> None:
    code = """
import sys
import collapipe.models as models
assert "transformers" not in sys.modules
try:
    models.adapter_for("bert", "ner", "[]")
except Exception:
    pass
loaded = [name for name in sys.modules if name.startswith("transformers.models.")]
assert any("modeling_bert" in name for name in loaded)
others = ("roberta", "distilbert", "marian", "bart")
assert not [name for name in loaded if name.rpartition("modeling_")[2] in others]
"""
    subprocess.run([sys.executable, "-c", code], check=True)
