"""Tests a deployment with mutual TLS: it trains, and each host may do only what its role permits."""

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_server import PrometheusServer, eventually, running_prometheus
from reference.tiny_jobs import make_job
from unit.rpc.authorities import Unchecked

from collapipe.certificates import Role
from collapipe.errors import NotFoundError, NotPermittedError, PeerLostError
from collapipe.rpc import Security, call, open_channel, sign_grant
from collapipe.rpc.permissions import ANYBODY, PERMISSIONS
from collapipe.telemetry.sources.prometheus import PrometheusSource
from collapipe.v1 import (
    edge_server_pb2,
    edge_server_pb2_grpc,
    scheduler_pb2,
    stage_pb2_grpc,
    telemetry_pb2,
    telemetry_pb2_grpc,
    trace_pb2,
    trace_pb2_grpc,
)
from collapipe.v1.blob_pb2 import FetchBlobRequest
from collapipe.v1.blob_pb2_grpc import BlobServiceStub
from collapipe.v1.control_unit_pb2_grpc import ControlUnitServiceStub
from collapipe.v1.plan_pb2 import Attempt, Grant, Plan, SignedGrant, Stage
from collapipe.v1.scheduler_pb2_grpc import SchedulerServiceStub
from collapipe.v1.stage_pb2 import (
    ConfigureStage,
    ExchangeActivationsRequest,
    OpenLink,
    RunStageRequest,
)
from collapipe_client import LocalTestbed
from integration.secured import SecuredDeployment, collapipe

DEPLOY = Path(__file__).parents[2] / "deploy"
HOSTS = {"edge-server", "control-unit-0", "device-0-0", "device-0-1"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredDeployment]:
    with SecuredDeployment(tmp_path_factory.mktemp("secured")) as deployment:
        yield deployment


def ask(deployment: SecuredDeployment, security: Security, method: str, request: Any) -> Any:
    """Calls a method of the scheduler."""
    with open_channel(deployment.addresses["scheduler"], security, Role.SCHEDULER) as channel:
        return call(getattr(SchedulerServiceStub(channel), method), request, "the scheduler", 10)


def registration(
    host_id: str, role: scheduler_pb2.HostRole = scheduler_pb2.HOST_ROLE_DEVICE_AGENT
) -> scheduler_pb2.RegisterHostRequest:
    host = scheduler_pb2.Host(
        host_id=host_id, role=role, address="127.0.0.1:1", incarnation="another"
    )
    return scheduler_pb2.RegisterHostRequest(host=host)


def test_job_trains_over_mutual_tls_with_a_device_that_joined(
    deployment: SecuredDeployment, tmp_path: Path
) -> None:
    job = make_job(tmp_path, devices_per_cluster=2, training={"rounds": 2, "local_steps": 1})
    deadline = time.monotonic() + 60
    with deployment.client() as client:
        while {host.host.host_id for host in client.hosts() if host.alive} != HOSTS:
            assert time.monotonic() < deadline, {name: deployment.log(name) for name in HOSTS}
            time.sleep(0.1)
        job_id = client.submit(job)
        last = None
        for event in client.watch(job_id):
            last = event.status if event.HasField("status") else last
        assert last is not None and last.state == scheduler_pb2.JOB_STATE_SUCCEEDED, last
        (plan,) = client.plans(job_id, 0)
        assert {stage.host_id for stage in plan.stages} == HOSTS
        files = client.export(job_id, tmp_path / "model")
        assert client.evaluate(job_id, tmp_path / "held-out.jsonl").num_rows == 4
        assert [piece.is_last for piece in client.predict(job_id, ["road river"])] == [True]
        spans = {message.host_id: message for message in client.trace(job_id, 0)}
    assert any(path.name == "model.safetensors" for path in files)
    with deployment.client("other") as other:
        for asks in (
            lambda: other.cancel(job_id),
            lambda: other.delete(job_id),
            lambda: other.rollback(job_id, 1),
            lambda: other.export(job_id, tmp_path / "copy"),
            lambda: list(other.predict(job_id, ["road river"])),
            lambda: other.evaluate(job_id, tmp_path / "held-out.jsonl"),
        ):
            with pytest.raises(NotPermittedError, match=f"{job_id} belongs to client:me, and "):
                asks()
        with pytest.raises(NotFoundError, match="you have no job named"):
            other.submit(job, resume=True)
        with pytest.raises(NotFoundError, match="you have no job named"):
            other.check_resume(job)
        assert other.find_job(job_id).owner == "client:me"
    with deployment.client("root") as admin:
        assert admin.export(job_id, tmp_path / "model of the admin")
        admin.delete(job_id)
    assert set(spans) == HOSTS | {"scheduler"}
    assert all(message.spans and not message.missing for message in spans.values())


