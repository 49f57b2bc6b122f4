"""What a plan and the world do to frames on their way."""

import json
import logging
import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client import REGISTRY

from collapipe.emulation.world import EmulationFile
from collapipe.errors import CorruptDataError, InvalidInputError
from collapipe.neighbour_streams import endpoints
from collapipe.neighbour_streams.endpoints import (
    LinkMeter,
    LinkReceiver,
    LinkSender,
    LinkSettings,
    link_settings,
)
from collapipe.stage_host.host import StageHostSettings, choose_radio, choose_shaper
from collapipe.tensors import ACTIVATION, Frame, FrameKind, encode_frame
from collapipe.traffic_shaping.pacing import PacedShaper, ShapedLink, Shaper
from collapipe.traffic_shaping.radio import (
    EmulatedRadioDriver,
    NoRadioDriver,
    RadioDriver,
    rate_bps,
)
from collapipe.v1.plan_pb2 import LinkPlan, Plan
from collapipe.v1.stage_pb2 import FrameHeader
from collapipe.v1.tensor_pb2 import CODEC_BF16, CODEC_FP32, CODEC_INT8, Codec

CHANNEL = {"gain": 1e-9, "noise_watts_per_hertz": 4e-21}


class NotingLink(ShapedLink):
    """Notes what it is asked for instead of waiting; its chunks have 100 bytes."""

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


