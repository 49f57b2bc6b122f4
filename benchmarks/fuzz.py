"""Random messages to every method of every service, and random bytes to everything that reads bytes, beside a job that trains.

    python -m benchmarks.fuzz --messages 1000000

The services speak mutual TLS. Each method is called with the certificate of each role that may call it. These certificates belong to
holders that run no part of the job, so the job must go on. Prints tables in Markdown. A third of the calls that need a
grant of the scheduler have one, for a job that was made up for them. A control unit that the job does not use gets valid
requests for data, rounds and uses of another job.

The exit status is 1 in each of these cases:

- A call ended with a wrong status, or not in time.
- A pair of a method and a role got no message.
- A reader raised an unexpected error, or took a number that no host can mean.
- A server stopped or kept a call open. Or it grew by more than 300 MB in all, or by more than 30 MB in the second half.
- The job stopped.
"""

import argparse
import hashlib
import itertools
import math
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fuzzing import (  # noqa: E402
    Outcome,
    RandomCalls,
    RandomInputs,
    all_methods,
    read_random_bytes,
    take_turns,
)
from integration.secured import SecuredDeployment, collapipe  # noqa: E402
from reference.tiny_jobs import make_job  # noqa: E402
from stored_jobs import StoredRow, stored_commit  # noqa: E402
from unit.rpc.authorities import Authority  # noqa: E402
from unit.rpc.serving import CallContext  # noqa: E402

from collapipe.certificates import Identity, Role, pki  # noqa: E402
from collapipe.certificates.revoked_keys import parse_list  # noqa: E402
from collapipe.certificates.tokens import decode_token, encode_token  # noqa: E402
from collapipe.control_unit import stage_answers  # noqa: E402
from collapipe.documents import read_document  # noqa: E402
from collapipe.errors import CollapipeError, InvalidInputError  # noqa: E402
from collapipe.job import JobConfig  # noqa: E402
from collapipe.rpc import (  # noqa: E402
    check_masking_keys,
    check_push,
    grant_of,
    sign_grant,
    sign_masking_keys,
)
from collapipe.rpc.options import TELLS_VERSIONS  # noqa: E402
from collapipe.rpc.permissions import ANYBODY, PERMISSIONS  # noqa: E402
from collapipe.scheduler import round_answers  # noqa: E402
from collapipe.scheduler.job_documents import JobDocument  # noqa: E402
from collapipe.scheduler.scrape import read_page  # noqa: E402
from collapipe.secure_aggregation.keys import PublicKeys  # noqa: E402
from collapipe.tasks.vocabulary import parse_vocabulary  # noqa: E402
from collapipe.telemetry.known_hosts import KnownHost, KnownHosts  # noqa: E402
from collapipe.tensors.frames import Frame, FrameAssembler, FrameKind, encode_frame  # noqa: E402
from collapipe.v1 import (  # noqa: E402
    control_unit_pb2,
    control_unit_pb2_grpc,
    edge_server_pb2,
    enrollment_pb2,
    job_pb2,
    plan_pb2,
    secure_aggregation_pb2,
    stage_pb2,
    telemetry_pb2,
    tensor_pb2,
)
from collapipe.weights.tensor_blob import TensorBlob, load_tensors  # noqa: E402

