"""What the scheduler says about the data of a job."""

from typing import Any

import pytest

from collapipe.job import JobConfig
from collapipe.scheduler.job_preparation import describe_data
from collapipe.v1.control_unit_pb2 import HeldOutLabel, PrepareDataResponse

from .jobs import job as make_job


def job(kind: str = "classification", **data: Any) -> JobConfig:
    made = make_job()
    return made.model_copy(
        update={
            "task": made.task.model_copy(update={"kind": kind}),
            "data": made.data.model_copy(update=data),
        }
    )


def answer(num_rows: int, num_held_out: int, **places: str) -> PrepareDataResponse:
    listed = [HeldOutLabel(label=label, place=place) for label, place in places.items()]
    return PrepareDataResponse(
        num_rows=num_rows, num_held_out_rows=num_held_out, held_out_labels=listed
    )


def test_rows_that_are_held_out_are_told_with_numbers() -> None:
    loaded = [answer(50, 8, warm="a:1"), answer(49, 7, cold="a:2")]
    [note] = describe_data(job(), loaded, ["cold", "mild", "warm"])
    assert "15 of 114 rows are held out" in note
    assert note.endswith("none of them has 1 of the 3 labels: mild")
    [note] = describe_data(job(), loaded, ["cold", "warm"])
    assert note.endswith("(the hash of a text chooses about 15%)")


def test_entity_types_count_as_the_labels_of_tags() -> None:
    labels = ["O", "B-person", "I-person", "B-place", "I-place"]
    [note] = describe_data(job("ner"), [answer(9, 1, **{"B-place": "a:1", "O": "a:1"})], labels)
    assert note.endswith("none of them has 1 of the 2 labels: person")


def test_labels_that_only_held_out_rows_have_are_named_with_their_place() -> None:
    named = job(held_out="b.jsonl")
    loaded = [answer(50, 2, warm="b:1", wet="b:4"), answer(50, 2, wet="b:9")]
    [note] = describe_data(named, loaded, ["cold", "warm"])
    assert note.startswith("warning: no training row has the label wet (b:4). Held-out rows")
    assert describe_data(named, loaded, ["warm", "wet"]) == []


def test_notes_stay_short() -> None:
    places = {f"label {number}": f"b:{number}" for number in range(500)}
    [note] = describe_data(job(held_out="b.jsonl"), [answer(9, 500, **places)], [])
    assert "label 104 (b:104), ..." in note and len(note) < 400


def test_note_about_how_rows_were_read_comes_once() -> None:
    loaded = [answer(9, 1), answer(9, 1)]
    for data in loaded:
        data.notes.append("a.conll: its tags are IOB1")
    notes = describe_data(job(held_out="b.jsonl"), loaded, [])
    assert notes == ["a.conll: its tags are IOB1"]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            "classification",
            "3 of 100 training rows are cut, and 2 of 20 held-out rows are cut, because they are longer than task.max_length = {}",
        ),
        (
            "ner",
            "2 of 20 held-out rows are cut, so that the words that are cut off count as misses",
        ),
        (
            "instruction",
            "3 of 103 training rows are left out, and 2 of 20 held-out rows count as wrong",
        ),
    ],
)
def test_long_rows_of_all_clusters_are_told(kind: str, said: str) -> None:
    loaded = [answer(50, 10), answer(50, 10)]
    loaded[0].num_long_rows, loaded[1].num_long_rows = 1, 2
    loaded[1].num_long_held_out_rows = 2
    asked = job(kind, held_out="b.jsonl")
    [note] = describe_data(asked, loaded, [])
    assert said.format(asked.task.max_length) in note


def test_limit_of_held_out_rows_is_told() -> None:
    [note] = describe_data(job(max_held_out_rows=15), [answer(50, 15, warm="a:1")], ["warm"])
    assert note.endswith("about 15%, and data.max_held_out_rows allows 15)")
