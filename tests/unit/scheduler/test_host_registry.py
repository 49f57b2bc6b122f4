import time

import pytest
from prometheus_client import REGISTRY
from pydantic import ValidationError

from collapipe.errors import NotFoundError, WrongStateError
from collapipe.job import DataConfig, JobConfig, TaskConfig
from collapipe.scheduler.host_registry import (
    CONTROL_UNIT,
    DEVICE_AGENT,
    EDGE_SERVER,
    SILENCE_SECONDS,
    Gap,
    HostRegistry,
    choose_hosts,
)
from collapipe.v1.scheduler_pb2 import Host

from .jobs import Clock


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


def names(hosts: list[Host]) -> list[str]:
    return [host.host_id for host in hosts]


def texts(gaps: list[Gap]) -> list[str]:
    return [gap.text for gap in gaps]


def make_job(clusters: int = 1, devices: int | list[int] | None = None) -> JobConfig:
    return JobConfig(
        clusters=clusters,
        devices_per_cluster=devices,
        task=TaskConfig(kind="classification"),
        data=DataConfig(source="stdlib_docstrings"),
    )


# --- registration and heartbeats


def test_host_is_alive_until_it_is_silent_for_longer_than_allowed() -> None:
    registry, clock = registry_of("a")
    clock.now += SILENCE_SECONDS
    assert names(registry.alive()) == ["a"]
    assert [status.alive for status in registry.statuses()] == [True]
    clock.now += 0.1
    assert registry.alive() == []
    assert [status.alive for status in registry.statuses()] == [False]


def test_heartbeat_keeps_only_its_own_host_alive() -> None:
    registry, clock = registry_of("a", "b")
    clock.now += 8
    registry.heartbeat("b", "first")
    clock.now += 4
    assert names(registry.alive()) == ["b"]


@pytest.mark.parametrize("name", ["a", "a:1"])
def test_suspect_is_dead_until_its_next_heartbeat(name: str) -> None:
    clock = Clock()
    registry = HostRegistry(clock)
    registry.register(device("a"))
    clock.now += 1
    registry.suspect(name, "it broke its stream")
    assert registry.alive() == []
    clock.now += 0.1
    registry.heartbeat("a", "first")
    assert names(registry.alive()) == ["a"]


def test_suspect_that_registers_again_is_alive_at_once() -> None:
    registry, _clock = registry_of("a")
    for _ in range(5):
        registry.suspect("a", "it broke its stream")
    registry.register(device("a", incarnation="second"))
    assert names(registry.alive()) == ["a"]


def test_host_that_only_others_cannot_reach_is_left_out_for_longer_each_time() -> None:
    registry, clock = registry_of("a")
    left_out = []
    for _ in range(5):
        registry.suspect("a", "it broke its stream")
        start = clock.now
        while not registry.alive(suspects=False):
            clock.now += 0.5
            registry.heartbeat("a", "first")
            assert names(registry.alive(suspects=True)) == ["a"]
        left_out.append(clock.now - start)
    assert left_out == [10.5, 20.5, 40.5, 60.5, 60.5]


def test_status_of_a_suspect_has_the_reason_until_the_suspicion_ends() -> None:
    registry, clock = registry_of("a", "b")
    registry.suspect("a", "it broke its stream")
    suspect, other = registry.statuses()
    assert suspect.suspicion == "it broke its stream"
    left = suspect.suspected_until.ToMilliseconds() / 1000 - time.time()
    assert 0 < left <= 10
    assert (other.suspicion, other.HasField("suspected_until")) == ("", False)
    clock.now += 10.5
    assert registry.statuses()[0].suspicion == ""


def test_unknown_name_makes_nobody_a_suspect() -> None:
    registry, _ = registry_of("a")
    registry.suspect("", "it broke its stream")
    registry.suspect("somebody", "it broke its stream")
    assert names(registry.alive()) == ["a"]


def test_heartbeat_of_an_unknown_host_asks_it_to_register_again() -> None:
    registry, _ = registry_of("a")
    with pytest.raises(NotFoundError, match=r"'ghost' is not registered: register it again"):
        registry.heartbeat("ghost", "first")


def test_heartbeat_of_a_replaced_incarnation_is_refused_and_changes_nothing() -> None:
    registry, clock = registry_of("a")
    registry.register(device("a", incarnation="second"))
    clock.now += 20
    with pytest.raises(WrongStateError, match=r"another process has registered .*'a'.*--host-id"):
        registry.heartbeat("a", "first")
    assert registry.alive() == []
    registry.heartbeat("a", "second")
    assert names(registry.alive()) == ["a"]


def test_host_that_comes_back_after_a_restart_keeps_its_place() -> None:
    registry, clock = registry_of("a", "b")
    clock.now += 30
    registry.register(device("a", incarnation="second"))
    registry.heartbeat("b", "first")
    hosts = registry.alive()
    assert [(host.host_id, host.incarnation) for host in hosts] == [("a", "second"), ("b", "first")]


# --- the hosts of a job


