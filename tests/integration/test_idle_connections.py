"""Strangers with idle connections stop neither a service at its limit of open files nor a running job."""

import json
import resource
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from faults.interrupted import PATIENT_SECONDS, Run, make_interruptible_job, run_interrupted
from reference.tiny_jobs import make_job

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


class Strangers:
    """Keeps connections to a server open without a byte, until it is closed. Those that the server closes come again."""

    def __init__(self, address: str, number: int) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._selector = selectors.DefaultSelector()
        self._open: set[socket.socket] = set()
        self._number = number
        self._is_over = threading.Event()
        self.have_tried_all = threading.Event()
        self._thread = threading.Thread(target=self._connect, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(_LIMIT_SECONDS)
        for connection in self._open:
            connection.close()

    def _connect(self) -> None:
        while not self._is_over.is_set():
            for _ in range(self._number - len(self._open)):
                with suppress(OSError):  # The server takes no more for the moment.
                    connection = socket.create_connection(self._address, 1.0)
                    self._open.add(connection)
                    self._selector.register(connection, selectors.EVENT_READ)
                if self._is_over.is_set():
                    return
            self.have_tried_all.set()
            for key, _ in self._selector.select(0.1):
                connection = key.fileobj  # type: ignore[assignment]
                with suppress(OSError):
                    if connection.recv(4096):
                        continue
                self._selector.unregister(connection)
                self._open.discard(connection)
                connection.close()


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
        document = tmp_path / "state" / "jobs" / job_id / "job.json"
        assert json.loads(document.read_text())
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
