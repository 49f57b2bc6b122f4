"""Which hosts are there, which of them a job takes, and what is told about those that are missing."""

import logging
import time
from collections.abc import Sequence

import pytest
from planned_jobs import Clock
from planned_jobs import job as make_job
from prometheus_client import REGISTRY
from pydantic import ValidationError

from collapipe.errors import NotFoundError, WrongStateError
from collapipe.job import JobConfig
from collapipe.planning.job_hosts import JobHosts
from collapipe.scheduler import host_registry
from collapipe.scheduler.host_choice import Gap, choose_hosts
from collapipe.scheduler.host_registry import (
    CONTROL_UNIT,
    DEVICE_AGENT,
    EDGE_SERVER,
    SILENCE_SECONDS,
    HostRegistry,
)
from collapipe.scheduler.missing_hosts import MissingHosts
from collapipe.v1.scheduler_pb2 import Host, IncidentCode, MissingHost


def device(name: str, cluster: int = 0, incarnation: str = "first") -> Host:
    return Host(
        host_id=name,
        role=DEVICE_AGENT,
        cluster_index=cluster,
        incarnation=incarnation,
        address="a:1",
    )


def control_unit(cluster: int) -> Host:
    return Host(host_id=f"control-unit-{cluster}", role=CONTROL_UNIT, cluster_index=cluster)


EDGE = Host(host_id="edge-server", role=EDGE_SERVER)


def registry_of(*names: str) -> tuple[HostRegistry, Clock]:
    """A registry of devices that have just registered, and its clock."""
    clock = Clock()
    registry = HostRegistry(clock)
    for name in names:
        registry.register(device(name))
    return registry, clock


def names(hosts: Sequence[Host]) -> list[str]:
    return [host.host_id for host in hosts]


# --- registration and heartbeats


def exported() -> float | None:
    return REGISTRY.get_sample_value("collapipe_hosts", {"role": "device_agent"})


def test_host_is_alive_until_it_is_silent_for_longer_than_allowed() -> None:
    registry, clock = registry_of("a", "b")
    clock.now += SILENCE_SECONDS
    registry.heartbeat("b", "first")
    assert names(registry.alive()) == ["a", "b"]
    assert [status.alive for status in registry.statuses()] == [True, True]
    assert exported() == 2
    clock.now += 0.1
    assert exported() == 1, "it falls without a further heartbeat"
    assert names(registry.alive()) == ["b"]
    assert [status.alive for status in registry.statuses()] == [False, True]


@pytest.mark.parametrize("name", ["a", "a:1"])
def test_suspect_is_dead_until_it_registers_again(name: str) -> None:
    registry, clock = registry_of("a")
    clock.now += 1
    registry.suspect(name, "it broke its stream")
    assert registry.alive() == [] and names(registry.heard()) == ["a"]
    clock.now += 0.1
    with pytest.raises(NotFoundError, match="'a'"):
        registry.heartbeat("a", "first")
    assert registry.alive() == []
    registry.register(device("a"))
    registry.heartbeat("a", "first")
    assert names(registry.alive()) == ["a"] and registry.alive(suspects=False) == []
    clock.now += SILENCE_SECONDS + 1
    assert registry.heard() == []


def test_host_that_only_others_cannot_reach_is_left_out_for_longer_each_time() -> None:
    registry, clock = registry_of("a")
    left_out = []
    for _ in range(5):
        registry.suspect("a", "it broke its stream")
        registry.register(device("a"))
        start = clock.now
        while not registry.alive(suspects=False):
            clock.now += 0.5
            registry.heartbeat("a", "first")
            assert names(registry.alive(suspects=True)) == ["a"]
        left_out.append(clock.now - start)
    assert left_out == [10.5, 20.5, 40.5, 60.5, 60.5]
    registry.suspect("a", "it broke its stream")
    registry.register(device("a", incarnation="second"))
    assert names(registry.alive(suspects=False)) == ["a"], "another process is trusted at once"