def test_job_takes_its_devices_in_registration_order() -> None:
    hosts = [
        device("z"),
        EDGE,
        device("other", cluster=1),
        device("a"),
        control_unit(0),
        device("b"),
    ]
    chosen, missing = choose_hosts(hosts, make_job(devices=2))
    assert missing == []
    assert chosen is not None
    assert chosen.edge_server.host_id == "edge-server"
    assert names(list(chosen.clusters[0].devices)) == ["z", "a"]
    assert chosen.clusters[0].control_unit.host_id == "control-unit-0"


def test_job_without_a_number_of_devices_takes_all_of_its_cluster() -> None:
    hosts = [EDGE, control_unit(0), control_unit(1), device("a"), device("b", 1), device("c")]
    chosen, _ = choose_hosts(hosts, make_job(clusters=2))
    assert chosen is not None
    assert [names(list(cluster.devices)) for cluster in chosen.clusters] == [["a", "c"], ["b"]]


def test_job_takes_the_clusters_of_the_deployment_that_it_names() -> None:
    hosts = [EDGE, control_unit(0), control_unit(3), device("a"), device("b", 3)]
    job = make_job(clusters=2).model_copy(update={"use_clusters": [3, 1]})
    chosen, missing = choose_hosts(hosts, job)
    assert chosen is None
    assert texts(missing) == [
        "a control unit for cluster 1",
        "1 more device in cluster 1 (have 0)",
    ]
    chosen, _ = choose_hosts([*hosts, control_unit(1), device("c", 1)], job)
    assert chosen is not None
    assert [names(list(cluster.devices)) for cluster in chosen.clusters] == [["b"], ["c"]]
    assert [cluster.host_cluster for cluster in chosen.clusters] == [3, 1]


@pytest.mark.parametrize(
    ("use_clusters", "error"),
    [
        ([0], "use_clusters lists 1 numbers for 2 clusters: give one for each cluster"),
        ([1, 1], r"use_clusters is \[1, 1\]: use different numbers from 0 on"),
        ([-1, 0], r"use_clusters is \[-1, 0\]: use different numbers from 0 on"),
    ],
)
def test_clusters_of_the_deployment_that_make_no_sense_are_refused(
    use_clusters: list[int], error: str
) -> None:
    with pytest.raises(ValidationError, match=error):
        JobConfig(task=TaskConfig(kind="ner"), clusters=2, use_clusters=use_clusters)


def test_host_that_a_job_has_blamed_is_still_heard() -> None:
    clock = Clock()
    registry = HostRegistry(clock)
    registry.register(EDGE)
    registry.suspect("edge-server", "job a lost it")
    assert registry.alive() == []
    assert names(registry.heard()) == ["edge-server"]
    clock.now += SILENCE_SECONDS + 1
    assert registry.heard() == []


def test_job_says_everything_that_is_missing() -> None:
    chosen, missing = choose_hosts(
        [device("a"), control_unit(0), device("b", cluster=1)], make_job(clusters=2, devices=[3, 2])
    )
    assert chosen is None
    assert texts(missing) == [
        "an edge server",
        "2 more devices in cluster 0 (have 1)",
        "a control unit for cluster 1",
        "1 more device in cluster 1 (have 1)",
    ]


def test_job_without_a_number_of_devices_needs_at_least_one() -> None:
    chosen, missing = choose_hosts([EDGE, control_unit(0)], make_job())
    assert (chosen, texts(missing)) == (None, ["1 more device in cluster 0 (have 0)"])


def test_cluster_may_have_fewer_devices_if_the_job_goes_on() -> None:
    alive = [EDGE, control_unit(0), device("a"), device("b")]
    hosts, missing = choose_hosts(alive, make_job(devices=3), fewer=True)
    assert texts(missing) == ["1 more device in cluster 0 (have 2)"]
    assert hosts is not None
    assert names(hosts.devices) == ["a", "b"]
    hosts, missing = choose_hosts(alive[:2], make_job(devices=3), fewer=True)
    assert hosts is None
    assert texts(missing) == ["3 more devices in cluster 0 (have 0)"]


def test_preferred_devices_take_part_before_others_in_registration_order() -> None:
    alive = [EDGE, control_unit(0), device("a"), device("b"), device("c")]
    hosts, _ = choose_hosts(alive, make_job(devices=2), preferred={"c", "b"})
    assert hosts is not None
    assert names(hosts.devices) == ["b", "c"]


def test_exported_count_of_hosts_falls_without_a_further_heartbeat() -> None:
    def exported() -> float | None:
        return REGISTRY.get_sample_value("collapipe_hosts", {"role": "device_agent"})

    _registry, clock = registry_of("a", "b")
    assert exported() == 2
    clock.now += SILENCE_SECONDS + 0.1
    assert exported() == 0


@pytest.mark.parametrize(("num_hosts", "seconds"), [(1, 2.0), (400, 2.0), (600, 3.0), (2000, 3.5)])
def test_many_hosts_send_heartbeats_less_often(num_hosts: int, seconds: float) -> None:
    registry, _clock = registry_of(*map(str, range(num_hosts)))
    assert registry.heartbeat_seconds == seconds
