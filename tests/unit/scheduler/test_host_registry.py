import pytest

from collapipe.errors import NotFoundError, WrongStateError
from collapipe.job import DataConfig, JobConfig, TaskConfig
from collapipe.scheduler.host_registry import (
    CONTROL_UNIT,
    DEVICE_AGENT,
    EDGE_SERVER,
    Registry,
    alive,
    choose_hosts,
    heartbeat,
    register,
)
from collapipe.v1.scheduler_pb2 import Host

SILENCE = 10.0


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


def registry_of(*hosts: Host, now: float = 0.0) -> Registry:
    registry: Registry = {}
    for host in hosts:
        registry = register(registry, host, now)
    return registry


def names(hosts: list[Host]) -> list[str]:
    return [host.host_id for host in hosts]


def make_job(clusters: int = 1, devices: int | list[int] | None = None) -> JobConfig:
    return JobConfig(
        clusters=clusters,
        devices_per_cluster=devices,
        task=TaskConfig(kind="classification"),
        data=DataConfig(source="stdlib_docstrings"),
    )


# --- who is known, and who is alive


def test_host_is_alive_until_it_is_silent_for_longer_than_allowed() -> None:
    registry = registry_of(device("a"), now=100.0)
    assert names(alive(registry, 110.0, SILENCE)) == ["a"]
    assert alive(registry, 110.1, SILENCE) == []


def test_heartbeat_keeps_only_its_own_host_alive() -> None:
    registry = heartbeat(registry_of(device("a"), device("b")), "b", "first", 8.0)
    assert names(alive(registry, 12.0, SILENCE)) == ["b"]


def test_heartbeat_of_an_unknown_host_asks_it_to_register_again() -> None:
    with pytest.raises(NotFoundError, match=r"'ghost' is not registered: register it again"):
        heartbeat(registry_of(device("a")), "ghost", "first", 1.0)


def test_heartbeat_of_a_replaced_incarnation_is_refused_and_changes_nothing() -> None:
    registry = register(registry_of(device("a")), device("a", incarnation="second"), 1.0)
    with pytest.raises(WrongStateError, match=r"'a' was registered by another process.*--host-id"):
        heartbeat(registry, "a", "first", 20.0)
    assert alive(registry, 20.0, SILENCE) == []
    assert names(alive(heartbeat(registry, "a", "second", 20.0), 20.0, SILENCE)) == ["a"]


def test_host_that_comes_back_after_a_restart_keeps_its_place() -> None:
    registry = registry_of(device("a"), device("b"))
    registry = register(registry, device("a", incarnation="second"), 30.0)
    registry = heartbeat(registry, "b", "first", 30.0)
    hosts = alive(registry, 30.0, SILENCE)
    assert [(host.host_id, host.incarnation) for host in hosts] == [("a", "second"), ("b", "first")]


def test_registering_leaves_the_registry_it_was_given_as_it_was() -> None:
    before = registry_of(device("a"))
    register(before, device("b"), 1.0)
    heartbeat(before, "a", "first", 5.0)
    assert {name: known.last_seen for name, known in before.items()} == {"a": 0.0}


# --- who takes part in a job


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


def test_job_says_everything_that_is_missing() -> None:
    chosen, missing = choose_hosts(
        [device("a"), control_unit(0), device("b", cluster=1)], make_job(clusters=2, devices=[3, 2])
    )
    assert chosen is None
    assert missing == [
        "an edge server",
        "2 more devices in cluster 0 (have 1)",
        "a control unit for cluster 1",
        "1 more device in cluster 1 (have 1)",
    ]


def test_job_without_a_number_of_devices_needs_at_least_one() -> None:
    chosen, missing = choose_hosts([EDGE, control_unit(0)], make_job())
    assert (chosen, missing) == (None, ["1 more device in cluster 0 (have 0)"])