HOLDERS = {
    Role.SCHEDULER: "scheduler:fuzz-scheduler",
    Role.EDGE_SERVER: "edge-server:fuzz-edge",
    Role.CONTROL_UNIT: "control-unit:fuzz-control@9",
    Role.DEVICE_AGENT: "device-agent:fuzz-device@9",
    Role.CLIENT: "client:fuzz-client",
    Role.ADMIN: "admin:fuzz-admin",
}
SERVERS = {
    "SchedulerService": "scheduler",
    "ControlUnitService": "control-unit-0",
    "EdgeServerService": "edge-server",
    "StorageService": "edge-server",
    "EnrollmentService": "authority",
}
"""Services that all stage hosts offer are called at device-0-1."""
_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    TELLS_VERSIONS,
]
"""A channel of the project would not send what is too large for the server. Each channel has a connection of its own."""
_SAMPLE_CLUSTER = 1
_SAMPLE_CONTROL_UNIT = f"control-unit-{_SAMPLE_CLUSTER}"
"""The job beside does not use its cluster, so it may load data and run rounds of another job."""
_THREADS = 8
_FIRST_GRANT = 1 << 62
"""The scheduler of the deployment has no larger number, so that these grants always count."""
PARTS = 10
"""Equal parts of the messages, or of the time if it does not suffice. Memory is measured after each."""
_MOST_GROWTH_BYTES = 300_000_000
_MOST_LATE_GROWTH_BYTES = 30_000_000
"""Most growth in the second half of a run. A leak of 200 bytes for each of 300,000 messages exceeds it."""
_START_SECONDS = 300.0
"""Longest time until a job commits its next rounds. A busy machine takes minutes to start all processes."""
_END_SECONDS = 60.0
"""Time in which the calls of every method must have ended once the job is cancelled."""