CALLERS = {
    Role.SCHEDULER: "scheduler",
    Role.EDGE_SERVER: "edge-server",
    Role.CONTROL_UNIT: "control-unit-0",
    Role.DEVICE_AGENT: "device-0-0",
    Role.CLIENT: "me",
    Role.ADMIN: "root",
    Role.PROMETHEUS: "prometheus",
}
SERVERS = {
    "SchedulerService": "scheduler",
    "ControlUnitService": "control-unit-0",
    "EdgeServerService": "edge-server",
    "StorageService": "edge-server",
}
"""Every other service is one of all stage hosts, or of several kinds of hosts."""


@pytest.mark.parametrize(
    # The authority asks for no certificate, and checks tokens.
    "service",
    [name for name, methods in PERMISSIONS.items() if ANYBODY not in methods.values()],
)
@pytest.mark.parametrize("role", CALLERS)
def test_each_role_may_call_what_the_table_says_even_before_it_sends_a_message(
    deployment: SecuredDeployment, service: str, role: Role
) -> None:
    methods = PERMISSIONS[service]
    address = deployment.addresses[SERVERS.get(service.rpartition(".")[2], "device-0-1")]
    expected = Role.SCHEDULER if "SchedulerService" in service else None
    with open_channel(address, deployment.security(CALLERS[role]), expected) as channel:
        refused = set()
        for method in methods:
            calling: Any = channel.stream_stream(f"/{service}/{method}")
            call = calling(iter(()), timeout=20)
            with suppress(grpc.RpcError):
                list(call)
            if call.code() is grpc.StatusCode.PERMISSION_DENIED:
                refused.add(method)
    assert refused == {method for method, roles in methods.items() if role not in roles}


def test_control_unit_of_another_cluster_can_neither_run_a_stage_nor_disturb_a_job(
    deployment: SecuredDeployment, tmp_path: Path
) -> None:
    holder = "control-unit:control-unit-9"
    collapipe("certs", "issue", str(deployment.authority), holder)
    stranger = deployment.security("control-unit-9")
    attempt = Attempt(job_id="job", round_index=2**31, attempt=2**31)
    stages = [
        Stage(host_id="control-unit-9", stop_unit=1),
        Stage(host_id="device-0-0", start_unit=1),
    ]
    grant = Grant(attempt=attempt, plan=Plan(stages=stages))
    for signed in (SignedGrant(grant=grant.SerializeToString()), sign_grant(stranger, grant)):
        configure = ConfigureStage(attempt=attempt, plan=grant.plan, stage_index=1, grant=signed)
        assert "grant" in refusal_of_session(deployment, stranger, configure)
    job = make_job(tmp_path, devices_per_cluster=2, training={"rounds": 1, "local_steps": 1})
    with deployment.client() as client:
        job_id = client.submit(job)
        states = [event.status.state for event in client.watch(job_id) if event.HasField("status")]
    assert states[-1] == scheduler_pb2.JOB_STATE_SUCCEEDED


def refusal_of_grant(deployment: SecuredDeployment, number: int) -> str:
    """Returns why a device refuses a grant of the scheduler, which never has the model of the session."""
    attempt = Attempt(job_id="over", plan_id="plan")
    stages = [
        Stage(host_id="control-unit-0", stop_unit=1),
        Stage(host_id="device-0-0", start_unit=1),
    ]
    grant = Grant(attempt=attempt, plan=Plan(stages=stages), number=number)
    configure = ConfigureStage(
        attempt=attempt,
        plan=grant.plan,
        stage_index=1,
        grant=sign_grant(deployment.security("scheduler"), grant),
    )
    return refusal_of_session(deployment, deployment.security("control-unit-0"), configure)


