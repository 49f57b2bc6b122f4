"""Prompts and chats become rows whose answers are learned, and predictions become the metrics of whole answers."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig

from collapipe.errors import InvalidInputError
from collapipe.tasks import Task, load_task, parse_vocabulary, write_tokenizer_files
from collapipe.tasks.vocabulary import make_vocabulary

Load = Callable[..., Task]

PAIRS = [(f"What follows {number}?\n", f"{number + 1}") for number in range(12)]
CHATS = [
    [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": f"Name number {number}."},
        {"role": "assistant", "content": "Again?"},
        {"role": "user", "content": "Yes."},
        {"role": "assistant", "content": f"It is {number}."},
    ]
    for number in range(12)
]
TEMPLATE = """\
{{ bos_token }}{% for message in messages %}{% if message['role'] not in ('system', 'user', 'assistant') %}\
{{ raise_exception('unknown role ' + message['role']) }}{% endif %}\
<|start|>{{ message['role'] }}
{{ message['content'] }}<|eot|>
{% endfor %}{% if add_generation_prompt %}<|start|>assistant
{% endif %}"""
"""It names tokens that the family does not have, and writes a line break behind each message."""


def pairs(rows: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "completion": completion} for prompt, completion in rows]


def write_chat_model(
    directory: Path, template: str | None = TEMPLATE, declared: dict[str, Any] | None = None
) -> str:
    """Writes a directory whose vocabulary has special tokens like that of Llama 3, without weights that are read."""
    tokenizer = Tokenizer.from_str(
        make_vocabulary([text for pair in PAIRS for text in pair], 300, "gpt2").decode()
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|start|>", "<|eot|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    if declared is None:
        declared = {
            "bos_token": "<|begin|>",
            "eos_token": {"__type": "AddedToken", "content": "<|eot|>"},
        }
    names = {**declared, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    LlamaConfig(vocab_size=tokenizer.get_vocab_size(), eos_token_id=None).save_pretrained(directory)
    (directory / "model.safetensors").touch()
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return str(directory)


@pytest.fixture
def load(load_rows: Callable[..., Task]) -> Load:
    """Loads the task of a Llama; its arguments are those of `load_rows` without the kind."""

    def load_pairs(*rows: Any, **sections: Any) -> Task:
        model = {"family": "llama", **sections.pop("model", {})}
        return load_rows("instruction", *rows, model=model, **sections)

    return load_pairs


def test_only_the_completion_and_its_end_are_learned(load: Load, tmp_path: Path) -> None:
    task = load(pairs(PAIRS))
    tokenizer = parse_vocabulary(task.vocabulary)
    [batch] = task.micro_batches([2, 9], 1)
    for row, (prompt, completion) in zip((0, 1), (PAIRS[2], PAIRS[9]), strict=True):
        ids = batch.tensors["input_ids"][row][batch.tensors["attention_mask"][row] == 1].tolist()
        labels = batch.tensors["labels"][row].tolist()
        start = len(tokenizer.encode(prompt).ids)
        assert ids[:start] == tokenizer.encode(prompt).ids
        assert tokenizer.decode(ids[start:]).strip() == completion
        assert ids[-1] == tokenizer.token_to_id("</s>")
        assert labels[: start - 1] == [-100] * (start - 1)
        assert labels[start - 1 : len(ids) - 1] == ids[start:]
        assert set(labels[len(ids) - 1 :]) == {-100}
    assert batch.num_targets == int((batch.tensors["labels"] != -100).sum())


def test_prompt_keeps_the_tokens_that_it_has_alone(load: Load, tmp_path: Path) -> None:
    """Without a separator, a token of the joined text would span the prompt and the answer."""
    rows = [("number", "ninety"), *[("numberninety one\n", "two")] * 30]
    task = load(pairs(rows))
    tokenizer = parse_vocabulary(task.vocabulary)
    prompt = tokenizer.encode("number", add_special_tokens=False).ids
    assert tokenizer.encode("numberninety", add_special_tokens=False).ids[: len(prompt)] != prompt
    [batch] = task.micro_batches([0], 1)
    ids = batch.tensors["input_ids"][0].tolist()
    bos, end = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
    assert [*ids[: 1 + len(prompt)], ids[-1]] == [bos, *prompt, end]
    assert tokenizer.decode(ids) == "numberninety"


@pytest.mark.parametrize("space", ["byte level", "metaspace"])
def test_answer_gains_no_blank_behind_a_prompt_that_ends_with_one(
    load: Load, tmp_path: Path, space: str
) -> None:
    prompt, answer = "What follows 3? ", "ninety"
    model = {}
    if space == "metaspace":
        directory = Path(write_chat_model(tmp_path / "model"))
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(special_tokens=["<|eot|>"], show_progress=False)
        tokenizer.train_from_iterator([prompt, answer, "\n"] * 3, trainer)
        tokenizer.save(str(directory / "tokenizer.json"))
        model = {"pretrained": str(directory)}
    task = load(pairs([(prompt, answer)] * 30), model=model)
    tokenizer = parse_vocabulary(task.vocabulary)
    [batch] = task.micro_batches([0], 1)
    ids = batch.tensors["input_ids"][0].tolist()
    num_before = len(task.question(prompt).input_ids)
    assert ids[:num_before] == task.question(prompt).input_ids.tolist()
    assert tokenizer.decode(ids) == prompt + answer


def test_prompt_with_its_start_token_gets_no_second_one(load: Load, tmp_path: Path) -> None:
    """A person may write a chat as its template would."""
    task = load(pairs([(f"<s>{prompt}", answer) for prompt, answer in PAIRS]))
    plain = load(pairs(PAIRS))
    for index in (0, 5):
        [found], [expected] = (each.micro_batches([index], 1) for each in (task, plain))
        tokenizers = [parse_vocabulary(each.vocabulary) for each in (task, plain)]
        texts = [
            tokenizer.decode(batch.tensors["input_ids"][0].tolist(), skip_special_tokens=False)
            for tokenizer, batch in zip(tokenizers, (found, expected), strict=True)
        ]
        assert texts[0] == texts[1]
    for text in ("<s>What", "What"):
        ids = task.question(text).input_ids.tolist()
        assert ids.count(parse_vocabulary(task.vocabulary).token_to_id("<s>")) == 1


def test_chat_that_is_written_as_the_template_would_equals_a_list_of_messages(
    load: Load, tmp_path: Path
) -> None:
    directory = write_chat_model(tmp_path / "model")
    make_start_token(Path(directory), "<|begin|>")
    task = load([{"messages": chat} for chat in CHATS], model={"pretrained": directory})
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    written = tokenizer.apply_chat_template(
        CHATS[7][:-1], tokenize=False, add_generation_prompt=True
    )
    expected = tokenizer.apply_chat_template(CHATS[7][:-1], add_generation_prompt=True)["input_ids"]
    assert tokenizer(written)["input_ids"] != expected  # It gets a second start token there.
    assert task.question(written).input_ids.tolist() == expected
    assert task.question(json.dumps(CHATS[7][:-1])).input_ids.tolist() == expected


def test_chat_to_answer_that_has_a_key_twice_is_refused(load: Load, tmp_path: Path) -> None:
    directory = write_chat_model(tmp_path / "model")
    task = load([{"messages": chat} for chat in CHATS], model={"pretrained": directory})
    with pytest.raises(InvalidInputError, match="the text.* 'content' twice"):
        task.question('[{"role": "user", "content": "one", "content": "two"}]')


def test_text_to_answer_that_looks_like_a_hostile_chat_is_an_answerable_text_or_refused(
    load: Load, tmp_path: Path
) -> None:
    directory = write_chat_model(tmp_path / "model")
    task = load([{"messages": chat} for chat in CHATS], model={"pretrained": directory})
    nested = "[" * 100_000
    assert task.question(nested).row.key == nested
    with pytest.raises(InvalidInputError, match="the text: .*surrogate"):
        task.question(json.dumps([{"role": "user", "content": "\ud800"}]))


def make_start_token(directory: Path, *around: str) -> None:
    """Makes a tokenizer put a token before each text, and maybe one behind it."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[around[0], "$A", *around[1:]],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in around],
    )
    tokenizer.save(str(directory / "tokenizer.json"))


