"""Small cases of what users of neighbouring projects have reported. docs/public_reports.md has a row for each."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import MarianConfig, MarianMTModel

from collapipe.aggregation import bounded_weights, federated_average
from collapipe.data.findings import find_in_texts, unknown_labels
from collapipe.data.hold_out import HoldOut
from collapipe.data.rows import Row
from collapipe.data.sharding import dirichlet_clusters
from collapipe.data.sources import open_file
from collapipe.data.tables import make_rows
from collapipe.errors import DivergedError, InvalidInputError
from collapipe.evaluation import PREDICTED, RIGHT, ROWS, TRUE, add_sums, compute_metrics, of_class
from collapipe.job import FAMILIES, DataConfig, JobConfig, LoraConfig, ModelConfig, TaskConfig
from collapipe.models import (
    IGNORED,
    Head,
    ModelAdapter,
    adapter_for,
    create_config_json,
    initial_model,
    join_model,
    split_state,
)
from collapipe.models.adapter import cross_entropy_sum
from collapipe.models.lora import is_of_lora
from collapipe.models.state import save_lora
from collapipe.secure_aggregation.fixed_point import from_ring, to_ring
from collapipe.stage_runtime.optimizer import learning_rate, make_optimizer
from collapipe.stage_runtime.private_updates import UpdatePrivacy, make_private
from collapipe.tasks import Task, load_task
from collapipe.tasks.vocabulary import Vocabulary, make_vocabulary

LoadRows = Callable[..., Task]
JobMaker = Callable[..., JobConfig]
MakeTokenizer = Callable[[str], Tokenizer]
MakeBatch = Callable[[int], dict[str, Tensor]]

MINILM = {"pretrained": "minilm"}
CLASSES = DataConfig()


def write(path: Path, content: str | bytes) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def texts_of(path: str, kind: str = "classification") -> list[str]:
    return [row.texts[0] for row in open_file(path, kind, CLASSES).read()]


# --- what files say


def test_words_that_other_readers_take_for_missing_values_stay_texts(tmp_path: Path) -> None:
    """datasets 4467."""
    words = ["null", "NA", "nan", "None", "n/a", "-", "1e5"]
    rows = "".join(f"{word},{word}\n" for word in words)
    path = write(tmp_path / "rows.csv", f"text,label\n{rows}")
    read = open_file(path, "classification", CLASSES).read()
    assert [(*row.texts, *row.labels) for row in read] == [(word, word) for word in words]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_only_line_breaks_end_a_line(tmp_path: Path, separator: str) -> None:
    """datasets 3729, jsonlines 53."""
    texts = [f"one{separator}two", "three"]
    plain = write(tmp_path / "texts.txt", "".join(f"{text}\n" for text in texts))
    assert texts_of(plain, "causal_lm") == texts
    rows = [json.dumps({"text": text, "label": "a"}, ensure_ascii=False) for text in texts]
    if separator in "\u2028\u2029\x85":  # The others must be escaped in JSON.
        assert texts_of(write(tmp_path / "rows.jsonl", "\n".join(rows))) == texts


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_mark_of_byte_order_is_no_part_of_the_first_column(tmp_path: Path, suffix: str) -> None:
    """duckdb 2908."""
    separator = {"csv": ",", "tsv": "\t"}[suffix]
    content = f"text{separator}label\r\ngood{separator}a\r\n"
    path = write(tmp_path / f"rows.{suffix}", b"\xef\xbb\xbf" + content.encode())
    [row] = open_file(path, "classification", CLASSES).read()
    assert (row.texts, row.labels) == (("good",), ("a",))


def test_label_of_hidden_test_sets_is_no_class() -> None:
    """datasets 5624."""
    classes = {"label": ["bad", "good"]}
    records = [{"text": "fine", "label": 1}, {"text": "hidden", "label": -1}]
    with pytest.raises(InvalidInputError, match=r"sst2:2.*-1"):
        make_rows(records, classes, "classification", CLASSES, "sst2")
    [row] = make_rows(records[1:], {}, "classification", CLASSES, "rows.jsonl").rows
    assert row.labels == ("-1",)
    assert "-1" in str(unknown_labels({"-1": "rows.jsonl:1"}, ["0", "1"]))


def test_numbers_of_classes_become_the_names_of_their_data_set() -> None:
    """transformers 14230."""
    classes = {"ner_tags": ["O", "B-PER", "I-PER", "B-LOC"]}
    record = {"tokens": ["Ada", "in", "Rome"], "ner_tags": [1, 0, 3]}
    [row] = make_rows([record], classes, "ner", CLASSES, "conll").rows
    assert row.labels == ("B-PER", "O", "B-LOC")


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_key_that_comes_twice_is_refused(tmp_path: Path, form: str) -> None:
    """jq 1509."""
    row = '{"text": "a", "label": "x", "label": "y"}'
    path = write(tmp_path / f"rows.{form}", f"[{row}]" if form == "json" else row)
    with pytest.raises(InvalidInputError, match=rf"^{path}.*'label' twice"):
        open_file(path, "classification", CLASSES).read()


# --- texts as tokens


@pytest.mark.parametrize(
    ("target", "is_told"), [("ein Hund", True), ("ein Hund !", True), ("ein Hund, ja", False)]
)
def test_translations_that_bleu_cannot_measure_are_told(
    load_rows: LoadRows, target: str, is_told: bool
) -> None:
    """sacrebleu 198."""
    rows = [{"source": f"a dog {number}", "target": target} for number in range(4)]
    told = [
        each
        for each in load_rows("translation", rows, model={"family": "marian"}).findings
        if "BLEU" in each.what
    ]
    assert [each.is_warning for each in told] == [True] * is_told


def test_special_tokens_in_texts_are_told(load_rows: LoadRows) -> None:
    """tokenizers 787."""
    texts = ["a [SEP] b", "a b", "[MASK]", "c [SEP]"]
    rows = [{"text": text, "label": text[0]} for text in texts]
    task = load_rows("classification", rows, rows[1:2], model=MINILM)
    [told] = find_in_texts(task.kind, [task.texts])
    assert told.is_warning and told.place.endswith(":1")
    assert "3 of 5 rows" in told.what and "'[SEP]'" in told.what
    rows = [{"prompt": "<s> a", "completion": answer} for answer in ("b</s>", "b </s> c", "d", "e")]
    sections = {"model": {"family": "llama"}, "task": {"max_length": 64}}
    task = load_rows("instruction", rows, rows[2:], **sections)
    [told] = find_in_texts(task.kind, [task.texts, task.texts])
    assert told.place.endswith(":2") and "2 of 12 rows" in told.what


def test_texts_that_the_vocabulary_does_not_know_are_told(load_rows: LoadRows) -> None:
    """PreSumm 184."""
    texts = ["ሰላም ለዓለም", "a" * 200, "good day", "a good ዓለም"]
    rows = [{"text": text, "label": "xy"[number % 2]} for number, text in enumerate(texts)]
    task = load_rows("classification", rows, rows[2:3], model=MINILM)
    [told] = find_in_texts(task.kind, [task.texts])
    assert told.is_warning and "2 of 5 rows" in told.what and told.place.endswith(":1")


# --- labels of words


def test_both_names_of_one_scheme_give_the_same_entities(load_rows: LoadRows) -> None:
    """seqeval 71, seqeval 25."""
    tags = [["B-LOC", "I-LOC", "E-LOC", "S-PER", "O"], ["B-LOC", "I-LOC", "L-LOC", "U-PER", "O"]]
    found = []
    for scheme in tags:
        rows = [{"tokens": list("abcde"), "tags": scheme}] * 4
        [batch] = load_rows("ner", rows).micro_batches([0], 1)
        found.append(batch.tensors["labels"].tolist())
    assert found[0] == found[1]
    task = load_rows("ner", [{"tokens": list("abcde"), "tags": tags[0]}] * 4)
    assert task.labels == ["O", "B-LOC", "B-PER", "I-LOC", "I-PER"]


def test_tag_that_opens_an_entity_in_the_older_scheme_is_converted(tmp_path: Path) -> None:
    """glample/tagger 85."""
    path = write(tmp_path / "eng.conll", "AT O\nLEICESTERSHIRE I-ORG\nSurrey B-ORG\nwin O\n")
    [row] = open_file(path, "ner", CLASSES).read()
    assert row.labels == ("O", "B-ORG", "B-ORG", "O")


def test_first_tokens_belong_to_their_words_beside_accents(load_rows: LoadRows) -> None:
    """transformers 3058."""
    words = ["A", ",", "naïve", "[MASK]", "AllenNLP", "cafe\u0301", "\U0001f600", "sentence."]
    types = [f"B-t{number}" for number in range(len(words))]
    task = load_rows("ner", [{"tokens": words, "tags": types}] * 4, model=MINILM)
    [batch] = task.micro_batches([0], 1)
    labels = [x for x in batch.tensors["labels"][0].tolist() if x != IGNORED]
    assert [task.labels[number] for number in labels] == types
    [example] = task._train[:1]
    pieces = parse(task).encode(" ".join(words)).tokens
    found = [pieces[position] for position in example.first_tokens]
    assert found[2:5] == ["naive", "[MASK]", "allen"] and found[5] == "cafe"


def parse(task: Task) -> Tokenizer:
    return Tokenizer.from_str(task.vocabulary.partition(b"\n")[0].decode())


def test_added_token_moves_no_label_to_another_word(tmp_path: Path, make_job: JobMaker) -> None:
    """tokenizers 1300."""
    made = Tokenizer.from_str(make_vocabulary(["on off unit"], 300, "roberta").decode())
    made.add_tokens(["<unit>"])
    words, tags = ["<unit>", "on", "<unit>off", "on"], ["B-a", "B-b", "B-c", "B-d"]
    rows = json.dumps({"tokens": words, "tags": tags}) + "\n"
    path = write(tmp_path / "rows.jsonl", rows * 4)
    job = make_job("ner", {"train": path, "held_out": write(tmp_path / "h.jsonl", rows)})
    task = load_task(
        job.model_copy(update={"model": ModelConfig(family="roberta")}), 0, made.to_str().encode()
    )
    task.set_labels(task.labels)
    [batch] = task.micro_batches([0], 1)
    labels = [task.labels[x] for x in batch.tensors["labels"][0].tolist() if x != IGNORED]
    assert labels == tags


def test_words_that_are_cut_off_are_errors_and_keep_their_places(load_rows: LoadRows) -> None:
    """transformers 9724, transformers 18050, masakhane-ner 16."""
    words = [f"word{number}" for number in range(30)]
    rows = [{"tokens": words, "tags": ["B-x"] * 30}] * 4
    task = load_rows("ner", rows, model=MINILM, task={"max_length": 8})
    [example] = task._held_out[:1]
    answers = task.answer(example, torch.full((1, 8), task.labels.index("B-x"))).splitlines()
    assert [line.split("\t")[0] for line in answers] == words
    counted = task.sums([torch.full((4, 8), task.labels.index("B-x"))])
    assert counted["true"] == 4 * 30 and counted["right"] == counted["predicted"] < 4 * 30


def test_word_without_a_token_shifts_no_answer(load_rows: LoadRows) -> None:
    """camel_tools 105, delft 242."""
    words = ["Ada", "\u200b", "\u0651", "sleeps"]
    rows = [{"tokens": words, "tags": ["B-x", "O", "O", "B-x"]}] * 4
    task = load_rows("ner", rows, model=MINILM)
    prediction = torch.full((1, 8), task.labels.index("B-x"))
    answers = [line.split("\t") for line in task.answer(task._held_out[0], prediction).split("\n")]
    assert [tag for _, tag in answers[:-1]] == ["B-x", "O", "O", "B-x"]


def test_configuration_names_each_label(tokenizer: Tokenizer) -> None:
    """transformers 2487, transformers 3093."""
    task, labels = TaskConfig(kind="ner"), ["O", "B-LOC", "I-LOC"]
    values = json.loads(create_config_json(ModelConfig(), task, labels, tokenizer))
    assert values["id2label"] == {str(number): label for number, label in enumerate(labels)}
    assert values["label2id"] == {label: number for number, label in enumerate(labels)}


# --- tokens and targets


def with_roles(tokenizer: Tokenizer, **more: Any) -> bytes:
    return "\n".join([tokenizer.to_str(), json.dumps(more)]).encode()


def instruction(
    tmp_path: Path, make_job: JobMaker, rows: list[dict[str, Any]], vocabulary: bytes, **task: Any
) -> Task:
    path = write(tmp_path / "rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    held_out = write(tmp_path / "held.jsonl", json.dumps(rows[0]) + "\n")
    data = {"train": path, "held_out": held_out}
    return load_task(
        make_job("instruction", data, task=task, model={"family": "qwen2"}), 0, vocabulary
    )


def test_end_token_is_a_target_although_it_also_pads(
    tmp_path: Path, make_job: JobMaker, make_tokenizer: MakeTokenizer
) -> None:
    """trl 976, llm-course 33, granite 2."""
    roles = {"pad_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    tokenizer = make_tokenizer("qwen2")
    end = tokenizer.token_to_id("<|endoftext|>")
    rows = [{"prompt": "w1", "completion": "w2 " * (n + 1)} for n in range(4)]
    task = instruction(tmp_path, make_job, rows, with_roles(tokenizer, special_tokens=roles))
    [batch] = task.micro_batches(range(4), 1)
    for labels in batch.tensors["labels"].tolist():
        targets = [label for label in labels if label != IGNORED]
        assert targets[-1] == end and targets.count(end) == 1


def test_chat_has_one_start_token(
    tmp_path: Path, make_job: JobMaker, make_tokenizer: MakeTokenizer
) -> None:
    """trl 1400, OpenRLHF 393."""
    template = (
        "<s>{% for m in messages %}{{ m['content'] }} {% if m['role'] == 'assistant' %}"
        "<|endoftext|>{% endif %}{% endfor %}"
    )
    chat = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    tokenizer = make_tokenizer("qwen2")
    tokenizer.add_special_tokens(["<s>", "<|endoftext|>"])
    vocabulary = with_roles(tokenizer, chat_template=template)
    task = instruction(tmp_path, make_job, [{"messages": chat}] * 4, vocabulary)
    [batch] = task.micro_batches([0], 1)
    assert batch.tensors["input_ids"].tolist() == [[1, 5, 6, 7, 2]]


def test_answer_begins_after_the_tokens_of_the_prompt_alone() -> None:
    """trl 5213, AReaL 1427, torchtitan 4504."""
    words = {"a": 0, "b": 1, ".": 2, "c": 3, ".c": 4, "<|endoftext|>": 5, "<|pad|>": 6}
    tokenizer = Tokenizer(models.BPE(words, [(".", "c")]))
    tokenizer.decoder = decoders.Fuse()
    vocabulary = Vocabulary(tokenizer.to_str().encode(), "gpt2", 20)
    [(prompt, answer)] = vocabulary.encode_answers(["ab."], ["ca"], add_start=False)
    assert (prompt, answer) == ([0, 1, 2], [3, 0, 5])


def test_row_without_room_for_its_answer_is_left_out(
    tmp_path: Path, make_job: JobMaker, make_tokenizer: MakeTokenizer
) -> None:
    """llama-cookbook 133, trl 6668."""
    short, long = ({"prompt": "w1 " * n, "completion": "w2"} for n in (1, 30))
    vocabulary = make_tokenizer("qwen2").to_str().encode()
    task = instruction(
        tmp_path, make_job, [short, long, short, short, short], vocabulary, max_length=16
    )
    assert (task.num_rows, task.num_long_rows) == (4, 1)
    assert all(batch.num_targets for batch in task.micro_batches(range(4), 4))


def test_decoder_begins_with_the_start_token_of_the_configuration() -> None:
    """transformers 7719, transformers 9417."""
    config = MarianConfig(
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 1),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "d_model"), 4),
        vocab_size=9,
        pad_token_id=8,
        decoder_start_token_id=8,
        eos_token_id=0,
    )
    labels = torch.tensor([[3, 4, 0], [5, 0, IGNORED]])
    inputs = MarianMTModel(config).prepare_decoder_input_ids_from_labels(labels)
    assert inputs.tolist() == [[8, 3, 4], [8, 5, 0]]


def test_decoded_answer_has_no_other_blanks() -> None:
    """transformers 29452, tokenizers 1467."""
    data = make_vocabulary(["two words, and  more"], 300, "llama")
    vocabulary = Vocabulary(data, "llama", 40)
    for text in ("hi", "two words", "a  b", "x,y", "caf\u00e9"):
        [encoding] = vocabulary.encode([text])
        assert vocabulary.decode(list(encoding.ids)) == text


# --- losses and updates


def plain_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return cross_entropy(logits, batch["labels"], reduction="none")


def run_units(adapter: ModelAdapter, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Returns the sum of the losses, as a pipeline computes it."""
    activation = None
    for index, state in enumerate(split_state(adapter, model)):  # type: ignore[arg-type]
        unit = adapter.build_unit(index)
        unit.load_state_dict(state)
        unit.eval()
        if isinstance(unit, Head):
            assert activation is not None
            return unit.loss_sum(activation, batch, 0.0)
        activation = unit(activation, batch)
    raise AssertionError("the last unit is a head")


def test_loss_of_a_row_ignores_padding_and_other_rows(
    bert: ModelAdapter, make_batch: MakeBatch
) -> None:
    """transformers 29029, transformers 18809."""
    model = initial_model(bert, None, seed=3).eval()
    batch = make_batch(3)
    length = int(batch["attention_mask"][1].sum())
    alone = {
        name: tensor[1:2, :length] if tensor.ndim > 1 else tensor[1:2]
        for name, tensor in batch.items()
    }
    others = {**batch, "input_ids": batch["input_ids"].clone()}
    others["input_ids"][0], others["input_ids"][1, length:] = 7, 9
    with torch.no_grad():
        assert torch.allclose(plain_losses(model, alone)[0], plain_losses(model, batch)[1])
        assert torch.allclose(run_units(bert, model, batch), plain_losses(model, batch).sum())
        changed = {**others, "labels": torch.tensor([IGNORED, int(batch["labels"][1]), IGNORED])}
        assert torch.allclose(run_units(bert, model, changed), plain_losses(model, alone)[0])


def test_micro_batches_with_unequal_targets_have_the_loss_of_the_whole(
    load_rows: LoadRows,
) -> None:
    """transformers 24725, nanochat 59."""
    rows = [{"tokens": ["a"] * n, "tags": ["B-x"] * n} for n in (1, 9, 2, 4)]
    task = load_rows("ner", rows)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(300, len(task.labels), generator=generator)
    means = []
    for count in (1, 2, 4):
        batches = task.micro_batches(range(4), count)
        total = sum(
            cross_entropy_sum(table[b.tensors["input_ids"]], b.tensors["labels"], 0.0)
            for b in batches
        )
        means.append(float(total) / sum(b.num_targets for b in batches))
    [whole] = task.micro_batches(range(4), 1)
    logits = table[whole.tensors["input_ids"]]
    plain = cross_entropy(logits.flatten(0, 1), whole.tensors["labels"].flatten())
    assert means == pytest.approx([float(plain)] * 3)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_positions_without_a_target_add_nothing_with_label_smoothing(smoothing: float) -> None:
    """pytorch 73205, transformers 7546, OpenNMT-py 1463."""
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(6, 5, generator=generator), torch.tensor([1, IGNORED, 4] * 2)
    logs = logits.log_softmax(-1)
    expected = 0.0
    for row, label in zip(logs, labels.tolist(), strict=True):
        if label != IGNORED:
            expected -= float((1 - smoothing) * row[label] + smoothing * row.mean())
    assert float(cross_entropy_sum(logits, labels, smoothing)) == pytest.approx(expected)


