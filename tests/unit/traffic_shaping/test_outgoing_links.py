"""The rate, the chunks and the receivers of the links that leave a host."""

import weakref
from collections.abc import Iterator

import pytest
from emulated_links import ChangingEmulation, NotingShaper

from collapipe.radio_rate import radio_rate_bps
from collapipe.traffic_shaping import outgoing_links
from collapipe.traffic_shaping.outgoing_links import LinkShare, OutgoingLinks, SharedLink
from collapipe.traffic_shaping.pacing import Traffic
from collapipe.traffic_shaping.radio_driver import EmulatedRadioDriver, RadioDriver

CHANNEL = {"gain": 1e-9, "noise_watts_per_hertz": 4e-21}
LARGEST = 1 << 20


def link_to_b(
    emulation: ChangingEmulation, shaper: NotingShaper, radio: RadioDriver | None = None
) -> SharedLink:
    return OutgoingLinks("a", emulation.file, shaper, radio).link_to("b", "b:1")


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
def test_rate_is_the_least_of_share_wire_and_radio(
    emulation: ChangingEmulation, limit: int, wire: float | None, has_radio: bool, expected: float
) -> None:
    emulation.set(links={"*": {"rate_bps": wire}}, radios={"a>b": CHANNEL} if has_radio else {})
    shaper = NotingShaper()
    link = link_to_b(emulation, shaper, EmulatedRadioDriver(emulation.file))
    with link.limited_to(LinkShare(limit, 1e3, 0.05)):
        link.wait(7, Traffic.CONTROL)
        list(link.paced([b"12345"], Traffic.WEIGHTS))
    assert shaper.waits == [(7, expected), (5, expected)]
    assert shaper.kinds == [Traffic.CONTROL, Traffic.WEIGHTS]


def test_changed_emulation_applies_to_the_next_chunk(emulation: ChangingEmulation) -> None:
    shaper = NotingShaper()

    def changing() -> Iterator[bytes]:
        for rate in (4000.0, 1000.0, None):
            emulation.set(links={"a>b": {"rate_bps": rate}}, time_scale=1 + (rate or 0))
            yield b"123"

    list(link_to_b(emulation, shaper).paced(changing(), Traffic.WEIGHTS))
    assert shaper.rates == [4000.0, 1000.0, 0.0]


def test_share_of_the_newest_plan_is_in_force_until_its_session_ends(
    emulation: ChangingEmulation,
) -> None:
    shaper = NotingShaper()
    link = link_to_b(emulation, shaper)
    older, newer = link.limited_to(LinkShare(100)), link.limited_to(LinkShare(200))
    older.__enter__()
    newer.__enter__()
    assert link.rate_bps() == 200
    assert link.rate_bps(planned=False) == 0
    older.__exit__(None, None, None)
    assert link.rate_bps() == 200
    newer.__exit__(None, None, None)
    assert link.rate_bps() == 0
    assert shaper.limits == [200, 0]  # tc removes the limit without another frame.


def test_all_traffic_to_a_host_has_one_link(emulation: ChangingEmulation) -> None:
    links = OutgoingLinks("a", emulation.file, NotingShaper())
    link = links.link_to("b", "b:1")
    assert links.link_to("b") is links.link_at("b:1") is links.link_to_caller("b") is link
    assert link.shaped.address == "b:1"
    assert links.link_to("c", "c:1") is not link


def test_host_itself_and_nameless_callers_have_no_limits(emulation: ChangingEmulation) -> None:
    emulation.set(links={"*": {"rate_bps": 1000, "delay_seconds": 1.0}})
    links = OutgoingLinks("a", emulation.file, NotingShaper())
    for link in (links.link_to("a"), links.link_to_caller(""), links.link_at("unknown:1")):
        assert link.rate_bps() == 0
        assert link.delay_seconds == 0
    assert links.link_to_caller("b").rate_bps() == 1000
    assert links.delay_seconds("b", "a") == 1.0


