"""Tests that jobs become configurations, and that errors name the mistake and the remedy."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from collapipe.errors import InvalidInputError
from collapipe.job import FAMILIES, LoraConfig, ModelConfig, TaskConfig
from collapipe.models import ModelAdapter, adapter_for, create_config_json
from collapipe.models.configuration_ranges import _RANGES, READ_SETTINGS
from collapipe.models.families import FAMILIES as MODEL_FAMILIES
from collapipe.models.families import adapter_class
from collapipe.models.generation_settings import read_generation_settings

NER = TaskConfig(kind="ner")
CAUSAL_LM = TaskConfig(kind="causal_lm")
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
    generation = adapter.build_on_meta()[0].generation_config
    assert (generation.max_new_tokens, generation.num_beams) == (33, 1)
    assert (generation.pad_token_id, generation.eos_token_id) == (0, 2)


def write_directory(folder: Path, family: str, config: dict[str, Any], **files: Any) -> ModelConfig:
    """Writes what `create_config_json` reads of a pretrained directory; `files` are JSON documents."""
    documents = {"config": {"model_type": family, "vocab_size": 40, **config}, **files}
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return ModelConfig(family=family, pretrained=str(folder))


OLD_END, TRAINED_END = 7, 2
GIVEN: dict[str, Any] = {
    "eos_token_id": OLD_END,
    "bad_words_ids": [[5], [6, 7]],
    "forced_bos_token_id": 8,
    "forced_eos_token_id": OLD_END,
    "num_beams": 4,
    "length_penalty": 2.0,
    "max_length": 500,
}


@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_trained_end_replaces_that_of_the_directory_whose_other_settings_stay(
    make_tokenizer: MakeTokenizer, tmp_path: Path, file: str
) -> None:
    """Older directories have the settings in config.json."""
    config = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": OLD_END}
    config |= {"forced_eos_token_id": OLD_END, "max_position_embeddings": 128}
    files = {} if file == "config" else {file: GIVEN}
    model = write_directory(tmp_path, "marian", config | (GIVEN if not files else {}), **files)
    config_json = create_config_json(model, TRANSLATION, [], make_tokenizer("marian"))
    adapter = adapter_for("marian", "translation", config_json)
    assert adapter.config.eos_token_id == adapter.config.forced_eos_token_id == TRAINED_END
    assert adapter.end_ids == {TRAINED_END}
    settings = adapter.build_on_meta()[0].generation_config
    settings.save_pretrained(tmp_path / "export")
    written = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    expected = {"eos_token_id": TRAINED_END, "forced_eos_token_id": TRAINED_END}
    expected |= {"bad_words_ids": GIVEN["bad_words_ids"], "forced_bos_token_id": 8}
    expected |= {"max_new_tokens": 33, "num_beams": 1, "do_sample": False}
    assert {key: written[key] for key in expected} == expected
    assert not written.keys() & {"length_penalty", "max_length"}


@pytest.mark.parametrize("content", ["[]", "3", "null", '"text"', "{"])
def test_settings_of_generation_that_are_no_object_are_refused_with_their_file(
    tmp_path: Path, content: str
) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=re.escape(str(path))):
        read_generation_settings(tmp_path)


def test_language_model_keeps_its_other_ends_and_its_sampling(
    make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    given = {"eos_token_id": [7, 8, TRAINED_END], "do_sample": True, "temperature": 0.6}
    model = write_directory(
        tmp_path, "llama", {"pad_token_id": -1, "eos_token_id": 7}, generation_config=given
    )
    task = TaskConfig(kind="instruction")
    declared = {"eos_token": "</s>"}
    adapter = adapter_for(
        "llama", task.kind, create_config_json(model, task, [], make_tokenizer("llama"), declared)
    )
    assert adapter.config.eos_token_id == TRAINED_END
    assert adapter.config.pad_token_id is None
    assert adapter.end_ids == {7, 8, TRAINED_END}
    settings = adapter.build_on_meta()[0].generation_config
    assert settings.eos_token_id == [TRAINED_END, 7, 8]
    assert (settings.do_sample, settings.temperature, settings.pad_token_id) == (True, 0.6, 0)


def test_settings_that_only_sampling_uses_are_left_out_without_it(
    make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    """`transformers` would refuse to write them."""
    given = {"do_sample": False, "temperature": 0.6, "top_p": 0.9}
    model = write_directory(tmp_path, "llama", {}, generation_config=given)
    config_json = create_config_json(model, CAUSAL_LM, [], make_tokenizer("llama"))
    settings = adapter_for("llama", "causal_lm", config_json).build_on_meta()[0].generation_config
    settings.save_pretrained(tmp_path)
    assert settings.top_p != 0.9


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["{", '{"a":' * 100_000], ids=["cut", "deep"])
def test_damaged_settings_are_named(
    make_tokenizer: MakeTokenizer, tmp_path: Path, name: str, text: str
) -> None:
    model = write_directory(tmp_path, "llama", {})
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError, match=f"{tmp_path}/{name}: "):
        create_config_json(model, CAUSAL_LM, [], make_tokenizer("llama"))


def test_token_ids_beyond_the_rows_of_the_embedding_are_refused(
    make_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    """The vocabulary has a gap, so its number of tokens would fit."""
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 2, "<unk>": 57}, unk_token="<unk>"))
    model = write_directory(tmp_path, "llama", {})
    with pytest.raises(InvalidInputError, match="57 .*'<unk>'.* 40 rows"):
        create_config_json(model, CAUSAL_LM, [], tokenizer)


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
        ({"num_attention_heads": 0}, "num_attention_heads.* 0: .* 1 to 1024"),
        ({"num_hidden_layers": 0}, "num_hidden_layers.* 0: .* 1 to 256"),
        ({"num_hidden_layers": -1}, "num_hidden_layers.* -1"),
        ({"num_hidden_layers": 20_000}, "num_hidden_layers.* 20000"),
        ({"hidden_size": 10**12}, "hidden_size.* 1000000000000"),
        ({"layer_norm_eps": float("nan")}, "layer_norm_eps.* nan"),
        ({"initializer_range": 1e38}, r"initializer_range.* 1e\+38"),
        ({"hidden_dropout_prob": 1.5}, r"hidden_dropout_prob.* 1\.5"),
        ({"hidden_size": True}, "hidden_size.* True"),
    ],
)
def test_bad_override_is_refused(
    tokenizer: Tokenizer, override: dict[str, object], message: str
) -> None:
    model = ModelConfig(family="bert", config=override)
    with pytest.raises(InvalidInputError, match=message):
        create_config_json(model, NER, LABELS, tokenizer)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"pretraining_tp": 2}, "pretraining_tp"),  # No model of this library reads it.
        ({"rope_parameters": {"rope_theta": float("inf")}}, "rope_theta.* inf"),
        ({"rope_parameters": {"rope_theta": 1e4, "factr": 2}}, "'factr'.*'factor'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 1e300}}, r"factor.* 1e\+300"),
        ({"layer_types": 5}, "layer_types"),
        (
            {"num_hidden_layers": 200, "hidden_size": 65_536, "intermediate_size": 1_000_000},
            "1e\\+11",
        ),
    ],
)
def test_bad_override_of_a_language_model_is_refused(
    make_tokenizer: MakeTokenizer, override: dict[str, object], message: str
) -> None:
    model = ModelConfig(family="llama", config={"num_hidden_layers": 1, **override})
    with pytest.raises(InvalidInputError, match=message):
        create_config_json(model, CAUSAL_LM, [], make_tokenizer("llama"))


@pytest.mark.parametrize(
    ("family", "task", "width", "config"),
    [
        ("marian", TRANSLATION, "d_model", {}),
        ("distilbert", NER, "dim", {"sinusoidal_pos_embds": True}),
    ],
)
def test_sinusoidal_positions_are_as_many_as_are_computed_in_seconds(
    make_tokenizer: MakeTokenizer,
    family: str,
    task: TaskConfig,
    width: str,
    config: dict[str, object],
) -> None:
    def create(positions: int) -> str:
        values = {width: 1024, "max_position_embeddings": positions, **config}
        labels = LABELS if task is NER else []
        model = ModelConfig(family=family, config=values)
        return create_config_json(model, task, labels, make_tokenizer(family))

    assert json.loads(create(4096))["max_position_embeddings"] == 4096
    with pytest.raises(InvalidInputError, match=r"max_position_embeddings.* 4097.* 4096 "):
        create(4097)


@pytest.mark.parametrize("family", sorted(MODEL_FAMILIES))
def test_every_setting_that_a_job_may_give_has_a_range_or_few_values(family: str) -> None:
    """Whoever adds a family names the range of each new number."""
    has_few_values = (bool, str)
    config = adapter_class(family).config_class()
    for key in vars(adapter_class(family).config_class)["__annotations__"]:
        if key in READ_SETTINGS and key not in _RANGES:
            value = getattr(config, key)
            assert value is None or isinstance(value, (*has_few_values, list, dict)), key


def test_pattern_of_lora_becomes_names_in_a_time_that_no_pattern_can_make_long(
    make_tokenizer: MakeTokenizer,
) -> None:
    def targets(pattern: str) -> list[str]:
        lora = LoraConfig(target_modules=pattern)
        model = ModelConfig(family="llama", config={"num_hidden_layers": 2}, lora=lora)
        config_json = create_config_json(model, CAUSAL_LM, [], make_tokenizer("llama"))
        found: list[str] = json.loads(config_json)["lora"]["target_modules"]
        return found

    assert targets(r".*\.1\..*\.(q|v)_proj") == [
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.self_attn.v_proj",
    ]
    # Python's `re` would need hours for each name.
    with pytest.raises(InvalidInputError, match=r"target_modules.*X.*q_proj"):
        targets(r"([a-z.]+|[a-z0-9_.]+)+X")
    for unreadable in (r"(?=.*q_proj).*", r"(.)\1", "("):
        with pytest.raises(InvalidInputError, match=r"target_modules .*RE2"):
            targets(unreadable)


def test_pattern_that_an_earlier_version_stored_takes_no_longer(
    make_adapter: Callable[..., ModelAdapter], with_lora: Any
) -> None:
    llama = make_adapter("llama", "causal_lm")
    changed = with_lora(llama, target_modules=r".*\.2\..*\.q_proj")
    assert [i for i in range(changed.num_units) if changed.frozen_names(i)] != []
    assert changed.num_trained_units == 1
    with pytest.raises(InvalidInputError, match=r"target_modules.*X"):
        with_lora(llama, target_modules=r"([a-z.]+|[a-z0-9_.]+)+X")


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
        ("bert", "ner", '{"hidden_size": 30}'),
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
