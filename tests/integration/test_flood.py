"""Tests that messages of other attempts and random bytes do not disturb training devices: invariant I3."""

import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from faults.interrupted import (
    PATIENT_SECONDS,
    MomentMissedError,
    Run,
    final_digests,
    intact_commit,
    make_interruptible_job,
    run_interrupted,
    undisturbed_digests,
)

from collapipe.rpc import open_channel
from collapipe.v1.plan_pb2 import Attempt, SessionSettings, UnitState
from collapipe.v1.scheduler_pb2 import JOB_STATE_SUCCEEDED
from collapipe.v1.stage_pb2 import (
    FRAME_KIND_FORWARD,
    ConfigureStage,
    ExchangeActivationsRequest,
    FrameHeader,
    OpenLink,
    RunStageRequest,
)
from collapipe.v1.stage_pb2_grpc import StageServiceStub
from collapipe.v1.tensor_pb2 import CODEC_FP32, DATA_TYPE_FLOAT32, TensorHeader
from collapipe_client import LocalTestbed

_ROUNDS_OF_FLOOD = 50
"""How often each device gets four wrong calls."""


@pytest.fixture(scope="module")
def undisturbed(testbed: LocalTestbed, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return undisturbed_digests(testbed, tmp_path_factory.mktemp("data"))


def test_messages_of_other_attempts_change_nothing(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path
) -> None:
    statuses: list[grpc.StatusCode] = []
    while_training = 0

    def flood(run: Run) -> None:
        nonlocal while_training
        while_training = 0
        statuses.clear()
        old_job = Attempt(job_id=earlier_job.job_id, round_index=2, plan_id="of another job")
        old_round = Attempt(job_id=run.job_id, round_index=0, plan_id=run.plans[0].plan_id)
        other_plan = Attempt(job_id=run.job_id, round_index=1, plan_id="another")
        for stage_index, stage in enumerate(run.plans[0].stages[1:-1], start=1):
            # The certificate of the control unit that the devices serve, without a grant of the scheduler.
            with open_channel(stage.address, testbed.security("control-unit-0")) as channel:
                stub = StageServiceStub(channel)
                for number in range(_ROUNDS_OF_FLOOD):
                    configure = ConfigureStage(
                        attempt=(old_job, old_round)[number % 2],
                        plan=run.plans[0],
                        stage_index=stage_index,
                        units=[
                            UnitState(unit_index=unit)
                            for unit in range(stage.start_unit, stage.stop_unit)
                        ],
                        settings=SessionSettings(training_json="{}"),
                    )
                    attempt = (old_job, old_round, other_plan)[number % 3]
                    opening = OpenLink(attempt=attempt, stage_index=stage_index)
                    statuses.extend(
                        (
                            status_of(stub.RunStage(iter([RunStageRequest(configure=configure)]))),
                            status_of(stub.ExchangeActivations(garbled_link(opening))),
                            status_of(stub.ExchangeActivations(garbled_link(None))),
                            status_of(stub.RunStage(iter([RunStageRequest()]))),
                        )
                    )
                    while_training += not run.ended
        if while_training <= 10:
            raise MomentMissedError("the job ended before the flood")

    earlier_job = run_interrupted(testbed, make_interruptible_job(tmp_path / "1", PATIENT_SECONDS))
    assert earlier_job.final_state == JOB_STATE_SUCCEEDED, earlier_job.message
    run = run_interrupted(
        testbed,
        make_interruptible_job(tmp_path / "2", PATIENT_SECONDS),
        lambda run: run.round_index == 1,
        flood,
    )
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert run.attempts == {0}, run.messages
    assert final_digests(intact_commit(run)) == undisturbed
    assert len(statuses) == 3 * 4 * _ROUNDS_OF_FLOOD
    assert set(statuses) == {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
    }


def test_random_bytes_at_the_ports_change_nothing(
    testbed: LocalTestbed, undisturbed: list[str], tmp_path: Path
) -> None:
    draw = random.Random(1)
    stop = threading.Event()

    def send_random_bytes(address: str) -> None:
        host, _, port = address.rpartition(":")
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        while not stop.is_set():
            try:
                with socket.create_connection((host, int(port)), timeout=5) as connection:
                    connection.sendall(preface[: draw.choice([0, 7, 24])] + os.urandom(4096))
            except OSError:  # the server closes the connection, as it should
                pass
            stop.wait(0.02)

    addresses = [p.address for p in testbed.processes if p.name.startswith(("device", "edge"))]
    senders = [threading.Thread(target=send_random_bytes, args=(address,)) for address in addresses]
    for sender in senders:
        sender.start()
    try:
        run = run_interrupted(testbed, make_interruptible_job(tmp_path, PATIENT_SECONDS))
    finally:
        stop.set()
        for sender in senders:
            sender.join()
    assert run.final_state == JOB_STATE_SUCCEEDED, run.message
    assert run.attempts == {0}, run.messages
    assert final_digests(intact_commit(run)) == undisturbed
    assert testbed.lost() == []


def garbled_link(opening: OpenLink | None) -> Iterator[ExchangeActivationsRequest]:
    """Yields a frame with a wrong checksum, on a link that was opened wrongly or not at all."""
    if opening is not None:
        yield ExchangeActivationsRequest(open=opening)
    tensor = TensorHeader(
        name="activation",
        data_type=DATA_TYPE_FLOAT32,
        shape=[2, 2],
        codec=CODEC_FP32,
        byte_length=16,
        crc32=1,
    )
    header = FrameHeader(kind=FRAME_KIND_FORWARD, step_index=0, micro_batch=0, tensors=[tensor])
    yield ExchangeActivationsRequest(frame=header)
    yield ExchangeActivationsRequest(chunk=b"0123456789abcdef")


def status_of(call: Iterator[object]) -> grpc.StatusCode:
    """Returns the status code with which a streaming call ended."""
    try:
        for _ in call:
            pass
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK
