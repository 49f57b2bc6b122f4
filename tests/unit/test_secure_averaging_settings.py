"""Jobs that `averaging.secure` does not allow."""

from typing import Any

import pytest

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig

LATE = {"round_deadline_seconds": 10.0}


def job(**sections: Any) -> JobConfig:
    document = {"task": {"kind": "classification"}, "clusters": 4, "averaging": {"secure": True}}
    return JobConfig.from_dict(document | sections, "JOB.toml")


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"clusters": 2}, "needs at least 3 clusters"),
        ({"averaging": {"secure": True, "rule": "median"}}, 'they are "median" and 1'),
        ({"averaging": {"secure": True, "rule": "clipped_mean"}}, 'they are "clipped_mean" and 1'),
        ({"averaging": {"secure": True, "max_share": 0.5}}, 'they are "mean" and 0.5'),
        ({"training": {"upload_codecs": ["fp32", "int8"]}}, "masked uploads cannot be encoded"),
        ({"schedule": {**LATE, "min_clusters": 2}}, "2 of 4 clusters, but .* use at least 3"),
    ],
)
def test_job_that_masks_cannot_serve_is_refused(sections: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        job(**sections)


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