def main() -> None:
    """Sends and reads messages, and prints what became of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--messages",
        type=int,
        default=1_000_000,
        help="Half of them go to services, if the time suffices. The others are read in this process.",
    )
    parser.add_argument(
        "--seconds", type=float, default=1200.0, help="Longest time for all calls together."
    )
    parser.add_argument("--seed", default="1")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        outcomes = dict(
            fuzz_services(Path(name), options.messages // 2, options.seconds, options.seed)
        )
        left = options.messages - sum(outcome.messages for outcome in outcomes.values())
        outcomes |= fuzz_readers(Path(name), left, options.seed)
    print("| target | messages | outcomes | faults |\n|---|---|---|---|")
    for target, outcome in outcomes.items():
        print(f"| {target} | {outcome.messages} | {_list(outcome.codes)} | {len(outcome.faults)} |")
    kinds = sum((outcome.kinds for outcome in outcomes.values()), Counter[str]())
    print(f"\nmessages to services: {_list(kinds)}")
    print(f"{sum(outcome.messages for outcome in outcomes.values())} messages in all")
    for target, outcome in outcomes.items():
        for reason, messages in {reason: messages for reason, messages in outcome.faults}.items():
            print(f"{target}: {reason}: {[message.hex()[:400] for message in messages]}")
    sys.exit(any(outcome.faults for outcome in outcomes.values()))


def _list(numbers: Counter[str]) -> str:
    return ", ".join(f"{name} {number}" for name, number in numbers.items())


def fuzz_services(
    folder: Path, messages: int, seconds: float, seed: str
) -> Iterator[tuple[str, Outcome]]:
    """Yields what became of the calls of each method by each role, and then of the job and of the processes."""
    with SecuredDeployment(folder / "secured", num_clusters=2) as deployment, ExitStack() as owned:
        holders = {str(holder_of(role, method)) for method, role, _ in _targets()}
        collapipe("certs", "issue", str(deployment.authority), *holders, *HOLDERS.values())
        job = make_job(
            folder / "job",
            devices_per_cluster=2,
            training={"rounds": 100_000, "local_steps": 1},
            schedule={"strategy": "pipeline"},
        )
        client = owned.enter_context(deployment.client())
        sample = make_job(
            folder / "sample",
            devices_per_cluster=1,
            use_clusters=[_SAMPLE_CLUSTER],
            training={"rounds": 1, "local_steps": 1},
            schedule={"silence_seconds": 5},
        )
        sample_id = client.submit(sample)
        _wait_for_rounds(deployment, sample_id, 1)
        grants = owned.enter_context(Grants(deployment, sample, sample_id))
        job_id = client.submit(job)
        rounds = Counter[str]()
        _wait_for_rounds(deployment, job_id, 2)
        held = [deployment.memory()]
        calls: dict[str, RandomCalls] = {}
        for method, role, server in _targets():
            holder = holder_of(role, method)
            service = method.containing_service.name
            open_channel = partial(
                grpc.secure_channel,
                deployment.addresses[server],
                deployment.security(holder.name).channel_credentials(),
                _OPTIONS,
            )
            words = [holder.name, "127.0.0.1:1"]
            if role not in (Role.SCHEDULER, Role.ADMIN):  # They may do anything with the job.
                words.append(job_id)
            # A client would submit it, and a control unit would load its data in place of those of the job beside.
            if role not in (Role.CLIENT, Role.ADMIN) and service != "ControlUnitService":
                words.append(job.to_json())
            if server == _SAMPLE_CONTROL_UNIT:
                words += [sample_id, sample.to_json(), "client:me"]
            inputs = RandomInputs(
                f"{seed}/{method.full_name}/{role.value}/{server}",
                words,
                grants.messages(method.name, holder.name, server),
            )
            name = f"{service}/{method.name} as {role.value}"
            if server == _SAMPLE_CONTROL_UNIT:
                name += " at the idle control unit"
            channel = owned.enter_context(open_channel())
            calls[name] = RandomCalls(channel, open_channel, method, inputs)
        committed = client.find_job(job_id).num_rounds_committed
        line, started = deque(calls.values()), time.monotonic()
        for part in range(1, PARTS + 1):
            until = started + seconds * part / PARTS
            take_turns(line, _THREADS, messages * part // PARTS, until)
            held.append(deployment.memory())
        for name, made in calls.items():
            if not made.outcome.messages:
                made.outcome.faults.append(("got no message: give it more --seconds", []))
            yield name, made.outcome
        rounds["rounds meanwhile"] = client.find_job(job_id).num_rounds_committed - committed
        yield "the job beside", Outcome(codes=rounds)
        _wait_for_rounds(deployment, job_id, client.find_job(job_id).num_rounds_committed + 2)
        after = deployment.memory()
        for process in held[0]:
            yield f"MB of {process}", memory_outcome([each.get(process) for each in (*held, after)])
        logs = Outcome()
        for process in held[0]:
            for text in deployment.log(process).splitlines():
                if "unexpectedly" in text or "Traceback" in text:
                    logs.faults.append((f"{process}: {text}", []))
        yield "logs of the processes", logs
        client.cancel(job_id)
        open_calls = Outcome()
        for process, method in _calls_that_stay_open(deployment):
            open_calls.faults.append((f"{process}: a call of {method} does not end", []))
        yield "calls that stay open", open_calls


def holder_of(role: Role, method: MethodDescriptor) -> Identity:
    """Returns who calls a method. Each one has a caller of its own, because a caller has a limited share of the processor."""
    holder = Identity.parse(HOLDERS[role])
    return replace(holder, name=f"{holder.name}-{method.name.lower()}")


def memory_outcome(held: Sequence[int | None]) -> Outcome:
    """Judges what a process held at the start, after each part of the messages and at the end; `None` where it had ended.

    Buffers, threads and the events that a job keeps fill up once, so that memory reaches a plateau. A leak goes on in the second half.
    """
    outcome = Outcome()
    for place, held_bytes in enumerate(held):
        if held_bytes is None:
            outcome.faults.append(("the process has ended", []))
            return outcome
        name = f"{100 * place // PARTS} %" if place <= PARTS else "at the end"
        outcome.codes[name] = round(held_bytes / 1e6)
    first, middle, last = (int(held[place] or 0) for place in (0, PARTS // 2, -1))
    for text, growth, most in (
        ("in all", last - first, _MOST_GROWTH_BYTES),
        ("in the second half", last - middle, _MOST_LATE_GROWTH_BYTES),
    ):
        if growth > most:
            outcome.faults.append((f"grew by {growth / 1e6:.0f} MB {text}", []))
    return outcome


class Grants:
    """Makes valid first messages, with grants of a scheduler where they need one. What they ask for has the model of a trained job.

    Args:
        sample: The trained job. Only the second cluster has its data.
        sample_id: Its id.
    """

    def __init__(self, deployment: SecuredDeployment, sample: JobConfig, sample_id: str) -> None:
        self._deployment = deployment
        self._sample = sample
        self._spec = job_pb2.JobSpec(job_id=sample_id, config_json=sample.to_json())
        edge_server = deployment.folder / "state" / "edge-server"
        model = StoredRow(edge_server, "job", sample_id).read()["model"]
        self._model = plan_pb2.ModelSpec(**model)
        self._commit = stored_commit(edge_server, sample_id)
        stored = StoredRow(deployment.folder / "scheduler-state", "job", sample_id)
        self._document = JobDocument.model_validate_json(stored.read_text())
        self._numbers = itertools.count(100)
        self._channel = grpc.secure_channel(
            deployment.addresses[_SAMPLE_CONTROL_UNIT],
            deployment.security("fuzz-scheduler").channel_credentials(),
            _OPTIONS,
        )

    def __enter__(self) -> "Grants":
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.close()

    def messages(
        self, method: str, holder: str, server: str
    ) -> Callable[[Callable[[Message], None]], Message] | None:
        """Returns what makes first messages of a method; `None` if random ones reach as much.

        Args:
            holder: The name of the caller.
            server: The process that is called.
        """
        makers: dict[str, Callable[[Callable[[Message], None], str], Message]] = {
            "RunStage": self._configure,
            "PushUnit": self._push,
        }
        if server == _SAMPLE_CONTROL_UNIT:
            makers = {"PrepareData": self._data, "RunRound": self._round, "RunModel": self._use}
        maker = makers.get(method)
        return None if maker is None else lambda change: maker(change, holder)

    def _data(self, change: Callable[[Message], None], holder: str) -> Message:
        request = self._data_request()
        change(request)
        return request

    def _data_request(self) -> control_unit_pb2.PrepareDataRequest:
        return control_unit_pb2.PrepareDataRequest(
            job=self._spec, vocabulary=self._vocabulary(), owner="client:me"
        )

    def _vocabulary(self) -> job_pb2.BlobSource:
        return job_pb2.BlobSource(
            digest=self._document.vocabulary_digest,
            address=self._deployment.addresses["edge-server"],
        )

    def _round(self, change: Callable[[Message], None], holder: str) -> Message:
        # Another call may have replaced the data.
        stub = control_unit_pb2_grpc.ControlUnitServiceStub(self._channel)
        try:
            for _ in stub.PrepareData(self._data_request()):
                pass
        except grpc.RpcError as error:
            # A later call may have begun to load the data.
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
        return self._round_request(change, is_use=False)

    def _use(self, change: Callable[[Message], None], holder: str) -> Message:
        start = control_unit_pb2.RunModelStart(round=self._round_request(change, is_use=True))
        start.use.prediction.texts.append("a quiet road")
        change(start.use)
        return control_unit_pb2.RunModelRequest(start=start)

    def _round_request(
        self, change: Callable[[Message], None], *, is_use: bool
    ) -> control_unit_pb2.RunRoundRequest:
        """Returns a request for a round of the trained job that is never committed, or for a use of its model."""
        base = plan_pb2.ClusterState()
        base.CopyFrom(self._commit.clusters[0])
        for unit in base.units:
            unit.optimizer_digest = ""
        number, num_units = next(self._numbers), len(base.units)
        hosts = [_SAMPLE_CONTROL_UNIT, f"device-{_SAMPLE_CLUSTER}-0", "edge-server"]
        bounds = [0, 1, num_units - 1, num_units]
        stages = [
            plan_pb2.Stage(
                host_id=host,
                address=self._deployment.addresses[host],
                start_unit=bounds[index],
                stop_unit=bounds[index + 1],
                in_flight=1,
            )
            for index, host in enumerate(hosts)
        ]
        links = [plan_pb2.LinkPlan(codec=tensor_pb2.CODEC_FP32) for _ in hosts[1:]]
        plan = plan_pb2.Plan(stages=stages, num_micro_batches=4, links=links)
        request = control_unit_pb2.RunRoundRequest(
            attempt=plan_pb2.Attempt(job_id=self._spec.job_id, round_index=1),
            job=self._spec,
            model=self._model,
            plan=plan,
            base=base,
            labels=self._document.labels,
            local_steps=0 if is_use else 1,
            edge_address=self._deployment.addresses["edge-server"],
            edge_host_id="edge-server",
            vocabulary=self._vocabulary(),
            restore_point=base,
            total_steps=2,
            is_use=is_use,
        )
        change(request)
        request.attempt.job_id, request.attempt.attempt = self._spec.job_id, number
        # Whatever has changed, the scheduler has granted it.
        cluster, request.plan.cluster_index = request.plan.cluster_index, 0
        grant = grant_of(request, self._sample, _FIRST_GRANT + number)
        request.plan.cluster_index = grant.plan.cluster_index = cluster
        request.grant.CopyFrom(self._sign(grant))
        return request

    def _configure(self, change: Callable[[Message], None], holder: str) -> Message:
        units = list(self._commit.global_units)
        grant = self._grant(holder)
        stage = stage_pb2.ConfigureStage(
            attempt=grant.attempt,
            plan=grant.plan,
            stage_index=1,
            model=self._model,
            settings=plan_pb2.SessionSettings(
                training_json=self._sample.training.model_dump_json(),
                total_steps=1,
                silence_seconds=5.0,
                max_length=self._sample.task.max_length,
            ),
            units=units[1:],
            host_cluster=grant.host_cluster,
        )
        edge = self._deployment.addresses["edge-server"]
        for unit in stage.units:
            stage.sources.add(unit_index=unit.unit_index, weights_addresses=[edge])
        change(stage)
        # A larger number would be the newest attempt for ever.
        stage.attempt.job_id, stage.attempt.attempt = grant.attempt.job_id, grant.attempt.attempt
        stage.host_cluster = grant.host_cluster
        # Whatever has changed, the scheduler has granted it.
        grant.attempt.CopyFrom(stage.attempt)
        grant.plan.CopyFrom(stage.plan)
        grant.settings.CopyFrom(stage.settings)
        model = stage.model.SerializeToString(deterministic=True)
        grant.model_sha256 = hashlib.sha256(model).digest()
        stage.grant.CopyFrom(self._sign(grant))
        return stage_pb2.RunStageRequest(configure=stage)

    def _push(self, change: Callable[[Message], None], holder: str) -> Message:
        grant = self._grant(holder)
        unit = edge_server_pb2.PushedUnit(attempt=grant.attempt, total_bytes=1000, num_samples=1)
        change(unit)
        unit.attempt.job_id, unit.attempt.attempt = grant.attempt.job_id, grant.attempt.attempt
        grant.attempt.CopyFrom(unit.attempt)
        grant.plan.cluster_index = unit.cluster_index
        unit.grant.CopyFrom(self._sign(grant))
        return edge_server_pb2.PushUnitRequest(unit=unit)

    def _grant(self, holder: str) -> plan_pb2.Grant:
        """Returns a grant of a new attempt, whose first stage is the caller."""
        number = next(self._numbers)
        attempt = plan_pb2.Attempt(job_id="made-up", attempt=number)
        stop = len(self._commit.global_units)
        stages = [
            plan_pb2.Stage(host_id=holder, address="127.0.0.1:1", stop_unit=1, in_flight=1),
            plan_pb2.Stage(
                host_id="device-0-1",
                address=self._deployment.addresses["device-0-1"],
                start_unit=1,
                stop_unit=stop,
                in_flight=1,
            ),
        ]
        plan = plan_pb2.Plan(stages=stages, num_micro_batches=1, links=[plan_pb2.LinkPlan()])
        # No job runs on this cluster, so no session of the job beside ends.
        return plan_pb2.Grant(
            attempt=attempt,
            plan=plan,
            host_cluster=9,
            edge_host_id="edge-server",
            edge_address=self._deployment.addresses["edge-server"],
            number=_FIRST_GRANT + number,
        )

    def _sign(self, grant: plan_pb2.Grant) -> plan_pb2.SignedGrant:
        """Signs a grant as a scheduler of the deployment."""
        return sign_grant(self._deployment.security("fuzz-scheduler"), grant)


def fuzz_readers(folder: Path, messages: int, seed: str) -> dict[str, Outcome]:
    """Returns what became of the bytes that each reader got."""
    found = dict(readers(folder))
    number = math.ceil(messages / len(found))
    return {
        name: read_random_bytes(
            read, samples, RandomInputs(f"{seed}/{name}"), (CollapipeError, *allowed), number
        )
        for name, (read, samples, allowed) in found.items()
    }


def _targets() -> Iterator[tuple[Any, Role, str]]:
    """Yields each method with each role that may call it, and a process that serves it. A caller of the authority needs no role,
    so one is enough. Methods of control units are called at two: one trains the job beside, and one is free for valid messages."""
    for method in all_methods():
        roles = PERMISSIONS[method.containing_service.full_name][method.name]
        for role in [Role.CLIENT] if roles == ANYBODY else sorted(roles):
            service = method.containing_service.name
            yield method, role, SERVERS.get(service, "device-0-1")
            if service == "ControlUnitService":
                yield method, role, _SAMPLE_CONTROL_UNIT


def _calls_that_stay_open(deployment: SecuredDeployment) -> set[tuple[str, str]]:
    """Returns each process and method of which no moment within `_END_SECONDS` was without a call."""
    until, busy = time.monotonic() + _END_SECONDS, _running_calls(deployment)
    while busy and time.monotonic() < until:
        time.sleep(0.2)
        busy &= _running_calls(deployment)
    return busy


def _running_calls(deployment: SecuredDeployment) -> set[tuple[str, str]]:
    running = Counter[tuple[str, str]]()
    signs = {"grpc_server_started_total": 1, "grpc_server_handled_total": -1}
    for process in deployment.memory():
        for family in text_string_to_metric_families(deployment.metrics_page(process)):
            for sample in family.samples:
                if sign := signs.get(sample.name):
                    running[process, sample.labels["grpc_method"]] += sign * int(sample.value)
    return {key for key, number in running.items() if number > 0}


def _wait_for_rounds(deployment: SecuredDeployment, job_id: str, number: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    with deployment.client() as client:
        while client.find_job(job_id).num_rounds_committed < number:
            if time.monotonic() > deadline:
                raise SystemExit(f"the job stopped: {client.find_job(job_id)}")
            time.sleep(0.2)


def readers(
    folder: Path,
) -> Iterator[tuple[str, tuple[Callable[[bytes], Any], list[bytes], tuple[type[Exception], ...]]]]:
    """Yields each function that reads bytes of others, with samples, and with the errors that its callers expect beside the
    project's own."""
    frame = Frame(FrameKind.FORWARD, 1, 2, {"activation": torch.ones(2, 3, 4)})
    header, chunks = encode_frame(frame)
    body = b"".join(chunks)

    def read_frame(data: bytes) -> None:
        length = int.from_bytes(data[:2], "big")
        try:
            parsed = stage_pb2.FrameHeader.FromString(data[2 : 2 + length])
        except DecodeError:  # The server refuses it before a handler sees it.
            parsed = header
        assembler = FrameAssembler()
        if assembler.begin(parsed) is None and data[2 + length :]:
            assembler.add(data[2 + length :])

    encoded = header.SerializeToString()
    yield "frames", (read_frame, [len(encoded).to_bytes(2, "big") + encoded + body], ())
    blob = b"".join(map(bytes, TensorBlob({"a": torch.ones(3, 4), "b": torch.zeros(2)}).read()))
    yield "blobs", (load_tensors, [blob], ())
    known = KnownHosts([KnownHost("device-0-0", "device-0-0:1", "0")])
    page = telemetry_pb2.GetMetricsResponse()
    for name in ("collapipe_stage_steps_total", "collapipe_link_transfer_bytes_total"):
        page.samples.add(name=name, value=3.0, labels={"link": "device-0-0>edge-server"})

    def read_telemetry(data: bytes) -> None:
        answer = telemetry_pb2.GetMetricsResponse.FromString(data)
        read_page(answer, "device-0-0", "device-0-0:1", known)

    yield "telemetry pages", (read_telemetry, [page.SerializeToString()], (DecodeError,))
    job = make_job(folder / "sample", devices_per_cluster=2)
    yield (
        "job files",
        (
            lambda data: JobConfig.from_json(data.decode(errors="replace")),
            [job.to_json().encode()],
            (),
        ),
    )
    key = pki.new_key()
    request = pki.build_request(Identity(Role.DEVICE_AGENT, "pi"), ["192.168.1.7"], key)
    yield "signing requests", (pki.read_request, [request], ())
    token = encode_token(
        enrollment_pb2.JoinToken(secret=bytes(32), identity=Identity(Role.DEVICE_AGENT, "pi").uri)
    )
    yield (
        "join tokens",
        (lambda data: decode_token(data.decode(errors="replace")), [token.encode()], ()),
    )
    revoked = enrollment_pb2.SignedRevokedKeys(keys=bytes(40), signature=bytes(70))
    yield "lists of revoked keys", (parse_list, [revoked.SerializeToString()], ())
    certificate = pki.build_root(key, pki.utc_now(), pki.datetime.timedelta(days=1))
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, "a")).to_str().encode()
    yield "vocabularies", (parse_vocabulary, [words], ())
    file = folder / "document.json"

    def read_file(data: bytes) -> None:
        file.unlink(missing_ok=True)  # To truncate a file may wait for the disk each time.
        file.write_bytes(data)
        document = read_document(file)
        if document is not None:
            JobDocument.model_validate(document)

    document = JobDocument(job_id="job-1", number=1, config_json=job.to_json())
    yield "documents", (read_file, [document.model_dump_json().encode()], (ValidationError,))
    yield "answers of stages", (_read_stage_answer, _stage_answers(), (DecodeError,))
    yield "answers of control units", (_read_round_answer, _round_answers(), (DecodeError,))
    authority = Authority(folder / "authority")
    scheduler, device = (authority.security(HOLDERS[role]) for role in _GRANTING)
    device.learn_least_grant(0)
    unit = edge_server_pb2.PushedUnit(attempt=_ATTEMPT, unit_index=1)
    stages = [plan_pb2.Stage(host_id="fuzz-device", stop_unit=2)]
    granted = plan_pb2.Grant(
        attempt=_ATTEMPT, plan=plan_pb2.Plan(stages=stages), edge_host_id="edge"
    )
    signed = sign_grant(scheduler, granted)

    def read_grant(data: bytes) -> None:
        unit.grant.ParseFromString(data)
        check_push(device, _CALLER, unit, "edge")
        if unit.grant.grant != signed.grant:
            raise AssertionError("a grant counts that the scheduler has not signed")

    yield "grants", (read_grant, [signed.SerializeToString()], (DecodeError,))
    control = authority.security("control-unit:fuzz-control")
    keys = sign_masking_keys(control, _ATTEMPT, 0, PublicKeys(bytes(32), bytes(32)))

    def read_masking_keys(data: bytes) -> None:
        found = secure_aggregation_pb2.SignedMaskingKeys.FromString(data)
        check_masking_keys(device, _ATTEMPT, [found], [0])
        if found.keys != keys.keys:
            raise AssertionError("masking keys count that the control unit has not signed")

    yield "masking keys", (read_masking_keys, [keys.SerializeToString()], (DecodeError,))
    yield "certificates", (pki.read_certificate, [pki.der(certificate), pki.pem(certificate)], ())
    yield "chains of certificates", (pki.read_chain, [2 * pki.pem(certificate)], ())