def test_end_token_that_a_tokenizer_puts_behind_texts_does_not_end_a_prompt(
    load: Load, tmp_path: Path
) -> None:
    directory = write_chat_model(tmp_path / "model")
    make_start_token(Path(directory), "<|begin|>", "<|eot|>")
    task = load(pairs(PAIRS), model={"pretrained": directory})
    tokenizer = parse_vocabulary(task.vocabulary)
    begin, end = (tokenizer.token_to_id(token) for token in ("<|begin|>", "<|eot|>"))
    [batch] = task.micro_batches([3], 1)
    ids = batch.tensors["input_ids"][0].tolist()
    assert (ids[0], ids[-1]) == (begin, end)
    assert ids.count(end) == 1
    assert task.question(PAIRS[3][0]).input_ids.tolist() == ids[: ids.index(end) - 1]
    write_tokenizer_files(Path(directory), task.vocabulary, "llama", 128)
    exported: Any = AutoTokenizer.from_pretrained(directory)
    assert exported(PAIRS[3][0])["input_ids"] == task.question(PAIRS[3][0]).input_ids.tolist()
    assert not [each for each in task.findings if "end token" in each.what]


def test_prompts_that_end_with_the_end_token_are_told(load: Load, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m['content'] }}<|eot|>{% endfor %}"
    directory = write_chat_model(tmp_path / "model", template)
    rows = [{"messages": chat} for chat in CHATS]
    task = load([*rows, *pairs(PAIRS)], model={"pretrained": directory})
    [found] = [each for each in task.findings if "end token" in each.what]
    assert found.severity == "warning"
    assert f"12 of {task.num_rows} prompts" in found.what and "'<|eot|>'" in found.what


