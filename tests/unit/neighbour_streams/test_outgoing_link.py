"""Pacing and encoding the frames that leave a host."""

import time
from collections.abc import Iterator

import pytest
import torch
from prometheus_client import REGISTRY

from collapipe.neighbour_streams.link_settings import LinkSettings
from collapipe.neighbour_streams.outgoing_link import OutgoingLink, OutgoingLinks
from collapipe.radio_rate import radio_rate_bps
from collapipe.tensors import ACTIVATION, Frame, FrameKind
from collapipe.traffic_shaping.pacing import ShapedLink, Shaper
from collapipe.traffic_shaping.radio_driver import (
    EmulatedRadioDriver,
    RadioDriver,
)
from collapipe.v1.stage_pb2 import FrameHeader

from .conftest import ChangingEmulation

STAGE = ("71", "2")
"""The labels of the sending stage in metrics."""
CHANNEL = {"gain": 1e-9, "noise_watts_per_hertz": 4e-21}


class NotingLink(ShapedLink):
    """Notes its calls instead of waiting. Its chunks have 100 bytes."""

    def __init__(self, notes: list[object]) -> None:
        self.notes = notes

    def chunk_bytes(self, rate_bps: float, largest: int) -> int:
        return 100

    def begin(self, rate_bps: float) -> None:
        self.notes.append(("begin", rate_bps))

    def wait(self, num_bytes: int) -> None:
        self.notes.append(("wait", num_bytes))

    def close(self) -> None:
        self.notes.append("close")


class NotingShaper(Shaper):
    def __init__(self) -> None:
        self.notes: list[object] = []

    def open(self, address: str) -> ShapedLink:
        self.notes.append(("open", address))
        return NotingLink(self.notes)

    @property
    def rates(self) -> list[float]:
        return [note[1] for note in self.notes if isinstance(note, tuple) and note[0] == "begin"]


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def frame(number: int = 0, num_values: int = 2048) -> Frame:
    return Frame(FrameKind.FORWARD, 0, number, {ACTIVATION: torch.randn(2, num_values // 2)})


def link_of(
    emulation: ChangingEmulation,
    shaper: Shaper,
    settings: LinkSettings | None = None,
    radio: RadioDriver | None = None,
    here: str = "a",
) -> OutgoingLink:
    host = OutgoingLinks(here, emulation.file, shaper, radio)
    return host.link_to("b", "b:1", settings or LinkSettings())


def send(link: OutgoingLink, *frames: Frame) -> list[FrameHeader | bytes]:
    return list(link.encoded_parts(frames, STAGE))


def test_link_waits_before_every_chunk(emulation: ChangingEmulation) -> None:
    shaper = NotingShaper()
    link = link_of(emulation, shaper, LinkSettings(rate_limit_bps=800))
    notes = shaper.notes
    for part in link.encoded_parts([frame(num_values=62)], STAGE):
        notes.append("header" if isinstance(part, FrameHeader) else len(part))
    assert notes == [
        ("open", "b:1"),
        ("begin", 800),
        "header",
        *[("wait", 100), 100, ("wait", 100), 100, ("wait", 48), 48],
        "close",
    ]


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


def test_broken_stream_closes_the_shaped_link(emulation: ChangingEmulation) -> None:
    shaper = NotingShaper()
    stream = link_of(emulation, shaper).encoded_parts([frame()], STAGE)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert shaper.notes[-1] == "close"


@pytest.mark.parametrize(
    ("limit", "wire", "has_radio", "expected"),
    [
        (0, None, False, 0.0),
        (500, None, False, 500.0),
        (0, 300.0, False, 300.0),
        (500, 300.0, False, 300.0),
        (200, 300.0, True, 200.0),
        (0, None, True, radio_rate_bps(1e3, 0.05, 1e-9, 4e-21)),
        (10**9, 1e9, True, radio_rate_bps(1e3, 0.05, 1e-9, 4e-21)),
    ],
)
def test_rate_is_the_least_of_plan_wire_and_radio(
    emulation: ChangingEmulation, limit: int, wire: float | None, has_radio: bool, expected: float
) -> None:
    emulation.set(links={"*": {"rate_bps": wire}}, radios={"a>b": CHANNEL} if has_radio else {})
    settings = LinkSettings(rate_limit_bps=limit, bandwidth_hz=1e3, transmit_power_watts=0.05)
    shaper = NotingShaper()
    send(link_of(emulation, shaper, settings, EmulatedRadioDriver(emulation.file)), frame())
    assert shaper.rates == [expected]
    assert value("collapipe_link_rate_limit_bps", link="a>b") == expected


def test_changed_emulation_applies_from_the_next_frame(emulation: ChangingEmulation) -> None:
    shaper = NotingShaper()
    link = link_of(emulation, shaper)

    def changing() -> Iterator[Frame]:
        for rate in (4000.0, 1000.0, None):
            emulation.set(links={"a>b": {"rate_bps": rate}}, time_scale=1 + (rate or 0))
            yield frame()

    for _ in link.encoded_parts(changing(), STAGE):
        pass
    assert shaper.rates == [4000.0, 1000.0, 0.0]


def test_link_reports_the_state_of_its_radio(emulation: ChangingEmulation) -> None:
    emulation.set(radios={"radio-a>b": CHANNEL})
    settings = LinkSettings(bandwidth_hz=1e6, transmit_power_watts=0.07)
    radio = EmulatedRadioDriver(emulation.file)
    send(link_of(emulation, NotingShaper(), settings, radio, here="radio-a"), frame())
    assert value("collapipe_radio_channel_gain", link="radio-a>b") == 1e-9
    assert value("collapipe_radio_noise_watts_per_hertz", link="radio-a>b") == 4e-21
    assert value("collapipe_radio_transmit_power_watts", link="radio-a>b") == 0.07
