"""Encoding the frames that leave a host, and waiting until they may leave."""

import time

import torch
from emulated_links import ChangingEmulation, NotingShaper
from prometheus_client import REGISTRY

from collapipe.neighbour_streams.link_settings import LinkSettings
from collapipe.neighbour_streams.outgoing_link import OutgoingLink
from collapipe.tensors import ACTIVATION, Frame, FrameKind
from collapipe.traffic_shaping.outgoing_links import LinkShare, OutgoingLinks
from collapipe.traffic_shaping.radio_driver import EmulatedRadioDriver
from collapipe.v1.stage_pb2 import FrameHeader

STAGE = ("71", "2")
"""The labels of the sending stage in metrics."""


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def frame(num_values: int = 2048) -> Frame:
    return Frame(FrameKind.FORWARD, 0, 0, {ACTIVATION: torch.randn(2, num_values // 2)})


def link_of(emulation: ChangingEmulation, shaper: NotingShaper, here: str = "a") -> OutgoingLink:
    links = OutgoingLinks(here, emulation.file, shaper, EmulatedRadioDriver(emulation.file))
    return OutgoingLink(links.link_to("b", "b:1"), LinkSettings())


def test_link_waits_before_the_header_and_every_chunk(emulation: ChangingEmulation) -> None:
    emulation.set(links={"*": {"rate_bps": 800}})
    shaper = NotingShaper()
    sizes = []
    for part in link_of(emulation, shaper).encoded_parts([frame(num_values=62)], STAGE):
        size = part.ByteSize() if isinstance(part, FrameHeader) else len(part)
        sizes.append(size)
        assert shaper.waits[-1] == (size, 800.0)
    assert sizes[1:] == [100, 100, 48]
    assert len(shaper.waits) == 4


class WaitTimes(list[tuple[int, float]]):
    """Takes the place of `NotingShaper.waits`, and knows when the last wait ended."""

    ended_at = 0.0

    def append(self, wait: tuple[int, float]) -> None:
        self.ended_at = time.perf_counter()


def test_header_tells_when_it_left_after_its_wait(emulation: ChangingEmulation) -> None:
    shaper = NotingShaper()
    shaper.waits = waits = WaitTimes()
    header = next(link_of(emulation, shaper).encoded_parts([frame(num_values=62)], STAGE))
    assert isinstance(header, FrameHeader)
    assert 0 < waits.ended_at <= header.sent_at_seconds <= time.perf_counter()


def test_sent_frames_are_counted_with_the_time_until_the_network_took_the_last_part(
    emulation: ChangingEmulation,
) -> None:
    stage = ("71", "3")
    for _ in link_of(emulation, NotingShaper()).encoded_parts([frame(num_values=62)], stage):
        time.sleep(0.02)  # A slow network.
    labels = {"cluster": "71", "stage": "3", "direction": "forward"}
    seconds = value("collapipe_stage_sending_seconds_total", **labels)
    assert seconds is not None and seconds >= 4 * 0.02  # A header and three chunks.
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
