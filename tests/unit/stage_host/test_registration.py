import logging
import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from collapipe.certificates import Role
from collapipe.errors import (
    CancelledError,
    CollapipeError,
    CorruptDataError,
    InvalidInputError,
    NotFoundError,
    PeerLostError,
    WrongStateError,
)
from collapipe.rpc import ChannelPool, Security
from collapipe.stage_host import registration
from collapipe.stage_host.registration import Registration
from collapipe.v1.enrollment_pb2 import ProtocolVersions, SignedRevokedKeys
from collapipe.v1.scheduler_pb2 import (
    HeartbeatRequest,
    HeartbeatResponse,
    Host,
    RegisterHostRequest,
    RegisterHostResponse,
)
from collapipe.weights.blob_store import JobStores


class Scheduler(ChannelPool):
    """Takes the place of the scheduler and of the channel to it. Refuses registrations and heartbeats as a test says."""

    def __init__(self) -> None:
        super().__init__(Security.insecure())
        self.asked: set[tuple[str, Role | None]] = set()
        self.num_channels = 0
        self.heard: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.refuse_registration: list[CollapipeError] = []
        self.refuse_heartbeat: list[CollapipeError] = []
        self.deleted: list[str] = []
        self.least_grant = 0
        self.protocol = ProtocolVersions(oldest=1, newest=1)
        self.revoked: SignedRevokedKeys | None = None
        self.unshaped: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.acknowledged: queue.SimpleQueue[int] = queue.SimpleQueue()

    def channel(self, address: str, role: Role | None = None, *, for_weights: bool = False) -> Any:
        self.asked.add((address, role))
        self.num_channels += 1
        return self

    def unary_unary(self, path: str, *_: object, **__: object) -> Callable[..., Any]:
        return lambda request, timeout: getattr(self, path.rpartition("/")[2])(request)

    unary_stream = stream_unary = stream_stream = unary_unary

    def RegisterHost(self, request: RegisterHostRequest) -> RegisterHostResponse:
        self.heard.put(("register", request.host.incarnation))
        if self.refuse_registration:
            raise self.refuse_registration.pop(0)
        answer = RegisterHostResponse(least_grant=self.least_grant, protocol=self.protocol)
        if self.revoked is not None:
            answer.revoked_keys.CopyFrom(self.revoked)
        answer.heartbeat_interval.FromMilliseconds(1)
        return answer

    def Heartbeat(self, request: HeartbeatRequest) -> HeartbeatResponse:
        assert request.host_id == "device-1"
        self.heard.put(("heartbeat", request.incarnation))
        self.unshaped.put(request.unshaped)
        if self.refuse_heartbeat:
            raise self.refuse_heartbeat.pop(0)
        self.acknowledged.put(request.num_deletions)
        new = self.deleted[request.num_deletions :]
        return HeartbeatResponse(
            deleted_job_ids=new,
            num_deletions=len(self.deleted),
            least_grant=self.least_grant,
        )

    def hears(self) -> str:
        return self.heard.get(timeout=60)[0]

    def hears_next(self, count: int) -> list[str]:
        return [self.hears() for _ in range(count)]


@contextmanager
def registered(scheduler: Scheduler, stores: JobStores | None = None) -> Iterator[Host]:
    host = Host(host_id="device-1", address="a:1", incarnation="first")
    keeping = Registration(host, "scheduler:1", scheduler, stores)
    try:
        yield host
    finally:
        keeping.close()
        assert not keeping._thread.is_alive()


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Scheduler:
    for wait in ("_RETRY_SECONDS", "_MOST_RETRY_SECONDS"):
        monkeypatch.setattr(registration, wait, 0.001)
    caplog.set_level(logging.INFO)
    return Scheduler()


def test_host_registers_and_then_sends_heartbeats(scheduler: Scheduler) -> None:
    with registered(scheduler) as host:
        heard = [scheduler.heard.get(timeout=60) for _ in range(4)]
    assert [what for what, _ in heard] == ["register", *["heartbeat"] * 3]
    assert {incarnation for _, incarnation in heard} == {host.incarnation}
    # A renewed certificate needs a new channel, so each call asks for one.
    assert scheduler.asked == {("scheduler:1", Role.SCHEDULER)}
    assert scheduler.num_channels >= 4


def test_heartbeats_say_why_links_are_not_shaped(scheduler: Scheduler) -> None:
    host, reasons = Host(host_id="device-1", address="a:1"), iter(["no netem"])
    keeping = Registration(host, "scheduler:1", scheduler, unshaped=lambda: next(reasons, ""))
    try:
        assert [scheduler.unshaped.get(timeout=60) for _ in range(2)] == ["no netem", ""]
    finally:
        keeping.close()


@pytest.mark.parametrize(
    ("refusal", "level", "said"),
    [
        (NotFoundError("who are you"), logging.INFO, "registering again"),
        (WrongStateError("the name is used"), logging.WARNING, "the name is used"),
        (CancelledError("the deadline was over"), logging.INFO, "try 1"),
    ],
    ids=["forgotten", "used name", "deadline"],
)
def test_host_whose_heartbeat_fails_registers_again(
    scheduler: Scheduler,
    caplog: pytest.LogCaptureFixture,
    refusal: CollapipeError,
    level: int,
    said: str,
) -> None:
    scheduler.refuse_heartbeat = [refusal]
    with registered(scheduler):
        heard = scheduler.hears_next(4)
    assert heard == ["register", "heartbeat", "register", "heartbeat"]
    assert said in caplog.text
    assert max(record.levelno for record in caplog.records) == level