class World:
    """A file that can be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set()
        self.file = EmulationFile(path)

    def set(self, **sections: object) -> None:
        self.path.write_text(json.dumps(sections))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "world.json")


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def frame(number: int = 0, num_values: int = 2048) -> Frame:
    return Frame(FrameKind.FORWARD, 0, number, {ACTIVATION: torch.randn(2, num_values // 2)})


def sender_of(
    world: World,
    shaper: Shaper,
    settings: LinkSettings | None = None,
    radio: RadioDriver | None = None,
    here: str = "a",
) -> LinkSender:
    settings = settings or LinkSettings()
    return LinkSender(here, "b", "b:1", settings, world.file, shaper, radio or NoRadioDriver())


def send(sender: LinkSender, *frames: Frame) -> list[FrameHeader | bytes]:
    return list(sender.parts(frames, lambda frame, seconds: None))


# --- what a plan decides


def plan_of(**link: object) -> Plan:
    return Plan(links=[LinkPlan(), LinkPlan(**link)])  # type: ignore[arg-type]


def test_each_direction_has_the_power_of_its_sender_and_all_else_in_common() -> None:
    plan = plan_of(
        codec=CODEC_INT8,
        rate_limit_bps=5,
        bandwidth_hz=3.0,
        transmit_power_watts=0.1,
        return_transmit_power_watts=0.2,
    )
    assert link_settings(plan, 1, 2) == LinkSettings(CODEC_INT8, 5, 3.0, 0.1)
    assert link_settings(plan, 2, 1) == LinkSettings(CODEC_INT8, 5, 3.0, 0.2)


def test_link_that_the_plan_does_not_name_is_lossless_and_unlimited() -> None:
    assert link_settings(Plan(), 0, 1) == link_settings(plan_of(), 1, 0) == LinkSettings()


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ({"codec": 9}, "link 1 of the plan has the codec 9, which"),
        ({"bandwidth_hz": -1.0}, "link 1 of the plan has a bandwidth of -1.0"),
        ({"transmit_power_watts": float("nan")}, "a transmit power of nan"),
        ({"return_transmit_power_watts": float("inf")}, "a transmit power of inf"),
    ],
)
def test_plan_that_no_link_can_follow_is_refused(link: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        for ends in ((1, 2), (2, 1)):
            link_settings(plan_of(**link), *ends)


# --- sending


def test_every_chunk_is_waited_for_between_its_header_and_itself(world: World) -> None:
    shaper = NotingShaper()
    stream = sender_of(world, shaper, LinkSettings(rate_limit_bps=800)).parts(
        [frame(num_values=62)], lambda frame, seconds: shaper.notes.append("sent")
    )
    notes = shaper.notes
    for part in stream:
        notes.append("header" if isinstance(part, FrameHeader) else len(part))
    assert notes == [
        ("open", "b:1"),
        ("begin", 800),
        "header",
        *[("wait", 100), 100, ("wait", 100), 100, ("wait", 48), 48],
        "sent",
        "close",
    ]


def test_sending_lasts_until_the_last_part_is_taken(world: World) -> None:
    told: list[float] = []
    stream = sender_of(world, NotingShaper()).parts(
        [frame(num_values=62)], lambda frame, seconds: told.append(seconds)
    )
    for _ in stream:
        time.sleep(0.02)  # a network that takes its time
    assert len(told) == 1
    assert told[0] >= 4 * 0.02  # a header and three chunks


def test_stream_that_breaks_off_ends_its_shaping(world: World) -> None:
    shaper = NotingShaper()
    stream = sender_of(world, shaper).parts([frame()], lambda frame, seconds: None)
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
        (0, None, True, rate_bps(1e3, 0.05, 1e-9, 4e-21)),
        (10**9, 1e9, True, rate_bps(1e3, 0.05, 1e-9, 4e-21)),
    ],
)
def test_rate_is_the_least_of_plan_wire_and_radio(
    world: World, limit: int, wire: float | None, has_radio: bool, expected: float
) -> None:
    world.set(links={"*": {"rate_bps": wire}}, radios={"a>b": CHANNEL} if has_radio else {})
    settings = LinkSettings(rate_limit_bps=limit, bandwidth_hz=1e3, transmit_power_watts=0.05)
    shaper = NotingShaper()
    send(sender_of(world, shaper, settings, EmulatedRadioDriver(world.file)), frame())
    assert shaper.rates == [expected]
    assert value("collapipe_link_rate_limit_bps", link="a>b") == expected


def test_world_that_changes_holds_from_the_next_frame(world: World) -> None:
    shaper = NotingShaper()
    sender = sender_of(world, shaper)
    frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()

    def changing() -> Iterator[Frame]:
        for rate in (4000.0, 1000.0, None):
            world.set(links={"a>b": {"rate_bps": rate}}, time_scale=1 + (rate or 0))
            yield frame()

    for _ in sender.parts(changing(), lambda frame, seconds: frames.put(frame)):
        pass
    assert shaper.rates == [4000.0, 1000.0, 0.0]


def test_sender_tells_the_state_of_its_radio(world: World) -> None:
    world.set(radios={"radio-a>b": CHANNEL})
    settings = LinkSettings(bandwidth_hz=1e6, transmit_power_watts=0.07)
    radio = EmulatedRadioDriver(world.file)
    send(sender_of(world, NotingShaper(), settings, radio, here="radio-a"), frame())
    assert value("collapipe_radio_channel_gain", link="radio-a>b") == 1e-9
    assert value("collapipe_radio_noise_watts_per_hertz", link="radio-a>b") == 4e-21
    assert value("collapipe_radio_transmit_power_watts", link="radio-a>b") == 0.07


# --- receiving


class Arrivals:
    """A receiver, and what it delivered with the time."""

    def __init__(self, world: World, here: str = "b") -> None:
        self.meter = LinkMeter(71, 1)
        self.frames: queue.SimpleQueue[tuple[float, Frame]] = queue.SimpleQueue()
        self.receiver = LinkReceiver(
            "a", here, 4, world.file, self.meter, lambda f: self.frames.put((time.monotonic(), f))
        )

    def take(self, sent: Frame, codec: Codec = CODEC_FP32) -> None:
        header, chunks = encode_frame(sent, codec, 1000)
        self.receiver.begin(header)
        for chunk in chunks:
            self.receiver.add(chunk)

    def next(self) -> tuple[float, Frame]:
        return self.frames.get(timeout=30)


@pytest.mark.parametrize(
    ("codec", "name", "num_bytes"),
    [(CODEC_FP32, "fp32", 8192), (CODEC_BF16, "bf16", 4096), (CODEC_INT8, "int8", 4104)],
)
def test_receiver_counts_wire_bytes_and_the_time_from_header_to_last_byte(
    world: World, monkeypatch: pytest.MonkeyPatch, codec: Codec, name: str, num_bytes: int
) -> None:
    now = iter([10.0, *[11.0] * 3, *[13.0] * 99])
    arrivals = Arrivals(world, f"metered-{name}")
    header, chunks = encode_frame(frame(num_values=4096 if name == "int8" else 2048), codec, 2000)
    monkeypatch.setattr(endpoints.time, "perf_counter", lambda: next(now))
    arrivals.receiver.begin(header)
    sizes = [len(chunk) for chunk in chunks if arrivals.receiver.add(chunk) is None]
    link = f"a>metered-{name}"
    seconds = value("collapipe_link_transfer_seconds_total", link=link)
    assert sum(sizes) == num_bytes
    assert value("collapipe_link_transfer_bytes_total", link=link, codec=name) == num_bytes
    assert seconds == (1.0 if len(sizes) <= 3 else 3.0)
    assert arrivals.meter.received_bytes == num_bytes


def test_frame_that_is_too_small_to_tell_a_rate_is_not_counted(world: World) -> None:
    arrivals = Arrivals(world, "small")
    arrivals.take(frame(num_values=100))
    arrivals.take(Frame(FrameKind.BACKWARD, 0, 0))
    assert [arrivals.next()[1].kind for _ in range(2)] == [FrameKind.FORWARD, FrameKind.BACKWARD]
    assert value("collapipe_link_transfer_seconds_total", link="a>small") is None


def test_frame_without_a_delay_is_delivered_before_the_next_part_is_read(world: World) -> None:
    arrivals = Arrivals(world)
    arrivals.take(frame(3))
    assert arrivals.frames.get_nowait()[1].micro_batch == 3


def test_delayed_frames_come_late_in_order_and_do_not_hold_each_other_up(world: World) -> None:
    world.set(links={"a>b": {"delay_seconds": 0.5}})
    arrivals = Arrivals(world)
    started = time.monotonic()
    for number in range(4):
        arrivals.take(frame(number))
    assert time.monotonic() - started < 0.5  # whoever receives does not wait
    came = [arrivals.next() for _ in range(4)]
    arrivals.receiver.close()
    assert [f.micro_batch for _, f in came] == [0, 1, 2, 3]
    assert came[0][0] - started >= 0.5
    assert came[-1][0] - started < 4 * 0.5


def test_frame_does_not_overtake_when_the_delay_ends(world: World) -> None:
    world.set(links={"a>b": {"delay_seconds": 0.3}})
    arrivals = Arrivals(world)
    arrivals.take(frame(0))
    world.set()
    arrivals.take(frame(1))
    arrivals.receiver.close()
    assert [arrivals.next()[1].micro_batch for _ in range(2)] == [0, 1]


def test_what_is_no_frame_is_refused(world: World) -> None:
    with pytest.raises(CorruptDataError, match="outside any frame"):
        Arrivals(world).receiver.add(b"abc")


# --- what a host is asked for


def settings_of(**values: object) -> StageHostSettings:
    return StageHostSettings.model_construct(**values)


@pytest.mark.parametrize("option", [{"shaper": "tc"}, {"radio": "iw"}])
def test_interface_has_to_be_named(option: dict[str, str]) -> None:
    settings = settings_of(**option)
    with pytest.raises(InvalidInputError, match=r"(tc|iw) needs --interface NAME"):
        choose_shaper(settings)
        choose_radio(settings, EmulationFile(None))


def test_links_are_paced_with_a_warning_where_the_kernel_refuses(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        shaper = choose_shaper(settings_of(shaper="tc", interface="no-such0"))
    assert isinstance(shaper, PacedShaper)
    assert "paced inside this process instead" in caplog.text


def test_radio_is_the_emulated_one_unless_none_is_asked_for() -> None:
    nothing = EmulationFile(None)
    assert isinstance(choose_radio(settings_of(), nothing), EmulatedRadioDriver)
    assert isinstance(choose_radio(settings_of(radio="none"), nothing), NoRadioDriver)