def test_host_that_registers_again_and_again_is_a_suspect_and_fills_no_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, clock = registry_of("a")
    with caplog.at_level(logging.INFO):
        for number in range(1000):
            clock.now += 0.5
            registry.register(device("a", incarnation=str(number)))
            registry.heartbeat("a", str(number))
            assert bool(registry.alive(suspects=False)) == (number < 5), number
            assert names(registry.alive()) == ["a"]
    assert len(caplog.records) == 6
    (status,) = registry.statuses()
    assert "more than 6 times in 60 s" in status.suspicion
    registry.register(
        device("a", incarnation="999")
    )  # The same process, for example after a restart of the scheduler.
    clock.now += 61
    registry.register(device("a", incarnation="last"))
    assert names(registry.alive(suspects=False)) == ["a"]


def test_status_says_why_links_are_not_shaped_until_they_are() -> None:
    registry, _ = registry_of("a", "b")
    registry.heartbeat("a", "first", "x" * 2000)
    assert [status.unshaped for status in registry.statuses()] == ["x" * 1000, ""]
    registry.heartbeat("a", "first")
    assert [status.unshaped for status in registry.statuses()] == ["", ""]


def test_status_of_a_suspect_has_the_reason_until_the_suspicion_ends() -> None:
    registry, clock = registry_of("a", "b")
    began = time.time()
    registry.suspect("a", "it broke its stream")
    suspect, other = registry.statuses()
    assert suspect.suspicion == "it broke its stream"
    until = suspect.suspected_until.ToMilliseconds() / 1000
    assert began + 9.9 < until <= time.time() + 10
    assert (other.suspicion, other.HasField("suspected_until")) == ("", False)
    clock.now += 10.5
    assert registry.statuses()[0].suspicion == ""


def test_unknown_host_makes_nobody_a_suspect_and_is_asked_to_register_again() -> None:
    registry, _ = registry_of("a")
    for name in ("", "somebody"):
        registry.suspect(name, "it broke its stream")
    assert names(registry.alive()) == ["a"]
    with pytest.raises(NotFoundError, match="'ghost'"):
        registry.heartbeat("ghost", "first")


def test_heartbeat_of_a_replaced_incarnation_is_refused_and_changes_nothing() -> None:
    registry, clock = registry_of("a", "b")
    clock.now += 20
    registry.register(device("a", incarnation="second"))
    registry.heartbeat("b", "first")
    # A host that comes back after a restart keeps its place.
    assert [host.incarnation for host in registry.alive()] == ["second", "first"]
    clock.now += 20
    with pytest.raises(WrongStateError, match=r"'a'.*--host-id"):
        registry.heartbeat("a", "first")
    assert registry.alive() == []
    registry.heartbeat("a", "second")
    assert names(registry.alive()) == ["a"]


@pytest.mark.parametrize(("num_hosts", "seconds"), [(1, 2.0), (400, 2.0), (600, 3.0), (2000, 3.5)])
def test_many_hosts_send_heartbeats_less_often(num_hosts: int, seconds: float) -> None:
    registry, _clock = registry_of(*map(str, range(num_hosts)))
    assert registry.heartbeat_seconds == seconds


# --- the hosts of a job


def job(
    clusters: int = 1, devices: int | list[int] | None = None, use_clusters: list[int] | None = None
) -> JobConfig:
    more = {"clusters": clusters, "devices_per_cluster": devices, "use_clusters": use_clusters}
    return make_job(more={name: value for name, value in more.items() if value is not None})


def devices_of(hosts: JobHosts | None) -> list[list[str]]:
    assert hosts is not None
    return [names(cluster.devices) for cluster in hosts.clusters]


def lacking(hosts: Sequence[Host], wanted: JobConfig, *, fewer: bool = False) -> list[str]:
    """Returns what is missing, if the job cannot run without it."""
    chosen, missing = choose_hosts(hosts, wanted, fewer=fewer)
    assert chosen is None
    return [gap.text for gap in missing]


def test_job_takes_its_devices_in_registration_order_and_preferred_ones_first() -> None:
    other = device("other", cluster=1)
    hosts = [device("z"), EDGE, other, device("a"), control_unit(0), device("b")]
    chosen, missing = choose_hosts(hosts, job(devices=2))
    assert (missing, devices_of(chosen)) == ([], [["z", "a"]])
    assert chosen is not None
    assert chosen.edge_server.host_id == "edge-server"
    assert chosen.clusters[0].control_unit.host_id == "control-unit-0"
    chosen, _ = choose_hosts(hosts, job(devices=2), preferred={"b", "a"})
    assert devices_of(chosen) == [["a", "b"]]


