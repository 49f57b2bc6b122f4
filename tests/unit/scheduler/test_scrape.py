"""The scheduler scrapes hosts within its limits, and believes them only about themselves."""

import math
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from planned_jobs import Clock, serving
from prometheus_client import REGISTRY

from collapipe.errors import InvalidInputError, PeerLostError, WrongStateError
from collapipe.rpc import ChannelPool
from collapipe.scheduler import scrape
from collapipe.scheduler.host_registry import DEVICE_AGENT, EDGE_SERVER
from collapipe.scheduler.scrape import ScrapeSource, read_page
from collapipe.scheduler.telemetry_window import known_hosts
from collapipe.telemetry import metrics
from collapipe.telemetry.known_hosts import KnownHosts
from collapipe.telemetry.sources import NEEDED, Series
from collapipe.telemetry.sources.samples import born_at_zero, increase
from collapipe.telemetry_service import TelemetryServicer
from collapipe.v1 import telemetry_pb2, telemetry_pb2_grpc
from collapipe.v1.scheduler_pb2 import Host

STEPS = "collapipe_stage_steps_total"
LINK_BYTES = "collapipe_link_transfer_bytes_total"
LIMIT_SECONDS = 60.0

Answer = Callable[[], telemetry_pb2.GetMetricsResponse]


def sample(name: str, value: float, **labels: str) -> telemetry_pb2.MetricSample:
    return telemetry_pb2.MetricSample(name=name, labels=labels, value=value)


def page(steps: float, seconds: float = 0.0) -> telemetry_pb2.GetMetricsResponse:
    samples = [sample(STEPS, steps, cluster="0", stage="1", foreign="x"), sample("other_total", 3)]
    return telemetry_pb2.GetMetricsResponse(samples=samples, seconds=seconds)


