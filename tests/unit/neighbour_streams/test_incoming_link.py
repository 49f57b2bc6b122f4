"""Reassembling, measuring and delaying the frames that arrive."""

import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from emulated_links import ChangingEmulation
from prometheus_client import REGISTRY

from collapipe.errors import CorruptDataError, DivergedError
from collapipe.neighbour_streams import incoming_link
from collapipe.neighbour_streams.incoming_link import IncomingLink
from collapipe.tensors import ACTIVATION, MAX_BYTES_OF_KINDS, Frame, FrameKind, encode_frame
from collapipe.v1.tensor_pb2 import CODEC_BF16, CODEC_FP32, CODEC_INT8, Codec


def value(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def frame(number: int = 0, num_values: int = 2048) -> Frame:
    return Frame(FrameKind.FORWARD, 0, number, {ACTIVATION: torch.randn(2, num_values // 2)})


class Arrivals:
    """A link, and the frames that it delivered."""

    def __init__(self, emulation: ChangingEmulation, here: str = "b") -> None:
        self.frames: queue.SimpleQueue[Frame] = queue.SimpleQueue()
        self.link = IncomingLink(
            "a", here, MAX_BYTES_OF_KINDS, ("71", "1"), 4, emulation.file, self.frames.put
        )

    def take(self, sent: Frame, codec: Codec = CODEC_FP32, chunk_bytes: int = 1000) -> None:
        header, chunks = encode_frame(sent, codec, chunk_bytes)
        self.link.begin_frame(header)
        for chunk in chunks:
            self.link.add_chunk(chunk)

    def next(self, count: int) -> list[Frame]:
        return [self.frames.get(timeout=60) for _ in range(count)]


def set_clock(monkeypatch: pytest.MonkeyPatch, *readings: float) -> None:
    now = iter(readings)
    clock = SimpleNamespace(perf_counter=lambda: next(now))
    monkeypatch.setattr(incoming_link, "time", clock)


@pytest.mark.parametrize(
    ("codec", "name", "num_bytes"),
    [(CODEC_FP32, "fp32", 8192), (CODEC_BF16, "bf16", 4096), (CODEC_INT8, "int8", 4104)],
)
def test_receiver_counts_wire_bytes_and_the_time_from_header_to_last_byte(
    emulation: ChangingEmulation,
    monkeypatch: pytest.MonkeyPatch,
    codec: Codec,
    name: str,
    num_bytes: int,
) -> None:
    set_clock(monkeypatch, 9.0, 10.0, *[11.0] * 3, *[13.0] * 99)
    arrivals = Arrivals(emulation, f"metered-{name}")
    header, chunks = encode_frame(frame(num_values=4096 if name == "int8" else 2048), codec, 2000)
    arrivals.link.begin_frame(header)
    sizes = [len(chunk) for chunk in chunks if arrivals.link.add_chunk(chunk) is None]
    link = f"a>metered-{name}"
    seconds = value("collapipe_link_transfer_seconds_total", link=link)
    assert sum(sizes) == num_bytes
    assert value("collapipe_link_transfer_bytes_total", link=link, codec=name) == num_bytes
    assert seconds == (1.0 if len(sizes) <= 3 else 3.0)
    assert arrivals.link.received_bytes == num_bytes


@pytest.mark.parametrize(
    ("case", "sent_at", "read_at", "ended_at", "seconds"),
    [
        ("in time", 102.0, 12.0, 13.0, 1.0),
        ("read late", 102.0, 12.7, 13.0, 1.0),
        ("behind the frame before it", 100.5, 11.2, 13.0, 2.0),
        ("false time", float("nan"), 12.7, 13.0, 2.0),
        ("future time", 900.0, 12.7, 13.0, 0.3),
        ("infinite time", float("inf"), 12.7, 13.0, 2.0),
    ],
)
def test_time_begins_when_the_header_could_arrive_not_when_a_busy_host_read_it(
    emulation: ChangingEmulation,
    monkeypatch: pytest.MonkeyPatch,
    case: str,
    sent_at: float,
    read_at: float,
    ended_at: float,
    seconds: float,
) -> None:
    """The sender's clock is 90 s ahead. A first frame is read in time: it is sent at 10 s and ends at 11 s."""
    set_clock(monkeypatch, 9.0, 10.0, 11.0, 11.0, read_at, *[ended_at] * 2)
    arrivals = Arrivals(emulation, case)
    for sent in (100.0, sent_at):
        header, chunks = encode_frame(frame(), CODEC_FP32, 4096)
        header.sent_at_seconds = sent
        arrivals.link.begin_frame(header)
        for chunk in chunks:
            arrivals.link.add_chunk(chunk)
    measured = value("collapipe_link_transfer_seconds_total", link=f"a>{case}")
    assert measured == pytest.approx(1.0 + seconds)


def test_frames_without_a_delay_are_delivered_at_once_and_small_ones_not_measured(
    emulation: ChangingEmulation,
) -> None:
    arrivals = Arrivals(emulation, "small")
    for number, sent in enumerate((frame(num_values=100), Frame(FrameKind.BACKWARD, 0, 0))):
        arrivals.take(sent)
        assert arrivals.frames.get_nowait().kind is sent.kind, number
    assert value("collapipe_link_transfer_seconds_total", link="a>small") is None


def test_delayed_frames_arrive_late_and_in_order_with_overlapping_delays(
    emulation: ChangingEmulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, goes_on, naps = SimpleNamespace(now=100.0), threading.Event(), list[float]()

    def sleep(seconds: float) -> None:
        assert goes_on.wait(60)
        naps.append(seconds)
        clock.now += seconds

    fake = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter, sleep=sleep)
    monkeypatch.setattr(incoming_link, "time", fake)
    emulation.set(links={"a>b": {"delay_seconds": 0.5}})
    arrivals = Arrivals(emulation)
    for number in range(3):
        arrivals.take(frame(number))  # The receiver does not wait.
    emulation.set()
    arrivals.take(frame(3))  # It does not overtake the others.
    assert arrivals.frames.empty()
    goes_on.set()
    assert [one.micro_batch for one in arrivals.next(4)] == [0, 1, 2, 3]
    assert naps == [0.5, 0.0, 0.0, 0.0]
    arrivals.link.close()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (float("nan"), torch.float32),
        (float("inf"), torch.float32),
        (1e30, torch.float32),
        (-1e30, torch.bfloat16),
        (float("inf"), torch.float16),
        (float("nan"), torch.float16),
    ],
)
def test_values_that_are_not_finite_or_make_others_infinite_blame_the_sender(
    emulation: ChangingEmulation, value: float, dtype: torch.dtype
) -> None:
    arrivals = Arrivals(emulation)
    tensor = torch.zeros((2, 8), dtype=dtype)
    tensor[1, 7] = value
    sent = Frame(FrameKind.FORWARD, 0, 3, {ACTIVATION: tensor})
    with pytest.raises(DivergedError, match="a .*micro-batch 3") as raised:
        arrivals.take(sent)
    assert raised.value.host_id == "a" and arrivals.frames.empty()


def test_chunk_without_a_frame_is_refused(emulation: ChangingEmulation) -> None:
    with pytest.raises(CorruptDataError, match="chunk of 3 bytes"):
        Arrivals(emulation).link.add_chunk(b"abc")


def test_moderate_values_arrive_although_their_norm_is_large(emulation: ChangingEmulation) -> None:
    arrivals = Arrivals(emulation)
    sent = Frame(FrameKind.FORWARD, 0, 0, {ACTIVATION: torch.full((2, 8), 9e17)})
    arrivals.take(sent)
    assert torch.equal(arrivals.next(1)[0].tensors[ACTIVATION], sent.tensors[ACTIVATION])
