"""Tests that a job goes back to a kept commit, and goes on from there."""

from pathlib import Path

import pytest
from reference.tiny_jobs import make_job
from safetensors.torch import load_file
from stored_jobs import stored_commit

from collapipe.errors import NotFoundError, WrongStateError
from collapipe.job import JobConfig
from collapipe.rpc import open_channel
from collapipe.v1.edge_server_pb2 import RollBackRequest
from collapipe.v1.edge_server_pb2_grpc import EdgeServerServiceStub
from collapipe.v1.plan_pb2 import Commit
from collapipe.v1.scheduler_pb2 import HOST_ROLE_EDGE_SERVER, JOB_STATE_CANCELLED
from collapipe_client import LocalTestbed
from integration.running import FinishedJob, run_job


def make_rounds(folder: Path, name: str, rounds: int = 4, **training: object) -> JobConfig:
    """Returns a job whose rounds do not depend on their number."""
    settings = {"rounds": rounds, "replicate_every": 3, "decay": "constant", **training}
    return make_job(folder, name=name, devices_per_cluster=2, training=settings)


def read_commit(finished: FinishedJob) -> Commit:
    """Returns the present commit of the edge server."""
    return stored_commit(finished.state / "edge-server", finished.job_id)


def append_row(job: JobConfig) -> None:
    with open(job.data.train[0], "a", encoding="utf-8") as file:
        file.write('{"text": "a new row", "label": "thing"}\n')


def test_job_repeats_the_rounds_after_the_restore_point_bit_for_bit(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_rounds(tmp_path, "repeating")
    first = run_job(testbed, job)
    assert (first.commit.num_rounds, first.commit.restore_point.num_rounds) == (4, 3)
    append_row(job)  # The repeated round must not use it.
    with testbed.client() as client:
        answer = client.rollback(first.job_id, 3)
        assert not answer.begins_anew
        assert (answer.job.num_rounds_committed, answer.job.state) == (3, JOB_STATE_CANCELLED)
        assert client.find_job(first.job_id).num_rounds_committed == 3
        last = [event.status for event in client.watch(first.job_id)][-1]
        assert (last.num_rounds_committed, last.state) == (3, JOB_STATE_CANCELLED)
        hosts = client.stored(first.job_id)["hosts"]
    assert hosts["edge-server"]["last_commit"]["num_rounds"] == 3
    assert hosts["control-unit-0"]["round"][-1]["round"] == 4
    again = run_job(testbed, job, resume=True)
    assert [started.round_index for started in again.started] == [3]
    assert list(again.commit.global_units) == list(first.commit.global_units)
    assert list(again.commit.clusters) == list(first.commit.clusters)


def test_job_goes_on_from_another_kept_commit_with_new_optimizer_states(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_rounds(tmp_path, "anew", rounds=2)
    first = run_job(testbed, job)
    with testbed.client() as client:
        client.export(first.job_id, tmp_path / "before")
    job = make_rounds(tmp_path, "anew")
    longer = run_job(testbed, job, resume=True)
    assert longer.commit.restore_point.num_rounds == 3
    append_row(job)
    with testbed.client() as client:
        with pytest.raises(NotFoundError, match="keeps the weights after 2, 3, 4 rounds"):
            client.rollback(first.job_id, 1)
        answer = client.rollback(first.job_id, 2)
        assert answer.begins_anew
        assert answer.job.evaluation.num_rounds == 0, "the evaluated model is gone"
        client.export(first.job_id, tmp_path / "after")
        (answered,) = client.predict(first.job_id, ["a text"])
        assert answered.text
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)
    # The optimizer states of the last commit are copied to disks, so that this test can read them.
    copying = {"training": job.training.model_copy(update={"replicate_every": 2})}
    again = run_job(testbed, job.model_copy(update=copying), resume=True)
    assert [started.round_index for started in again.started] == [2, 3]
    assert again.commit.clusters[0].num_samples == longer.commit.clusters[0].num_samples + 1
    assert again.commit.clusters[0].step_index == longer.commit.clusters[0].step_index
    steps = {
        int(step) for name, step in again.optimizer_state(0).items() if name.endswith("//step")
    }
    assert steps == {2 * job.training.local_steps}


def test_job_is_resumed_or_goes_back_again_if_the_scheduler_did_not_see_the_new_commit(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_rounds(tmp_path, "unseen")
    first = run_job(testbed, job)
    with testbed.client() as client:
        edge = next(h.host for h in client.hosts() if h.host.role == HOST_ROLE_EDGE_SERVER)
        with open_channel(edge.address, testbed.security("scheduler")) as channel:
            request = RollBackRequest(job_id=first.job_id, num_rounds=2, attempt=1)
            list(EdgeServerServiceStub(channel).RollBack(request))
        unseen = read_commit(first)
        assert unseen.num_rounds == 2
        assert client.find_job(first.job_id).num_rounds_committed == 4
        answer = client.rollback(first.job_id, 2)
        assert (answer.begins_anew, answer.job.num_rounds_committed) == (True, 2)
        assert read_commit(first) == unseen
        with open_channel(edge.address, testbed.security("scheduler")) as channel:
            request = RollBackRequest(job_id=first.job_id, num_rounds=0, attempt=9)
            with pytest.raises(Exception, match="keeps the weights after 2 rounds"):
                list(EdgeServerServiceStub(channel).RollBack(request))
    again = run_job(testbed, job, resume=True)
    assert [started.round_index for started in again.started] == [2, 3]


def test_job_that_is_not_over_does_not_go_back(testbed: LocalTestbed, tmp_path: Path) -> None:
    job = make_rounds(tmp_path, "running", rounds=50)
    with testbed.client() as client:
        job_id = client.submit(job)
        with pytest.raises(WrongStateError, match=f"job {job_id} is .*wait for its end, or cancel"):
            client.rollback(job_id, 0)
        client.cancel(job_id)
        for _ in client.watch(job_id):
            pass
        with pytest.raises(NotFoundError, match="there is no job 'other'"):
            client.rollback("other", 0)
