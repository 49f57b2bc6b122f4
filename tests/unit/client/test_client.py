import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from collapipe.errors import CorruptDataError, NotFoundError, PeerLostError, WrongStateError
from collapipe.job import JobConfig
from collapipe.rpc import Security
from collapipe.v1.edge_server_pb2 import ExportModelResponse
from collapipe.v1.job_pb2 import RoundProgress
from collapipe.v1.scheduler_pb2 import (
    JOB_STATE_QUEUED,
    JOB_STATE_RUNNING,
    JOB_STATE_SUCCEEDED,
    JobStatus,
)
from collapipe_client.client import CollaPipeClient
from collapipe_client.job_files import load_preset

from .fake_services import Event, FakeServices


@pytest.fixture
def client(fake: FakeServices) -> Iterator[CollaPipeClient]:
    with CollaPipeClient(fake.address, Security.insecure()) as client:
        yield client


def test_submit_sends_the_job_and_resume(client: CollaPipeClient, fake: FakeServices) -> None:
    job = load_preset("demo")
    assert client.submit(job, resume=True) == "job-1"
    assert JobConfig.from_json(fake.submitted[0].config_json) == job
    assert fake.submitted[0].resume


def test_watch_leaves_out_signs_of_life_unless_asked(
    client: CollaPipeClient, fake: FakeServices
) -> None:
    fake.events = [Event(), Event(status=JobStatus(state=JOB_STATE_SUCCEEDED)), Event()]
    assert len(list(client.watch("job-1"))) == 1
    assert len(list(client.watch("job-1", signs_of_life=True))) == 3


def test_watch_yields_the_events_of_a_batch_one_by_one(
    client: CollaPipeClient, fake: FakeServices
) -> None:
    batch = [
        Event(progress=RoundProgress(cluster_index=index), log_id="log", number=2 + index)
        for index in range(3)
    ]
    fake.events = [
        Event(status=JobStatus(state=JOB_STATE_RUNNING), log_id="log", number=1),
        Event(log_id="log", number=4, batch=batch),
        Event(status=JobStatus(state=JOB_STATE_SUCCEEDED), log_id="log", number=5),
    ]
    last = fake.events[2:]
    fake.events = fake.events[:2]
    fake.after_events = lambda: setattr(fake, "events", last)
    watched = list(client.watch("job-1"))
    assert [event.number for event in watched] == [1, 2, 3, 4, 5]
    assert [event.progress.cluster_index for event in watched[1:4]] == [0, 1, 2]
    assert [(request.log_id, request.after) for request in fake.watched] == [("", 0), ("log", 4)]


def test_lines_are_those_of_watch(client: CollaPipeClient, fake: FakeServices) -> None:
    waiting = JobStatus(state=JOB_STATE_QUEUED, message="waits for a job")
    fake.events = [
        Event(status=waiting),
        Event(),
        Event(status=JobStatus(state=JOB_STATE_SUCCEEDED)),
    ]
    assert list(client.lines("job-1")) == ["queued: waits for a job", "succeeded"]


def test_watch_goes_on_where_it_stopped_when_the_scheduler_is_back(
    client: CollaPipeClient, fake: FakeServices
) -> None:
    fake.events = [Event(status=JobStatus(state=JOB_STATE_RUNNING), log_id="log", number=3)]
    last = [Event(status=JobStatus(state=JOB_STATE_SUCCEEDED), log_id="log", number=4)]

    def stop() -> None:
        fake.events = last

    fake.after_events = stop
    reasons: list[str] = []
    watched = list(client.watch("job-1", waiting=reasons.append))
    assert [event.number for event in watched] == [3, 4]
    [reason] = reasons
    assert client.address in reason
    assert [(request.log_id, request.after) for request in fake.watched] == [("", 0), ("log", 3)]


def test_watch_gives_up_on_silence(fake: FakeServices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collapipe_client.client.SIGN_OF_LIFE_SECONDS", 0.1)
    release = threading.Event()
    fake.after_events = lambda: release.wait(60)
    silence = timedelta(seconds=0.2)
    with (
        CollaPipeClient(fake.address, Security.insecure(), silence_timeout=silence) as client,
        pytest.raises(PeerLostError, match=r" 0\.2 s"),
    ):
        list(client.watch("job-1"))
    release.set()


def test_find_job_returns_the_newest_job_of_a_name(
    client: CollaPipeClient, fake: FakeServices
) -> None:
    fake.jobs = [JobStatus(job_id=i, name=n) for i, n in (("1", "a"), ("2", "a"), ("3", "b"))]
    assert client.find_job("a").job_id == "2"
    assert client.find_job("1").job_id == "1"
    with pytest.raises(NotFoundError, match="'c'.* a, b"):
        client.find_job("c")


def test_export_writes_the_files_and_keeps_other_files(
    client: CollaPipeClient, fake: FakeServices, tmp_path: Path
) -> None:
    fake.jobs = [JobStatus(job_id="job-1", name="a")]
    fake.files = [
        ExportModelResponse(file_name="config.json", total_bytes=2, chunk=b"{}"),
        ExportModelResponse(file_name="model.safetensors", total_bytes=4),
        ExportModelResponse(chunk=b"ab"),
        ExportModelResponse(chunk=b"cd"),
        ExportModelResponse(file_name="empty", total_bytes=0),
    ]
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    client.export("a", tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"abcd",
        "empty": b"",
        "notes.txt": b"mine",
    }


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (ExportModelResponse(file_name="../x", total_bytes=0), "'../x'"),
        (ExportModelResponse(file_name="a", total_bytes=3, chunk=b"ab"), "1 bytes less"),
        (ExportModelResponse(chunk=b"ab"), "file name"),
    ],
)
def test_export_of_a_damaged_stream_leaves_no_files(
    client: CollaPipeClient,
    fake: FakeServices,
    tmp_path: Path,
    piece: ExportModelResponse,
    message: str,
) -> None:
    fake.jobs = [JobStatus(job_id="job-1", name="a")]
    fake.files = [piece]
    with pytest.raises(CorruptDataError, match=message):
        client.export("a", tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []


def test_export_without_an_edge_server_says_so(
    client: CollaPipeClient, fake: FakeServices, tmp_path: Path
) -> None:
    fake.jobs = [JobStatus(job_id="job-1", name="a")]
    fake.hosts[0].alive = False
    with pytest.raises(WrongStateError, match="edge server"):
        client.export("a", tmp_path)
