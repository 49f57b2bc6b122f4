import io
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console, RenderableType

from collapipe.unit_names import unit_words
from collapipe.v1.job_pb2 import Evaluation, RoundProgress, RoundSummary, StageReport
from collapipe.v1.plan_pb2 import Plan, Stage
from collapipe.v1.scheduler_pb2 import (
    INCIDENT_CODE_HOST_LOST,
    JOB_STATE_PREPARING,
    JOB_STATE_QUEUED,
    JOB_STATE_RUNNING,
    JOB_STATE_SUCCEEDED,
    WARNING_CODE_FLAT_LOSS,
    DataNote,
    HostStatus,
    Incident,
    JobState,
    JobStatus,
    JobTrouble,
    JobWarning,
    MissingHost,
    RoundCommitted,
    RoundStarted,
    WatchJobResponse,
)
from collapipe_client import live_view
from collapipe_client.live_picture import render
from collapipe_client.live_view import PlainDisplay, event_document, make_display
from collapipe_client.plan_tables import RoundRecord
from collapipe_client.trouble import incident_lines, is_warning, say_clock, say_trouble
from collapipe_client.view_state import PREPARATION, JobView, apply_event, progress_lines

_RANGES = [("control-unit-0", 0, 1), ("device-0-0", 1, 4), ("device-0-1", 4, 7), ("edge", 7, 8)]
_PLAN = Plan(
    cluster_index=0,
    stages=[Stage(host_id=h, start_unit=start, stop_unit=stop) for h, start, stop in _RANGES],
)
_PLACEMENT = "control-unit-0 embedding | device-0-0 blocks 0-2 | device-0-1 blocks 3-5 | edge head"


def _status(state: JobState, seconds: float = 2, **fields: Any) -> WatchJobResponse:
    status = JobStatus(name="demo", state=state, **{"num_rounds": 2, **fields})
    return WatchJobResponse(elapsed_seconds=seconds, status=status)


def _started(**fields: Any) -> WatchJobResponse:
    return WatchJobResponse(elapsed_seconds=3, round_started=RoundStarted(plans=[_PLAN], **fields))


_FEW = "waiting for 2 more devices in cluster 0 (have 1)"
_WAITING = _status(JOB_STATE_PREPARING, 1, message=_FEW)
_RUNNING = _status(JOB_STATE_RUNNING)
_STARTED = _started(round_index=0)


def _progress(steps: int, loss: float | None = None, waiting_for: str = "") -> WatchJobResponse:
    reports = [
        StageReport(host_id=h, start_unit=start, stop_unit=stop, busy_ratio=0.5)
        for h, start, stop in _RANGES
    ]
    progress = RoundProgress(
        cluster_index=0,
        steps_done=steps,
        local_steps=8,
        loss=loss,
        samples_per_second=21.5,
        stages=reports,
        waiting_for=waiting_for,
    )
    return WatchJobResponse(elapsed_seconds=4, progress=progress)


_EVALUATED = WatchJobResponse(
    elapsed_seconds=5,
    evaluation=Evaluation(num_rounds=1, metric="accuracy", value=0.5, num_rows=10),
)
_COMMITTED = WatchJobResponse(
    elapsed_seconds=6, round_committed=RoundCommitted(num_rounds=1, round_seconds=12.5)
)


def _view(*events: WatchJobResponse) -> JobView:
    return reduce(apply_event, events, JobView())


def _lines(*events: WatchJobResponse) -> list[str]:
    view, lines = JobView(), []
    for event in events:
        before, view = view, apply_event(view, event)
        lines += progress_lines(before, view)
    return lines


@pytest.mark.parametrize(
    ("start", "stop", "words"),
    [
        (0, 1, "embedding"),
        (1, 2, "block 0"),
        (7, 8, "head"),
        (0, 8, "embedding, blocks 0-5, head"),
        (5, 8, "blocks 4-5, head"),
    ],
)
def test_unit_words_name_the_range(start: int, stop: int, words: str) -> None:
    assert unit_words(start, stop, 8) == words


@pytest.mark.parametrize(("late", "words"), [([1], "cluster 1"), ([0, 2], "clusters 0, 2")])
def test_late_clusters_are_named_when_a_round_is_committed(late: list[int], words: str) -> None:
    committed = RoundCommitted(num_rounds=1, round_seconds=12.5, late_clusters=late)
    lines = _lines(_RUNNING, _STARTED, WatchJobResponse(round_committed=committed))
    assert lines[-1] == f"round 1/2 committed in 12.5 s without {words}"