@pytest.mark.parametrize("decay", ["linear", "inverse_sqrt", "constant"])
def test_learning_rate_goes_on_where_it_was(decay: str) -> None:
    """transformers 34053, transformers 23099, transformers 27749."""
    training = JobConfig.from_dict(
        {"task": {"kind": "ner"}, "training": {"warm_up_steps": 3, "decay": decay}}, "a job"
    ).training
    whole = [learning_rate(training, step, 10) for step in range(10)]
    resumed = [learning_rate(training, 5 + step, 10) for step in range(5)]
    assert whole[5:] == resumed and len(set(whole[:3])) == 3


def test_vectors_do_not_decay(bert: ModelAdapter) -> None:
    """keras-bert 60, oumi 341, Fast-LLM 545."""
    unit = bert.build_unit(1)
    named = dict(unit.named_parameters())
    training = JobConfig.from_dict({"task": {"kind": "ner"}}, "a job").training
    groups = make_optimizer(list(named.values()), training).param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in named.items():
        is_vector = name.endswith("bias") or "LayerNorm" in name
        assert (id(parameter) in decayed) is not is_vector, name


# --- adapters


def test_adapter_of_a_classifier_has_its_labelling_layer(
    tmp_path: Path, tokenizer: Tokenizer, make_batch: MakeBatch
) -> None:
    """peft 310, peft 577, peft 1070, peft 1035."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ModelConfig(config=sizes | {"intermediate_size": 24}, lora=LoraConfig(r=2))
    task = TaskConfig(kind="classification", max_length=12)
    adapter = adapter_for(
        "bert", "classification", create_config_json(config, task, ["a", "b", "c"], tokenizer)
    )
    generator = torch.Generator().manual_seed(0)
    states = [
        {n: torch.randn(t.shape, generator=generator) * 0.3 if t.is_floating_point() else t
         for n, t in state.items()}
        for state in split_state(adapter, initial_model(adapter, None, seed=3))
    ]  # fmt: skip
    merged = join_model(adapter, ({n: t.clone() for n, t in s.items()} for s in states))
    save_lora(adapter, states, tmp_path, "base")
    frozen: dict[str, Tensor] = {}
    for index, state in enumerate(states):
        for name, own in adapter.frozen_names(index).items():
            frozen[name] = state[own]
    base = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(tmp_path))
    base.load_state_dict(frozen, strict=False)
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    batch = make_batch(1)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        assert torch.allclose(merged(**inputs).logits, loaded(**inputs).logits, atol=1e-4)


def test_exact_averages_of_products_train_one_factor_only(tokenizer: Tokenizer) -> None:
    """FederatedLLM 10."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    task = TaskConfig(kind="classification", max_length=12)
    lora = LoraConfig(r=2, averaging="product")
    config = ModelConfig(config=sizes, lora=lora)
    adapter = adapter_for(
        "bert", "classification", create_config_json(config, task, ["a", "b"], tokenizer)
    )
    named = adapter.build_unit(1).named_parameters()
    trained = {name for name, parameter in named if parameter.requires_grad and is_of_lora(name)}
    assert trained and all("lora_B" in name for name in trained)


