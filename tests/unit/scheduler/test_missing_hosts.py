"""Which hosts count as missing, and what is told about them."""

from collapipe.scheduler.host_registry import DEVICE_AGENT, SILENCE_SECONDS, Gap, HostRegistry
from collapipe.scheduler.missing_hosts import MissingHosts
from collapipe.v1.scheduler_pb2 import Host, IncidentCode, MissingHost

from .jobs import Clock

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


def test_used_host_is_lost_once_until_it_is_back() -> None:
    watched = Watched()
    assert watched.look() == []
    watched.pass_time()
    for _ in range(2):
        (host,) = watched.look()  # `b`, which the job has never used, is silent, too.
        assert (host.host_id, host.wanted, host.left_out) == ("a", "", "")
    (status, _) = watched.registry.statuses()
    assert abs(host.last_seen.ToMilliseconds() - status.last_seen.ToMilliseconds()) < 1000
    watched.register("a", "second")
    assert watched.look("a") == []  # The present round still goes on without it.
    assert watched.told == [("HOST_LOST", "a"), ("HOST_BACK", "a")]


def test_host_of_the_right_kind_that_has_registered_before_is_named() -> None:
    watched = Watched()
    (nobody,) = watched.look(_DEVICES)
    assert (nobody.host_id, nobody.wanted, nobody.HasField("last_seen")) == (
        "",
        _DEVICES.text,
        False,
    )
    assert watched.told == []
    watched.pass_time("a")
    (host,) = watched.look(_DEVICES)
    assert (host.host_id, host.wanted) == ("b", _DEVICES.text)
    assert watched.told == [("HOST_LOST", "b")]


def test_host_that_others_blame_is_lost_then_left_out_and_then_back() -> None:
    watched = Watched()
    watched.clock.now += 1
    watched.registry.suspect("a", "it broke its stream")
    assert [host.left_out for host in watched.look()] == [""]
    watched.clock.now += 1
    watched.registry.heartbeat("a", "first")
    (host,) = watched.look("a", left_out={"a": ""})
    assert host.left_out == "it broke its stream"
    watched.clock.now += 9.5
    assert watched.look("a", left_out={"a": ""}) == []
    assert watched.told == [("HOST_LOST", "a"), ("HOST_LEFT_OUT", "a"), ("HOST_BACK", "a")]


def test_host_that_the_job_leaves_out_has_its_reason() -> None:
    watched = Watched()
    (host,) = watched.look("b", left_out={"b": "no plan was possible with it"})
    assert (host.host_id, host.left_out) == ("b", "no plan was possible with it")
    assert watched.told == [("HOST_LEFT_OUT", "b")]


def test_host_that_has_not_registered_again_after_a_restart_of_the_scheduler_has_no_time() -> None:
    watched = Watched()
    (host,) = watched.look("c")
    assert (host.host_id, host.HasField("last_seen")) == ("c", False)
    assert watched.told == [("HOST_LOST", "c")]


def test_lost_host_that_the_job_needs_no_more_is_not_told_as_back() -> None:
    watched = Watched()
    watched.pass_time("a")
    watched.look(_DEVICES)
    assert watched.look() == []
    assert watched.told == [("HOST_LOST", "b")]


def test_many_hosts_that_change_at_once_are_told_together() -> None:
    watched = Watched()
    names = [f"device-{number:02}" for number in range(11)]
    for name in names:
        watched.register(name)
    watched.pass_time()
    assert len(watched.missing.look(set(names), (), {})) == 11
    for name in names:
        watched.register(name, "second")
    assert watched.missing.look(set(names), (), {}) == []
    assert watched.told == [("HOST_LOST", " ".join(names)), ("HOST_BACK", " ".join(names))]