def refusal_of_session(
    deployment: SecuredDeployment, security: Security, configure: ConfigureStage
) -> str:
    """Returns why device-0-0 refuses a session."""
    with open_channel(deployment.addresses["device-0-0"], security) as channel:
        call = stage_pb2_grpc.StageServiceStub(channel).RunStage(
            iter([RunStageRequest(configure=configure)]), timeout=20
        )
        with pytest.raises(grpc.RpcError) as raised:
            next(call)
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    return str(raised.value.details())


def test_grant_of_an_attempt_that_is_over_is_refused(
    deployment: SecuredDeployment, tmp_path: Path
) -> None:
    job = make_job(tmp_path, devices_per_cluster=2, training={"rounds": 1, "local_steps": 1})
    with deployment.client() as client:
        job_id = client.submit(job)
        events = client.watch(job_id)
        while not next(events).HasField("round_started"):  # The attempt began before.
            pass
        number = int(1e6 * time.time())
        assert "must be those that the scheduler" in refusal_of_grant(deployment, number)
        states = [event.status.state for event in events if event.HasField("status")]
    assert states[-1] == scheduler_pb2.JOB_STATE_SUCCEEDED
    deadline = time.monotonic() + 20
    while "here grants count from" not in (said := refusal_of_grant(deployment, number)):
        assert "must be those that the scheduler has granted" in said
        assert time.monotonic() < deadline, said
    assert f"has the number {number}, but" in said
    later = int(1e6 * time.time()) + 120_000_000
    assert "must be those that the scheduler has granted" in refusal_of_grant(deployment, later)


def test_only_the_stage_before_may_open_a_stream_to_a_stage(
    deployment: SecuredDeployment, tmp_path: Path
) -> None:
    job = make_job(tmp_path, devices_per_cluster=2, training={"rounds": 1000, "local_steps": 20})
    deadline = time.monotonic() + 60
    code = None
    with deployment.client() as client:
        job_id = client.submit(job)
        try:
            # Between two rounds, no stage expects a stream.
            while code is not grpc.StatusCode.PERMISSION_DENIED:
                assert time.monotonic() < deadline, code
                (status,) = (one for one in client.jobs() if one.job_id == job_id)
                try:
                    (plan,) = client.plans(job_id, status.num_rounds_committed)
                except NotFoundError:  # This round is not planned yet.
                    continue
                attempt = Attempt(
                    job_id=job_id, round_index=status.num_rounds_committed, plan_id=plan.plan_id
                )
                # The stage before is the other device.
                opening = OpenLink(attempt=attempt, stage_index=2)
                with open_channel(
                    plan.stages[2].address, deployment.security("control-unit-0")
                ) as channel:
                    call = stage_pb2_grpc.StageServiceStub(channel).ExchangeActivations(
                        iter([ExchangeActivationsRequest(open=opening)]), timeout=20
                    )
                    with pytest.raises(grpc.RpcError) as raised:
                        next(call)
                code = raised.value.code()
                assert code in (
                    grpc.StatusCode.PERMISSION_DENIED,
                    grpc.StatusCode.FAILED_PRECONDITION,
                )
        finally:
            client.cancel(job_id)
    assert f"may not speak for '{plan.stages[1].host_id}'" in str(raised.value.details())


def test_job_that_names_another_file_of_the_control_unit_fails_and_says_so(
    deployment: SecuredDeployment, tmp_path: Path
) -> None:
    job = make_job(tmp_path, devices_per_cluster=2)
    data = job.data.model_copy(update={"train": "/etc/passwd", "held_out": None})
    with deployment.client() as client:
        job_id = client.submit(job.model_copy(update={"name": "reader", "data": data}))
        last = [event.status for event in client.watch(job_id) if event.HasField("status")][-1]
    assert last.state == scheduler_pb2.JOB_STATE_FAILED
    assert (
        "data.train names /etc/passwd, but on this host jobs may only read files in" in last.message
    )


