import errno
import os
import socket
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from collapipe.errors import PeerLostError
from collapipe.rpc import Security, serve
from collapipe.v1 import scheduler_pb2
from collapipe_client.client import CollaPipeClient
from collapipe_client.doctor import peers, ports
from collapipe_client.doctor.peers import (
    check_peer,
    check_peers,
    check_scheduler,
    clock_offset,
    peers_of,
)
from collapipe_client.doctor.ports import check_port, find_listener


def _status(
    host_id: str, role: scheduler_pb2.HostRole, cluster: int = 0, **fields: object
) -> scheduler_pb2.HostStatus:
    host = scheduler_pb2.Host(
        host_id=host_id, role=role, cluster_index=cluster, address=str(fields.get("address", ""))
    )
    return scheduler_pb2.HostStatus(host=host, alive=bool(fields.get("alive", True)))


_MODULE = "collapipe.device_agent"


def test_free_port_and_taken_port_are_distinguished() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        taken = check_port("gRPC", "listen", f"0.0.0.0:{port}", _MODULE)
        assert taken.result == "fail"
        assert f"(pid {os.getpid()})" in taken.found
        assert Path(sys.executable).name in taken.found or "pytest" in taken.found
    assert check_port("gRPC", "listen", f"0.0.0.0:{port}", _MODULE).result == "ok"
    assert find_listener(port) == ""


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("203.0.113.7:7100", "not an address of"),
        ("7100", "not host:port"),
        ("0.0.0.0:x", "not host:port"),
        ("0.0.0.0:70000", "not host:port"),
        ("no such name:7100", "not an address of"),
        ("127.0.0.1:0", "this machine only"),
        ("localhost:7100", "this machine only"),
    ],
)
def test_unusable_listen_address_fails(address: str, found: str) -> None:
    check = check_port("gRPC", "listen", address, _MODULE)
    assert (check.result, found in check.found) == ("fail", True)
    assert check.remedy


@pytest.mark.parametrize(
    ("holder", "result"),
    [("python -m collapipe.device_agent (pid 7)", "ok"), ("nginx (pid 7)", "fail"), ("", "warn")],
)
def test_port_is_judged_by_the_process_that_holds_it(
    monkeypatch: pytest.MonkeyPatch, holder: str, result: str
) -> None:
    monkeypatch.setattr(ports, "find_listener", lambda port: holder)
    with socket.create_server(("0.0.0.0", 0)) as server:
        check = check_port("gRPC", "listen", f"0.0.0.0:{server.getsockname()[1]}", _MODULE)
    assert (check.result, bool(check.remedy)) == (result, result != "ok")


def test_port_that_only_root_may_open_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    forbidden = Mock(side_effect=PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
    monkeypatch.setattr(ports, "listen_briefly", forbidden)
    check = check_port("gRPC", "listen", "0.0.0.0:80", _MODULE)
    assert (check.result, "only root" in check.found) == ("fail", True)


def test_warning_names_silent_hosts() -> None:
    device, edge = scheduler_pb2.HOST_ROLE_DEVICE_AGENT, scheduler_pb2.HOST_ROLE_EDGE_SERVER
    hosts = [_status("edge-server", edge), _status("pi-3", device, alive=False)]
    check = check_scheduler("s:7100", hosts)
    assert (check.result, "1 hosts alive, silent: pi-3" in check.found) == ("warn", True)
    assert check_scheduler("s:7100", hosts[:1]).result == "ok"
    assert check_scheduler("s:7100", PeerLostError("s", "no answer")).result == "fail"


def test_peers_of_a_device_are_its_cluster_and_the_edge_server() -> None:
    device = scheduler_pb2.HOST_ROLE_DEVICE_AGENT
    hosts = [
        _status("edge-server", scheduler_pb2.HOST_ROLE_EDGE_SERVER),
        _status("control-unit-1", scheduler_pb2.HOST_ROLE_CONTROL_UNIT, 1),
        _status("device-0-0", device, 0),
        _status("device-1-0", device, 1),
        _status("device-1-1", device, 1, alive=False),
    ]
    names = [status.host.host_id for status in peers_of("device-agent", 1, hosts)]
    assert names == ["edge-server", "control-unit-1", "device-1-0"]
    assert len(peers_of("scheduler", 0, hosts)) == 4
    assert len(peers_of(None, 0, hosts)) == 4


def test_peer_that_serves_is_ok_with_its_round_trip() -> None:
    server = serve("127.0.0.1:0", Security.insecure(), lambda server, address: None)
    try:
        check = check_peer("device-0-0", server.address, Security.insecure())
    finally:
        server.drain(0)
    assert (check.result, "round trip" in check.found) == ("ok", True)


def test_checks_of_unreachable_peers_give_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    device = scheduler_pb2.HOST_ROLE_DEVICE_AGENT
    unknown, refused = check_peers(
        [
            _status("a", device, address="no-such-host.invalid:7100"),
            _status("b", device, address=f"127.0.0.1:{port}"),
        ],
        Security.insecure(),
    )
    assert unknown.result == refused.result == "fail"
    assert "'no-such-host.invalid' is not known" in unknown.found
    assert "/etc/hosts" in unknown.remedy
    assert "refused" in refused.found


def test_port_without_a_grpc_service_fails_as_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_CALL_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        mute.settimeout(0)
        check = check_peer("a", f"127.0.0.1:{mute.getsockname()[1]}", Security.insecure())
    assert check.result == "fail"
    assert "connected in" in check.found


def test_remedy_for_a_silent_peer_is_its_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=TimeoutError))
    check = check_peer("pi-3", "127.0.0.1:7100", Security.insecure())
    assert (check.result, "sudo ufw allow 7100/tcp" in check.remedy) == ("fail", True)


class _Scheduler(CollaPipeClient):
    """A scheduler whose clock is wrong. Its host sends a heartbeat every two seconds of a simulated time."""

    def __init__(self, behind_seconds: float, *, alive: bool = True) -> None:
        self.now = 1000.0
        self._behind = behind_seconds
        self._alive = alive

    def hosts(self) -> list[scheduler_pb2.HostStatus]:
        self.now += 0.01  # a round trip
        status = _status("pi-3", scheduler_pb2.HOST_ROLE_DEVICE_AGENT, alive=self._alive)
        heard = (self.now - 0.3) // 2 * 2 + 0.3
        status.last_seen.FromMilliseconds(int((heard - self._behind) * 1000))
        return [status]

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("behind", [0.0, -3600.0])
def test_clock_offset_is_found_within_its_uncertainty(behind: float) -> None:
    scheduler = _Scheduler(behind)
    found = clock_offset(scheduler, lambda: scheduler.now, scheduler.sleep)
    assert found is not None
    offset, uncertainty = found
    assert abs(offset - behind) <= uncertainty + 0.002
    assert uncertainty < 0.1


def test_clock_offset_is_unknown_without_heartbeats() -> None:
    scheduler = _Scheduler(0.0, alive=False)
    assert clock_offset(scheduler, lambda: scheduler.now, scheduler.sleep) is None
