"""Reassembling, measuring and delaying the frames that arrive."""

import queue
import time

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
    """A link, and the frames that it delivered, each with its time."""

    def __init__(self, emulation: ChangingEmulation, here: str = "b") -> None:
        self.frames: queue.SimpleQueue[tuple[float, Frame]] = queue.SimpleQueue()
        self.link = IncomingLink(
            "a",
            here,
            MAX_BYTES_OF_KINDS,
            ("71", "1"),
            4,
            emulation.file,
            lambda frame: self.frames.put((time.monotonic(), frame)),
        )

    def take(self, sent: Frame, codec: Codec = CODEC_FP32) -> None:
        header, chunks = encode_frame(sent, codec, 1000)
        self.link.begin_frame(header)
        for chunk in chunks:
            self.link.add_chunk(chunk)

    def next(self) -> tuple[float, Frame]:
        return self.frames.get(timeout=30)


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
    now = iter([9.0, 10.0, *[11.0] * 3, *[13.0] * 99])
    monkeypatch.setattr(incoming_link.time, "perf_counter", lambda: next(now))
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
    now = iter([9.0, 10.0, 11.0, 11.0, 11.0, read_at, *[ended_at] * 3])
    monkeypatch.setattr(incoming_link.time, "perf_counter", lambda: next(now))
    arrivals = Arrivals(emulation, case)
    for sent in (100.0, sent_at):
        header, chunks = encode_frame(frame(), CODEC_FP32, 4096)
        header.sent_at_seconds = sent
        arrivals.link.begin_frame(header)
        for chunk in chunks:
            arrivals.link.add_chunk(chunk)
    measured = value("collapipe_link_transfer_seconds_total", link=f"a>{case}")
    assert measured == pytest.approx(1.0 + seconds)


def test_small_frame_is_not_measured(emulation: ChangingEmulation) -> None:
    arrivals = Arrivals(emulation, "small")
    arrivals.take(frame(num_values=100))
    arrivals.take(Frame(FrameKind.BACKWARD, 0, 0))
    assert [arrivals.next()[1].kind for _ in range(2)] == [FrameKind.FORWARD, FrameKind.BACKWARD]
    assert value("collapipe_link_transfer_seconds_total", link="a>small") is None


def test_frame_without_a_delay_is_delivered_before_the_next_part_is_read(
    emulation: ChangingEmulation,
) -> None:
    arrivals = Arrivals(emulation)
    arrivals.take(frame(3))
    assert arrivals.frames.get_nowait()[1].micro_batch == 3


def test_delayed_frames_arrive_late_and_in_order_with_overlapping_delays(
    emulation: ChangingEmulation,
) -> None:
    emulation.set(links={"a>b": {"delay_seconds": 0.5}})
    arrivals = Arrivals(emulation)
    started = time.monotonic()
    for number in range(4):
        arrivals.take(frame(number))
    assert time.monotonic() - started < 0.5  # The receiver does not wait.
    came = [arrivals.next() for _ in range(4)]
    arrivals.link.close()
    assert [f.micro_batch for _, f in came] == [0, 1, 2, 3]
    assert came[0][0] - started >= 0.5
    assert came[-1][0] - started < 4 * 0.5


def test_frame_does_not_overtake_delayed_frames(emulation: ChangingEmulation) -> None:
    emulation.set(links={"a>b": {"delay_seconds": 0.3}})
    arrivals = Arrivals(emulation)
    arrivals.take(frame(0))
    emulation.set()
    arrivals.take(frame(1))
    arrivals.link.close()
    assert [arrivals.next()[1].micro_batch for _ in range(2)] == [0, 1]


def test_chunk_without_a_frame_is_refused(emulation: ChangingEmulation) -> None:
    with pytest.raises(CorruptDataError, match="outside any frame"):
        Arrivals(emulation).link.add_chunk(b"abc")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_blame_the_sender(
    emulation: ChangingEmulation, value: float
) -> None:
    arrivals = Arrivals(emulation)
    sent = frame(number=3)
    sent.tensors[ACTIVATION][1, 7] = value
    with pytest.raises(DivergedError, match="a sent values that are not finite") as raised:
        arrivals.take(sent)
    assert raised.value.host_id == "a" and arrivals.frames.empty()


def test_finite_values_arrive_although_their_sum_overflows(emulation: ChangingEmulation) -> None:
    arrivals = Arrivals(emulation)
    sent = Frame(FrameKind.FORWARD, 0, 0, {ACTIVATION: torch.full((2, 8), 3e38)})
    arrivals.take(sent)
    assert torch.equal(arrivals.next()[1].tensors[ACTIVATION], sent.tensors[ACTIVATION])