class Simulation:
    """A source that scrapes simulated hosts on a simulated clock. The id of a host is its address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, channels: ChannelPool) -> None:
        self.clock, self.set_by = Clock(), 0.0
        self.hosts: dict[str, Answer] = {}
        self.asked: list[str] = []
        self._end, self._is_closed = 0.0, False
        event = SimpleNamespace(wait=self._wait, is_set=lambda: self._is_closed, set=self._close)
        thread = SimpleNamespace(
            start=lambda: None, join=lambda: None, is_alive=lambda: not self._is_closed
        )
        pages = SimpleNamespace(
            submit=lambda work, *arguments: work(*arguments), shutdown=lambda **_: None
        )
        threads = SimpleNamespace(
            Lock=threading.Lock, Event=lambda: event, Thread=lambda **_: thread
        )
        monkeypatch.setattr(
            scrape,
            "time",
            SimpleNamespace(time=lambda: self.clock() + self.set_by, monotonic=self.clock),
        )
        monkeypatch.setattr(scrape, "threading", threads)
        monkeypatch.setattr(scrape, "ThreadPoolExecutor", lambda *_: pages)
        monkeypatch.setattr(scrape, "call", self._call)
        self.named: list[Host] = []
        """Hosts that are registered and not scraped."""
        self.source = ScrapeSource(self._present, self._known, channels)

    def run(self, seconds: float) -> None:
        self._end = self.clock.now + seconds
        self.source._scrape_until_closed()

    def series(self) -> Sequence[Series]:
        return self.source.window(0.0, self.clock.now)

    def values(self, address: str) -> list[float]:
        return [v for one in self.series() if one.instance == address for _, v in one.points]

    def _present(self) -> list[Host]:
        return [Host(host_id=address, address=address) for address in self.hosts]

    def _known(self) -> KnownHosts:
        return known_hosts([*self.named, *self._present()], ScrapeSource.instance_field)

    def _call(self, method: Any, request: Any, host_id: str, limit_seconds: float) -> Any:
        assert (list(request.names), limit_seconds) == (list(NEEDED), 10.0)
        self.asked.append(host_id)
        return self.hosts[host_id]()

    def _wait(self, seconds: float) -> bool:
        self.clock.now += max(seconds, 0.0)
        return self.clock.now >= self._end

    def _close(self) -> None:
        self._is_closed = True


@pytest.fixture
def simulation(monkeypatch: pytest.MonkeyPatch, channels: ChannelPool) -> Simulation:
    return Simulation(monkeypatch, channels)


def test_samples_are_kept_in_order_with_the_labels_of_services(simulation: Simulation) -> None:
    simulation.hosts["a"] = lambda: page(len(simulation.asked))
    simulation.run(3.5)
    (found,) = simulation.series()
    assert (found.instance, found.name) == ("a", STEPS)
    assert found.labels == (("cluster", "0"), ("stage", "1"))
    assert found.points == ((1000.0, 1.0), (1001.0, 2.0), (1002.0, 3.0), (1003.0, 4.0))
    # A window includes both of its ends.
    assert simulation.source.window(1001.0, 1002.0)[0].points == found.points[1:3]
    assert simulation.source.window(998.0, 999.0) == []


@pytest.mark.parametrize("hours", [-3, 3])
def test_clock_that_is_set_changes_no_time_between_samples(
    simulation: Simulation, hours: int
) -> None:
    simulation.hosts["a"] = lambda: page(len(simulation.asked))
    simulation.run(2.5)
    simulation.set_by = 3600.0 * hours
    simulation.run(2.5)
    (found,) = simulation.source.window(0.0, simulation.source.now())
    times = [at for at, _ in found.points]
    assert len(times) == 6
    assert max(later - before for before, later in pairwise(times)) <= 1.5


def test_real_hosts_that_hang_or_do_not_run_do_not_hold_up_others(channels: ChannelPool) -> None:
    asked, done = threading.Semaphore(0), threading.Event()

    class Asked(TelemetryServicer):
        def GetMetrics(
            self, request: telemetry_pb2.GetMetricsRequest, context: grpc.ServicerContext
        ) -> telemetry_pb2.GetMetricsResponse:
            asked.release()
            return super().GetMetrics(request, context)

    class Hangs(telemetry_pb2_grpc.TelemetryServiceServicer):
        def GetMetrics(self, request: Any, context: Any) -> telemetry_pb2.GetMetricsResponse:
            done.wait(LIMIT_SECONDS)
            return page(1)

    metrics.STAGE_STEPS.labels("70", "1").inc(3)
    add = telemetry_pb2_grpc.add_TelemetryServiceServicer_to_server
    with serving(Hangs(), add) as slow, serving(Asked(), add) as address:
        listed = [slow, "127.0.0.1:1", "no address", address]
        hosts = [Host(host_id=each, address=each, cluster_index=70) for each in listed]
        known = known_hosts(hosts, ScrapeSource.instance_field)
        source = ScrapeSource(lambda: hosts, lambda: known, channels, 0.01)
        try:
            for _ in range(2):  # The first page is there when the host is asked for the second.
                assert asked.acquire(timeout=LIMIT_SECONDS)
            found = source.window(0.0, math.inf)
        finally:
            done.set()
            source.close()
    assert {one.instance for one in found} == {address}
    assert {one.name for one in found} <= set(NEEDED)
    (steps,) = [one for one in found if ("cluster", "70") in one.labels]
    assert (steps.name, steps.points[0][1]) == (STEPS, 3)
    assert "collapipe_process_peak_resident_memory_bytes" in {one.name for one in found}
    with pytest.raises(PeerLostError):
        source.window(0.0, math.inf)
    source.close()  # closing twice is allowed


@pytest.mark.parametrize(("own_seconds", "num_pages"), [(0.0, 4), (2.0, 8), (math.nan, 8)], ids=str)
def test_host_behind_a_slow_link_is_scraped_less_often(
    simulation: Simulation, own_seconds: float, num_pages: int
) -> None:
    def answer() -> telemetry_pb2.GetMetricsResponse:
        simulation.clock.now += 2.0
        return page(1, own_seconds)

    simulation.hosts = {"slow": answer, "a": lambda: page(1)}
    simulation.run(30.0)
    # The pause after three pages is 18 s.
    assert (simulation.asked.count("slow") == 4) == (num_pages == 4)
    assert simulation.asked.count("slow") >= num_pages
    assert simulation.asked.count("a") >= 10
    assert simulation.source.max_gap_seconds > 30


def test_failed_pages_leave_a_gap(simulation: Simulation, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "collapipe.scheduler.scrape")

    def answer() -> telemetry_pb2.GetMetricsResponse:
        if len(simulation.asked) in (2, 3):
            raise WrongStateError("not now")
        return page(len(simulation.asked))

    simulation.hosts["host-a"] = answer
    simulation.run(4.5)
    assert simulation.values("host-a") == [1, 4, 5]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert all("host-a" in record.message for record in caplog.records)
    assert "not now" in caplog.records[0].message


def test_unexpected_error_affects_no_other_host_and_is_logged_once(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    def answer() -> telemetry_pb2.GetMetricsResponse:
        raise AttributeError("no such thing")

    simulation.hosts = {"odd": answer, "a": lambda: page(1)}
    simulation.run(5.0)
    assert simulation.asked.count("odd") > 2 and simulation.values("odd") == []
    assert len(simulation.values("a")) > 2
    (logged,) = caplog.records
    assert "odd" in logged.message and "AttributeError: no such thing" in logged.message
    assert logged.exc_info is not None


def test_hosts_come_and_go_and_their_samples_are_forgotten(simulation: Simulation) -> None:
    simulation.run(2.0)
    assert simulation.series() == []
    simulation.hosts["a"] = lambda: page(1)
    simulation.run(400.0)
    assert 290 <= len(simulation.values("a")) <= 301
    simulation.hosts.clear()
    simulation.run(302.0)
    assert simulation.series() == []


def test_many_hosts_are_scraped_at_a_limited_rate(simulation: Simulation) -> None:
    simulation.hosts = {f"device-{number}": lambda: page(1) for number in range(60)}
    simulation.run(30.0)
    assert 500 < len(simulation.asked) <= 601
    assert simulation.source.pass_seconds == 3.0
    assert simulation.source.max_gap_seconds == 43.0


def test_interval_with_fewer_than_two_kept_scrapes_is_refused(channels: ChannelPool) -> None:
    with pytest.raises(InvalidInputError, match="5 s .* 9 s"):
        ScrapeSource(lambda: (), lambda: KnownHosts([]), channels, 5, keep_seconds=9)


@pytest.mark.parametrize(("num_samples", "length"), [(5001, 1), (1, 1 << 20)])
def test_page_that_is_too_large_is_refused(num_samples: int, length: int) -> None:
    samples = [sample(STEPS, 1, stage="x" * length)] * num_samples
    with pytest.raises(InvalidInputError, match=f"greedy sent {num_samples} "):
        answer = telemetry_pb2.GetMetricsResponse(samples=samples)
        read_page(answer, "greedy", "greedy:1", KnownHosts([]))


def read_labels(role: Any, **labels: str) -> bool:
    """Returns whether a sample of a host "me" in cluster 3 is read with these labels."""
    me = Host(host_id="me", address="me:1", role=role, cluster_index=3)
    others = [Host(host_id=each, address=f"{each}:1", cluster_index=4) for each in ("b", "c")]
    known = known_hosts([me, *others], ScrapeSource.instance_field)
    answer = telemetry_pb2.GetMetricsResponse(samples=[sample(LINK_BYTES, 1, **labels)])
    page, dropped = read_page(answer, "me", "me:1", known)
    assert len(page) + len(dropped) == 1
    return bool(page)


def test_host_speaks_about_its_links_to_known_hosts_only() -> None:
    links = [
        "b>me",
        "me>b",
        "me>scheduler",
        "b>c",
        "me",
        "me>",
        "",
        ">",
        "mean>b",
        "b>me>c",
        "me>d",
    ]
    read = [link for link in links if read_labels(DEVICE_AGENT, link=link, codec="fp32")]
    assert read == ["b>me", "me>b", "me>scheduler"]


@pytest.mark.parametrize(
    ("labels", "roles"),
    [
        ({"cluster": "3", "stage": "3"}, [DEVICE_AGENT]),
        ({"cluster": "4", "stage": "0"}, [EDGE_SERVER]),
        ({"cluster": "5", "stage": "0"}, []),
        ({"cluster": "3", "stage": "4"}, []),
        ({"cluster": "3", "stage": "x" * 1000}, []),
        ({"codec": "int4"}, [DEVICE_AGENT, EDGE_SERVER]),
        ({"codec": "int5"}, []),
        ({"sensor": "rapl"}, [DEVICE_AGENT, EDGE_SERVER]),
        ({"sensor": "model"}, [DEVICE_AGENT, EDGE_SERVER]),
        ({"sensor": "made up"}, []),
    ],
    ids=str,
)
def test_labels_are_clusters_stages_codecs_and_sensors_that_there_are(
    labels: dict[str, str], roles: list[Any]
) -> None:
    assert [each for each in (DEVICE_AGENT, EDGE_SERVER) if read_labels(each, **labels)] == roles


def dropped_samples() -> float:
    return (
        REGISTRY.get_sample_value("collapipe_telemetry_dropped_samples_total", {"source": "scrape"})
        or 0.0
    )


def test_labels_that_change_with_every_page_are_dropped_and_counted_and_told_once(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    """They would fill the memory."""

    def answer() -> telemetry_pb2.GetMetricsResponse:
        links = [f"a>{len(simulation.asked)}{number}{'x' * 1000}" for number in range(100)]
        samples = [sample(LINK_BYTES, 1, link=link, codec="fp32") for link in [*links, "a>b"]]
        return telemetry_pb2.GetMetricsResponse(samples=samples)

    before = dropped_samples()
    simulation.hosts["a"] = answer
    simulation.named = [Host(host_id="b", address="b")]
    simulation.run(50.0)
    assert [dict(one.labels)["link"] for one in simulation.series()] == ["a>b"]
    assert dropped_samples() - before == 100 * len(simulation.asked) >= 5000
    (logged,) = caplog.records
    assert logged.levelname == "WARNING" and "100 samples of a " in logged.getMessage()
    assert len(logged.getMessage()) < 1000


def test_counter_that_was_left_out_before_has_not_grown_from_zero(simulation: Simulation) -> None:
    """The link leads to a host that registers later, for example after a restart of the scheduler."""

    def answer() -> telemetry_pb2.GetMetricsResponse:
        known = [sample(LINK_BYTES, 1, link="a>scheduler", codec="fp32")]
        left_out = [sample(LINK_BYTES, 1e9 + len(simulation.asked), link="a>b", codec="fp32")]
        new = [sample(LINK_BYTES, 7, link="a>scheduler", codec="int8")]
        return telemetry_pb2.GetMetricsResponse(
            samples=[*known, *left_out, *new * (len(simulation.asked) > 6)]
        )

    simulation.hosts["a"] = answer
    simulation.run(2.5)
    simulation.named = [Host(host_id="b", address="b")]
    simulation.run(6.0)
    grown = {one.labels: increase(one) for one in born_at_zero(simulation.series())}
    assert [(dict(labels)["link"], value) for labels, value in sorted(grown.items())] == [
        ("a>b", 5.0),
        ("a>scheduler", 0.0),
        ("a>scheduler", 7.0),
    ]


def test_host_with_too_many_samples_gets_a_gap(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scrape, "_MAX_KEPT_SAMPLES", 100)
    samples = [sample(STEPS, 1, cluster="0", stage=stage) for stage in "012345678"]
    simulation.hosts = {
        "a": lambda: telemetry_pb2.GetMetricsResponse(samples=samples),
        "b": lambda: page(1),
    }
    simulation.named = [Host(host_id=f"device-{number}") for number in range(9)]
    simulation.run(200.0)
    assert len(simulation.values("a")) == 99
    assert len(simulation.values("b")) == 100
    assert {"a has 99 samples" in one.message for one in caplog.records} == {True, False}
    # When its old samples are forgotten, there is room for others.
    simulation.run(160.0)
    assert len(simulation.values("a")) == 99
    assert simulation.source.window(250.0 + 1000, simulation.clock.now)


def test_host_that_moves_from_port_to_port_fills_no_memory(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each page has as many samples as are possible, and the next one comes from another port."""

    def full_page() -> telemetry_pb2.GetMetricsResponse:
        labels = (f"one>n{number}" for number in range(5000))
        return telemetry_pb2.GetMetricsResponse(
            samples=[sample(LINK_BYTES, 1.0, link=link) for link in labels]
        )

    simulation.hosts = {"one": full_page, "two": lambda: page(3)}

    def present() -> list[Host]:
        moving = Host(host_id="one", address=f"one:{int(simulation.clock.now)}")
        return [moving, Host(host_id="two", address="two")]

    simulation.named = [Host(host_id=f"n{number}") for number in range(5000)]
    monkeypatch.setattr(simulation, "_present", present)
    monkeypatch.setattr(simulation.source, "_hosts", present)
    simulation.run(5.0)
    found = simulation.series()
    assert sum(one.instance.startswith("one:") for one in found) == 5000
    assert simulation.values("two")
    # When the old samples are gone, there is room for new ones.
    simulation.clock.now += 300.0
    simulation.run(3.0)
    assert sum(one.instance.startswith("one:") for one in simulation.series()) == 5000
    assert len(simulation.source._owners) < 10
