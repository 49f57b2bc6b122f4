"""The page of real schedulers: with the link of a local testbed, and with certificates in a deployment."""

import json
import os
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from reference.tiny_jobs import make_job
from unit.rpc.authorities import Authority

from collapipe.rpc import Security
from collapipe.v1 import scheduler_pb2
from collapipe_client import CollaPipeClient, LocalTestbed
from integration.running import run_job

LIMIT_SECONDS = 120.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


@pytest.fixture
def visitor(testbed: LocalTestbed) -> Iterator[httpx.Client]:
    """A browser that has opened the link of the testbed."""
    url, _, key = testbed.workspace.page_link().partition("#key=")
    with httpx.Client(base_url=url, trust_env=False, timeout=LIMIT_SECONDS) as client:
        own = {"Origin": url.rstrip("/"), "X-CollaPipe": "1"}
        assert client.post("/api/session", json={"key": key}, headers=own).status_code == 204
        yield client


def test_page_of_a_testbed_shows_a_job_from_its_queue_to_its_records(
    testbed: LocalTestbed, visitor: httpx.Client, tmp_path: Path
) -> None:
    seen: list[dict[str, Any]] = []

    def look(event: Any) -> None:
        if event.WhichOneof("event") in ("progress", "round_started"):
            seen.append(visitor.get("/api/state").json())

    job = make_job(tmp_path, devices_per_cluster=3, num_rows=(40,), training={"local_steps": 6})
    finished = run_job(testbed, job, on_event=look)
    during = [each for each in seen if each["details"]["0"]["pipeline"]]
    assert during, "the page has not shown the pipeline while the job ran"
    planned = [stage.host_id for stage in finished.plans(0)[0].stages]
    assert [host["id"] for host in during[0]["details"]["0"]["pipeline"]] == planned

    def status() -> dict[str, Any]:
        return next(one for one in look_at(finished.job_id)["jobs"] if one["id"] == finished.job_id)

    def look_at(job_id: str) -> dict[str, Any]:
        state: dict[str, Any] = visitor.get("/api/state", params={"job": job_id}).json()
        return state

    # The page looks at the jobs once a second.
    wait_for(lambda: status()["state"] == "succeeded", "the page shows the end of the job")
    assert (status()["committed"], status()["mine"]) == (2, True)
    state = look_at(finished.job_id)
    assert any(event["kind"] == "round_committed" for event in state["job"]["events"])
    page = visitor.get(f"/api/jobs/{finished.job_id}/rounds").json()
    assert [each["round"] for each in page["rounds"]] == [1, 2] and page["done"]
    losses = [loss for each in page["rounds"] for loss in each["losses"]]
    assert losses == pytest.approx(finished.losses(0), rel=1e-3)
    assert page["rounds"][1]["metrics"] == pytest.approx(
        {
            finished.evaluations[-1].metric: finished.evaluations[-1].value,
            **finished.evaluations[-1].other_metrics,
        },
        rel=1e-3,
    )
    trace = visitor.get(f"/api/jobs/{finished.job_id}/rounds/2/trace").json()
    assert {host["id"] for host in trace["hosts"]} >= set(planned)
    assert all(host["bars"] for host in trace["hosts"]) and not trace["missing"]


def test_page_of_a_testbed_is_for_its_user_only(
    testbed: LocalTestbed, visitor: httpx.Client
) -> None:
    url = str(visitor.base_url).rstrip("/")
    assert httpx.get(f"{url}/api/state", trust_env=False).status_code == 403
    assert visitor.get("/api/state", headers={"Host": "evil.example"}).status_code == 403
    for name in ("page.json", "page-secret"):
        path = testbed.workspace.state_dir("scheduler") / name
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.stat().st_uid == os.getuid()