def test_time_of_the_evaluation_in_a_round_is_told_without_late_clusters() -> None:
    summaries = [RoundSummary(evaluation_seconds=seconds) for seconds in (2.0, 4.5, 9.0)]
    committed = RoundCommitted(
        num_rounds=1, round_seconds=12.5, summaries=summaries, late_clusters=[2]
    )
    view = _view(_RUNNING, _STARTED, WatchJobResponse(round_committed=committed))
    assert view.evaluation_seconds == 4.5
    last = _lines(_RUNNING, _STARTED, WatchJobResponse(round_committed=committed))[-1]
    assert "committed in 12.5 s, of which 4.5 s " in last


def test_evaluation_counts_only_as_far_as_it_delayed_the_round() -> None:
    summaries = [
        RoundSummary(training_seconds=5.0, evaluation_seconds=10.0),
        RoundSummary(training_seconds=14.0),
    ]
    committed = RoundCommitted(num_rounds=1, round_seconds=15.0, summaries=summaries)
    view = _view(_RUNNING, _STARTED, WatchJobResponse(round_committed=committed))
    assert view.evaluation_seconds == 1.0
    assert "of which 1.00 s " in RoundRecord({}, committed, {}).seconds()


def test_cluster_that_ended_early_is_told_with_its_steps_and_a_late_one_is_not() -> None:
    summaries = [RoundSummary(local_steps=steps) for steps in (4, 2, 0)]
    committed = RoundCommitted(num_rounds=1, late_clusters=[2], summaries=summaries)
    event = WatchJobResponse(elapsed_seconds=9, round_committed=committed)
    assert _view(_RUNNING, _STARTED, event).ended_early == ((1, 2, 4),)


def test_job_that_waits_again_has_no_clusters() -> None:
    assert _view(_RUNNING, _STARTED).clusters
    assert not _view(_RUNNING, _STARTED, _status(JOB_STATE_QUEUED)).clusters


def test_view_follows_a_job_to_its_end() -> None:
    started = (_WAITING, _RUNNING, _STARTED, _progress(3, loss=1.25))
    view = _view(*started, _progress(3), WatchJobResponse())
    assert (view.name, view.state, view.round_index, view.num_rounds) == ("demo", "running", 0, 2)
    (cluster,) = view.clusters
    assert (cluster.steps_done, cluster.local_steps, cluster.loss) == (3, 8, 1.25)
    assert [s.units for s in cluster.stages] == ["embedding", "blocks 0-2", "blocks 3-5", "head"]
    again = apply_event(view, _started(attempt=1))
    assert (again.attempt, again.clusters[0].loss, again.clusters[0].steps_done) == (1, None, 0)
    view = reduce(apply_event, [_EVALUATED, _COMMITTED], view)
    assert (view.round_index, view.num_rounds_committed) == (None, 1)
    assert view.evaluation == _EVALUATED.evaluation and not view.ended
    # The last status says that the job went back, and has the metric.
    last = _status(JOB_STATE_SUCCEEDED, evaluation=_EVALUATED.evaluation)
    view = _view(_RUNNING, _STARTED, _COMMITTED, last)
    assert view.ended and view.num_rounds_committed == 0
    assert view.evaluation is not None and view.evaluation.value == 0.5


def test_progress_lines_report_each_change_once() -> None:
    steps = [_progress(s, loss=2.0) for s in range(1, 9)]
    assert _lines(
        _WAITING, _WAITING, _RUNNING, _STARTED, *steps, WatchJobResponse(), _EVALUATED, _COMMITTED
    ) == [
        "preparing: waiting for 2 more devices in cluster 0 (have 1)",
        "running",
        "round 1/2 starts",
        f"  cluster 0: {_PLACEMENT}",
        *(f"round 1/2, cluster 0: step {s}/8, loss 2.0000, 21.5 samples/s" for s in (2, 4, 6, 8)),
        "accuracy 0.5000 after 1 round (10 rows)",
        "round 1/2 committed in 12.5 s",
    ]