def test_job_of_a_client_that_the_control_unit_does_not_name_gets_no_data(
    deployment: SecuredDeployment, tmp_path: Path
) -> None:
    with deployment.client("other") as client:
        job_id = client.submit(make_job(tmp_path, devices_per_cluster=2))
        last = [event.status for event in client.watch(job_id) if event.HasField("status")][-1]
    assert last.state == scheduler_pb2.JOB_STATE_FAILED
    assert "control-unit-0 refuses its data to client:other, because only me, root" in last.message


def test_process_takes_its_name_from_its_certificate(deployment: SecuredDeployment) -> None:
    assert "known as device-agent:device-0-0 until " in deployment.log("device-0-0")


def test_device_cannot_submit_a_job(deployment: SecuredDeployment, tmp_path: Path) -> None:
    request = scheduler_pb2.SubmitJobRequest(config_json=make_job(tmp_path).to_json())
    with pytest.raises(
        NotPermittedError,
        match=r"^device-agent:device-0-0 may not call .*/SubmitJob: .*, client may",
    ):
        ask(deployment, deployment.security("device-0-0"), "SubmitJob", request)


def test_client_cannot_register_as_a_host(deployment: SecuredDeployment) -> None:
    with pytest.raises(NotPermittedError, match=r"^client:me may not call .*/RegisterHost: .*"):
        ask(deployment, deployment.security("me"), "RegisterHost", registration("me"))


@pytest.mark.parametrize(
    ("method", "request_", "claimed"),
    [
        (
            "RegisterHost",
            registration("device-0-0", scheduler_pb2.HOST_ROLE_EDGE_SERVER),
            "edge-server:device-0-0",
        ),
        ("RegisterHost", registration("device-0-1"), "device-agent:device-0-1"),
        ("RegisterHost", registration("edge-server"), "device-agent:edge-server"),
        ("Heartbeat", scheduler_pb2.HeartbeatRequest(host_id="device-0-1"), "'device-0-1'"),
    ],
    ids=["as an edge server", "as another device", "under the name of another", "for another"],
)
def test_device_cannot_speak_for_another_host(
    deployment: SecuredDeployment, method: str, request_: Any, claimed: str
) -> None:
    with pytest.raises(NotPermittedError) as raised:
        ask(deployment, deployment.security("device-0-0"), method, request_)
    assert str(raised.value).startswith(
        f"device-agent:device-0-0 may not speak for {claimed}: the host id and the role"
    )
    with deployment.client() as client:
        assert all(host.host.address != "127.0.0.1:1" for host in client.hosts())


def test_device_cannot_register_in_another_cluster(deployment: SecuredDeployment) -> None:
    request = registration("device-0-0")
    request.host.cluster_index = 1
    with pytest.raises(NotPermittedError, match="may not be in cluster 1, because"):
        ask(deployment, deployment.security("device-0-0"), "RegisterHost", request)


def test_device_cannot_command_other_hosts(deployment: SecuredDeployment) -> None:
    device = deployment.security("device-0-0")
    with (
        open_channel(deployment.addresses["edge-server"], device) as channel,
        pytest.raises(NotPermittedError, match="/CommitRound: .*, scheduler may"),
    ):
        stub = edge_server_pb2_grpc.EdgeServerServiceStub(channel)
        call(
            lambda request, timeout: next(stub.CommitRound(request, timeout=timeout)),
            edge_server_pb2.CommitRoundRequest(),
            "the edge server",
            10,
        )
    with (
        open_channel(deployment.addresses["device-0-1"], device) as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        next(stage_pb2_grpc.StageServiceStub(channel).RunStage(iter(()), timeout=10))
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "control-unit may" in str(raised.value.details())


@pytest.mark.parametrize("caller", ["me", "device-0-0"])
def test_only_the_scheduler_reads_the_spans_and_metrics_of_a_host(
    deployment: SecuredDeployment, caller: str
) -> None:
    security = deployment.security(caller)
    with open_channel(deployment.addresses["device-0-1"], security) as channel:
        stub = trace_pb2_grpc.TraceServiceStub(channel)
        with pytest.raises(NotPermittedError, match="/ReadClock: .*, scheduler may"):
            call(stub.ReadClock, trace_pb2.ReadClockRequest(), "device-0-1", 10)
        with pytest.raises(grpc.RpcError) as raised:
            next(stub.GetSpans(trace_pb2.GetSpansRequest(), timeout=10))
        telemetry = telemetry_pb2_grpc.TelemetryServiceStub(channel)
        with pytest.raises(NotPermittedError, match="/GetMetrics: .*, scheduler may"):
            call(telemetry.GetMetrics, telemetry_pb2.GetMetricsRequest(), "device-0-1", 10)
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.fixture
def prometheus(deployment: SecuredDeployment, tmp_path: Path) -> Iterator[PrometheusServer]:
    """A server with the deployed configuration, whose targets are from `collapipe targets`."""
    tls = str(deployment.authority / "issued" / "prometheus")

    def with_certificate(path: str) -> str:
        return (DEPLOY / path).read_text(encoding="utf-8").replace("/etc/collapipe/tls", tls)

    config = yaml.safe_load(with_certificate("prometheus/prometheus.tls.yml"))
    (job,) = [one for one in config["scrape_configs"] if one["job_name"] == "collapipe"]
    del job["static_configs"]
    job["file_sd_configs"] = [{"files": ["targets.json"], "refresh_interval": "1s"}]
    web_config = tmp_path / "web.yml"
    web_config.write_text(with_certificate("kubernetes/components/prometheus/web.yml"))
    config |= {"scrape_configs": [job], "rule_files": []}
    context = deployment.security("me").client_context()
    with running_prometheus(tmp_path, config, web_config, context) as server:
        endpoint = ("--scheduler", deployment.addresses["scheduler"], *deployment.files("me"))
        collapipe("targets", str(tmp_path / "targets.json"), *endpoint)
        yield server


def test_prometheus_scrapes_all_hosts_until_its_key_is_revoked(
    deployment: SecuredDeployment, prometheus: PrometheusServer
) -> None:
    def health() -> dict[str, str]:
        """Returns the last error of each host, or an empty text."""
        return {
            one["labels"]["service"]: "" if one["health"] == "up" else one["lastError"] or "new"
            for one in prometheus.active_targets()
        }

    eventually(lambda: health() == dict.fromkeys(HOSTS, ""))
    # Renewed certificates interrupt nothing.
    deployment.renew()
    renewed = time.time()

    def scraped_since() -> set[str]:
        source = PrometheusSource(
            prometheus.url,
            deployment.security("scheduler").client_context,
            Role.PROMETHEUS.server_name,
        )
        return {series.instance for series in source.window(renewed, time.time())}

    eventually(lambda: len(scraped_since()) == len(HOSTS))
    assert health() == dict.fromkeys(HOSTS, "")

    collapipe("certs", "revoke", str(deployment.authority), "prometheus:prometheus")
    refused = "server returned HTTP status 403 Forbidden"
    eventually(lambda: health() == dict.fromkeys(HOSTS, refused))
    assert "the key of this certificate was revoked" in deployment.log("device-0-0")


def test_device_cannot_collect_a_trace(deployment: SecuredDeployment) -> None:
    security = deployment.security("device-0-0")
    with open_channel(deployment.addresses["scheduler"], security, Role.SCHEDULER) as channel:
        stub = SchedulerServiceStub(channel)
        with pytest.raises(grpc.RpcError) as raised:
            next(stub.GetTrace(scheduler_pb2.GetTraceRequest(), timeout=10))
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "client may" in str(raised.value.details())


@pytest.mark.parametrize(
    ("service", "stub", "method", "role"),
    [
        ("scheduler", SchedulerServiceStub, "UseModel", "client"),
        ("control-unit-0", ControlUnitServiceStub, "RunModel", "scheduler"),
    ],
)
def test_device_cannot_use_a_model(
    deployment: SecuredDeployment, service: str, stub: Any, method: str, role: str
) -> None:
    security = deployment.security("device-0-0")
    with (
        open_channel(deployment.addresses[service], security) as channel,
        pytest.raises(grpc.RpcError) as raised,
    ):
        next(getattr(stub(channel), method)(iter(()), timeout=10))
    assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert f"{role} may" in str(raised.value.details())


def test_certificate_of_another_authority_is_refused_and_the_log_says_so(
    deployment: SecuredDeployment, tmp_path: Path
) -> None:
    """A foreign certificate is refused, whether or not its owner trusts this deployment's authority."""
    other = tmp_path / "other"
    collapipe("certs", "issue", str(other), "--init", "device-agent:device-0-0", "client:me")
    stranger, ours = other / "issued" / "me", deployment.security("me")
    security = Unchecked(ours.ca, stranger / "cert.pem", stranger / "key.pem")
    with pytest.raises(PeerLostError, match="doctor` on both machines examines their certificates"):
        ask(deployment, security, "ListHosts", scheduler_pb2.ListHostsRequest())

    tls = other / "issued" / "device-0-0"
    files = [f"--tls-{name}={tls / f'{name}.pem'}" for name in ("ca", "cert", "key")]
    deployment.start(
        *("stranger", "collapipe.device_agent", *files),
        *("--scheduler", deployment.addresses["scheduler"]),
    )
    refusal = "its certificate is of another authority: both sides need certificates of one"
    deadline = time.monotonic() + 60
    while refusal not in deployment.log("stranger"):
        assert time.monotonic() < deadline, deployment.log("stranger")
        time.sleep(0.1)


def test_service_with_the_certificate_of_another_role_does_not_start(
    deployment: SecuredDeployment,
) -> None:
    name = "impostor"
    files = deployment.files("device-0-0")
    state = str(deployment.folder / "impostor-state")
    deployment.start(name, "collapipe.scheduler", "--state-dir", state, *files)
    with pytest.raises(AssertionError, match="is of device-agent:device-0-0, and this is a sched"):
        deployment.wait(name)


def test_service_takes_the_cluster_of_its_certificate(deployment: SecuredDeployment) -> None:
    collapipe("certs", "issue", str(deployment.authority), "device-agent:device-5-0@5")
    own = ["--scheduler", deployment.addresses["scheduler"], *deployment.files("device-5-0")]
    deployment.start("device-5-0", "collapipe.device_agent", *own, "--cluster-index", "4")
    with pytest.raises(AssertionError, match="--cluster-index 4 is not the cluster in --tls-cert "):
        deployment.wait("device-5-0")
    deployment.start("device-5-0", "collapipe.device_agent", *own)
    deployment.wait("device-5-0")
    with deployment.client() as client:

        def registered() -> bool:
            found = {status.host.host_id: status.host.cluster_index for status in client.hosts()}
            return found.get("device-5-0") == 5

        eventually(registered)


def test_all_hosts_refuse_a_revoked_key(deployment: SecuredDeployment) -> None:
    holder = "device-agent:device-6-0@6"
    collapipe("certs", "issue", str(deployment.authority), holder)
    stolen = deployment.security("device-6-0")

    def asks(name: str) -> str:
        """Returns why a host refuses to give the stolen device a blob."""
        with open_channel(deployment.addresses[name], stolen) as channel:
            fetch = BlobServiceStub(channel).FetchBlob
            try:
                next(fetch(FetchBlobRequest(digest="0" * 64), timeout=10))
            except grpc.RpcError as error:
                return str(error.details())
        return ""

    hosts = ("edge-server", "control-unit-0", "device-0-0", "device-0-1")
    assert not any("revoked" in asks(name) for name in hosts)
    collapipe("certs", "revoke", str(deployment.authority), holder)
    eventually(lambda: all("the key of this certificate was revoked" in asks(n) for n in hosts))
    with pytest.raises(NotPermittedError, match="the key of this certificate was revoked"):
        ask(deployment, stolen, "ListHosts", scheduler_pb2.ListHostsRequest())
    with deployment.client() as client:
        assert client.hosts()  # Everybody else goes on.


def test_another_user_of_this_machine_cannot_use_a_local_testbed(
    testbed: LocalTestbed, deployment: SecuredDeployment
) -> None:
    addresses = [process.address for process in testbed.processes]
    for stranger in (Security.insecure(), deployment.security("me")):
        for address in addresses:
            with open_channel(address, stranger) as channel, pytest.raises(grpc.RpcError) as raised:
                stub = telemetry_pb2_grpc.TelemetryServiceStub(channel)
                stub.GetMetrics(telemetry_pb2.GetMetricsRequest(), timeout=10)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
