"""Tests that certificates are renewed during a job, which ends with the same bits and without a failed attempt."""

import time
from collections.abc import Callable
from pathlib import Path

import httpx
from reference.tiny_jobs import make_job
from unit.rpc.authorities import serial_number, serial_number_on_disk

from collapipe.job import JobConfig
from collapipe.v1 import scheduler_pb2
from collapipe_client import CollaPipeClient
from integration.secured import HOLDERS, SecuredDeployment, collapipe

SERVICES = ("scheduler", "edge-server", "control-unit-0", "device-0-0", "device-0-1")
ROUNDS = 10


def train(
    client: CollaPipeClient, job: JobConfig, folder: Path, renew: Callable[[], None]
) -> bytes:
    """Trains in one attempt, renews after two rounds, and returns the model."""
    job_id = client.submit(job)
    status = scheduler_pb2.JobStatus()
    for event in client.watch(job_id):
        if event.HasField("status"):
            status = event.status
        elif event.HasField("round_started"):
            assert event.round_started.attempt == 0
        elif event.HasField("round_committed") and event.round_committed.num_rounds == 2:
            renew()
            assert client.find_job(job_id).num_rounds_committed <= ROUNDS - 3
    assert status.state == scheduler_pb2.JOB_STATE_SUCCEEDED, status
    client.export(job_id, folder)
    return (folder / "model.safetensors").read_bytes()


def test_job_goes_on_while_every_certificate_is_renewed(tmp_path: Path) -> None:
    job = make_job(tmp_path, devices_per_cluster=2, training={"rounds": ROUNDS, "local_steps": 1})
    folder = tmp_path / "secured"
    folder.mkdir()
    with SecuredDeployment(folder) as deployment, deployment.client() as client:
        undisturbed = train(client, job, tmp_path / "undisturbed", lambda: None)
        before = {name: serial_number_on_disk(deployment.security(name)) for name in SERVICES}
        assert train(client, job, tmp_path / "renewed", deployment.renew) == undisturbed
        caller = deployment.security("me")
        deadline = time.monotonic() + 60
        for name in SERVICES:
            shown = serial_number(deployment.addresses[name], caller)
            assert before[name] != shown == serial_number_on_disk(deployment.security(name))
            while "the certificate was renewed: known as" not in deployment.log(name):
                assert time.monotonic() < deadline, deployment.log(name)
                time.sleep(0.1)
            assert "is not used" not in deployment.log(name)


def test_issuing_authority_is_renewed_during_a_job_and_revoked_after_it(tmp_path: Path) -> None:
    job = make_job(tmp_path, devices_per_cluster=2, training={"rounds": ROUNDS, "local_steps": 1})
    folder = tmp_path / "secured"
    folder.mkdir()

    def why_refused(name: str) -> str:
        """Returns why a host refuses an admin; empty if it does not."""
        try:
            deployment.metrics_page(name)
        except httpx.HTTPStatusError as error:
            return error.response.text
        return ""

    with SecuredDeployment(folder) as deployment:
        authority = str(deployment.authority)
        medium = str((deployment.authority / "root").rename(tmp_path / "medium"))

        def renew() -> None:
            collapipe("certs", "issuing", authority, "--root", medium)
            # Some hosts get certificates of the new issuing authority, and others keep theirs.
            line = ("certs", "issue", authority, "scheduler:scheduler", "device-agent:device-0-0")
            collapipe(*line, "--address", "127.0.0.9")

        with deployment.client() as client:
            train(client, job, tmp_path / "renewed", renew)
        assert not any(map(why_refused, SERVICES))
        collapipe("certs", "issuing", authority, "--root", medium, "--revoke")
        deadline = time.monotonic() + 60
        while not all("issuing authority" in why_refused(name) for name in SERVICES):
            assert time.monotonic() < deadline, {name: why_refused(name) for name in SERVICES}
            time.sleep(0.5)
        collapipe("certs", "issue", authority, *HOLDERS)
        assert not any(map(why_refused, SERVICES))
        scheduler = deployment.log("scheduler")
        with deployment.client() as client:
            while [one.host.host_id for one in client.hosts() if not one.alive] != ["device-0-1"]:
                assert time.monotonic() < deadline, scheduler
                time.sleep(0.5)
