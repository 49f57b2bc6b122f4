"""A trace file holds every span on one clock, and its slices nest."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collapipe.errors import InvalidInputError
from collapipe.v1.scheduler_pb2 import GetTraceResponse
from collapipe.v1.trace_pb2 import Span
from collapipe_client.trace_file import HostTrace, read_hosts, write_trace

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
    messages = [
        GetTraceResponse(
            host_id="scheduler", unix_offset_seconds=7.0, spans=[span("r", "p", 0, 1)]
        ),
        *(
            GetTraceResponse(
                host_id="a",
                clock_offset_seconds=2.0,
                clock_uncertainty_seconds=uncertainty,
                spans=[span("t", "work", 0, 1)],
            )
            for uncertainty in (0.3, 0.1)
        ),
        GetTraceResponse(host_id="a", missing="a went away"),
        GetTraceResponse(host_id="b", missing="b sends no heartbeats"),
    ]
    scheduler, a, b = read_hosts(messages)
    assert scheduler.unix_offset_seconds == 7.0
    assert (len(a.spans), a.clock_offset_seconds, a.clock_uncertainty_seconds) == (2, 2.0, 0.3)
    assert (a.missing, b.missing, b.spans) == ("a went away", "b sends no heartbeats", [])


def test_folder_that_does_not_exist_is_named_with_the_remedy(tmp_path: Path) -> None:
    host = HostTrace(host_id="a", spans=[span("t", "work", 0, 1)])
    with pytest.raises(InvalidInputError, match=r"cannot be written \(No such .*--output"):
        write_trace(tmp_path / "none" / "file", "job", [host])
