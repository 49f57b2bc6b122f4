"""What one box may do to a scheduler with mutual TLS when it registers, and what a host learns then."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from unit.rpc.authorities import Authority

from collapipe.certificates import Role
from collapipe.errors import (
    CollapipeError,
    InvalidInputError,
    NotPermittedError,
    WrongStateError,
)
from collapipe.protocol import OURS
from collapipe.rpc import ChannelPool, Server, call, serve
from collapipe.rpc.permissions import PERMISSIONS
from collapipe.scheduler import calls_back
from collapipe.scheduler.host_registry import HostRegistry
from collapipe.scheduler.job_store import JobStore
from collapipe.scheduler.retention import Retention
from collapipe.scheduler.servicer import SchedulerServicer
from collapipe.stage_host.registration import Registration
from collapipe.v1 import scheduler_pb2_grpc
from collapipe.v1.scheduler_pb2 import (
    HOST_ROLE_DEVICE_AGENT,
    HOST_ROLE_EDGE_SERVER,
    HeartbeatRequest,
    Host,
    HostStatus,
    ListHostsRequest,
    RegisterHostRequest,
)

BOX, SECONDS = "device-agent:box@3", 60.0


class Deployment:
    """A scheduler, and boxes that call it."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        security = self.authority.security("scheduler:scheduler")
        self.security, self.registry = security, HostRegistry()
        self._channels = ChannelPool(security)
        self._servicer = SchedulerServicer(
            JobStore(folder / "state"),
            self._channels,
            self.registry,
            None,  # type: ignore[arg-type]
            retention=Retention(100, 0),
            jobs_at_once=8,
        )
        add = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
        self._server = serve(
            "127.0.0.1:0",
            security,
            lambda server, address: add(self._servicer, server),
            PERMISSIONS,
        )
        self.address = self._server.address
        self._boxes: list[Server] = []
        self.honest_host = Host(
            host_id="box",
            role=HOST_ROLE_DEVICE_AGENT,
            cluster_index=3,
            address=self.start_box("first").address,
            incarnation="first",
        )

    def start_box(self, process: str) -> Server:
        """Starts a process of the box that can be called, and does not register it."""
        box = serve("127.0.0.1:0", self.authority.security(BOX), lambda *_: None, process=process)
        self._boxes.append(box)
        return box

    def ask(self, method: str, request: Any, holder: str = BOX) -> Any:
        channels = ChannelPool(self.authority.security(holder))
        try:
            channel = channels.channel(self.address, Role.SCHEDULER)
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            return call(getattr(stub, method), request, "the scheduler", SECONDS)
        finally:
            channels.close()

    def register(self, **changes: Any) -> Any:
        request = RegisterHostRequest(host=self.honest_host)
        request.host.MergeFrom(Host(**changes))
        return self.ask("RegisterHost", request)

    def stop_box(self) -> None:
        """Ends the first process of the box."""
        self._boxes.pop(0).drain(0)

    def statuses(self) -> list[HostStatus]:
        request = ListHostsRequest()
        return list(self.ask("ListHosts", request, "client:me").hosts)

    def close(self) -> None:
        for box in self._boxes:
            box.drain(0)
        self._server.drain(0)
        self._servicer.close()
        self._channels.close()


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    made = Deployment(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"host_id": "other"}, NotPermittedError, "may not speak for device-agent:other"),
        ({"role": HOST_ROLE_EDGE_SERVER}, NotPermittedError, "edge-server:box"),
        ({"role": 99}, InvalidInputError, "role 99"),
        ({"cluster_index": 4}, NotPermittedError, "cluster 4"),
        ({"cluster_index": (1 << 32) - 1}, InvalidInputError, "cluster_index 4.29497e"),
        ({"address": "10.0.0.1:5"}, NotPermittedError, "10.0.0.1:5"),
        ({"address": "127.0.0.1:0"}, InvalidInputError, "127.0.0.1:0"),
        ({"address": "127.0.0.1:1,127.0.0.1:2"}, CollapipeError, "127.0.0.1:1,127.0.0.1"),
        ({"address": ",".join(f"127.0.0.1:{n}" for n in range(4000))}, InvalidInputError, "256"),
        ({"metrics_address": "[::]:5"}, NotPermittedError, "5"),
        ({"metrics_address": "127.0.0.1:99999"}, InvalidInputError, "99999"),
        ({"incarnation": "x" * 257}, InvalidInputError, "256 characters"),
        ({"host_id": "x" * 60_000}, InvalidInputError, "256 characters"),
        ({"memory_bytes": (1 << 64) - 1}, InvalidInputError, "memory_bytes"),
        *(
            ({name: value}, InvalidInputError, name)
            for name in ("speed", "energy_budget_joules", "busy_watts", "max_transmit_watts")
            for value in (math.inf, math.nan, -1.0, 1e300)
        ),
        ({"idle_watts": math.nan}, InvalidInputError, "idle_watts"),
    ],
)
def test_box_cannot_register_as_something_else_or_as_what_no_host_can_be(
    deployment: Deployment, changes: dict[str, Any], error: type[CollapipeError], words: str
) -> None:
    with pytest.raises(error) as raised:
        deployment.register(**changes)
    assert words in str(raised.value)
    assert deployment.registry.statuses() == []