# --- averages


def test_average_is_that_of_the_formula_whatever_the_order() -> None:
    """PySyft 3863, PySyft 3828, FLEXible 122, Federated-Learning-PyTorch 27."""
    tensors = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5]), torch.tensor([-8.0, 4.0])]
    rows = [10, 30, 60]
    expected = [0.1 * 1 + 0.3 * 3 - 0.6 * 8, -0.2 + 0.15 + 2.4]
    for order in ((0, 1, 2), (2, 0, 1)):
        averaged = federated_average([tensors[i] for i in order], [rows[i] for i in order])
        assert averaged.tolist() == pytest.approx(expected)


def test_shares_of_the_clusters_that_are_there_add_up_to_one() -> None:
    """WAFFLE 6."""
    assert federated_average([torch.ones(3)] * 2, [10, 30]).tolist() == [1, 1, 1]
    weights = bounded_weights([10, 30, 60], 0.5)
    assert [weight / sum(weights) for weight in weights] == pytest.approx([0.125, 0.375, 0.5])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_no_family_has_statistics_beside_its_parameters(
    family: str, make_tokenizer: MakeTokenizer
) -> None:
    """PFLlib 260, FedScale 57, flower 1060, PySyft 2498."""
    kind = FAMILIES[family][0]
    values = create_config_json(
        ModelConfig(family=family),
        TaskConfig(kind=kind),  # type: ignore[arg-type]
        ["a", "b"],
        make_tokenizer(family),
    )
    model, _ = adapter_for(family, kind, values).build_on_meta()
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    others = {n for n, t in model.state_dict().items() if t.is_floating_point()} - parameters
    assert all(name.endswith("final_logits_bias") for name in others)  # It is always zero.