def test_stream_tells_of_a_new_job_and_its_user_cancels_it(
    testbed: LocalTestbed, visitor: httpx.Client, tmp_path: Path
) -> None:
    # No cluster has so many devices, so the job waits.
    job = make_job(tmp_path, devices_per_cluster=9, name="waits-for-devices")
    with testbed.client() as client, visitor.stream("GET", "/api/stream") as stream:
        job_id = client.submit(job)
        for line in stream.iter_lines():
            changed = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if any(one["id"] == job_id for one in changed.get("jobs", ())):
                break
        own = {"Origin": str(visitor.base_url).rstrip("/"), "X-CollaPipe": "1"}
        assert visitor.post(f"/api/jobs/{job_id}/cancel").status_code == 403
        assert visitor.post(f"/api/jobs/{job_id}/cancel", headers=own).status_code == 204
        wait_for(
            lambda: client.find_job(job_id).state == scheduler_pb2.JOB_STATE_CANCELLED,
            "the job is cancelled",
        )
        assert visitor.post(f"/api/jobs/{job_id}/cancel", headers=own).status_code == 404


class Deployment:
    """A scheduler with mutual TLS, whose page is not on a loopback address."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        own = self.authority.security("scheduler:scheduler")
        ready = folder / "ready.json"
        line = [sys.executable, "-m", "collapipe.scheduler", f"--state-dir={folder / 'state'}"]
        line += [f"--tls-ca={own.ca}", f"--tls-cert={own.certificate}", f"--tls-key={own.key}"]
        # The test itself talks to it over loopback.
        line += ["--listen=127.0.0.1:0", "--web=0.0.0.0:0", f"--ready-file={ready}"]
        self.process = subprocess.Popen(line)
        wait_for(ready.exists, "the scheduler serves")
        self.address = json.loads(ready.read_text())["address"]
        page = json.loads((folder / "state" / "page.json").read_text())
        assert "link" not in page
        self.url = page["url"].replace("0.0.0.0", "127.0.0.1").rstrip("/")

    def visitor(self, holder: str | None = None) -> httpx.Client:
        """A browser with the certificate of a holder, or without one."""
        security = self.authority.security(holder or "client:me")
        context = security.client_context()
        assert context is not None
        if holder is None:
            context = ssl.create_default_context(cafile=str(security.ca))
        return httpx.Client(
            base_url=self.url, verify=context, trust_env=False, timeout=LIMIT_SECONDS
        )

    def security(self, holder: str) -> Security:
        return self.authority.security(holder)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("deployment"))
    yield deployment
    deployment.process.terminate()
    assert deployment.process.wait(30) == 0


def test_deployment_serves_https_and_people_cancel_their_own_jobs(
    deployment: Deployment, tmp_path: Path
) -> None:
    assert deployment.url.startswith("https://")
    with CollaPipeClient(deployment.address, deployment.security("client:me")) as client:
        job_id = client.submit(make_job(tmp_path, name="waits-for-hosts"))
    own = {"Origin": deployment.url, "X-CollaPipe": "1"}
    path = f"/api/jobs/{job_id}/cancel"
    for holder in (None, "client:other", "prometheus:prometheus"):
        with deployment.visitor(holder) as visitor:
            [status] = visitor.get("/api/state").json()["jobs"]
            assert (status["id"], status["owner"], status["mine"]) == (job_id, "client:me", False)
            refused = visitor.post(path, headers=own)
            assert refused.status_code == 403 and "client:me" in refused.json()["error"]
    with deployment.visitor("client:me") as visitor:
        assert visitor.get("/api/state").json()["jobs"][0]["mine"]
        assert visitor.post(path).status_code == 403  # Another site would not send the header.
        assert visitor.post(path, headers=own).status_code == 204
        wait_for(
            lambda: visitor.get("/api/state").json()["jobs"][0]["state"] == "cancelled",
            "the job is cancelled",
        )
        assert visitor.get("/", headers={"Host": "evil.example"}).status_code == 403
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(deployment.url.replace("https", "http"), trust_env=False)
