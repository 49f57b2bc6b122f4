"""Labels and metrics of each task, on small data with known labels."""

from collections.abc import Callable

import pytest
import torch
from sacrebleu.metrics.bleu import BLEU
from seqeval.metrics import f1_score  # type: ignore[import-untyped]
from seqeval.scheme import IOB2  # type: ignore[import-untyped]
from tokenizers import Tokenizer

from collapipe.data.cluster_rows import labels_in_order
from collapipe.errors import InvalidInputError, WrongStateError
from collapipe.evaluation import add_sums, bleu_tokenizer, make_evaluation
from collapipe.models import adapter_class
from collapipe.tasks import Task
from collapipe.tasks.translation import count_writings

LoadRows = Callable[..., Task]

SENTENCES = [
    "Ada B-person\nLovelace I-person\nlives O\nin O\nLondon B-place\n",
    "Nobody O\nis O\nhere O\n",
    "Paris B-place\n",
]
PAIRS = [
    {"en": "a dog runs in the green grass", "de": "ein Hund läuft im grünen Gras"},
    {"en": "two men", "de": "zwei Männer"},
    {"en": "the woman is reading a book", "de": "die Frau liest gerade ein Buch"},
]


@pytest.fixture
def ner(load_rows: LoadRows) -> Task:
    return load_rows("ner", "\n".join(SENTENCES * 2))


@pytest.fixture(params=["marian", "bart"])
def translation(request: pytest.FixtureRequest, load_rows: LoadRows) -> Task:
    return load_rows("translation", PAIRS * 2, model={"family": request.param})


def special_token_ids(vocabulary: bytes) -> dict[str, int]:
    return adapter_class("marian").special_token_ids(Tokenizer.from_str(vocabulary.decode()))


def score(task: Task, predictions: list[torch.Tensor]) -> float:
    """Returns the main metric."""
    return task.score(predictions)[task.metric]


def truth_of(task: Task, instead_of_ignored: int) -> list[torch.Tensor]:
    labels = [batch.tensors["labels"] for batch in task.held_out_micro_batches(2)]
    return [torch.where(label < 0, instead_of_ignored, label) for label in labels]


def test_accuracy_counts_right_classes_whatever_the_order_of_lengths(load_rows: LoadRows) -> None:
    words = [("long " * 9, "warm"), ("x", "cold"), ("in between", "warm"), ("y", "cold")]
    rows = [{"text": text, "label": label} for text, label in words]
    task = load_rows("classification", rows)
    assert task.metric == "accuracy"
    predictions = truth_of(task, 0)
    assert [p.tolist() for p in predictions] == [[0, 0], [1, 1]]  # Short rows come first.
    assert score(task, predictions) == 1.0
    predictions[1][1] = 0
    assert score(task, predictions) == 0.75


def test_score_with_missing_predictions_is_refused(ner: Task) -> None:
    with pytest.raises(WrongStateError, match="4 of 6 held-out rows"):
        score(ner, truth_of(ner, 0)[:2])


def test_ner_labels_have_o_first_and_targets_are_the_first_tokens_of_words(ner: Task) -> None:
    assert ner.labels == labels_in_order([ner.labels])  # as the job orders those of all clusters
    assert ner.labels == ["O", "B-person", "B-place", "I-person", "I-place"]
    [batch] = ner.micro_batches([0, 1], 1)
    assert batch.num_targets == 8
    row = batch.tensors["labels"][0]
    assert [int(label) for label in row if label != -100] == [1, 3, 0, 0, 2]
    assert row[0] == -100  # [CLS]
    with pytest.raises(InvalidInputError, match=r"train\.conll:1: .*'B-place'"):
        ner.set_labels(["O", "B-person", "I-person"])


INVISIBLE = {"tokens": ["\u200b", "\u00ad"], "tags": ["O", "B-person"]}
MINILM = {"pretrained": "minilm"}


def test_ner_rows_without_a_token_are_told(load_rows: LoadRows) -> None:
    rows = [{"tokens": ["Ada", "sleeps"], "tags": ["B-person", "O"]}] * 4
    task = load_rows("ner", [*rows, INVISIBLE, *rows, INVISIBLE], rows, model=MINILM)
    [batch] = task.micro_batches([4, 9], 1)
    assert batch.num_targets == 0
    [found] = [each for each in task.findings if "token" in each.what]
    assert found.severity == "warning" and found.place.endswith("train.jsonl:5")
    assert "2 of 10 training rows" in found.what


def test_ner_rows_that_all_lack_tokens_are_refused(load_rows: LoadRows) -> None:
    with pytest.raises(InvalidInputError, match=r"train\.jsonl:1.* 4 training rows"):
        load_rows("ner", [INVISIBLE] * 5, model=MINILM)


def test_entity_f1_needs_exact_span_and_type(ner: Task) -> None:
    assert ner.metric == "entity_f1"
    truth = truth_of(ner, 4)
    assert score(ner, truth) == 1.0
    shortened = [torch.where(label == 3, 0, label) for label in truth]  # Only "Ada" remains.
    assert score(ner, shortened) == pytest.approx(2 / 3)  # 4 of 6 entities are right.
    assert score(ner, [torch.zeros_like(label) for label in truth]) == 0.0
    other_type = [torch.where(label == 2, 1, label) for label in truth]
    assert score(ner, other_type) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("tags", "same"),
    [
        (["B-person", "I-person", "O", "O", "B-place"], True),
        (["O", "I-person", "O", "O", "I-place"], False),  # No B- begins these entities.
        (["B-place", "I-person", "O", "O", "B-place"], False),  # The type changes within an entity.
        (["O", "O", "O", "O", "O"], True),
    ],
)
def test_entity_f1_is_that_of_seqeval_in_both_modes(
    load_rows: LoadRows, tags: list[str], same: bool
) -> None:
    task = load_rows("ner", "\n".join(SENTENCES[:1] * 6))
    [truth] = {example.row.labels for example in task._held_out}
    names = task.labels
    predictions = []
    for batch in task.held_out_micro_batches(2):
        labels = batch.tensors["labels"].clone()
        for row in labels:
            row[row != -100] = torch.tensor([names.index(tag) for tag in tags])
        predictions.append(labels.clamp(min=0))
    rows = [list(truth)] * 6, [tags] * 6
    lenient, strict = f1_score(*rows), f1_score(*rows, mode="strict", scheme=IOB2)
    assert task.score(predictions) == pytest.approx(
        {"entity_f1": lenient, "strict_entity_f1": strict}
    )
    assert (lenient == strict) == same


