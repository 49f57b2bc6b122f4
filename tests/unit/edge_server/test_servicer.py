"""Tests of calls about jobs that were deleted, train at the same time or were left by a killed process."""

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from stored_jobs import StoredRow

from collapipe.edge_server import global_model, heavy_work
from collapipe.edge_server.commit_store import CommitStore
from collapipe.edge_server.commits import initial_commit
from collapipe.edge_server.servicer import EdgeServerServicer
from collapipe.errors import CancelledError, NotFoundError, WrongStateError
from collapipe.job import JobConfig
from collapipe.rpc import ChannelPool, Security
from collapipe.stage_host import HostResources
from collapipe.stage_runtime import CPU
from collapipe.traffic_shaping.outgoing_links import OutgoingLinks
from collapipe.v1.edge_server_pb2 import (
    ExportModelRequest,
    PrepareJobRequest,
    PrepareJobResponse,
    PushedUnit,
    PushUnitRequest,
    RollBackRequest,
)
from collapipe.v1.job_pb2 import BlobSource, JobSpec
from collapipe.v1.plan_pb2 import Attempt
from collapipe.weights.blob_cache import BlobCache
from collapipe.weights.blob_store import JobStores

from .edges import TINY

STAYS = cast(
    grpc.ServicerContext,
    SimpleNamespace(
        add_callback=lambda callback: True,
        is_active=lambda: True,
        invocation_metadata=lambda: (),
    ),
)
"""The side of gRPC of a call whose caller stays."""


@pytest.fixture
def commits(tmp_path: Path, prepared_state: Path) -> CommitStore:
    """Has one job, with its initial model."""
    return CommitStore(shutil.copytree(prepared_state, tmp_path / "edge"))


@pytest.fixture
def stores(tmp_path: Path, commits: CommitStore) -> JobStores:
    return JobStores(tmp_path / "edge", commits.delete)


@pytest.fixture
def servicer(stores: JobStores, commits: CommitStore) -> Iterator[EdgeServerServicer]:
    with ExitStack() as stack:
        channels = ChannelPool(Security.insecure())
        stack.callback(channels.close)
        links = OutgoingLinks.unlimited("edge-server")
        resources = HostResources(CPU, channels, links, BlobCache(), stores)
        yield EdgeServerServicer(stores, commits, resources)


def test_export_keeps_its_job_until_it_has_ended(
    stores: JobStores, servicer: EdgeServerServicer
) -> None:
    answers = servicer.ExportModel(ExportModelRequest(job_id="job"), STAYS)
    pieces = [next(answers)]
    assert not stores.delete_job("job")
    pieces += answers
    assert stores.delete_job("job")
    sizes = {piece.file_name: piece.total_bytes for piece in pieces if piece.file_name}
    assert "model.safetensors" in sizes
    assert sum(sizes.values()) == sum(len(piece.chunk) for piece in pieces)


def first_model_of(job_id: str, stores: JobStores) -> PrepareJobRequest:
    """A request for the first model of a new job, whose vocabulary is stored already."""
    shutil.copytree(stores.directory("job"), stores.directory(job_id))
    document = StoredRow(stores.directory("job").parents[1], "job", "job").read()
    job = JobConfig.model_validate(
        {
            "clusters": 2,
            "task": {"kind": "classification", "max_length": 12},
            "model": {"config": TINY},
        }
    )
    return PrepareJobRequest(
        job=JobSpec(job_id=job_id, config_json=job.to_json()),
        labels=["a", "b"],
        vocabulary=BlobSource(digest=document["vocabulary_digest"]),
    )


class Caller:
    """The side of gRPC of a call whose caller may go away."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self.context = cast(
            grpc.ServicerContext, SimpleNamespace(add_callback=self._add, is_active=lambda: True)
        )

    def _add(self, callback: Callable[[], None]) -> bool:
        self._callbacks.append(callback)
        return True

    def go_away(self) -> None:
        for callback in self._callbacks:
            callback()


@pytest.fixture
def slow_model(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Makes first models wait: the event that one has begun, and the one that lets it go on."""
    begun, may_go_on = threading.Event(), threading.Event()
    make = global_model.initial_model

    def wait_and_make(*arguments: Any) -> Any:
        begun.set()
        may_go_on.wait()
        return make(*arguments)

    monkeypatch.setattr(global_model, "initial_model", wait_and_make)
    yield begun, may_go_on
    may_go_on.set()


