"""The frames that leave a host: how the plan limits them, how they are encoded, and what they wait for."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import grpc
import pytest
import torch
from emulated_links import ChangingEmulation, NotingShaper
from prometheus_client import REGISTRY

from collapipe.errors import CollapipeError, InvalidInputError, PeerLostError
from collapipe.neighbour_streams import outgoing_link
from collapipe.neighbour_streams.incoming_link import IncomingLink
from collapipe.neighbour_streams.link_settings import LinkSettings, link_settings, upload_share
from collapipe.neighbour_streams.outgoing_link import OutgoingLink
from collapipe.neighbour_streams.stream import (
    NeighbourLinks,
    StreamToNextStage,
    serve_previous_stage,
)
from collapipe.rpc import ChannelPool, Outbox, Security, serve
from collapipe.tensors import ACTIVATION, MAX_BYTES_OF_KINDS, Frame, FrameKind
from collapipe.traffic_shaping.outgoing_links import LinkShare, OutgoingLinks
from collapipe.traffic_shaping.pacing import Traffic
from collapipe.traffic_shaping.radio_driver import EmulatedRadioDriver
from collapipe.v1 import stage_pb2, stage_pb2_grpc
from collapipe.v1.plan_pb2 import LinkPlan, Plan, Stage
from collapipe.v1.stage_pb2 import FrameHeader
from collapipe.v1.tensor_pb2 import CODEC_INT8

STAGE = ("71", "2")
"""The labels of the sending stage in metrics."""


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


# --- what a plan decides for each direction of a link


def plan_of(**link: object) -> Plan:
    return Plan(links=[LinkPlan(), LinkPlan(**link)])  # type: ignore[arg-type]


def test_directions_differ_only_in_the_power_of_their_sender() -> None:
    plan = plan_of(
        codec=CODEC_INT8,
        rate_limit_bps=5,
        bandwidth_hz=3.0,
        transmit_power_watts=0.1,
        return_transmit_power_watts=0.2,
    )
    assert link_settings(plan, 1, 2) == LinkSettings(CODEC_INT8, LinkShare(5, 3.0, 0.1))
    assert link_settings(plan, 2, 1) == LinkSettings(CODEC_INT8, LinkShare(5, 3.0, 0.2))


def test_link_without_settings_in_the_plan_is_lossless_and_unlimited() -> None:
    assert link_settings(Plan(), 0, 1) == link_settings(plan_of(), 1, 0) == LinkSettings()


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ({"codec": 9}, "link 1 .*codec 9"),
        ({"bandwidth_hz": -1.0}, "link 1 .*bandwidth of -1.0"),
        ({"transmit_power_watts": float("nan")}, "power of nan"),
        ({"return_transmit_power_watts": float("inf")}, "power of inf"),
    ],
)
def test_impossible_settings_are_refused(link: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        for ends in ((1, 2), (2, 1)):
            link_settings(plan_of(**link), *ends)


def test_upload_of_a_stage_has_its_share_and_power() -> None:
    sending = Stage(upload_bandwidth_hz=2e6, upload_transmit_power_watts=0.1)
    plan = Plan(stages=[sending, Stage()])
    assert upload_share(plan, 0) == LinkShare(0, 2e6, 0.1)
    assert upload_share(plan, 1) == LinkShare()
    with pytest.raises(InvalidInputError, match="stage 0 .*bandwidth of -1.0"):
        upload_share(Plan(stages=[Stage(upload_bandwidth_hz=-1.0)]), 0)


# --- frames


def frame(num_values: int = 62, number: int = 0) -> Frame:
    return Frame(FrameKind.FORWARD, 0, number, {ACTIVATION: torch.randn(2, num_values // 2)})


def links_of(emulation: ChangingEmulation, shaper: NotingShaper, here: str = "a") -> OutgoingLinks:
    return OutgoingLinks(here, emulation.file, shaper, EmulatedRadioDriver(emulation.file))


def link_of(emulation: ChangingEmulation, shaper: NotingShaper, here: str = "a") -> OutgoingLink:
    return OutgoingLink(links_of(emulation, shaper, here).link_to("b", "b:1"), LinkSettings())


def test_link_waits_before_the_header_and_every_chunk(emulation: ChangingEmulation) -> None:
    emulation.set(links={"*": {"rate_bps": 800}})
    shaper = NotingShaper()
    sizes = []
    for part in link_of(emulation, shaper).encoded_parts([frame()], STAGE):
        size = part.ByteSize() if isinstance(part, FrameHeader) else len(part)
        sizes.append(size)
        assert shaper.waits[-1] == (size, 800.0)
    assert sizes[1:] == [100, 100, 48]
    assert len(shaper.waits) == 4
    assert shaper.kinds == [Traffic.ACTIVATIONS]


def test_header_tells_when_it_left_and_metrics_how_long_the_network_took(
    emulation: ChangingEmulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=100.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(outgoing_link, "time", clock)

    class SlowWaits(list[tuple[int, float]]):
        """Takes the place of `NotingShaper.waits`. Each wait takes a second."""

        def append(self, wait: tuple[int, float]) -> None:
            clock.now += 1

    shaper = NotingShaper()
    shaper.waits = SlowWaits()
    stage = ("71", "3")
    header, *_ = link_of(emulation, shaper).encoded_parts([frame()], stage)
    assert isinstance(header, FrameHeader)
    assert header.sent_at_seconds == 101.0
    labels = {"cluster": "71", "stage": "3", "direction": "forward"}
    assert value("collapipe_stage_sending_seconds_total", **labels) == 4.0
    assert value("collapipe_link_bytes_total", **labels, way="sent") == 62 * 4


def test_broken_stream_ends_its_burst(emulation: ChangingEmulation) -> None:
    shaper = NotingShaper()
    stream = link_of(emulation, shaper).encoded_parts([frame()], STAGE)
    next(stream)
    assert shaper.num_bursts == 1
    stream.close()  # type: ignore[attr-defined]
    assert shaper.num_bursts == 0


def test_frame_reports_the_rate_and_the_radio_of_its_link(emulation: ChangingEmulation) -> None:
    channel = {"gain": 1e-9, "noise_watts_per_hertz": 4e-21}
    emulation.set(links={"*": {"rate_bps": 500}}, radios={"radio-a>b": channel})
    link = link_of(emulation, NotingShaper(), here="radio-a")
    with link.shared.limited_to(LinkShare(300, 1e6, 0.07)):
        list(link.encoded_parts([frame()], STAGE))
    assert value("collapipe_link_rate_limit_bps", link="radio-a>b") == 300
    assert value("collapipe_radio_channel_gain", link="radio-a>b") == 1e-9
    assert value("collapipe_radio_noise_watts_per_hertz", link="radio-a>b") == 4e-21
    assert value("collapipe_radio_transmit_power_watts", link="radio-a>b") == 0.07


# --- streams


class NextStage(stage_pb2_grpc.StageServiceServicer):
    """The host of the next stage. It closes its stream when a test closes its outbox."""

    def __init__(self, emulation: ChangingEmulation, owned: ExitStack) -> None:
        self.emulation = emulation
        self.shaper = NotingShaper()
        self.arrived: queue.SimpleQueue[Frame | CollapipeError] = queue.SimpleQueue()
        """What arrives at either end, frames and failures."""
        self.outbox: Outbox[Frame] = Outbox()
        self.server = serve(
            "127.0.0.1:0",
            Security.insecure(),
            lambda server, address: stage_pb2_grpc.add_StageServiceServicer_to_server(self, server),
        )
        owned.callback(self.server.drain, 0)
        owned.callback(self.outbox.close)

    def links(self, sender: str, receiver: str, outbox: Outbox[Frame]) -> NeighbourLinks:
        limits = MAX_BYTES_OF_KINDS
        incoming = IncomingLink(
            sender, receiver, limits, STAGE, 4, self.emulation.file, self.arrived.put
        )
        link = links_of(self.emulation, self.shaper, receiver).link_to(sender)
        return NeighbourLinks(STAGE, outbox, OutgoingLink(link, LinkSettings()), incoming)

    def ExchangeActivations(
        self,
        request_iterator: Iterator[stage_pb2.ExchangeActivationsRequest],
        context: grpc.ServicerContext,
    ) -> Iterator[stage_pb2.ExchangeActivationsResponse]:
        next(request_iterator)
        links = self.links("a", "b", self.outbox)
        yield from serve_previous_stage(request_iterator, links, self.arrived.put)


def test_frames_go_both_ways_until_the_next_stage_closes_its_stream(
    emulation: ChangingEmulation,
) -> None:
    with ExitStack() as owned:
        next_stage = NextStage(emulation, owned)
        channels = ChannelPool(Security.insecure())
        owned.callback(channels.close)
        stub = stage_pb2_grpc.StageServiceStub(channels.channel(next_stage.server.address))
        outbox: Outbox[Frame] = Outbox()
        links = next_stage.links("b", "a", outbox)
        stream = StreamToNextStage(stub, stage_pb2.OpenLink(), links, 60.0, next_stage.arrived.put)
        owned.callback(stream.close, broken=True)
        outbox.put(frame(number=3))
        arrived = next_stage.arrived.get(timeout=60)
        assert isinstance(arrived, Frame) and arrived.micro_batch == 3
        next_stage.outbox.put(Frame(FrameKind.BACKWARD, 0, 4))
        answer = next_stage.arrived.get(timeout=60)
        assert isinstance(answer, Frame) and answer.micro_batch == 4
        next_stage.outbox.close()
        failure = next_stage.arrived.get(timeout=60)
        assert isinstance(failure, PeerLostError) and failure.host_id == "b"