def test_metric_counts_rows_and_not_clusters() -> None:
    """flower 1944, flower 983, FATE 1400."""
    right = {of_class(count, 0): 1 for count in (TRUE, PREDICTED, RIGHT)}
    clusters = [{ROWS: 1, **right}, {ROWS: 9, of_class(TRUE, 0): 9, of_class(PREDICTED, 1): 9}]
    assert compute_metrics("classification", add_sums(clusters))["accuracy"] == 0.1


@pytest.mark.parametrize("clusters", [1, 2, 3])
def test_each_held_out_row_is_measured_once(
    tmp_path: Path, make_job: JobMaker, clusters: int
) -> None:
    """accelerate 575, accelerate 952, accelerate 1674."""
    lines = [json.dumps({"text": f"text {n}", "label": "ab"[n % 2]}) for n in range(16)]
    train = write(tmp_path / "train.jsonl", "\n".join(lines))
    held_out = write(tmp_path / "held.jsonl", "\n".join(lines[:7]))
    job = make_job("classification", {"train": train, "held_out": held_out}, clusters=clusters)
    first = load_task(job, 0, None)
    tasks = [first, *(load_task(job, index, first.vocabulary) for index in range(1, clusters))]
    seen: Counter[tuple[int, ...]] = Counter()
    for task in tasks:
        task.set_labels(["a", "b"])
        for batch in task.held_out_micro_batches(2):
            seen.update(tuple(row) for row in batch.tensors["input_ids"].tolist())
    assert len(seen) == 7 and set(seen.values()) == {1}