def test_only_jobs_that_need_a_model_wait_for_the_one_whose_model_is_made_and_they_say_so(
    stores: JobStores,
    servicer: EdgeServerServicer,
    slow_model: tuple[threading.Event, threading.Event],
) -> None:
    begun, may_go_on = slow_model
    slow, next_one = first_model_of("slow", stores), first_model_of("next", stores)
    answers: list[PrepareJobResponse] = []
    thread = threading.Thread(target=lambda: answers.extend(servicer.PrepareJob(slow, STAYS)))
    thread.start()
    begun.wait()
    # Changes of a job that has its model do not wait.
    (answer,) = servicer.RollBack(RollBackRequest(job_id="job", num_rounds=0, attempt=1), STAYS)
    assert answer.commit.job_id == "job"
    waiting = servicer.PrepareJob(next_one, STAYS)
    assert next(each for each in waiting if each.waits_for_job_id).waits_for_job_id == "slow"
    may_go_on.set()
    assert list(waiting)[-1].commit.job_id == "next"
    thread.join()
    assert answers[-1].commit.job_id == "slow"


class Abandoned:
    """A call that makes the model of the job "slow", whose connection breaks meanwhile."""

    def __init__(self, servicer: EdgeServerServicer, stores: JobStores) -> None:
        self._servicer, self._caller = servicer, Caller()
        self.request = first_model_of("slow", stores)
        self.outcome: object = None
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        try:
            self.outcome = list(self._servicer.PrepareJob(self.request, self._caller.context))
        except CancelledError as error:
            self.outcome = error

    def begin_and_lose(self, begun: threading.Event) -> None:
        self._thread.start()
        begun.wait()
        self._caller.go_away()

    def ends_as_cancelled(self) -> bool:
        self._thread.join()
        return isinstance(self.outcome, CancelledError)


@pytest.fixture
def abandoned(servicer: EdgeServerServicer, stores: JobStores) -> Abandoned:
    return Abandoned(servicer, stores)


