"""Tests of an edge server that several jobs train with at the same time."""

from pathlib import Path

import pytest

from collapipe.errors import WrongStateError
from collapipe.weights.blob_store import JobStores

from .edges import Edge
from .test_deleted_jobs import serving


def test_pushes_of_a_job_are_dropped_when_another_job_takes_one_of_its_clusters(
    tmp_path: Path, vocabulary: bytes
) -> None:
    for name in ("left", "right", "next"):
        Edge(tmp_path / "jobs" / name, vocabulary).prepare()
    with serving(JobStores(tmp_path)) as (servicer, _):
        servicer._expect_pushes("left", frozenset({0, 1}))
        servicer._expect_pushes("right", frozenset({2}))
        left, right = servicer._pushed_units("left"), servicer._pushed_units("right")
        assert left is not right
        servicer._expect_pushes("right", frozenset({2}))  # The next attempt of the same job.
        servicer._expect_pushes("next", frozenset({1}))
        assert servicer._pushed_units("right") is right
        with pytest.raises(WrongStateError, match="jobs that train here are next, right"):
            servicer._pushed_units("left")
