import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from unit.rpc.authorities import Authority

from collapipe.certificates import pki
from collapipe.errors import (
    CancelledError,
    CollapipeError,
    InvalidInputError,
    NotFoundError,
    WrongStateError,
)
from collapipe.rpc import ChannelPool, Security, serve
from collapipe.stage_host import registration
from collapipe.stage_host.registration import Registration
from collapipe.v1.scheduler_pb2 import (
    HeartbeatRequest,
    HeartbeatResponse,
    Host,
    RegisterHostRequest,
    RegisterHostResponse,
)
from collapipe.v1.scheduler_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from collapipe.weights.blob_store import JobStores

PLAIN = Security.insecure()


class Scheduler(SchedulerServiceServicer):
    """Records registrations and heartbeats. Refuses them as a test says."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.refuse_registration: list[CollapipeError] = []
        self.refuse_heartbeat: list[CollapipeError] = []
        self.deleted: list[str] = []
        self.least_grant = 0
        self.acknowledged: queue.SimpleQueue[int] = queue.SimpleQueue()

    def RegisterHost(
        self, request: RegisterHostRequest, context: grpc.ServicerContext
    ) -> RegisterHostResponse:
        self.heard.put(("register", request.host.incarnation))
        if self.refuse_registration:
            raise self.refuse_registration.pop(0)
        answer = RegisterHostResponse(least_grant=self.least_grant)
        answer.heartbeat_interval.FromMilliseconds(10)
        return answer

    def Heartbeat(
        self, request: HeartbeatRequest, context: grpc.ServicerContext
    ) -> HeartbeatResponse:
        assert request.host_id == "device-1"
        self.heard.put(("heartbeat", request.incarnation))
        if self.refuse_heartbeat:
            raise self.refuse_heartbeat.pop(0)
        self.acknowledged.put(request.num_deletions)
        new = self.deleted[request.num_deletions :]
        return HeartbeatResponse(
            deleted_job_ids=new,
            num_deletions=len(self.deleted),
            least_grant=self.least_grant,
        )

    def hears(self) -> tuple[str, str]:
        return self.heard.get(timeout=20)


@contextmanager
def serving(
    scheduler: Scheduler, listen: str = "127.0.0.1:0", security: Security = PLAIN
) -> Iterator[str]:
    server = serve(
        listen,
        security,
        lambda grpc_server, address: add_SchedulerServiceServicer_to_server(scheduler, grpc_server),
    )
    try:
        yield server.address
    finally:
        server.drain(0)


@contextmanager
def registered(
    address: str, security: Security = PLAIN, stores: JobStores | None = None
) -> Iterator[Host]:
    host, channels = Host(host_id="device-1", address="a:1"), ChannelPool(security)
    keeping = Registration(host, address, channels, stores)
    try:
        yield host
    finally:
        keeping.close()
        channels.close()


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "_RETRY_SECONDS", 0.02)


def test_host_registers_and_then_sends_heartbeats_until_it_is_closed() -> None:
    scheduler = Scheduler()
    with serving(scheduler) as address:
        with registered(address) as host:
            heard = [scheduler.hears() for _ in range(4)]
        assert [what for what, _ in heard] == ["register", *["heartbeat"] * 3]
        assert {incarnation for _, incarnation in heard} == {host.incarnation}
        while not scheduler.heard.empty():
            scheduler.heard.get()
        assert not threading.Event().wait(0.1)
        assert scheduler.heard.empty(), "a closed registration goes on"


def test_host_with_a_renewed_certificate_finds_a_scheduler_that_restarted(tmp_path: Path) -> None:
    authority, scheduler = Authority(tmp_path), Scheduler()
    of_scheduler = authority.security("scheduler:scheduler")
    device = authority.security("device-agent:device-1", lifetime=timedelta(seconds=4))
    presented = device.presented()
    assert presented is not None
    with ExitStack() as stack:
        with serving(scheduler, security=of_scheduler) as address:
            stack.enter_context(registered(address, device))
            assert scheduler.hears()[0] == "register"
        while pki.utc_now() <= presented.expires + timedelta(seconds=1):
            threading.Event().wait(0.05)
        authority.security("device-agent:device-1")
        restarted = Scheduler()
        with serving(restarted, address, of_scheduler):
            assert restarted.hears()[0] in ("register", "heartbeat")


def test_every_process_has_its_own_incarnation() -> None:
    with serving(Scheduler()) as address, registered(address) as one, registered(address) as two:
        assert one.incarnation
        assert one.incarnation != two.incarnation


def test_forgotten_host_registers_again() -> None:
    scheduler = Scheduler()
    scheduler.refuse_heartbeat = [NotFoundError("who are you")]
    with serving(scheduler) as address, registered(address):
        heard = [scheduler.hears()[0] for _ in range(4)]
    assert heard == ["register", "heartbeat", "register", "heartbeat"]


def test_host_with_a_used_name_logs_that_and_retries(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = Scheduler()
    scheduler.refuse_heartbeat = [WrongStateError("give each host its own --host-id")]
    with caplog.at_level(logging.WARNING), serving(scheduler) as address, registered(address):
        heard = [scheduler.hears()[0] for _ in range(3)]
    assert heard == ["register", "heartbeat", "register"]
    assert "give each host its own --host-id" in caplog.text


def test_refused_host_logs_the_reason_and_retries(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = Scheduler()
    scheduler.refuse_registration = [InvalidInputError("a host needs a role")]
    with caplog.at_level(logging.ERROR), serving(scheduler) as address, registered(address):
        heard = [scheduler.hears()[0] for _ in range(2)]
    assert heard == ["register", "register"]
    assert "the scheduler refuses this host: a host needs a role" in caplog.text


def test_heartbeat_that_the_scheduler_ended_is_no_refusal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = Scheduler()
    scheduler.refuse_heartbeat = [CancelledError("the deadline was over")]
    with caplog.at_level(logging.INFO), serving(scheduler) as address, registered(address):
        heard = [scheduler.hears()[0] for _ in range(4)]
    assert heard == ["register", "heartbeat", "register", "heartbeat"]
    assert "cannot reach the scheduler (try 1)" in caplog.text
    assert "refuses" not in caplog.text


def test_host_waits_for_a_scheduler_that_starts_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scheduler = Scheduler()
    with serving(scheduler) as address:
        pass  # The server ends at once, which frees its port.
    with caplog.at_level(logging.INFO), registered(address):
        while "cannot reach the scheduler (try 2)" not in caplog.text:
            assert not threading.Event().wait(0.02)
        with serving(scheduler, address):
            assert scheduler.hears()[0] == "register"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def wait_until_deleted(stores: JobStores, job_id: str) -> None:
    directory = stores.directory(job_id)
    doomed = directory.with_name(f".{job_id}")  # It has this name while its files are deleted.
    for _ in range(1000):
        if not directory.exists() and not doomed.exists():
            return
        threading.Event().wait(0.02)
    raise AssertionError(f"{job_id} was not deleted in 20 s")


def test_host_deletes_what_the_scheduler_has_deleted_and_a_job_in_use_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scheduler, stores = Scheduler(), JobStores(tmp_path)
    for job_id in ("used", "old", "kept"):
        stores.store(job_id)
    scheduler.deleted = ["unknown", "../kept", "used", "old"]
    with serving(scheduler) as address, registered(address, stores=stores):
        with stores.using("used"):
            wait_until_deleted(stores, "old")
            while scheduler.acknowledged.get(timeout=20) < 4:
                pass
            assert stores.directory("used").exists()
        wait_until_deleted(stores, "used")
        stores.store("new")
        scheduler.deleted = [*scheduler.deleted, "new"]
        wait_until_deleted(stores, "new")
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["kept"]
    assert "'../kept' stays here" in caplog.text


def test_host_asks_for_all_deletions_again_when_it_registers_again(tmp_path: Path) -> None:
    scheduler, stores = Scheduler(), JobStores(tmp_path)
    scheduler.deleted = ["a", "b"]
    with serving(scheduler) as address, registered(address, stores=stores):
        while scheduler.acknowledged.get(timeout=20) < 2:
            pass
        stores.store("other")
        scheduler.deleted = ["other", "c"]  # as many as before, at a scheduler that lost its state
        scheduler.refuse_heartbeat = [NotFoundError("who are you")]
        wait_until_deleted(stores, "other")


def hears_heartbeats(scheduler: Scheduler, number: int) -> None:
    """Waits until the answers to so many heartbeats have arrived."""
    for _ in range(number + 1):
        assert scheduler.hears()[0] == "heartbeat"


def test_number_of_the_least_grant_comes_with_answers_and_falls_only_when_the_host_registers() -> (
    None
):
    scheduler, security = Scheduler(), Security.insecure()
    scheduler.least_grant = 7
    with serving(scheduler) as address, registered(address, security):
        assert scheduler.hears()[0] == "register"
        hears_heartbeats(scheduler, 0)
        assert security.least_grant == 7
        scheduler.least_grant = 9
        hears_heartbeats(scheduler, 2)
        assert security.least_grant == 9
        scheduler.least_grant = 8
        hears_heartbeats(scheduler, 2)
        assert security.least_grant == 9
        scheduler.refuse_heartbeat = [NotFoundError("a scheduler that lost its state")]
        while scheduler.hears()[0] != "register":
            pass
        hears_heartbeats(scheduler, 0)
        assert security.least_grant == 8