def test_first_model_is_given_up_when_nobody_asks_again_for_long(
    commits: CommitStore,
    abandoned: Abandoned,
    slow_model: tuple[threading.Event, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_go_on = slow_model
    monkeypatch.setattr(heavy_work, "_GRACE_SECONDS", 0.0)
    abandoned.begin_and_lose(begun)
    may_go_on.set()
    assert abandoned.ends_as_cancelled()
    assert not commits.has("slow")


def test_call_after_a_broken_connection_finds_the_first_model_that_is_being_made(
    servicer: EdgeServerServicer,
    abandoned: Abandoned,
    slow_model: tuple[threading.Event, threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_go_on = slow_model
    abandoned.begin_and_lose(begun)
    again = servicer.PrepareJob(abandoned.request, STAYS)
    assert next(again).waits_for_job_id == ""
    begun.clear()
    monkeypatch.setattr(
        heavy_work, "_GRACE_SECONDS", 0.0
    )  # Whoever waits holds the work up longer.
    may_go_on.set()
    assert list(again)[-1].commit.job_id == "slow"
    assert not abandoned.ends_as_cancelled()
    assert not begun.is_set()


def test_first_model_of_a_cancelled_job_is_given_up_at_once(
    servicer: EdgeServerServicer,
    abandoned: Abandoned,
    slow_model: tuple[threading.Event, threading.Event],
) -> None:
    begun, may_go_on = slow_model
    abandoned.begin_and_lose(begun)
    gives_up = PrepareJobRequest(job=JobSpec(job_id="slow"), gives_up=True)
    assert list(servicer.PrepareJob(gives_up, STAYS)) == []
    may_go_on.set()
    assert abandoned.ends_as_cancelled()


def test_first_model_of_earlier_labels_is_not_used_for_a_request_with_others(
    stores: JobStores,
    servicer: EdgeServerServicer,
    abandoned: Abandoned,
    slow_model: tuple[threading.Event, threading.Event],
) -> None:
    begun, may_go_on = slow_model
    abandoned.begin_and_lose(begun)
    changed = PrepareJobRequest()
    changed.CopyFrom(abandoned.request)
    changed.labels.append("a new label")
    again = servicer.PrepareJob(changed, STAYS)
    next(again)
    may_go_on.set()
    assert "a new label" in list(again)[-1].model.config_json
    assert abandoned.ends_as_cancelled()


def test_first_model_without_a_caller_makes_room_for_that_of_another_job(
    stores: JobStores,
    servicer: EdgeServerServicer,
    abandoned: Abandoned,
    slow_model: tuple[threading.Event, threading.Event],
) -> None:
    begun, may_go_on = slow_model
    abandoned.begin_and_lose(begun)
    waiting = servicer.PrepareJob(first_model_of("next", stores), STAYS)
    assert next(each for each in waiting if each.waits_for_job_id).waits_for_job_id == "slow"
    may_go_on.set()
    assert list(waiting)[-1].commit.job_id == "next"
    assert abandoned.ends_as_cancelled()


def test_first_model_without_a_caller_ends_with_the_service(
    servicer: EdgeServerServicer,
    abandoned: Abandoned,
    slow_model: tuple[threading.Event, threading.Event],
) -> None:
    begun, may_go_on = slow_model
    abandoned.begin_and_lose(begun)
    servicer._heavy_work.end()
    may_go_on.set()
    assert abandoned.ends_as_cancelled()


def test_late_calls_about_a_deleted_job_are_refused_and_make_no_directory(
    stores: JobStores, commits: CommitStore, servicer: EdgeServerServicer, tmp_path: Path
) -> None:
    servicer._expect_pushes("job", frozenset({0}))  # as if the job had run last
    assert stores.delete_job("job")
    unit = PushedUnit(attempt=Attempt(job_id="job"), total_bytes=3)
    for answers in (
        servicer.ExportModel(ExportModelRequest(job_id="job"), STAYS),
        servicer.PushUnit(iter([PushUnitRequest(unit=unit)]), STAYS),
    ):
        with pytest.raises(NotFoundError, match="job job"):
            next(answers)
    assert not (tmp_path / "edge" / "jobs" / "job").exists()
    assert not commits.has("job")


def test_pushes_of_a_job_are_dropped_when_another_job_takes_one_of_its_clusters(
    stores: JobStores, commits: CommitStore, servicer: EdgeServerServicer
) -> None:
    model = commits.job("job")
    for name in ("left", "right", "next"):
        shutil.copytree(stores.directory("job"), stores.directory(name))
        first = initial_commit(name, commits.commit("job").global_units, 2)
        commits.add(model.model_copy(update={"job_id": name}), first)
    servicer._expect_pushes("left", frozenset({0, 1}))
    servicer._expect_pushes("right", frozenset({2}))
    left, right = servicer._pushed_units("left"), servicer._pushed_units("right")
    assert left is not right
    servicer._expect_pushes("right", frozenset({2}))  # The next attempt of the same job.
    servicer._expect_pushes("next", frozenset({1}))
    assert servicer._pushed_units("right") is right
    with pytest.raises(WrongStateError, match="'left' .* next, right"):
        servicer._pushed_units("left")


def test_started_edge_server_deletes_what_a_killed_one_has_received(tmp_path: Path) -> None:
    left = tmp_path / "jobs/job/pushed/cluster-0-unit-5"
    left.parent.mkdir(parents=True)
    left.touch()
    resources = cast(HostResources, SimpleNamespace(channels=None))
    EdgeServerServicer(JobStores(tmp_path), CommitStore(tmp_path), resources)
    assert not left.parent.exists()
