"""Tests that kill a device while a model is used: the error names it, and later uses and jobs work."""

import time
from pathlib import Path

import pytest
from integration.running import run_job
from killed_processes import kill, restart
from reference.tiny_jobs import make_job

from collapipe.errors import PeerLostError
from collapipe.v1.model_use_pb2 import AnswerPiece
from collapipe_client import CollaPipeClient, LocalTestbed

LONG = {"n_positions": 2000}


def tokens(pieces: list[AnswerPiece]) -> list[int]:
    return [token for piece in pieces for token in piece.tokens]


def wait_until_dead(client: CollaPipeClient, host_id: str) -> None:
    deadline = time.monotonic() + 60
    while any(host.alive for host in client.hosts() if host.host.host_id == host_id):
        assert time.monotonic() < deadline, f"{host_id} still counts as alive after 60 s"
        time.sleep(0.1)


def test_killed_device_is_named_and_the_next_uses_and_jobs_work(
    testbed: LocalTestbed, tmp_path: Path
) -> None:
    job = make_job(
        tmp_path, "gpt2", "causal_lm", num_rows=(41,), devices_per_cluster=3, model_config=LONG
    )
    finished = run_job(testbed, job)
    victim = finished.plans(0)[-1].stages[2].host_id
    with testbed.client() as client:
        expected = tokens(list(client.predict(job.name, ["road river"], max_new_tokens=8)))
        pieces = client.predict(job.name, ["road river"] * 8, max_new_tokens=1900)
        next(pieces)
        kill(testbed, victim)
        with pytest.raises(PeerLostError, match=victim):
            list(pieces)
        wait_until_dead(client, victim)
        # Two devices are left, so the segments are others.
        assert tokens(list(client.predict(job.name, ["road river"], max_new_tokens=8))) == expected
        restart(testbed, victim)
        testbed.wait_until_registered()
        assert tokens(list(client.predict(job.name, ["road river"], max_new_tokens=8))) == expected
    assert run_job(testbed, job).commit.global_units == finished.commit.global_units
