"""`collapipe trace` writes what every process did in a round of a real job."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

from reference.tiny_jobs import make_job
from typer.testing import CliRunner
from unit.client.traces import ReadTrace, Slice, read_trace

from collapipe_client import LocalTestbed
from collapipe_client.cli import app
from integration.running import FinishedJob, run_job

MICRO_BATCHES, STEPS = 4, 2


def traced(testbed: LocalTestbed, job_id: str, number: int, file: Path) -> tuple[Any, ReadTrace]:
    """Runs the command, and returns what it printed and the slices in its file."""
    result = CliRunner().invoke(
        app,
        [
            *("trace", str(number), "--job", job_id, "--output", str(file), "--json"),
            *testbed.endpoint_options,
        ],
    )
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout), read_trace(file)


def covered(slices: list[Slice], begin: int, end: int) -> float:
    """Returns the share of an interval that lies in some slice."""
    total, until = 0, begin
    for each in sorted(slices, key=lambda each: each.start):
        total += max(0, min(each.end, end) - max(each.start, until))
        until = max(until, each.end)
    return total / (end - begin)


def check_stage(trace: ReadTrace, host: str, cluster: int) -> None:
    """Checks the track on which one stage computes and waits."""
    track = [
        s for s in trace.slices if (s.host, s.track) == (host, f"compute for cluster {cluster}")
    ]
    outermost = [s for s in track if not s.depth]
    assert {s.category for s in track if s.depth} <= {"recompute"}
    # The writer gives spans that overlap a track of their own.
    assert not [
        s
        for s in trace.slices
        if s.host == host and s.track.startswith("compute") and "(" in s.track
    ]
    for earlier, later in itertools.pairwise(outermost):
        assert earlier.end <= later.start
    done = Counter((s.category, s.values.get("step"), s.values.get("micro_batch")) for s in track)
    splits = not host.startswith("control-unit")
    for action in ("forward", "backward", *["weight"] * splits):
        passes = {key: count for key, count in done.items() if key[0] == action}
        assert passes == {
            (action, step, number): 1 for step in range(STEPS) for number in range(MICRO_BATCHES)
        }
    assert sum(s.category == "update" for s in track) == STEPS
    [training] = [
        s for s in trace.slices if s.host == f"control-unit-{cluster}" and s.name == "train"
    ]
    assert covered(outermost, training.start, training.end) > 0.5


def test_trace_has_every_micro_batch_of_every_stage(testbed: LocalTestbed, tmp_path: Path) -> None:
    job = make_job(
        tmp_path,
        num_rows=(21, 21),
        devices_per_cluster=[3, 1],
        training={"recompute": True, "split_backward": True, "local_steps": STEPS},
        schedule={"num_micro_batches": MICRO_BATCHES},
        name="traced",
    )
    finished = run_job(testbed, job)
    said, trace = traced(testbed, finished.job_id, 2, tmp_path / "round.pftrace")
    pipelines = [[stage.host_id for stage in finished.plans(index)[1].stages] for index in range(2)]
    hosts = {host for pipeline in pipelines for host in pipeline} | {"scheduler"}
    assert set(said["hosts"]) == {s.host for s in trace.slices} == hosts
    assert not said["missing"]
    assert said["spans"] == len(trace.slices)
    with testbed.client() as client:
        for message in client.trace(finished.job_id, 1):
            # All processes have the clock of this machine, so the true offset is 0.
            assert abs(message.clock_offset_seconds) <= message.clock_uncertainty_seconds

    for cluster, pipeline in enumerate(pipelines):
        for host in pipeline:
            check_stage(trace, host, cluster)
        check_frames(trace, pipeline)
        check_weights(trace, finished, cluster)
    check_rounds(trace)


def check_frames(trace: ReadTrace, pipeline: list[str]) -> None:
    """Checks the two ends of every frame, and the arrow between them."""
    for pair in itertools.pairwise(pipeline):
        for kind, (sender, receiver) in (("forward", pair), ("backward", pair[::-1])):
            sent, received = (
                [
                    s
                    for s in trace.slices
                    if (s.host, s.track, s.category) == (host, f"{way} {peer}", way.split()[0])
                    and s.name.split()[1] == kind
                ]
                for host, way, peer in (
                    (sender, "send to", receiver),
                    (receiver, "receive from", sender),
                )
            )
            assert len(sent) == len(received) == MICRO_BATCHES * STEPS
            assert all(s.values["link"] == f"{sender}>{receiver}" for s in (*sent, *received))
            assert all(s.values["bytes"] for s in sent) and all(s.values["codec"] for s in sent)
            ends = {s.flows[0]: s for s in received}
            assert len(ends) == len(received)
            for s in sent:
                end = ends[s.flows[0]]
                assert s.values["bytes"] == end.values["bytes"]
                assert s.name.split()[1:] == end.name.split()[1:]


def check_weights(trace: ReadTrace, finished: FinishedJob, cluster: int) -> None:
    """Checks that each unit reached the edge server in one push, from the host that trained it."""
    for stage in finished.plans(cluster)[1].stages[:-1]:
        pushed = [s for s in trace.slices if s.host == stage.host_id and s.category == "push"]
        assert [s.values["unit"] for s in pushed] == list(range(stage.start_unit, stage.stop_unit))
        assert all(s.values["bytes"] for s in pushed)


def check_rounds(trace: ReadTrace) -> None:
    """Checks that the phases cover the round, and those of the control units lie in it."""
    phases = [s for s in trace.slices if (s.host, s.track) == ("scheduler", "round")]
    assert [s.name for s in phases] == ["plan", "run", "commit"]
    begin, end = phases[0].start, phases[-1].end
    assert begin == 0
    assert covered(phases, begin, end) > 0.5
    names = ["configure", "train", "finish"]
    for cluster in range(2):
        own = [s for s in trace.slices if (s.host, s.track) == (f"control-unit-{cluster}", "round")]
        assert [s.name for s in own] == names
        assert covered(own, own[0].start, own[-1].end) > 0.5
    # A later commit only says that a restore point is complete.
    commit = next(s for s in trace.slices if s.host == "edge-server" and s.name == "commit")
    averaged = [s for s in trace.slices if s.category == "average"]
    assert averaged and all(s.end <= commit.end for s in averaged)


def test_trace_of_a_round_that_no_host_remembers_says_why(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    finished = run_job(testbed, make_job(tmp_path, devices_per_cluster=1, training={"rounds": 1}))
    arguments = ["--job", finished.job_id, *testbed.endpoint_options]
    result = CliRunner().invoke(app, ["trace", "7", *arguments])
    assert result.exit_code == 2
    assert "round" in result.stderr and not list(tmp_path.glob("*.pftrace"))