@pytest.mark.parametrize(
    ("refusal", "level", "said"),
    [
        (InvalidInputError("a host needs a role"), logging.ERROR, "a host needs a role"),
        (PeerLostError("the scheduler", "it starts later"), logging.INFO, "try 2"),
    ],
    ids=["refused", "starts later"],
)
def test_host_tries_to_register_until_it_is_accepted(
    scheduler: Scheduler,
    caplog: pytest.LogCaptureFixture,
    refusal: CollapipeError,
    level: int,
    said: str,
) -> None:
    scheduler.refuse_registration = [refusal, refusal]
    with registered(scheduler):
        heard = scheduler.hears_next(4)
    assert heard == ["register", "register", "register", "heartbeat"]
    assert said in caplog.text
    assert max(record.levelno for record in caplog.records) == level


def test_host_whose_address_is_gone_says_so_once_and_registers_again(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = [True, True, False, False, True]  # at first, and after each heartbeat
    monkeypatch.setattr(
        registration, "is_address_here", lambda address: here.pop(0) if len(here) > 1 else here[0]
    )
    with registered(scheduler):
        heard = scheduler.hears_next(6)
    assert heard == [
        *("register", "heartbeat"),
        *("register", "heartbeat"),  # It has lost its address.
        *("register", "heartbeat"),  # It has it again.
    ]
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [error.args for error in errors] == [("a:1",)]


def test_host_that_has_failed_for_hours_still_registers(scheduler: Scheduler) -> None:
    lost = PeerLostError("the scheduler", "it is switched off")
    scheduler.refuse_registration = [*[lost] * 1100, WrongStateError("the port is closed")]
    with registered(scheduler):
        heard = scheduler.hears_next(1103)
    assert heard[-2:] == ["register", "heartbeat"]


class Stores(JobStores):
    """Tells which jobs it was to delete, and whether it did."""

    def __init__(
        self, directory: Path, forget: Callable[[str], None] = lambda job_id: None
    ) -> None:
        super().__init__(directory, forget)
        self.tries: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()

    def delete_job(self, job_id: str) -> bool:
        done = super().delete_job(job_id)
        self.tries.put((job_id, done))
        return done

    def wait_for(self, job_id: str, deleted: bool) -> None:
        while self.tries.get(timeout=60) != (job_id, deleted):
            pass


def test_host_deletes_what_the_scheduler_has_deleted_and_a_job_in_use_later(
    scheduler: Scheduler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stores = Stores(tmp_path)
    for job_id in ("used", "old", "kept"):
        stores.store(job_id)
    scheduler.deleted = ["unknown", "../kept", "used", "old"]
    with ExitStack() as use:
        use.enter_context(stores.using("used"))  # first, because a registered host deletes at once
        with registered(scheduler, stores):
            stores.wait_for("old", deleted=True)
            stores.wait_for("used", deleted=False)
            assert stores.directory("used").exists()
            use.close()
            stores.wait_for("used", deleted=True)
            stores.store("new")
            scheduler.deleted = [*scheduler.deleted, "new"]
            stores.wait_for("new", deleted=True)
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["kept"]
    assert "'../kept'" in caplog.text


def test_host_tries_again_to_delete_what_its_disk_has_refused(
    scheduler: Scheduler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError("the disk is full"), CorruptDataError("state.db is damaged")]

    def forget(job_id: str) -> None:
        if failures:
            raise failures.pop()

    stores = Stores(tmp_path, forget)
    scheduler.deleted = ["old"]
    with registered(scheduler, stores):
        stores.wait_for("old", deleted=True)
    assert failures == []
    assert "state.db is damaged" in caplog.text and "the disk is full" in caplog.text


def test_host_asks_for_all_deletions_again_when_it_registers_again(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    stores = Stores(tmp_path)
    scheduler.deleted = ["a", "b"]
    with registered(scheduler, stores):
        while scheduler.acknowledged.get(timeout=60) < 2:
            pass
        stores.store("other")
        scheduler.deleted = ["other", "c"]  # as many as before, at a scheduler that lost its state
        scheduler.refuse_heartbeat = [NotFoundError("who are you")]
        stores.wait_for("other", deleted=True)


def test_host_learns_revoked_keys_before_the_first_grant_counts(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: queue.SimpleQueue[tuple[bytes, int | None]] = queue.SimpleQueue()

    def learn(security: Security, signed: SignedRevokedKeys) -> None:
        learned.put((signed.keys, security.least_grant))

    monkeypatch.setattr(Security, "learn_revoked", learn)
    scheduler.revoked = SignedRevokedKeys(keys=b"list")
    with registered(scheduler):
        assert learned.get(timeout=60) == (b"list", None)


def test_number_of_the_least_grant_comes_with_answers_and_falls_only_when_the_host_registers(
    scheduler: Scheduler,
) -> None:
    def learns() -> int:
        """Returns what the host knows after the answers that follow now."""
        while not scheduler.heard.empty():
            scheduler.heard.get()
        scheduler.hears_next(3)
        return scheduler.security.least_grant

    scheduler.least_grant = 7
    with registered(scheduler):
        assert learns() == 7
        scheduler.least_grant = 9
        assert learns() == 9
        scheduler.least_grant = 8
        assert learns() == 9
        scheduler.refuse_heartbeat = [NotFoundError("a scheduler that lost its state")]
        while scheduler.hears() != "register":
            pass
        assert learns() == 8


def test_host_does_not_stay_registered_with_a_scheduler_of_another_version(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registration, "_UPDATE_SECONDS", 0.001)
    scheduler.protocol.Clear()
    with registered(scheduler):
        assert scheduler.hears_next(3) == ["register"] * 3
        scheduler.protocol.newest = 1
        while scheduler.hears() != "heartbeat":
            pass
    assert "update CollaPipe on the machine of the scheduler" in caplog.text