def test_invented_callers_take_no_memory_without_an_emulation() -> None:
    links = OutgoingLinks.unlimited("a")
    kept = links.link_to_caller("checked", is_checked=True)
    assert links.link_to_caller("checked") is kept
    link = weakref.ref(links.link_to_caller("invented"))
    assert link() is None


def test_links_to_callers_are_kept_up_to_a_number(
    emulation: ChangingEmulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing_links, "_MAX_LINKS", 1)
    emulation.set(links={"*": {"rate_bps": 1000}})
    links = OutgoingLinks("a", emulation.file, NotingShaper())
    first, second = links.link_to_caller("b"), links.link_to_caller("c")
    assert links.link_to_caller("b") is first
    assert links.link_to_caller("c") is not second


def test_weights_are_cut_and_leave_after_the_delay(
    emulation: ChangingEmulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(outgoing_links.time, "sleep", slept.append)
    emulation.set(links={"a>b": {"delay_seconds": 0.3}})
    link = link_to_b(emulation, NotingShaper())
    pieces = [memoryview(bytes(range(250))), b"", b"last"]
    chunks = list(link.paced_weights(pieces, LARGEST))
    assert slept == [0.3]
    assert [len(chunk) for chunk in chunks] == [100, 100, 50, 4]
    assert b"".join(chunks) == b"".join(pieces)


# --- the size of chunks


class Network:
    """Takes the chunks of a link at a rate, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link = OutgoingLinks.unlimited("a").link_to("b")
        self.rate_bps = 1e9
        self.now = 100.0
        self._sent_at = 0.0
        monkeypatch.setattr(outgoing_links.time, "perf_counter", lambda: self._sent_at)
        monkeypatch.setattr(outgoing_links.time, "monotonic", lambda: self.now)

    def take(self, num_bytes: int) -> list[float]:
        """Sends a blob, and returns the seconds of each chunk."""
        seconds = []
        for chunk in self.link.paced_weights([bytes(num_bytes)], LARGEST):
            seconds.append(8 * len(chunk) / self.rate_bps)
            self._sent_at += seconds[-1]
        return seconds

    @property
    def chunk_bytes(self) -> int:
        return self.link.chunk_bytes(LARGEST)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(monkeypatch)


def test_chunks_of_a_slow_network_soon_take_at_most_half_a_second(network: Network) -> None:
    network.rate_bps = 64e3
    seconds = network.take(100_000)
    assert seconds[0] < 3
    assert 0.2 < max(seconds[1:]) <= 0.5
    network.rate_bps = 16e3
    assert max(network.take(100_000)[1:]) <= 0.52


def test_chunks_stay_small_while_the_kernel_takes_whole_frames_at_once(network: Network) -> None:
    for _ in range(20):
        network.take(80_000)  # The buffers of a slow link are fast.
        network.now += 10  # the time of this frame at 64 kbit/s
    # Half a second would be 4,000 bytes.
    assert network.chunk_bytes <= 8000


def test_chunks_of_a_fast_network_grow_to_the_largest(network: Network) -> None:
    network.take(25 << 20)
    assert network.chunk_bytes == LARGEST
    list(network.link.paced([b"1"], Traffic.WEIGHTS))  # The short end of a blob says nothing.
    assert network.chunk_bytes == LARGEST
    network.rate_bps = 100  # A message of 10 bytes behind others takes 0.8 s.
    network.take(10)
    assert network.chunk_bytes == LARGEST


def test_chunks_are_small_again_after_a_broken_transfer_or_a_long_pause(network: Network) -> None:
    first = network.chunk_bytes
    network.take(25 << 20)
    broken = network.link.paced_weights([bytes(10)], LARGEST)
    next(broken)
    broken.close()
    assert network.chunk_bytes == first
    network.take(25 << 20)
    network.now += 300
    assert network.chunk_bytes == first


def test_few_addresses_of_a_receiver_are_remembered() -> None:
    links = OutgoingLinks.unlimited("here")
    other = links.link_to("other", "other:1")
    for port in range(1000):
        last = links.link_to("there", f"there:{port}")
    assert links.link_at("there:999") is last is not links.link_at("there:0")
    assert links.link_at("other:1") is other
    assert len(links._receivers) == 9