_RANDOM_ANSWERS = 300
"""Damaged bytes are seldom a message. So there are also so many whole ones, with the extreme values of each type."""
_ATTEMPT = plan_pb2.Attempt(job_id="job", attempt=1)
_GRANTING = (Role.SCHEDULER, Role.DEVICE_AGENT)
_CALLER: Any = CallContext("device-agent:fuzz-device")
_DIGEST = "0" * 64
_TIMES = stage_pb2.StageTimes(forward_seconds=1.0, backward_seconds=2.0, total_seconds=4.0)


def _stage_answers() -> list[bytes]:
    unit = plan_pb2.UnitState(unit_index=1, weights_digest=_DIGEST, optimizer_digest=_DIGEST)
    answers: list[dict[str, Message]] = [
        {"configured": stage_pb2.StageConfigured(fetched_bytes=9, fetch_seconds=1.5)},
        {"step_done": stage_pb2.StepDone(squared_gradient_norms=[1.0, 2.0], times=_TIMES)},
        {"finished": stage_pb2.RoundFinished(units=[unit], pushed_bytes=9, push_seconds=0.5)},
        {"progress": stage_pb2.StageProgress(waiting_for="a frame", moved_bytes=1 << 40)},
    ]
    made = [stage_pb2.RunStageResponse(**each).SerializeToString() for each in answers]  # type: ignore[arg-type]
    return [*made, *_random_messages(stage_pb2.RunStageResponse.DESCRIPTOR)]


