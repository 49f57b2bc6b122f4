"""Strangers with idle connections stop neither a service at its limit of open files nor a running job."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from faults.interrupted import PATIENT_SECONDS, Run, make_interruptible_job, run_interrupted
from reference.tiny_jobs import make_job
from stored_jobs import StoredRow
from strangers import Strangers

from collapipe.errors import PeerLostError
from collapipe.rpc import Security
from collapipe.service_process import raise_open_files
from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe_client import CollaPipeClient, LocalTestbed

from .secured import collapipe

_LIMIT_SECONDS = 120.0
_USUAL_LIMIT = 1024


@contextmanager
def limited_files(soft: int) -> Iterator[None]:
    """Gives the processes that start within the block a soft limit of open files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        raise_open_files()


def wait_for(condition: Callable[[], bool], why: Callable[[], str]) -> None:
    deadline = time.monotonic() + _LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, why()
        time.sleep(0.05)


def answers(client: CollaPipeClient) -> bool:
    with suppress(PeerLostError):
        return client.jobs() == []
    return False


def test_service_with_few_descriptors_writes_files_and_serves_clients_meanwhile(
    tmp_path: Path,
) -> None:
    certificates, ready = tmp_path / "certificates", tmp_path / "ready.json"
    collapipe("certs", "issue", str(certificates), "--init", "scheduler:scheduler", "client:me")

    def security(name: str) -> Security:
        folder = certificates / "issued" / name
        return Security(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")

    own = security("scheduler")
    line = [sys.executable, "-m", "collapipe.scheduler", "--listen", "127.0.0.1:0"]
    line += [f"--tls-ca={own.ca}", f"--tls-cert={own.certificate}", f"--tls-key={own.key}"]
    line += ["--state-dir", str(tmp_path / "state"), "--ready-file", str(ready)]
    log = tmp_path / "log"
    with ExitStack() as started:
        output = started.enter_context(open(log, "wb"))
        # Soft and hard limit. The shell becomes the service.
        limited = ["sh", "-c", 'ulimit -n 256 && exec "$@"', "sh", *line]
        process = subprocess.Popen(limited, stdout=output, stderr=output)
        started.callback(process.wait, _LIMIT_SECONDS)
        started.callback(process.kill)
        wait_for(lambda: ready.exists() or process.poll() is not None, log.read_text)
        address = json.loads(ready.read_text())["address"]
        strangers = Strangers(address, 400)
        started.callback(strangers.close)
        assert strangers.have_tried_all.wait(_LIMIT_SECONDS)
        client = started.enter_context(CollaPipeClient(address, security("me")))
        # A newcomer tries again if all places are taken at this moment. Once it has called, it keeps its place.
        wait_for(partial(answers, client), log.read_text)
        job_id = client.submit(make_job(tmp_path / "job"))
        assert StoredRow(tmp_path / "state", "job", job_id).read()["job_id"] == job_id
        assert [job.job_id for job in client.jobs()] == [job_id]
        wait_for(lambda: "connections that had made no call" in log.read_text(), log.read_text)
        assert "Too many open files" not in log.read_text()


def test_running_job_goes_on_under_1100_idle_connections(tmp_path: Path) -> None:
    with ExitStack() as started:
        with limited_files(_USUAL_LIMIT):
            testbed = started.enter_context(LocalTestbed([3, 1], tmp_path / "testbed"))
        testbed.wait_until_registered()

        def attack(run: Run) -> None:
            attacked = [p for p in testbed.processes if p.name in ("scheduler", "edge-server")]
            assert len(attacked) == 2
            for process in attacked:
                strangers = Strangers(process.address, 1100)
                started.callback(strangers.close)
                assert strangers.have_tried_all.wait(_LIMIT_SECONDS)

        job = make_interruptible_job(tmp_path / "job", PATIENT_SECONDS, training={"rounds": 12})
        run = run_interrupted(testbed, job, lambda run: run.round_index == 1, attack)
        assert run.final_state == JOB_STATE_SUCCEEDED, run.message
        assert run.attempts == {0}, run.messages
        assert testbed.lost() == []
        with testbed.client() as newcomer:
            assert newcomer.jobs()