def test_job_without_a_number_of_devices_takes_all_of_its_cluster_and_needs_one() -> None:
    hosts = [EDGE, control_unit(0), control_unit(1), device("a"), device("b", 1), device("c")]
    assert devices_of(choose_hosts(hosts, job(clusters=2))[0]) == [["a", "c"], ["b"]]
    assert lacking(hosts[:2], job()) == ["1 more device in cluster 0 (have 0)"]


def test_job_takes_the_clusters_of_the_deployment_that_it_names() -> None:
    hosts = [EDGE, control_unit(0), control_unit(3), device("a"), device("b", 3)]
    wanted = job(clusters=2, use_clusters=[3, 1])
    assert lacking(hosts, wanted) == [
        "a control unit for cluster 1",
        "1 more device in cluster 1 (have 0)",
    ]
    chosen, _ = choose_hosts([*hosts, control_unit(1), device("c", 1)], wanted)
    assert chosen is not None
    assert devices_of(chosen) == [["b"], ["c"]]
    assert [cluster.host_cluster for cluster in chosen.clusters] == [3, 1]


def test_clusters_of_the_deployment_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValidationError, match="use_clusters .* 1 .* 2 "):
        job(clusters=2, use_clusters=[0])
    with pytest.raises(ValidationError, match=r"use_clusters is \[1, 1\]"):
        job(clusters=2, use_clusters=[1, 1])
    with pytest.raises(ValidationError, match=r"use_clusters\.0\n.*\n?.*input_value=-1"):
        job(clusters=2, use_clusters=[-1, 0])


def test_job_says_everything_that_is_missing() -> None:
    hosts = [device("a"), control_unit(0), device("b", cluster=1)]
    assert lacking(hosts, job(clusters=2, devices=[3, 2])) == [
        "an edge server",
        "2 more devices in cluster 0 (have 1)",
        "a control unit for cluster 1",
        "1 more device in cluster 1 (have 1)",
    ]


def test_cluster_may_have_fewer_devices_if_the_job_goes_on() -> None:
    alive = [EDGE, control_unit(0), device("a"), device("b")]
    hosts, [gap] = choose_hosts(alive, job(devices=3), fewer=True)
    assert gap.text == "1 more device in cluster 0 (have 2)"
    assert devices_of(hosts) == [["a", "b"]]
    assert lacking(alive[:2], job(devices=3), fewer=True) == [
        "3 more devices in cluster 0 (have 0)"
    ]


_DEVICES = Gap(DEVICE_AGENT, 0, "1 more device in cluster 0 (have 1)")