def test_entities_beyond_the_length_limit_are_misses(load_rows: LoadRows) -> None:
    # [CLS], four of the five words, [SEP]: "London" is cut off in 2 of 6 rows.
    task = load_rows("ner", "\n".join(SENTENCES * 2), task={"max_length": 6})
    truth = truth_of(task, 0)
    assert max(batch.shape[1] for batch in truth) == 6
    assert score(task, truth) == pytest.approx(2 * 4 / (4 + 6))


def test_entities_of_a_type_that_only_held_out_rows_have_are_misses(load_rows: LoadRows) -> None:
    train, held_out = (
        "\n".join(SENTENCES[:stop]).replace("London B-place", "London O") for stop in (2, 3)
    )
    sections = {"training": {"mini_batch": 2}, "schedule": {"num_micro_batches": 1}}
    task = load_rows("ner", train, held_out, **sections)
    assert task.labels == ["O", "B-person", "I-person"]
    assert score(task, truth_of(task, 0)) == pytest.approx(2 * 1 / (1 + 2))


def test_translation_targets_end_with_the_end_token(translation: Task) -> None:
    [batch] = translation.micro_batches([0, 1], 1)
    targets = batch.tensors["labels"]
    eos = special_token_ids(translation.vocabulary)["eos_token"]
    assert targets[0, -1] == eos
    kept = targets[1][targets[1] != -100]
    assert kept[-1] == eos
    assert len(kept) < targets.shape[1]
    assert batch.num_targets == int((targets != -100).sum())


def test_bleu_of_the_truth_is_100_and_padding_does_not_count(translation: Task) -> None:
    assert translation.metric == "bleu"
    special = special_token_ids(translation.vocabulary)
    truth = truth_of(translation, special["pad_token"])
    assert score(translation, truth) == pytest.approx(100.0)
    tail = [torch.cat([label, label], dim=1) for label in truth]  # What follows the end token.
    assert score(translation, tail) == pytest.approx(100.0)
    empty = [torch.full_like(label, special["eos_token"]) for label in truth]
    assert score(translation, empty) == 0.0
    assert score(translation, truth[::-1]) < 50.0  # Each translation belongs to another sentence.


@pytest.mark.parametrize(
    ("tokenizer", "targets"),
    [
        ("13a", ["ein Hund läuft im grünen Gras", "das Zeichen 中 ist ein Wort"]),
        ("zh", ["一只狗在绿色的草地上奔跑。", "OpenAI 发布了 ChatGPT 新版本。"]),
        ("char", ["犬が緑の芝生を走っています。", "二人の男性が本を読んでいる。"]),
        ("char", ["개가 푸른 잔디밭에서 달립니다.", "두 남자가 책을 읽고 있다."]),
        ("char", ["สุนัขวิ่งบนหญ้าสีเขียว", "ผู้ชายสองคนกำลังอ่านหนังสือ"]),
        ("13a", ["собака бежит по зелёной траве", "двое мужчин читают книгу дома"]),
    ],
)
def test_bleu_has_the_tokenizer_of_the_writing_and_its_signature(
    load_rows: LoadRows, tokenizer: str, targets: list[str]
) -> None:
    rows = [{"en": f"row {number}", "de": text} for number, text in enumerate(targets * 3)]
    task = load_rows("translation", rows, model={"family": "marian"})
    special = special_token_ids(task.vocabulary)
    truth = truth_of(task, special["pad_token"])
    assert score(task, truth) == pytest.approx(100)
    for batch in truth:
        batch[:, 3] = special["pad_token"]  # A token is missing.
    sums = task.sums(truth)
    evaluation = make_evaluation("translation", sums, 1)
    decoded = [task._vocabulary.decode(row) for batch in truth for row in batch.tolist()]
    wanted = [task._held_out[index].row.texts[1] for index in task._by_length()]
    plain = BLEU(tokenize=tokenizer)
    assert evaluation.value == pytest.approx(plain.corpus_score(decoded, [wanted]).score)
    assert 0 < evaluation.value < 100
    assert str(plain.get_signature()) in evaluation.definitions["bleu"]


def test_tokenizer_of_bleu_does_not_depend_on_the_division_of_rows() -> None:
    chinese, german = (count_writings([text]) for text in ("一只狗在跑。", "ein Hund"))
    assert [bleu_tokenizer(each) for each in (chinese, german)] == ["zh", "13a"]
    assert bleu_tokenizer(add_sums([chinese, german])) == "zh"


def test_translations_that_are_all_alike_are_found(translation: Task) -> None:
    truth = truth_of(translation, 0)
    alike = [truth[0][:1].expand(len(label), -1) for label in truth]
    for predictions, is_one in ((truth, False), (alike, True)):
        sums = translation.sums(predictions)
        assert make_evaluation("translation", sums, 1).one_answer == is_one