def test_progress_lines_report_a_long_wait_and_an_unchanged_placement_once() -> None:
    assert _lines(_RUNNING, _STARTED, _started(attempt=1))[-1] == "round 1/2 starts (attempt 2)"
    reports = [_progress(1, waiting_for="step 1: edge waits for frames")] * 10
    waits = [line for line in _lines(_RUNNING, _STARTED, *reports) if "stands still" in line]
    assert waits == ["round 1/2, cluster 0 stands still: step 1: edge waits for frames"]


def test_picture_shows_state_steps_hosts_and_metric() -> None:
    view = _view(_RUNNING, _STARTED, _progress(3, 1.25, "edge waits for frames"), _EVALUATED)
    picture = _printed(render(view, 0.0))
    for part in (
        "demo  running  round 1/2",
        "step 3/8  loss 1.2500  21.5 samples/s\n",
        "waits for: cluster 0, edge waits for frames",
        "blocks 3-5",
        "50% busy",
        "accuracy 0.5000 after 1 round",
    ):
        assert part in picture
    assert _FEW in _printed(render(_view(_WAITING), 0.0))


def _printed(picture: RenderableType, width: int = 120, height: int | None = None) -> str:
    file = io.StringIO()
    Console(file=file, width=width, height=height).print(picture)
    return file.getvalue()


_LOST = JobTrouble(
    missing=[
        MissingHost(host_id="device-0", last_seen=Timestamp(seconds=1000)),
        MissingHost(host_id="device-1", left_out="it sent values that are not finite"),
        MissingHost(host_id="device-2"),
        MissingHost(wanted="an edge server"),
    ]
)


def test_picture_says_which_hosts_are_missing_and_since_when() -> None:
    lost = _status(JOB_STATE_RUNNING, trouble=_LOST)
    picture = _printed(render(_view(_RUNNING, lost), 1042.0), width=300)
    for words in (
        "  goes on without device-0 (",
        " 42 s ago, at ",
        "), device-1 (left out: it sent values that are not finite), device-2 (not registered ",
        "), an edge server\n",
    ):
        assert words in picture
    assert "goes on without" not in _printed(render(_view(lost, _RUNNING), 1042.0))


def test_failure_is_named_unless_the_message_of_the_job_has_it() -> None:
    trouble = JobTrouble(num_failures=2, failure="its disk is full")
    told = say_trouble(trouble, 0.0)
    assert told.startswith("2 attempts") and told.endswith(" (its disk is full)")
    known = say_trouble(trouble, 0.0, "attempt 3 follows a failure: its disk is full")
    assert f"{known} (its disk is full)" == told


def test_heartbeat_in_the_future_points_to_the_clocks() -> None:
    assert "check the clocks" in say_trouble(_LOST, 1000.0 - 86_400)


@pytest.mark.parametrize(
    ("ahead", "words"),
    [(-8.0, ""), (20.0, ""), (86_405.0, "1 d ahead of"), (-7300.0, "2 h behind")],
)
def test_wrong_clock_of_the_scheduler_shows_in_the_heartbeats_of_living_hosts(
    ahead: float, words: str
) -> None:
    living = HostStatus(alive=True)
    living.last_seen.FromMilliseconds(round(1000 * (100_000 + ahead)))
    dead = HostStatus()
    dead.last_seen.FromMilliseconds(0)
    said = say_clock([dead, living], 100_000.0)
    assert words in said
    assert bool(said) == bool(words)


_INCIDENT = Incident(code=INCIDENT_CODE_HOST_LOST, message="device-0 is lost")
_WARNING = JobWarning(code=WARNING_CODE_FLAT_LOSS, message="it stays", advice="change it")
_NOTE = DataNote(message="9 of 60 rows")
_DOUBT = DataNote(message="2 of 60 rows", is_warning=True)


@pytest.mark.parametrize(
    ("kind", "event", "line", "key", "value"),
    [
        ("incident", _INCIDENT, "HOST_LOST: device-0 is lost", "code", "HOST_LOST"),
        ("warning", _WARNING, "warning: it stays: change it", "code", "FLAT_LOSS"),
        ("data_note", _NOTE, "9 of 60 rows", "message", "9 of 60 rows"),
        ("data_note", _DOUBT, "warning: 2 of 60 rows", "is_warning", True),
    ],
)
def test_incident_warning_or_note_is_a_line_in_text_and_json(
    kind: str, event: Any, line: str, key: str, value: Any
) -> None:
    told = WatchJobResponse(**{kind: event})
    assert incident_lines(told) == [line]
    assert is_warning(told) == line.startswith("warning: ")
    assert event_document(kind, told)[key] == value
    assert incident_lines(_RUNNING) == []


