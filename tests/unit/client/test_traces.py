"""Traces: a file has every span on one clock, `collapipe trace` writes it, and the browser shows it."""

import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import AttemptFailedError, InvalidInputError
from collapipe.v1.scheduler_pb2 import GetTraceRequest, GetTraceResponse, JobStatus
from collapipe.v1.trace_pb2 import Span
from collapipe_client import trace_viewer
from collapipe_client.trace_file import HostTrace, read_hosts, write_trace
from collapipe_client.trace_viewer import show_in_browser

from .commands import run
from .fake_services import FakeServices
from .traces import ReadTrace, read_trace


def span(track: str, name: str, start: float, end: float, **more: Any) -> Span:
    return Span(track=track, name=name, started_seconds=start, ended_seconds=end, **more)


def written(folder: Path, *hosts: HostTrace) -> ReadTrace:
    path = folder / "round.pftrace"
    num_slices = write_trace(path, "job, round 1", list(hosts))
    read = read_trace(path)
    assert num_slices == len(read.slices)
    assert not list(folder.glob("*.partial"))
    return read


def test_hosts_are_on_the_clock_of_the_scheduler(tmp_path: Path) -> None:
    scheduler = HostTrace(
        host_id="scheduler",
        spans=[span("round", "run", 100.0, 104.0)],
        unix_offset_seconds=1e9,
    )
    device = HostTrace(
        host_id="device",
        spans=[span("compute for cluster 0", "forward", 5001.0, 5003.0, step=0, micro_batch=2)],
        clock_offset_seconds=4900.0,
        clock_uncertainty_seconds=0.0025,
    )
    read = written(tmp_path, scheduler, device)
    assert [(s.host, s.name, s.start, s.end) for s in read.slices] == [
        ("scheduler", "run", 0, 4 * 10**9),
        ("device", "forward 2", 10**9, 3 * 10**9),
    ]
    assert read.slices[1].values == {"step": 0, "micro_batch": 2}
    assert read.unix_nanoseconds == (100 + 10**9) * 10**9
    assert read.attributes["clock of device"] == "4900000.000 ms ahead, at most 2.500 ms wrong"
    assert read.attributes["round"] == "job, round 1"
    assert read.labels["device"] == [read.attributes["clock of device"]]


def test_arrow_leads_from_sending_a_frame_to_receiving_it(tmp_path: Path) -> None:
    frame = {"step": 1, "micro_batch": 3}
    a = HostTrace(
        host_id="a",
        spans=[
            span("send to b", "send forward", 1, 2, peer="b", codec="int8", bytes=70, **frame),
            span("receive from b", "receive backward", 5, 6, peer="b", bytes=80, **frame),
        ],
    )
    b = HostTrace(
        host_id="b",
        spans=[
            span("receive from a", "receive forward", 1.5, 2.5, peer="a", bytes=70, **frame),
            span("send to a", "send backward", 4, 5, peer="a", codec="fp32", bytes=80, **frame),
        ],
    )
    slices = {(s.host, s.name): s for s in written(tmp_path, a, b).slices}
    sent, received = slices["a", "send forward 3"], slices["b", "receive forward 3"]
    back = slices["b", "send backward 3"]
    assert len(sent.flows) == 1 and sent.flows == received.flows != back.flows
    assert back.flows == slices["a", "receive backward 3"].flows
    assert sent.values == {"step": 1, "micro_batch": 3, "bytes": 70, "link": "a>b", "codec": "int8"}
    assert received.values["link"] == "a>b" and back.values["link"] == "b>a"


def test_overlapping_spans_get_tracks_of_their_own(tmp_path: Path) -> None:
    host = HostTrace(
        host_id="a",
        spans=[
            span("weights", "fetch", 0, 3, unit=1),
            span("weights", "fetch", 1, 4, unit=2),
            span("weights", "fetch", 3, 5, unit=3),
            span("compute", "backward", 0, 4),
            span("compute", "recompute", 0, 1),
        ],
    )
    slices = {s.name: s for s in written(tmp_path, host).slices}
    assert slices["fetch unit 1"].track == slices["fetch unit 3"].track == "weights"
    assert slices["fetch unit 2"].track == "weights (2)"
    assert [slices[name].depth for name in ("backward", "recompute")] == [0, 1]


times = st.tuples(st.floats(0, 10), st.floats(0, 10)).map(sorted)


@given(st.lists(times, min_size=1, max_size=30))
def test_any_spans_become_slices_that_nest(
    tmp_path_factory: pytest.TempPathFactory, intervals: list[list[float]]
) -> None:
    spans = [span("t", "work", *interval) for interval in intervals]
    read = written(tmp_path_factory.mktemp("trace"), HostTrace(host_id="a", spans=spans))
    first = min(interval[0] for interval in intervals)
    expected = sorted(tuple(round((t - first) * 1e9) for t in interval) for interval in intervals)
    assert sorted((s.start, s.end) for s in read.slices) == expected


def test_messages_of_a_host_are_joined() -> None:
    one = [span("t", "work", 0, 1)]
    clock = {"clock_offset_seconds": 2.0, "clock_uncertainty_seconds": 0.3}
    messages = [
        GetTraceResponse(host_id="scheduler", unix_offset_seconds=7.0, spans=one),
        GetTraceResponse(host_id="a", spans=one, **clock),
        GetTraceResponse(host_id="a", spans=one, **{**clock, "clock_uncertainty_seconds": 0.1}),
        GetTraceResponse(host_id="a", missing="a went away"),
        GetTraceResponse(host_id="b", missing="b sends no heartbeats"),
    ]
    scheduler, a, b = read_hosts(messages)
    assert scheduler.unix_offset_seconds == 7.0
    assert (len(a.spans), a.clock_offset_seconds, a.clock_uncertainty_seconds) == (2, 2.0, 0.3)
    assert (a.missing, b.missing, b.spans) == ("a went away", "b sends no heartbeats", [])