class Watched:
    """A registry of the devices `a` and `b`, and what was told about them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.registry = HostRegistry(self.clock)
        self.told: list[tuple[str, str]] = []
        self.missing = MissingHosts(self.registry, self._tell)
        for host_id in ("a", "b"):
            self.register(host_id)

    def register(self, host_id: str, incarnation: str = "first") -> None:
        host = Host(host_id=host_id, role=DEVICE_AGENT, incarnation=incarnation)
        self.registry.register(host)

    def pass_time(self, *living: str) -> None:
        """Lets hosts become silent, but for the living ones."""
        self.clock.now += SILENCE_SECONDS + 1
        for host_id in living:
            self.registry.heartbeat(host_id, "first")

    def look(
        self, *lacking: str | Gap, left_out: dict[str, str] | None = None
    ) -> list[MissingHost]:
        return self.missing.look({"a"}, lacking, left_out or {})

    def _tell(self, code: IncidentCode, text: str, *host_ids: str) -> None:
        name = IncidentCode.Name(code).removeprefix("INCIDENT_CODE_")
        self.told.append((name, " ".join(host_ids)))
        assert host_ids[0] in text


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_used_host_is_lost_once_until_it_is_back(watched: Watched) -> None:
    assert watched.look() == []
    watched.pass_time()
    for _ in range(2):
        (host,) = watched.look()  # `b`, which the job has never used, is silent, too.
        assert (host.host_id, host.wanted, host.left_out) == ("a", "", "")
    (status, _) = watched.registry.statuses()
    assert abs(host.last_seen.ToMilliseconds() - status.last_seen.ToMilliseconds()) < 5000
    watched.register("a", "second")
    assert watched.look("a") == []  # The present round still goes on without it.
    assert watched.told == [("HOST_LOST", "a"), ("HOST_BACK", "a")]


def test_host_of_the_right_kind_that_has_registered_before_is_named(watched: Watched) -> None:
    (nobody,) = watched.look(_DEVICES)
    assert (nobody.host_id, nobody.wanted) == ("", _DEVICES.text)
    assert watched.told == [] and not nobody.HasField("last_seen")
    watched.pass_time("a")
    (host,) = watched.look(_DEVICES)
    assert (host.host_id, host.wanted) == ("b", _DEVICES.text)
    assert watched.look() == []  # The job needs it no more, which is not told.
    assert watched.told == [("HOST_LOST", "b")]


def test_host_that_others_blame_is_lost_then_left_out_and_then_back(watched: Watched) -> None:
    watched.clock.now += 1
    watched.registry.suspect("a", "it broke its stream")
    assert [host.left_out for host in watched.look()] == [""]
    watched.clock.now += 1
    watched.register("a")
    (host,) = watched.look("a", left_out={"a": ""})
    assert host.left_out == "it broke its stream"
    watched.clock.now += 9.5
    assert watched.look("a", left_out={"a": ""}) == []
    assert watched.told == [("HOST_LOST", "a"), ("HOST_LEFT_OUT", "a"), ("HOST_BACK", "a")]


def test_host_that_the_job_leaves_out_has_its_reason(watched: Watched) -> None:
    (host,) = watched.look("b", left_out={"b": "no plan was possible with it"})
    assert (host.host_id, host.left_out) == ("b", "no plan was possible with it")
    assert watched.told == [("HOST_LEFT_OUT", "b")]


def test_host_that_has_not_registered_since_a_restart_has_no_time(watched: Watched) -> None:
    (host,) = watched.look("c")
    assert (host.host_id, host.HasField("last_seen")) == ("c", False)
    assert watched.told == [("HOST_LOST", "c")]


def test_many_hosts_that_change_at_once_are_told_together(watched: Watched) -> None:
    names = [f"device-{number:02}" for number in range(11)]
    for name in names:
        watched.register(name)
    watched.pass_time()
    assert len(watched.missing.look(set(names), (), {})) == 11
    for name in names:
        watched.register(name, "second")
    assert watched.missing.look(set(names), (), {}) == []
    assert watched.told == [("HOST_LOST", " ".join(names)), ("HOST_BACK", " ".join(names))]


def test_host_that_is_silent_for_longest_is_forgotten_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_registry, "_MOST_HOSTS", 3)
    clock = Clock()
    registry = HostRegistry(clock)
    for number in range(5):
        clock.now += 1
        registry.register(Host(host_id=f"device-{number}", incarnation="1"))
        if number:
            registry.heartbeat("device-1", "1")
    assert {host.host_id for host in registry.heard()} == {"device-1", "device-3", "device-4"}


def test_refused_host_is_shown_until_it_registers_and_harms_no_living_one() -> None:
    registry, clock = registry_of("a")
    registry.refuse(device("a", incarnation="older"), "it is a twin", is_twin=True)
    registry.refuse(device("b"), "too old")
    (alive,), (unknown,) = registry.statuses(), registry.refused()
    assert (alive.alive, alive.refusal, alive.twin_address) == (True, "", "a:1")
    assert (unknown.host.host_id, unknown.alive, unknown.refusal) == ("b", False, "too old")
    registry.refuse(device("a", incarnation="older"), "too old")
    assert registry.statuses()[0].twin_address == ""
    clock.now += 11
    assert registry.statuses()[0].refusal == "too old"
    clock.now += 60
    assert (registry.statuses()[0].refusal, registry.refused()) == ("", [])
    for index in range(5000):
        registry.refuse(device(f"d{index}"), "too old")
    assert len(registry.refused()) == 4096
    for name in ("a", "b"):
        registry.register(device(name))
    assert [status.refusal or status.twin_address for status in registry.statuses()] == ["", ""]
    assert len(registry.statuses()) == 2