# --- masks and noise


def test_masked_average_is_the_weighted_one_for_many_clusters() -> None:
    """openfl 1407, fedbiomed 898, FLASHE 8, FATE 3687."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(50, generator=generator)
    rows = [3 + 7 * number for number in range(10)]
    changes = [torch.randn(50, generator=generator) * 10.0 ** (n % 7 - 6) - 2.5 for n in range(10)]
    ring = [
        to_ring(base + change, base, count, 2 * sum(rows), "w")
        for change, count in zip(changes, rows, strict=True)
    ]
    total = torch.stack(ring).sum(0, dtype=torch.int32)
    averaged = from_ring(base, total, sum(rows), 2 * sum(rows), "w")
    plain = federated_average([base + change for change in changes], rows)
    assert torch.allclose(averaged, plain, rtol=0, atol=1e-6)


def test_largest_changes_of_the_most_clusters_do_not_overflow() -> None:
    """fedbiomed 1210."""
    base = torch.zeros(2)
    extreme = torch.tensor([7.0, -7.0])
    ring = [to_ring(extreme, base, 9, 1800, "w") for _ in range(100)]
    total = torch.stack(ring).sum(0, dtype=torch.int32)
    assert from_ring(base, total, 900, 1800, "w").tolist() == pytest.approx([7, -7])


def test_change_that_is_too_large_for_a_mask_is_refused_and_not_clipped() -> None:
    """flower 4982, flower 7633."""
    with pytest.raises(DivergedError, match="layer.weight"):
        to_ring(torch.tensor([8.0]), torch.zeros(1), 1, 2, "layer.weight")


def test_noise_has_the_size_of_the_bound_of_the_whole_change() -> None:
    """opacus 202, disco 317."""
    job = JobConfig.from_dict(
        {
            "task": {"kind": "ner"},
            "clusters": 4,
            "privacy": {"noise_multiplier": 2.0, "clip_norm": 0.6},
        },
        "a job",
    )
    assert job.noise_stddev == pytest.approx(2.0 * 0.6 / math.sqrt(3))
    base = {"w": torch.full((40_000,), 5.0)}
    unit = nn.ParameterDict({"w": nn.Parameter(base["w"] + 1.0)})
    privacy = UpdatePrivacy(clip_norm=0.3, noise_stddev=1e-4, secret=bytes(32))
    make_private(dict(unit), base, privacy, ("a", "b"))
    change = (unit["w"].detach() - base["w"]).double()
    # The change is bounded, and not the weights.
    assert float(change.mean() * math.sqrt(40_000)) == pytest.approx(0.3, rel=0.01)
    assert float(change.std()) == pytest.approx(1e-4, rel=0.03)


# --- which rows train where


def test_held_out_rows_share_no_text_with_training_rows_and_stay_when_rows_come() -> None:
    """tensorflow 59279, flower 3211, datasets 8436."""
    rows = [Row("f", n, (f"text {n % 40}",), ("ab"[n % 2],)) for n in range(200)]
    hold_out = HoldOut("classification")
    train, held_out = hold_out.divide(rows)
    assert held_out and not {row.key for row in train} & {row.key for row in held_out}
    hold_out.accept()
    more, _ = hold_out.divide(
        [Row("f", 201 + n, row.texts, row.labels) for n, row in enumerate(train)]
    )
    assert len(more) == len(train)


def test_skewed_division_loses_no_row_and_depends_on_no_later_one() -> None:
    """Federated-Learning-in-PyTorch 17, flower 5948."""
    groups = [f"c{n % 3}" for n in range(300)]
    whole = dirichlet_clusters(1, 4, 0.5, 0, groups)
    parts = [*dirichlet_clusters(1, 4, 0.5, 0, groups[:100])]
    parts += dirichlet_clusters(1, 4, 0.5, 100, groups[100:])
    assert len(whole) == 300 and parts == whole
    assert dirichlet_clusters(2, 4, 0.5, 0, groups) != whole


def test_cluster_that_gets_too_few_rows_is_named(tmp_path: Path, make_job: JobMaker) -> None:
    """flower 4377, flower 2795."""
    lines = "".join(json.dumps({"text": f"t{n}", "label": "ab"[n % 2]}) + "\n" for n in range(40))
    data = {
        "train": write(tmp_path / "train.jsonl", lines),
        "held_out": write(tmp_path / "held.jsonl", lines),
        "sharding": "dirichlet",
        "dirichlet_alpha": 1e-3,
    }
    job = make_job("classification", data, clusters=4)
    first = b""
    with pytest.raises(InvalidInputError, match="dirichlet_alpha"):
        for index in range(4):
            first = load_task(job, index, first or None).vocabulary