def test_chat_whose_prompt_has_no_token_is_refused_with_its_line(
    load: Load, tmp_path: Path
) -> None:
    """Nothing would be there from which the first token of the answer could be predicted."""
    template = "{% if not add_generation_prompt %}{{ messages[-1]['content'] }}{% endif %}"
    directory = write_chat_model(tmp_path / "model", template)
    rows = [*pairs(PAIRS), {"messages": CHATS[0]}]
    with pytest.raises(InvalidInputError, match=r"jsonl:13: .* no token.* start token"):
        load(rows, model={"pretrained": directory})


def test_chat_is_rendered_by_the_template_and_only_its_last_message_is_learned(
    load: Load, tmp_path: Path
) -> None:
    directory = write_chat_model(tmp_path / "model")
    task = load([{"messages": chat} for chat in CHATS], model={"pretrained": directory})
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    [batch] = task.micro_batches([7], 1)
    ids, labels = batch.tensors["input_ids"][0].tolist(), batch.tensors["labels"][0].tolist()
    whole = tokenizer.apply_chat_template(CHATS[7], tokenize=False)
    prompt = tokenizer.apply_chat_template(CHATS[7][:-1], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == whole.removesuffix("\n")
    assert ids[: len(prompt)] == prompt
    learned = [label for label in labels if label != -100]
    assert learned == ids[len(prompt) :]
    assert tokenizer.decode(learned) == "It is 7.<|eot|>"


@pytest.mark.parametrize("blanks", [" \n", "\n"])
@pytest.mark.parametrize("content", ["{{ message['content'] }}", "{{ message['content'] | trim }}"])
def test_blanks_at_the_end_of_an_answer_stay_if_the_template_keeps_them(
    load: Load, tmp_path: Path, content: str, blanks: str
) -> None:
    template = TEMPLATE.replace("{{ message['content'] }}<|eot|>", content)
    directory = write_chat_model(tmp_path / "model", template)
    chats = [[*chat[:-1], {"role": "assistant", "content": f"yes{blanks}"}] for chat in CHATS]
    task = load([{"messages": chat} for chat in chats], model={"pretrained": directory})
    [batch] = task.micro_batches([7], 1)
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    learned = [label for label in batch.tensors["labels"][0].tolist() if label != -100]
    answer = "yes" if "trim" in content else f"yes{blanks}"
    assert tokenizer.decode(learned) == answer + "<|eot|>"


def test_second_cluster_and_export_render_as_the_pretrained_directory(
    load: Load, tmp_path: Path
) -> None:
    directory = write_chat_model(tmp_path / "model")
    rows = [{"messages": chat} for chat in CHATS * 2]
    task = load(rows, model={"pretrained": directory}, clusters=2)
    original: Any = AutoTokenizer.from_pretrained(directory)
    job = task._rows._job
    for path in Path(directory).iterdir():
        path.unlink()  # Only the first cluster and the edge server have the directory.
    second = load_task(job, 1, task.vocabulary)
    second.set_labels([])
    [batch] = second.held_out_micro_batches(64)
    texts = {original.decode(ids, skip_special_tokens=True) for ids in batch.tensors["input_ids"]}
    assert any("It is 5." in text for text in texts)

    exported = tmp_path / "export"
    exported.mkdir()
    write_tokenizer_files(exported, task.vocabulary, "llama", 128)
    tokenizer: Any = AutoTokenizer.from_pretrained(exported)
    for generates in (False, True):
        assert tokenizer.apply_chat_template(
            CHATS[3], add_generation_prompt=generates
        ) == original.apply_chat_template(CHATS[3], add_generation_prompt=generates)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|eot|>")
    assert tokenizer.pad_token == "<|eot|>"


@pytest.mark.parametrize(
    "source", ["tokenizer_config.json", "config.json", "generation_config.json"]
)
def test_special_tokens_of_a_directory_are_found(load: Load, tmp_path: Path, source: str) -> None:
    directory = Path(write_chat_model(tmp_path / "model", declared={}))
    with pytest.raises(InvalidInputError, match="'</s>', the eos_token"):
        load(pairs(PAIRS), model={"pretrained": str(directory)})
    end = Tokenizer.from_file(str(directory / "tokenizer.json")).token_to_id("<|eot|>")
    value: Any = [end, 0] if source == "generation_config.json" else end
    name = "eos_token_id"
    if source == "tokenizer_config.json":
        name, value = "eos_token", "<|eot|>"
    path = directory / source
    document = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**document, name: value}))
    task = load(pairs(PAIRS), model={"pretrained": str(directory)})
    [batch] = task.micro_batches([0], 1)
    assert batch.tensors["input_ids"][0, -1] == end