def _read_stage_answer(data: bytes) -> None:
    answer = stage_pb2.RunStageResponse.FromString(data)
    _take(answer, stage_answers.mistake_in(answer, plan_pb2.Stage(start_unit=1, stop_unit=2)))


def _round_answers() -> list[bytes]:
    report = job_pb2.StageReport(host_id="device", busy_ratio=0.5, times=_TIMES)
    progress = job_pb2.RoundProgress(steps_done=1, loss=0.7, stages=[report], moved_bytes=7)
    unit = plan_pb2.UnitState(weights_digest=_DIGEST)
    state = plan_pb2.ClusterState(units=[unit], num_samples=9, step_index=1)
    summary = job_pb2.RoundSummary(losses=[0.7], gradient_norms=[1.5], training_seconds=2.0)
    prepared = control_unit_pb2.RoundPrepared(state=state, summary=summary)
    answers = (
        control_unit_pb2.RunRoundResponse(progress=progress),
        control_unit_pb2.RunRoundResponse(prepared=prepared),
    )
    made = [answer.SerializeToString() for answer in answers]
    return [*made, *_random_messages(control_unit_pb2.RunRoundResponse.DESCRIPTOR)]


def _random_messages(kind: Any) -> list[bytes]:
    inputs = RandomInputs(kind.name)
    return [inputs.message(kind).SerializeToString() for _ in range(_RANDOM_ANSWERS)]


def _read_round_answer(data: bytes) -> None:
    answer = control_unit_pb2.RunRoundResponse.FromString(data)
    plan = plan_pb2.Plan(stages=[plan_pb2.Stage(host_id="device")])
    request = control_unit_pb2.RunRoundRequest(plan=plan, local_steps=1)
    request.base.units.add()
    _take(answer, round_answers.mistake_in(answer, request, "classification", 9))


def _take(answer: Message, mistake: str) -> None:
    """Refuses an answer with a mistake. Raises `AssertionError` if one without a mistake has a number that no host can mean."""
    if mistake:
        raise InvalidInputError(mistake)
    for name, number in _numbers(answer):
        may_be_any = name in ("loss", "losses", "gradient_norms", "squared_gradient_norms")
        if not may_be_any and not 0 <= number <= 1e15:
            raise AssertionError(f"{number} was taken as {name}")


def _numbers(message: Message) -> Iterator[tuple[str, float]]:
    for field, value in message.ListFields():
        for each in value if field.is_repeated else [value]:
            if isinstance(each, Message):
                yield from _numbers(each)
            elif isinstance(each, (int, float)):
                yield field.name, each


if __name__ == "__main__":
    main()
