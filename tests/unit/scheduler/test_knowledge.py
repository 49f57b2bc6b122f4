"""What the scheduler knows of hosts and links, from rounds, profiles and probes."""

import math
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import grpc
import pytest
from planned_jobs import hosts, job, serving

from collapipe.allocation import ClusterPlan, LinkPlan, StagePlan
from collapipe.errors import CancelledError, InvalidInputError, PeerLostError
from collapipe.planning.knowledge import HostKnowledge, Knowledge, LinkKnowledge
from collapipe.planning.round_problem import link_pairs
from collapipe.rpc import ChannelPool
from collapipe.scheduler import profiling
from collapipe.scheduler.host_calls import HostCalls
from collapipe.telemetry.estimates import ClusterEstimate, Estimates, HostEstimate, LinkEstimate
from collapipe.v1 import link_pb2_grpc
from collapipe.v1.link_pb2 import MeasureLinkRequest, MeasureLinkResponse
from collapipe.v1.plan_pb2 import ModelSpec
from collapipe.v1.profile_pb2 import ProfileBlockResponse

UNREACHABLE = "device-1"


class Probed:
    """Answers probes, and records which met a busy host. The first two can end only together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy: list[str] = []
        self._num_begun = 0
        self._together = threading.Barrier(2)
        self.clashes: list[set[str]] = []

    def call(self, method: Any, request: MeasureLinkRequest, sender: str, limit: float) -> Any:
        with self._taking_part({sender, request.host_id}) as number:
            if number <= 2:
                self._together.wait(60)
        if sender == UNREACHABLE:
            raise InvalidInputError("this host cannot send")
        return MeasureLinkResponse(goodput_bps=1e6, round_trip_seconds=0.01)

    @contextmanager
    def _taking_part(self, ends: set[str]) -> Iterator[int]:
        with self._lock:
            if ends & set(self._busy):
                self.clashes.append(ends)
            self._busy += ends
            self._num_begun += 1
            number = self._num_begun
        yield number
        with self._lock:
            for end in ends:
                self._busy.remove(end)


def test_every_link_is_probed_while_no_host_takes_part_in_two_probes_at_a_time(
    channels: ChannelPool,
) -> None:
    probed, of = Probed(), hosts(num_devices=4)
    found = profiling.probe_links(of, channels, probed.call)
    pairs = link_pairs(of.clusters[0], of.edge_server)
    assert found.keys() == {f"{sender}>{receiver}" for sender, receiver in pairs}
    assert probed.clashes == []
    for name, link in found.items():
        assert link.capacity_bps == (0.0 if name.startswith(f"{UNREACHABLE}>") else 1e6)


@pytest.mark.parametrize(
    "answer",
    [
        MeasureLinkResponse(goodput_bps=math.nan),
        MeasureLinkResponse(goodput_bps=math.inf),
        MeasureLinkResponse(goodput_bps=-1.0),
        MeasureLinkResponse(goodput_bps=1e300),
        MeasureLinkResponse(goodput_bps=1e6, round_trip_seconds=math.nan),
    ],
)
def test_link_with_an_impossible_rate_is_not_used(
    channels: ChannelPool, answer: MeasureLinkResponse
) -> None:
    found = profiling.probe_links(hosts(), channels, lambda *_: answer)
    assert {link.capacity_bps for link in found.values()} == {0.0}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (ProfileBlockResponse(seconds_per_sample=math.inf), "inf as seconds_per_sample"),
        (ProfileBlockResponse(seconds_per_sample=1e300), "1e.300 as seconds_per_sample"),
        (ProfileBlockResponse(seconds_per_micro_batch=-1.0), "-1.0 as seconds_per_micro_batch"),
        (ProfileBlockResponse(state_bytes=1 << 63), "as state_bytes"),
        (ProfileBlockResponse(work_shares=[math.nan]), "nan as work_shares"),
        (ProfileBlockResponse(stash_shares=[1.0] * 100_000), "100000 shares"),
    ],
)
def test_host_with_an_impossible_profile_is_named(
    channels: ChannelPool, answer: ProfileBlockResponse, words: str
) -> None:
    config = job(more={"schedule": {"strategy": "proportional"}})
    with pytest.raises(PeerLostError, match=f"device-0 sent .*{words}") as raised:
        profiling.profile_hosts(config, ModelSpec(), hosts(), channels, lambda *_: answer)
    assert raised.value.host_id == "device-0"


LINK = "device-0>device-1"
Source = Literal["guess", "profile", "rounds"]


def learn(known: Knowledge, share: float = math.inf, **estimates: object) -> Knowledge:
    known.update(Estimates(end=0.0, **estimates), [], {LINK: share})  # type: ignore[arg-type]
    return known


def seen(seconds: float, micro_batches: float = 20) -> dict[str, HostEstimate]:
    return {"device-0": HostEstimate(seconds_per_sample=seconds, micro_batches=micro_batches)}


def carried(bps: float, num_bytes: float = 1e6, **more: float) -> dict[str, LinkEstimate]:
    return {LINK: LinkEstimate(goodput_bps=bps, transfer_bytes=num_bytes, **more)}


def device(seconds: float, source: Source = "profile", profile: float = 0.0) -> Knowledge:
    """Knows the time of a block on a device, and the time in its last profile."""
    host = HostKnowledge(
        seconds_per_sample=seconds, source=source, profiled_seconds_per_sample=profile
    )
    return Knowledge(hosts={"device-0": host})


def link(**known: float) -> Knowledge:
    return Knowledge(links={LINK: LinkKnowledge(**known)})


def push(known: Knowledge, *seconds: float) -> None:
    """Each device pushes 8 Mbit. `seconds` are the times from the common start to each end."""
    known.update_weights_rates(
        {f"device-{k}>edge-server": (1e6, each) for k, each in enumerate(seconds)}
    )


def probe(known: Knowledge, bps: float, working: Collection[str] = ("edge-server",)) -> None:
    probed_link = LinkKnowledge(capacity_bps=bps)
    known.update_idle({}, {"device-0>edge-server": probed_link}, working)


def push_bps(known: Knowledge, device: int = 0) -> float | None:
    found = known.links.get(f"device-{device}>edge-server")
    return found.weights_bps if found else None


@pytest.fixture
def probed() -> Knowledge:
    """Knows an uplink of 100 Mbit/s from a probe."""
    uplink = LinkKnowledge(capacity_bps=1e8, probed_bps=1e8)
    return Knowledge(links={"device-0>edge-server": uplink})


@pytest.mark.parametrize(
    ("known", "measured", "expected", "source"),
    [
        (device(1.0, "profile"), [seen(1.1)], 1.1, "rounds"),
        (device(1.0, "profile"), [seen(1.1, micro_batches=1)], 1.0, "profile"),
        (device(1.0, "guess"), [seen(1.1, micro_batches=1)], 1.1, "guess"),
        (Knowledge(), [seen(1.0), seen(1.2)], 1.1, "rounds"),
        (Knowledge(), [seen(1.0), seen(4.0)], 4.0, "rounds"),
        (Knowledge(), [seen(1.0), {"device-0": HostEstimate()}], 1.0, "rounds"),
    ],
)
def test_measurements_replace_guesses_and_profiles_and_are_averaged_if_they_are_similar(
    known: Knowledge, measured: list[dict[str, HostEstimate]], expected: float, source: Source
) -> None:
    for estimates in measured:
        learn(known, hosts=estimates)
    host = known.hosts["device-0"]
    assert (host.seconds_per_sample, host.source) == (pytest.approx(expected), source)


def test_time_of_half_blocks_is_divided_by_their_work() -> None:
    # The device ran blocks 1 to 3, so a feed-forward network, an attention and a feed-forward network.
    known = Knowledge(work_shares=[0.6, 1.4])
    stages = (("control-unit", 0, 1), ("other", 1, 2), ("device-0", 2, 5), ("edge-server", 5, 6))
    plan = ClusterPlan(tuple(StagePlan(*stage, 1) for stage in stages), 1, (LinkPlan(),) * 3)
    same = {host_id: seen(1.0)["device-0"] for host_id, _, _ in stages}
    known.update(Estimates(end=0.0, hosts=same), [plan], {})
    found = {host_id: host.seconds_per_sample for host_id, host in known.hosts.items()}
    expected = {"control-unit": 1, "other": 1 / 0.6, "device-0": 3 / 3.4, "edge-server": 1}
    assert found == pytest.approx(expected)


def test_times_of_a_stage_that_recomputes_are_those_without_recomputation() -> None:
    known = Knowledge()
    stages = (StagePlan("device-0", 0, 3, 1, recompute=True), StagePlan("edge-server", 3, 5, 1))
    measured = HostEstimate(4.0, 2.0, deferred_share=0.25, micro_batches=10)
    hosts = {stage.host_id: measured for stage in stages}
    known.update(Estimates(end=0.0, hosts=hosts), [ClusterPlan(stages, 1, (LinkPlan(),))], {})
    found = [known.hosts[stage.host_id] for stage in stages]
    assert [host.seconds_per_sample for host in found] == pytest.approx([3.0, 4.0])
    assert [host.end_seconds_per_sample for host in found] == pytest.approx([1.5, 2.0])
    assert [host.deferred_share for host in found] == pytest.approx([1 / 3, 0.25])


def test_deferred_share_is_averaged_and_stays_without_a_measurement() -> None:
    known = Knowledge(hosts={"device-0": HostKnowledge(seconds_per_sample=1.0)})
    for share in (0.3, 0.32, None):
        learn(known, hosts={"device-0": HostEstimate(deferred_share=share)})
    assert known.hosts["device-0"].deferred_share == pytest.approx(0.31)


def test_block_time_of_a_host_without_blocks_follows_its_embedding() -> None:
    known = Knowledge(hosts={"control-unit": HostKnowledge(seconds_per_sample=2.0)})
    for seconds in (0.1, 0.4):
        alone = HostEstimate(end_seconds_per_sample=seconds, micro_batches=10)
        learn(known, hosts={"control-unit": alone})
    host = known.hosts["control-unit"]
    assert (host.seconds_per_sample, host.end_seconds_per_sample) == (8.0, 0.4)
    embedding, head = StagePlan("control-unit", 0, 1, 1), StagePlan("edge-server", 3, 4, 1)
    plan = ClusterPlan((embedding, StagePlan("device-0", 1, 3, 1), head), 1, (LinkPlan(),) * 2)
    known.hosts["edge-server"] = HostKnowledge(end_seconds_per_sample=0.1)
    assert not known.has_measured([plan])
    known.hosts["device-0"] = HostKnowledge(seconds_per_sample=1.0, source="rounds")
    assert known.has_measured([plan])
    # No round has measured the blocks of the control unit yet.
    with_blocks = (replace(embedding, stop_unit=2), StagePlan("device-0", 2, 3, 1), head)
    assert not known.has_measured([replace(plan, stages=with_blocks)])
    both = HostEstimate(seconds_per_sample=5.0, end_seconds_per_sample=0.4, micro_batches=10)
    learn(known, hosts={"control-unit": both})
    assert host.seconds_per_sample == 5.0


@pytest.mark.parametrize(
    ("capacity_bps", "share", "measured", "expected"),
    [
        (9e6, 8e6, carried(2e6), 2e6),  # The link delivers less than its share.
        (9e6, 2e6, carried(2e6), 9e6),
        (9e6, math.inf, carried(1.0, num_bytes=100), 9e6),
    ],
)
def test_capacity_of_a_link_is_what_it_delivers_if_its_share_does_not_limit_it(
    capacity_bps: float, share: float, measured: dict[str, LinkEstimate], expected: float
) -> None:
    known = learn(link(capacity_bps=capacity_bps), share, links=measured)
    assert known.links[LINK].capacity_bps == expected


def test_capacity_of_a_link_limited_by_its_share_grows_so_that_it_is_tested() -> None:
    # The link is fast again, but its share limits it.
    known = learn(link(capacity_bps=2e6), 2e6, links=carried(2e6))
    assert known.links[LINK].capacity_bps > 2e6


def test_radio_that_delivers_half_of_the_formula_has_half_the_efficiency() -> None:
    # With a signal-to-noise ratio of 1, a bandwidth of 1 MHz gives 1 Mbit/s.
    state = {"channel_gain": 1e-9, "noise_watts_per_hertz": 1e-16, "transmit_power_watts": 0.1}
    known = learn(Knowledge(), 1e6, links=carried(5e5, **state))
    assert known.links[LINK].efficiency == pytest.approx(0.5)
    assert (known.links[LINK].gain, known.links[LINK].noise_watts_per_hertz) == (1e-9, 1e-16)


def test_measured_size_of_activations_replaces_the_guess() -> None:
    known = Knowledge(activation_bytes=100.0)
    learn(known, clusters={"0": ClusterEstimate(activation_bytes_per_sample=500.0, samples=10)})
    assert known.activation_bytes == 500.0


def test_energy_queue_grows_above_the_budget_and_shrinks_below_it() -> None:
    known = Knowledge()
    known.update_backlogs({"device-0": 5.0}, {"device-0": 2.0})
    assert known.backlogs == {"device-0": 1.5}
    known.update_backlogs({}, {"device-0": 2.0})
    assert known.backlogs == {"device-0": 0.5}


def test_profile_of_an_unused_device_is_scaled_by_the_ratio_of_the_others() -> None:
    known = device(1.0, profile=1.0)
    known.hosts["device-1"] = device(4.0, profile=4.0).hosts["device-0"]
    learn(known, hosts=seen(0.5))  # the texts are half as long as those of the profile
    assert known.hosts["device-1"].seconds_per_sample == 2.0
    assert known.hosts["device-1"].source == "profile"


def test_unused_device_changes_by_the_ratio_of_its_profiles() -> None:
    known = device(0.5, "rounds", profile=1.0)
    known.update_idle({"device-0": 1.1}, {})  # this difference is noise
    assert known.hosts["device-0"].seconds_per_sample == 0.5
    known.update_idle({"device-0": 0.25}, {})
    assert known.hosts["device-0"].seconds_per_sample == 0.125


def test_device_that_slowed_down_in_use_recovers_when_its_profile_does() -> None:
    known = learn(device(1.0, profile=2.0), hosts=seen(1.0))
    learn(known, hosts=seen(4.0))  # it is so slow now that no round uses it
    for profile, expected in ((8.0, 4.0), (2.0, 1.0)):
        known.update_idle({"device-0": profile}, {})
        assert known.hosts["device-0"].seconds_per_sample == pytest.approx(expected)


def test_unused_link_has_the_rate_of_its_last_probe() -> None:
    known = link(capacity_bps=9e6, gain=1e-9)
    known.update_idle({}, {LINK: LinkKnowledge(capacity_bps=2e6, round_trip_seconds=0.01)})
    found = known.links[LINK]
    assert (found.capacity_bps, found.round_trip_seconds, found.gain) == (2e6, 0.01, 1e-9)


def test_pushing_time_is_divided_among_the_hosts_that_still_send() -> None:
    known = Knowledge()
    push(known, 3.0, 3.0, 3.0)  # together they send at 8 Mbit/s
    assert [push_bps(known, k) for k in range(3)] == pytest.approx([8e6] * 3)
    push(known, 101.0, 3.0, 3.0)
    assert push_bps(known, 0) == pytest.approx(8e6 / 99)
    assert [push_bps(known, k) for k in (1, 2)] == pytest.approx([8e6] * 2)


def test_host_that_sends_more_bytes_gets_no_lower_rate() -> None:
    known = Knowledge()
    known.update_weights_rates({"a>edge-server": (4e6, 5.0), "b>edge-server": (1e6, 2.0)})
    assert known.links["a>edge-server"].weights_bps == pytest.approx(8e6)
    assert known.links["b>edge-server"].weights_bps == pytest.approx(8e6)


@pytest.mark.parametrize(
    ("pushed", "probed_while_slow"),
    [
        ([1.0, 50.0], False),
        ([1.0, 50.0], True),
        ([1.0, 50.0, 50.0], False),
        ([1.0, 50.0, 50.0], True),
        ([50.0], True),  # The link was slow from the start, but after the probe.
    ],
)
def test_rate_of_weights_is_forgotten_when_the_link_is_restored(
    probed: Knowledge, pushed: list[float], probed_while_slow: bool
) -> None:
    for seconds in pushed:
        push(probed, seconds)
    if probed_while_slow:
        probe(probed, 2e6)
        assert push_bps(probed) == pytest.approx(8e6 / 50)
    probe(probed, 1e8)
    assert push_bps(probed) is None  # the link is measured again


def test_device_that_is_slow_for_another_reason_is_tried_again_only_once(probed: Knowledge) -> None:
    push(probed, 1.0)
    push(probed, 50.0)
    probe(probed, 1e8)
    assert push_bps(probed) is None  # it may be fast again
    push(probed, 50.0)
    probe(probed, 1e8)
    assert push_bps(probed) == pytest.approx(8e6 / 50)


def test_link_that_became_faster_while_in_use_keeps_its_rate(probed: Knowledge) -> None:
    for seconds in (1.0, 50.0, 1.0):
        push(probed, seconds)
    probe(probed, 1e8)
    assert push_bps(probed) == pytest.approx(8e6)


@pytest.mark.parametrize(
    ("bps", "working"),
    [
        (1.4e8, ["edge-server"]),  # This is noise.
        (9e8, ["device-0", "edge-server"]),
        (0.0, ["edge-server"]),  # The probe failed.
    ],
)
def test_probe_without_new_information_leaves_the_rate_of_weights(
    probed: Knowledge, bps: float, working: list[str]
) -> None:
    push(probed, 50.0)
    probe(probed, bps, working)
    assert push_bps(probed) == pytest.approx(8e6 / 50)


def test_small_transfers_do_not_change_the_rate_of_weights() -> None:
    known = Knowledge()
    for num_bytes, seconds, expected in (
        (100, 3.0, None),
        (1_000_000, 1.0, 8e6),
        (49_999, 0.5, 8e6),  # With LoRA, later rounds move little, and its fixed costs count.
        (50_000, 0.5, 8e5),
    ):
        known.update_weights_rates({"device-0>edge-server": (num_bytes, seconds)})
        assert push_bps(known) == (expected and pytest.approx(expected))


class Unending(link_pb2_grpc.LinkServiceServicer):
    """A host whose probes have no end."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def MeasureLink(self, request: Any, context: grpc.ServicerContext) -> MeasureLinkResponse:
        self.num_begun += 1
        self.has_begun.set()
        self.may_end.wait(60)
        return MeasureLinkResponse(goodput_bps=1e6)


def test_probes_end_with_their_job(channels: ChannelPool) -> None:
    """Those of a cancelled job would slow down the probes of the next one."""
    slow, calls, of = Unending(), HostCalls(channels, 60.0), hosts(num_devices=2)
    with serving(slow, link_pb2_grpc.add_LinkServiceServicer_to_server) as address:
        for host in of.by_id.values():
            host.address = address
        with ThreadPoolExecutor(1) as executor:
            probed = executor.submit(profiling.probe_links, of, channels, calls.ask)
            assert slow.has_begun.wait(60)
            calls.cancel("a person cancelled the job")
            with pytest.raises(CancelledError, match="a person"):
                probed.result(60)
        slow.may_end.set()
        num_begun = slow.num_begun
        assert num_begun <= len(of.by_id) // 2