def test_fields_that_nobody_knows_are_not_kept(deployment: Deployment) -> None:
    host = deployment.honest_host
    padding = b"\xa2\x3f" + b"\x80\x80\x02" + bytes(1 << 15)  # field 1012, 32 KiB
    padded = Host.FromString(host.SerializeToString() + padding)
    assert padded.ByteSize() > 1 << 15
    deployment.ask("RegisterHost", RegisterHostRequest(host=padded))
    (status,) = deployment.registry.statuses()
    assert status.host == host
    assert status.host.ByteSize() == host.ByteSize()


@pytest.mark.parametrize("known", [0, 7, (1 << 64) - 1])
def test_heartbeat_with_any_number_of_deletions_and_any_list_is_answered(
    deployment: Deployment, known: int
) -> None:
    deployment.register()
    request = HeartbeatRequest(
        host_id="box",
        incarnation="first",
        num_deletions=known,
        revoked_keys_sha256=bytes(1 << 15),
    )
    answer = deployment.ask("Heartbeat", request)
    assert (answer.num_deletions, list(answer.deleted_job_ids)) == (0, [])
    with pytest.raises(NotPermittedError, match="may not speak for 'box'"):
        deployment.ask("Heartbeat", request, "device-agent:other@3")


def test_host_that_registers_knows_the_revoked_keys_and_no_grant_before(
    deployment: Deployment,
) -> None:
    stolen = deployment.authority.security("control-unit:stolen@3")
    deployment.security.learn_revoked(deployment.authority.revoke("control-unit:stolen@3"))
    box = deployment.authority.security(BOX)
    assert (box.least_grant, box.revoked.number) == (None, 0)
    channels = ChannelPool(box)
    registration = Registration(deployment.honest_host, deployment.address, channels)
    try:
        deadline = time.monotonic() + SECONDS
        while box.least_grant is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert box.revoked.number == deployment.security.revoked.number > 0
        assert stolen.certificate is not None
        with pytest.raises(NotPermittedError, match="was revoked"):
            box.revoked.check(stolen.certificate.read_bytes())
    finally:
        registration.close()
        channels.close()


def test_box_that_cannot_be_called_back_is_refused_and_shown(deployment: Deployment) -> None:
    other = deployment.start_box("other").address
    for address in ("127.0.0.1:5", other):
        with pytest.raises(WrongStateError, match=address):
            deployment.register(address=address)
        (status,) = deployment.statuses()
        assert address in status.refusal and not status.alive
    assert deployment.registry.registered() == []
    deployment.register(address=other, incarnation="other")
    (status,) = deployment.statuses()
    assert (status.alive, status.refusal) == (True, "")


def test_box_of_a_version_that_does_not_name_its_process_may_register(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_back, "NAMES_ITS_PROCESS", OURS.newest + 1)
    deployment.register(incarnation="of no process")
    assert deployment.registry.heard_as("box") is not None


def test_twin_is_refused_while_the_first_process_answers(deployment: Deployment) -> None:
    deployment.register()
    twin = deployment.start_box("twin").address
    with pytest.raises(WrongStateError, match=f"{deployment.honest_host.address}.*{twin}"):
        deployment.register(address=twin, incarnation="twin")
    (status,) = deployment.statuses()
    assert (status.alive, status.host.incarnation) == (True, "first")
    assert (status.refusal, status.twin_address) == ("", twin)
    deployment.ask("Heartbeat", HeartbeatRequest(host_id="box", incarnation="first"))
    deployment.stop_box()
    deployment.register(address=twin, incarnation="twin")
    (status,) = deployment.statuses()
    assert (status.alive, status.host.incarnation, status.twin_address) == (True, "twin", "")
