"""Settings of a job that contradict each other, and codecs that it may choose."""

from collections.abc import Iterator
from typing import Any, get_args

import pytest

from collapipe.codec_numbers import CODEC_NAMES, CODECS_BY_NAME
from collapipe.codec_table import CODECS, CodecName
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.tensors.encoding import LOSSY_CODECS
from collapipe.v1 import tensor_pb2

LATE = {"round_deadline_seconds": 10.0}


def job(**sections: Any) -> JobConfig:
    document = {"task": {"kind": "classification"}, "clusters": 4, "averaging": {"secure": True}}
    return JobConfig.from_dict(document | sections, "JOB.toml")


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"clusters": 2}, "at least 3"),
        ({"averaging": {"secure": True, "rule": "median"}}, 'rule.* "median" and 1'),
        ({"averaging": {"secure": True, "rule": "clipped_mean"}}, 'rule.* "clipped_mean" and 1'),
        ({"averaging": {"secure": True, "max_share": 0.5}}, 'max_share.* "mean" and 0.5'),
        ({"training": {"upload_codecs": ["fp32", "int8"]}}, "upload_codecs"),
        ({"schedule": {**LATE, "min_clusters": 2}}, "2 of 4 .*at least 3"),
    ],
)
def test_job_that_masks_cannot_serve_is_refused(sections: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidInputError, match=named):
        job(**sections)


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"data": {"train": "x" * 4097}}, r"data\.train.* 4096 "),
        ({"data": {"train": ["x", "x" * 4097]}}, r"data\.train.* 4096 "),
        ({"model": {"lora": {"target_modules": ["x" * 4097]}}}, r"target_modules.* 4096 "),
        ({"model": {"family": "x" * 1_000_000}}, r"model\.family.* 4096 "),
        ({"x" * 1_000_000: 1}, "unknown key 'xxx"),
        ({f"key{number}": 1 for number in range(1000)}, "key7(.|\n)* 992 more"),
    ],
    ids=["path", "paths", "names", "megabyte", "long key", "many keys"],
)
def test_text_that_is_too_long_is_refused_in_few_words(
    sections: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidInputError, match=named) as refused:
        job(**sections)
    assert len(str(refused.value)) < 5000


def test_number_of_micro_batches_divides_the_mini_batch() -> None:
    # The rows that are left over would be in no step.
    with pytest.raises(
        InvalidInputError, match=r"num_micro_batches is 4, .* \(6\).*\[1, 2, 3, 6\]"
    ):
        job(training={"mini_batch": 6}, schedule={"num_micro_batches": 4})


@pytest.mark.parametrize(
    ("schedule", "threshold"),
    [
        ({}, 4),
        ({**LATE, "min_clusters": 3}, 3),
        ({**LATE, "min_clusters": 2, "late_clusters": "end_early"}, 4),
    ],
)
def test_as_many_control_units_reveal_as_no_round_can_do_without(
    schedule: dict[str, Any], threshold: int
) -> None:
    assert job(schedule=schedule).reveal_threshold == threshold


def test_every_codec_has_a_cost_a_number_and_an_implementation() -> None:
    numbers = set(tensor_pb2.Codec.values()) - {tensor_pb2.CODEC_UNSPECIFIED}
    assert tuple(CODECS) == get_args(CodecName)
    assert set(CODEC_NAMES) == numbers
    assert set(CODEC_NAMES.values()) == set(CODECS)
    assert {CODECS_BY_NAME[name] for name in CODECS} == numbers
    assert set(LOSSY_CODECS) == numbers - {tensor_pb2.CODEC_FP32}


def test_job_with_an_unknown_codec_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"codecs\.1 = 'int2'"):
        job(schedule={"codecs": ["fp32", "int2"]})


def test_every_number_of_a_job_has_a_range() -> None:
    numbers = [
        (place, part)
        for place, part in _parts("job", JobConfig.model_json_schema())
        if part.get("type") in ("integer", "number")
    ]
    assert len(numbers) > 50
    for place, part in numbers:
        assert {"minimum", "exclusiveMinimum"} & set(part), f"{place} has no smallest value"
        assert {"maximum", "exclusiveMaximum"} & set(part), f"{place} has no largest value"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("privacy", "noise_multiplier", 1e200),
        ("privacy", "noise_multiplier", 1e-160),
        ("privacy", "noise_multiplier", 1e-300),
        ("model", "vocabulary_size", 10**12),
        ("model", "lora", {"r": 10**12}),
        ("training", "learning_rate", 1e300),
        ("schedule", "penalty_weight", 1e300),
    ],
)
def test_impossible_number_is_refused(section: str, key: str, value: Any) -> None:
    with pytest.raises(InvalidInputError, match=rf"{section}\.{key}"):
        job(**{"averaging": {}, section: {key: value}})


def test_mistake_shows_little_of_a_long_value() -> None:
    with pytest.raises(InvalidInputError, match=r"task\.max_length") as caught:
        job(task={"kind": "classification", "max_length": "9" * 100_000})
    assert len(str(caught.value)) < 1000


def _parts(place: str, schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every part of a JSON schema with its place."""
    if isinstance(schema, dict):
        yield place, schema
        for key, part in schema.items():
            yield from _parts(f"{place}/{key}", part)
    elif isinstance(schema, list):
        for index, part in enumerate(schema):
            yield from _parts(f"{place}/{index}", part)