@pytest.mark.parametrize(
    "wrong",
    [
        span("t", "", 1, 2),
        span("", "work", 1, 2),
        span(" ", "\t", 1, 2),
        span("t", "work", float("nan"), 2),
        span("t", "work", 1, float("inf")),
        span("t", "work", 1, 1e300),
        span("t", "work", -1e300, 2),
        span("t", "work", 2, 1),
        span("t", "send a", 1, 2, peer="b", bytes=2**64 - 1),
    ],
    ids=str,
)
def test_spans_that_cannot_be_are_left_out_and_counted(tmp_path: Path, wrong: Span) -> None:
    right = span("t", "work", 1, 2)
    messages = [GetTraceResponse(host_id="a", spans=[right, wrong]) for _ in range(2)]
    [host] = read_hosts(messages)
    assert len(written(tmp_path, host).slices) == len(host.spans) == 2
    assert "2 spans" in host.missing


@pytest.mark.parametrize("offset", [float("nan"), float("-inf"), 1e300])
def test_host_whose_clock_cannot_be_is_left_out(tmp_path: Path, offset: float) -> None:
    one = [span("t", "work", 1, 2)]
    good = GetTraceResponse(host_id="a", spans=one)
    clock = GetTraceResponse(host_id="b", clock_offset_seconds=offset, spans=one)
    unsure = GetTraceResponse(host_id="b", clock_uncertainty_seconds=offset, spans=one)
    hosts = read_hosts([good, clock, unsure])
    assert len(written(tmp_path, *hosts).slices) == 1 and "2 spans" in hosts[1].missing


def test_folder_that_does_not_exist_is_named_with_the_remedy(tmp_path: Path) -> None:
    host = HostTrace(host_id="a", spans=[span("t", "work", 0, 1)])
    with pytest.raises(InvalidInputError, match="none.*--output"):
        write_trace(tmp_path / "none" / "file", "job", [host])


MISSING = GetTraceResponse(host_id="device-0-1", missing="device-0-1 sends no heartbeats")


def spans(host_id: str, uncertainty: float = 0.0) -> GetTraceResponse:
    both = [span("round", "run", 1, 2)] * 2
    return GetTraceResponse(host_id=host_id, clock_uncertainty_seconds=uncertainty, spans=both)


@pytest.fixture
def one_job(fake: FakeServices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServices:
    monkeypatch.chdir(tmp_path)
    fake.jobs = [JobStatus(job_id="job-1", name="demo", num_rounds_committed=2)]
    return fake


def test_last_round_of_the_newest_job_is_traced_and_missing_hosts_are_named(
    one_job: FakeServices, tmp_path: Path
) -> None:
    one_job.trace = [spans("scheduler"), spans("device-0-0", 0.0042), MISSING]
    result = run("trace", *one_job.options)
    assert one_job.traced == [GetTraceRequest(job_id="job-1", round_index=1)]
    for words in (".collapipe/traces/job-1-round-2.pftrace", "4 spans of 2 hosts", " 4.2 ms"):
        assert words in result.stdout
    assert "device-0-1 sends no heartbeats" in result.stderr
    assert (tmp_path / ".collapipe" / ".gitignore").read_text() == "*\n"
    read = read_trace(tmp_path / ".collapipe" / "traces" / "job-1-round-2.pftrace")
    assert len(read.slices) == 4
    assert read.attributes["missing device-0-1"] == "device-0-1 sends no heartbeats"


def test_round_without_any_spans_writes_no_file(one_job: FakeServices, tmp_path: Path) -> None:
    one_job.trace = [MISSING]
    said = run("trace", "1", *one_job.options, code=2).stderr
    assert "job-1, round 1" in said and "device-0-1 sends no heartbeats" in said
    assert not list(tmp_path.iterdir())


class Browser(threading.Thread):
    """Opens Perfetto's page: asks for another file first, and then for the trace."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.url = ""
        self.refused = 0
        self.body = b""
        self.origin: str | None = None

    def open(self, url: str) -> bool:
        self.url = url
        self.start()
        return True

    def run(self) -> None:
        served = urlsplit(self.url).fragment.partition("?url=")[2]
        try:
            urllib.request.urlopen(f"{served}.other", timeout=60)
        except urllib.error.HTTPError as error:
            self.refused = error.code
        with urllib.request.urlopen(served, timeout=60) as answer:
            self.body = answer.read()
            self.origin = answer.headers["Access-Control-Allow-Origin"]


def test_page_gets_the_trace_and_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "a round.pftrace"
    file.write_bytes(b"trace")
    (tmp_path / "a round.pftrace.other").write_bytes(b"secret")
    browser, notes = Browser(), list[str]()
    show_in_browser(file, notes.append, browser.open, port=0)
    browser.join(60)
    assert browser.url.startswith("https://ui.perfetto.dev/#!/?url=http://127.0.0.1:")
    assert (browser.refused, browser.body) == (404, b"trace")
    assert browser.origin == "https://ui.perfetto.dev"
    assert browser.url in notes[0]


def test_machine_without_a_browser_is_told_the_address_and_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_viewer, "_LIMIT_SECONDS", 0.01)
    file = tmp_path / "file"
    file.write_bytes(b"trace")
    notes: list[str] = []
    with pytest.raises(AttemptFailedError, match=r"0\.01 s"):
        show_in_browser(file, notes.append, lambda url: False, port=0)
    assert "https://ui.perfetto.dev" in notes[0]


def test_port_in_use_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"trace")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInputError, match=f"port {port}"):
            show_in_browser(file, print, lambda url: True, port=port)