def test_negative_token_id_of_a_directory_stands_for_none(load: Load, tmp_path: Path) -> None:
    directory = Path(write_chat_model(tmp_path / "model"))
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token_id": -1}))
    task = load(pairs(PAIRS), model={"pretrained": str(directory)})
    assert task._vocabulary.pad_id == task.end_id


def test_metrics_of_answers(load: Load) -> None:
    """The shortest row is wrong in one token, and each token costs log 3."""
    task = load(pairs(PAIRS))
    lengths = [
        (batch.tensors["labels"] != -100).sum(dim=1).float()
        for batch in task.held_out_micro_batches(5)
    ]
    predictions = [torch.stack([math.log(3) * each, each], dim=1) for each in lengths]
    predictions[0][0, 1] -= 1
    num_targets = float(sum(each.sum() for each in lengths))
    assert task.num_held_out_rows == 12
    values = task.score(predictions)
    assert next(iter(values)) == task.metric
    accuracy = (num_targets - 1) / num_targets
    expected = {"exact_match": 11 / 12, "perplexity": 3.0, "token_accuracy": accuracy}
    assert values == pytest.approx(expected)


LONG = {"prompt": "What is a long answer?\n", "completion": "word " * 40}


def test_long_rows_are_counted_and_held_out_ones_are_wrong(load: Load) -> None:
    rows = pairs(PAIRS)
    sections = {"task": {"max_length": 40}, "model": {"vocabulary_size": 270}}
    task = load([*rows, LONG, *rows], [LONG, *rows[:3]], **sections)
    assert (task.num_long_rows, task.num_long_held_out_rows) == (1, 1)
    assert (task.num_rows, task.num_held_out_rows) == (24, 4)
    [batch] = task.held_out_micro_batches(8)
    right = (batch.tensors["labels"] != -100).sum(dim=1)
    values = task.score([torch.stack([torch.zeros(3), right.float()], dim=1)])
    assert values["exact_match"] == 3 / 4
    assert values["perplexity"] == 1.0
    assert values["token_accuracy"] < 0.5


@pytest.mark.parametrize(
    ("rows", "held_out", "message"),
    [
        ([LONG] * 7, pairs(PAIRS), "7 training rows .* 40 "),
        (pairs(PAIRS), [LONG] * 7, "7 held-out rows .* 40 "),
        ([*pairs(PAIRS[:3]), *[LONG] * 7], None, r"has 3 .*raise task\.max_length"),
    ],
    ids=["training", "held-out", "few"],
)
def test_too_few_rows_that_fit_are_refused(
    load: Load, rows: list[Any], held_out: list[Any] | None, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load(rows, held_out, task={"max_length": 40})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a"}, r":1: .*data\.completion_column"),
        ({"completion": "a"}, r":1: .*data\.prompt_column"),
        ({"prompt": "a", "completion": " "}, ":1: .*'completion' is empty"),
        ({"messages": "hello"}, ":1: .*'messages' is 'hello'"),
        ({"messages": CHATS[0][-1:]}, ":1: .* 2 messages"),
        ({"messages": [["user", "a"], CHATS[0][-1]]}, ":1: .*message 1 .*role"),
        ({"messages": [{"role": "user"}, CHATS[0][-1]]}, ":1: .*content of message 1 "),
        ({"messages": CHATS[0][:-1]}, ":1: .*'user'.*\"assistant\""),
    ],
)
def test_wrong_row_is_refused_with_its_place(load: Load, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        load([row])


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (None, CHATS[0], r"model: .*chat_template\.jinja"),
        (TEMPLATE, [{"role": "tool", "content": "4"}, CHATS[0][-1]], ":1: .* unknown role tool"),
        (
            "{% if add_generation_prompt %}> {% endif %}{{ messages[-1]['content'] }}",
            CHATS[0],
            ":1: .*model .*'> Yes",
        ),
    ],
)
def test_chat_that_cannot_be_rendered_is_refused(
    load: Load, tmp_path: Path, template: str | None, chat: Any, message: str
) -> None:
    directory = write_chat_model(tmp_path / "model", template)
    with pytest.raises(InvalidInputError, match=message):
        load([{"messages": chat}], model={"pretrained": directory})


def test_chat_without_a_pretrained_directory_is_refused(load: Load) -> None:
    with pytest.raises(InvalidInputError, match=r"model\.pretrained is not set"):
        load([{"messages": CHATS[0]}])