def test_what_was_told_of_data_before_the_start_is_not_told_again() -> None:
    file = io.StringIO()
    console = Console(file=file, width=80)
    display = PlainDisplay(console, console)
    display.note("9 of 60 rows")
    for message in ("9 of 60 rows", "label b is unknown"):
        display.show(WatchJobResponse(data_note=DataNote(message=message)))
    assert file.getvalue().count("9 of 60 rows") == 1
    assert "label b is unknown" in file.getvalue()


def _picture(view: JobView, width: int, height: int, snapshot: Any = None) -> list[str]:
    picture = render(view, 0.0, snapshot, serving=(7, 10), width=width, height=height)
    return _printed(picture, width, height).splitlines()


def _large(num_clusters: int, num_devices: int) -> tuple[JobView, dict[str, Any]]:
    """Returns a job at work on so many clusters, and a snapshot of it. The second device of each cluster holds it back."""
    events = [_status(JOB_STATE_RUNNING, num_rounds=4, num_rounds_committed=1), _COMMITTED]
    details: dict[str, Any] = {}
    plans = []
    for index in range(num_clusters):
        devices = [f"device-{index}-{number}" for number in range(num_devices)]
        names = [f"control-unit-{index}", *devices, "edge-server"]
        stages = [Stage(host_id=n, start_unit=u, stop_unit=u + 1) for u, n in enumerate(names)]
        plans.append(Plan(cluster_index=index, stages=stages))
        details[str(index)] = {
            "pipeline": [
                {"id": name, "state": "working", "busy": 0.5, "memory_bytes": 3.3e8}
                | {"limit_bytes": 5e8, "needs_bytes": 2.12e8}
                for name in names
            ],
            "links": [
                {"from": one, "to": other, "forward_bps": 12.3e6, "backward_bps": 3.1e6}
                | {"limit_bps": 2e7}
                for one, other in pairwise(names)
            ],
            "bottleneck": "stage 2",
            "others": [{"id": f"device-{index}-idle", "state": "idle"}],
            "more": 0,
        }
    change = "device-0-1 takes block 2 from device-0-0 (predicted: 6.2 s for the round, 8.1 s without this change)"
    events.append(
        WatchJobResponse(round_started=RoundStarted(round_index=1, plans=plans, change=change))
    )
    for index in range(num_clusters):
        progress = RoundProgress(cluster_index=index, steps_done=2, local_steps=8, loss=1.5)
        progress.samples_per_second = 21.5
        progress.waiting_for = (
            "step 3: edge-server waits for frames of the device before it, and so on"
        )
        events.append(WatchJobResponse(progress=progress))
    by = "the processor of device-0-1: 0.12 s for a micro-batch"
    snapshot = {
        "now": 1000.0,
        "status": {
            "ends": {"low": 1100, "middle": 1130, "high": 1200},
            "ends_by": "the last rounds",
        },
        "job": {"held_back": [{"cluster": 0, "by": by, "share": 0.87, "is_measured": True}]},
        "details": details,
    }
    return _view(*events), snapshot


@pytest.mark.parametrize("width", [80, 140])
def test_picture_has_the_whole_job_in_every_width(width: int) -> None:
    view, snapshot = _large(2, 3)
    lines = _picture(view, width, 50, snapshot)
    assert max(map(len, lines)) <= width
    text = "\n".join(line.rstrip() for line in lines)
    for part in (
        "  whole job ",
        "31%  2 min 10 s left (1 min 40 s to 3 min 20 s)\n",
        "  cluster 1 ",
        "  > device-1-1",
        "bottleneck, 87% busy: the processor of device-0-1",
        "  waits for: cluster 0, step 3: edge-server waits for frames",
        "  idle: device-0-idle, device-1-idle\n",
        "  plan of round 2: device-0-1 takes block 2 from device-0-0 (predicted: 6.2 s",
        "without this change)\n",
        "  rounds 1: 12.5 s",
        "50% busy",
    ):
        assert part in text, text
    wide = ["212 of 500 MB", "-> 12.3 <- 3.1 Mbit/s of 20"]
    assert all(
        part in text for part in (wide if width == 140 else ["212/500 MB ->12.3 <-3.1 Mbit/s"])
    )
    # Only the line of what is waited for may end with dots.
    assert [line for line in lines if "…" in line and "waits for" not in line] == []


def test_memory_of_a_large_device_is_in_gigabytes() -> None:
    view, snapshot = _large(1, 1)
    snapshot["details"]["0"]["pipeline"][1] |= {"limit_bytes": 12e9, "needs_bytes": 3.1e8}
    snapshot["details"]["0"]["pipeline"][2] |= {"limit_bytes": None, "memory_bytes": 1.234e9}
    text = "\n".join(_picture(view, 80, 40, snapshot))
    assert "0.31/12 GB" in text and " 1234 MB" in text


@pytest.mark.parametrize(("num_clusters", "num_devices"), [(1, 60), (2, 40), (40, 3)])
@pytest.mark.parametrize("width", [80, 140])
def test_picture_of_many_devices_fits_and_counts_the_others(
    width: int, num_clusters: int, num_devices: int
) -> None:
    view, snapshot = _large(num_clusters, num_devices)
    lines = _picture(view, width, 30, snapshot)
    assert len(lines) <= 30 and max(map(len, lines)) <= width
    shown = [
        line for line in lines if " busy " in line and "…" not in line and "more host" not in line
    ]
    counts = [int(line.split()[1]) for line in lines if " more host" in line]
    hidden = [int(line.split()[1]) for line in lines if " more clusters" in line]
    per_cluster = num_devices + 2
    assert any("> device-" in line for line in shown)
    in_shown = (num_clusters - sum(hidden)) * per_cluster
    assert len(shown) + sum(counts) == in_shown


def test_preparation_is_told_as_steps() -> None:
    events = [
        _status(JOB_STATE_PREPARING, 2.0 * index, message=name)
        for index, name in enumerate(PREPARATION[:3])
    ]
    lines = [" ".join(line.split()) for line in _picture(_view(*events), 80, 30)]
    assert lines[1].startswith("starting processes") and lines[1].endswith("7 of 10")
    assert lines[2].startswith("looks for hosts") and lines[2].endswith("2.0 s")
    assert lines[4].startswith("making the model") and lines[4].endswith("0 s so far")
    assert lines[5].startswith("profiling devices")
    assert not any(
        "profiling" in line or "whole job" in line
        for line in _picture(_view(*events, _RUNNING, _STARTED), 80, 30)[2:]
    )


def test_reason_of_a_failure_and_a_wait_are_told_once() -> None:
    failure = "device-0 has sent no heartbeat for 10 s"
    trouble = JobTrouble(num_failures=1, failure=failure)
    messages = [
        f"attempt 2 looks for hosts, because the attempt before it failed: {failure}",
        "waits for device-0",
        "loading data",
    ]
    statuses = [_status(JOB_STATE_PREPARING, message=each, trouble=trouble) for each in messages]
    assert _lines(*statuses) == [
        "preparing: attempt 2 looks for hosts, because the attempt before it failed",
        "preparing: loading data",
    ]


def test_change_of_a_plan_is_a_line() -> None:
    changed = _started(round_index=1, change="device-0-1 takes block 2")
    last = _lines(_RUNNING, _STARTED, _COMMITTED, changed)[-1]
    assert "round 2" in last and last.endswith(": device-0-1 takes block 2")


@pytest.mark.parametrize("as_json", [False, True])
def test_events_go_to_standard_output_and_notes_elsewhere(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    display = make_display(as_json)
    display.note("waiting for the scheduler")
    display.show(_RUNNING)
    printed = capsys.readouterr()
    assert printed.err == "waiting for the scheduler\n"
    [line] = printed.out.splitlines()
    assert "running" in line


def test_plain_lines_say_how_many_processes_serve_only_when_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_view, "_SERVING_SECONDS", -1.0)
    file = io.StringIO()
    display = PlainDisplay(Console(file=io.StringIO()), Console(file=file, width=80))
    for num_serving in (1, 1, 1, 4, 4):
        display.serving(num_serving, 10)
    assert file.getvalue() == "1 of 10 processes serve\n4 of 10 processes serve\n"
