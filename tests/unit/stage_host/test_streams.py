import contextlib
import math
import threading
import time
from collections.abc import Callable

import pytest
import torch
from prometheus_client import REGISTRY
from torch import Tensor

from collapipe.errors import CollapipeError, InvalidInputError, PeerLostError, WrongStateError
from collapipe.job import TrainingConfig
from collapipe.models import Head, ModelAdapter
from collapipe.rpc import streams
from collapipe.stage_host.session import StageSession
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.stage_runtime.stage_context import dropout_key
from collapipe.tensors import Frame, FrameAssembler, FrameKind, encode_frame
from collapipe.tensors.encoding import LOSSY_CODECS
from collapipe.v1.stage_pb2 import (
    FRAME_KIND_BACKWARD,
    FRAME_KIND_FORWARD,
    FRAME_KIND_GENERATE,
    FRAME_KIND_LABELS,
    FrameHeader,
    OpenLink,
    RunStageRequest,
    RunStep,
)
from collapipe.v1.tensor_pb2 import CODEC_FP32, CODEC_INT8, DATA_TYPE_FLOAT32, Codec, TensorHeader

from .stage_hosts import (
    CLUSTER,
    LABELS,
    NeighbourStream,
    Session,
    StageHost,
    StreamPart,
    activation_frame,
)


@pytest.fixture(autouse=True)
def _frequent_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SIGN_OF_LIFE_SECONDS", 0.02)


@pytest.fixture
def session(host: StageHost) -> Session:
    return host.ready()


@pytest.fixture
def stream(host: StageHost, session: Session) -> NeighbourStream:
    return host.stream(host.opening(session.configure))


def test_step_over_a_stream_gives_the_numbers_of_a_plain_loop(
    bert: ModelAdapter,
    bert_states: list[dict[str, Tensor]],
    session: Session,
    stream: NeighbourStream,
) -> None:
    frame = activation_frame()
    session.run_step(0)
    # Labels count only if they come from the control unit.
    stream.send_frame(frame.with_tensors({**frame.tensors, "labels": torch.tensor([2, 2, 2])}))
    done = session.expect("step_done").step_done
    gradient = stream.receive()

    activation = frame.tensors["activation"].clone().requires_grad_()
    units = [bert.build_unit(index) for index in range(1, 5)]
    passed = activation
    for index, (unit, state) in enumerate(zip(units, bert_states[1:], strict=True), start=1):
        unit.load_state_dict(state)
        unit.train()
        torch.manual_seed(dropout_key(0, CLUSTER, 0, 0, 0, index))
        if isinstance(unit, Head):
            side = {**frame.tensors, "labels": LABELS}
            passed = unit.loss_sum(passed, side, TrainingConfig().label_smoothing) / 3
        else:
            passed = unit(passed, frame.tensors)
    passed.backward()
    assert done.loss == passed.item()
    assert gradient is not None
    assert (gradient.kind, gradient.step_index, gradient.micro_batch) == (FrameKind.BACKWARD, 0, 0)
    assert activation.grad is not None
    assert torch.equal(gradient.tensors["activation"], activation.grad)
    norm = math.fsum(
        torch.linalg.vector_norm(p.grad, dtype=torch.float64).item() ** 2
        for unit in units
        for p in unit.parameters()
        if p.grad is not None
    )
    assert math.fsum(done.squared_gradient_norms) == norm


def test_frames_that_arrive_before_their_step_wait_for_it(
    session: Session, stream: NeighbourStream
) -> None:
    for number in range(2):
        stream.send_frame(activation_frame(number))
    session.run_step(0, num_micro_batches=2)
    session.expect("step_done")
    answers = [stream.receive(), stream.receive()]
    assert [answer.micro_batch for answer in answers if answer] == [0, 1]


def test_both_directions_use_the_codec_and_the_rate_of_the_plan(host: StageHost) -> None:
    configure = host.configure()
    limit = 4_000_000
    configure.plan.links.add(codec=CODEC_INT8, rate_limit_bps=limit)
    session = host.open(configure)
    session.expect("configured")
    stream = host.stream(host.opening(configure))
    session.run_step(0)
    stream.send_frame(activation_frame(), CODEC_INT8)
    session.expect("step_done")
    gradient = stream.receive()
    assert gradient is not None
    # With int8, the values of a row are multiples of 1/127 of its largest value.
    rows = gradient.tensors["activation"].reshape(-1, 16)
    steps = rows / (rows.abs().amax(dim=1, keepdim=True) / 127)
    assert torch.allclose(steps, steps.round(), atol=1e-3)
    assert stream.codecs == {"activation": CODEC_INT8}
    limits = {"link": "device-1>control-unit"}
    assert REGISTRY.get_sample_value("collapipe_link_rate_limit_bps", limits) == limit


def test_plan_with_an_unknown_codec_is_refused(host: StageHost) -> None:
    configure = host.configure()
    configure.plan.links.add(codec=9)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="link 0 of the plan has the codec 9"):
        host.open(configure).expect("configured")


# --- streams that do not belong to the attempt


def another_job(opening: OpenLink) -> None:
    opening.attempt.job_id = "other"


def another_round(opening: OpenLink) -> None:
    opening.attempt.round_index = 1


def another_attempt(opening: OpenLink) -> None:
    opening.attempt.attempt = 1


def another_plan(opening: OpenLink) -> None:
    opening.attempt.plan_id = "other"


def another_stage(opening: OpenLink) -> None:
    opening.stage_index = 0


def another_cluster(opening: OpenLink) -> None:
    opening.cluster_index = CLUSTER + 1


@pytest.mark.parametrize(
    "change",
    [another_job, another_round, another_attempt, another_plan, another_stage, another_cluster],
)
def test_stream_of_another_attempt_is_refused_and_changes_nothing(
    host: StageHost, session: Session, change: Callable[[OpenLink], None]
) -> None:
    opening = host.opening(session.configure)
    change(opening)
    stranger = host.stream(opening)
    stranger.send_frame(activation_frame(1))
    with pytest.raises(WrongStateError, match=r"device-1 expects no stream to stage \d of round"):
        stranger.receive()
    session.run_step(0)
    host.stream(host.opening(session.configure)).send_frame(activation_frame(0))
    assert session.expect("step_done").step_done.loss > 0


def test_second_stream_is_refused_and_the_first_continues(
    host: StageHost, session: Session, stream: NeighbourStream
) -> None:
    stream.send_frame(activation_frame())
    session.run_step(0)
    session.expect("step_done")
    with pytest.raises(WrongStateError, match="expects no stream"):
        host.stream(host.opening(session.configure)).receive()
    answer = stream.receive()
    assert answer is not None
    assert answer.kind is FrameKind.BACKWARD


def test_stream_of_a_replaced_attempt_changes_nothing(
    host: StageHost, session: Session, stream: NeighbourStream
) -> None:
    stream.send_frame(activation_frame(1))
    new = host.ready(1)
    late = host.stream(host.opening(session.configure))
    with pytest.raises(WrongStateError, match="expects no stream"):
        late.receive()
    stream.send_frame(activation_frame(1))
    new.run_step(0)
    host.stream(host.opening(new.configure)).send_frame(activation_frame(0))
    new.expect("step_done")


def test_stream_after_the_end_of_its_session_is_refused(host: StageHost, session: Session) -> None:
    session.close()
    assert session.next() is None
    with pytest.raises(WrongStateError, match="expects no stream"):
        host.stream(host.opening(session.configure)).receive()


# --- damaged streams


def header(shape: list[int], byte_length: int) -> StreamPart:
    tensor = TensorHeader(
        name="activation",
        data_type=DATA_TYPE_FLOAT32,
        codec=CODEC_FP32,
        shape=shape,
        byte_length=byte_length,
    )
    return StreamPart(frame=FrameHeader(kind=FRAME_KIND_FORWARD, tensors=[tensor]))


def flipped() -> list[StreamPart]:
    made, chunks = encode_frame(activation_frame())
    data = [bytearray(chunk) for chunk in chunks]
    data[0][17] ^= 4
    return [StreamPart(frame=made), *(StreamPart(chunk=bytes(chunk)) for chunk in data)]


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (flipped(), "'activation' arrived with CRC-32"),
        ([StreamPart(chunk=b"abc")], "chunk of 3 bytes arrived outside any frame"),
        ([header([4], 16), header([4], 16)], "a new frame began while micro-batch 0"),
        ([header([1 << 40], 1 << 42)], "exceeds the limit of 9216"),
        ([header([16, 4, 36], 9216), header([2305], 9220)], "a new frame began while micro-batch"),
        ([header([2305], 9220)], "FORWARD with 9220 bytes exceeds the limit of 9216: the plan and"),
        (
            [StreamPart(frame=FrameHeader(kind=FRAME_KIND_GENERATE))],
            "a frame of kind GENERATE arrived, but its sender may only",
        ),
        ([StreamPart(frame=FrameHeader(kind=9))], "unknown kind 9"),  # type: ignore[arg-type]
        (
            [StreamPart(frame=FrameHeader(kind=FRAME_KIND_BACKWARD))],
            "a frame of kind BACKWARD arrived, but its sender may only",
        ),
        (
            [StreamPart(frame=FrameHeader(kind=FRAME_KIND_LABELS))],
            "a frame of kind LABELS arrived, but its sender may only",
        ),
        ([StreamPart(open=OpenLink())], "a stream carried open instead of a frame"),
        ([StreamPart()], "a stream carried an empty message instead of a frame"),
    ],
    ids=[
        "flipped bit",
        "stray chunk",
        "cut frame",
        "huge",
        "as large as allowed",
        "too large",
        "generation in a round",
        "kind",
        "wrong direction",
        "labels",
        "opening",
        "empty",
    ],
)
def test_damaged_stream_blames_the_sender_with_the_reason(
    session: Session, stream: NeighbourStream, parts: list[StreamPart], said: str
) -> None:
    session.run_step(0)
    for part in parts:
        stream.send(part)
    failed = session.expect("failed").failed
    assert said in failed.message
    assert failed.blamed_host_id == "control-unit"
    assert session.next() is None


def test_frame_of_another_step_fails_the_session(session: Session, stream: NeighbourStream) -> None:
    session.run_step(0)
    stream.send_frame(activation_frame(step=7))
    assert "got FORWARD of step 7, micro-batch 0, while" in session.expect("failed").failed.message


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (
            Frame(FrameKind.LABELS, 0, 1, {"labels": LABELS}),
            "got the labels of step 0, micro-batch 1",
        ),
        (Frame(FrameKind.LABELS, 0, 0, {"labels": LABELS.float()}), "as torch.float32 instead of"),
        (Frame(FrameKind.LABELS, 0, 0, {"labels": LABELS + 1}), "not all from 0 to 2"),
        (
            Frame(FrameKind.LABELS, 0, 0, {"labels": LABELS, "mask": LABELS}),
            "tensors labels, mask instead of",
        ),
        (
            Frame(FrameKind.FORWARD, 0, 0, {"labels": LABELS}),
            "FORWARD arrived, but its sender may only send LABELS",
        ),
    ],
)
def test_wrong_labels_fail_the_session(
    session: Session, stream: NeighbourStream, labels: Frame, said: str
) -> None:
    session.send(RunStageRequest(run_step=RunStep(num_micro_batches=1, num_targets=3)))
    session.send_labels(labels)
    stream.send_frame(activation_frame())
    assert said in session.expect("failed").failed.message


def test_stream_that_breaks_during_a_step_fails_the_session(
    session: Session, stream: NeighbourStream
) -> None:
    session.run_step(0, num_micro_batches=2)
    stream.send_frame(activation_frame(0))
    assert stream.receive() is not None
    stream.vanish()
    assert "previous stage broke its stream" in session.expect("failed").failed.message


def test_frame_that_this_host_cannot_use_is_told_with_its_reason(
    session: Session, stream: NeighbourStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = FrameAssembler.begin

    def refuse(assembler: FrameAssembler, header: FrameHeader) -> Frame | None:
        if header.kind == FRAME_KIND_FORWARD:
            raise RuntimeError("no such operation")
        return begin(assembler, header)

    session.run_step(0, num_micro_batches=2)
    monkeypatch.setattr(FrameAssembler, "begin", refuse)
    stream.send_frame(activation_frame(0))
    said = session.expect("failed").failed.message
    assert "could not use what the previous stage sent. On this host: RuntimeError: no such" in said


def test_stream_that_breaks_while_a_frame_is_decoded_is_named_as_broken(
    session: Session,
    stream: NeighbourStream,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begins, begin = threading.Event(), FrameAssembler.begin

    def begin_slowly(assembler: FrameAssembler, header: FrameHeader) -> Frame | None:
        if header.kind == FRAME_KIND_FORWARD:
            begins.set()
            time.sleep(0.5)
        return begin(assembler, header)

    session.run_step(0, num_micro_batches=2)
    monkeypatch.setattr(FrameAssembler, "begin", begin_slowly)
    stream.send_frame(activation_frame(0))
    assert begins.wait(30)
    stream.vanish()
    assert "previous stage broke its stream" in session.expect("failed").failed.message
    time.sleep(1)  # The thread that decodes ends later.
    assert "unexpectedly" not in caplog.text


def test_stream_that_breaks_after_the_last_step_lets_the_session_finish(
    session: Session, stream: NeighbourStream
) -> None:
    session.run_step(0)
    stream.send_frame(activation_frame())
    session.expect("step_done")
    stream.vanish()
    session.next_of_any_kind()  # a sign of life: meanwhile the host has noticed that the stream broke
    assert session.finish(1.0)


def test_stream_ends_with_its_session(session: Session, stream: NeighbourStream) -> None:
    session.run_step(0)
    stream.send_frame(activation_frame())
    session.expect("step_done")
    session.finish(1.0)
    session.close()
    answers: list[Frame | None] = [stream.receive(), stream.receive()]
    assert answers[1] is None


def test_failed_session_ends_its_stream(session: Session, stream: NeighbourStream) -> None:
    session.send(RunStageRequest())
    session.expect("failed")
    with contextlib.suppress(CollapipeError):
        assert stream.receive() is None


def test_previous_stage_that_takes_no_gradients_cannot_fill_the_memory(host: StageHost) -> None:
    session = StageSession(host.configure(), host.resources)
    session.configure()
    with pytest.raises(PeerLostError, match="control-unit has not taken 2 frames, but sent furth"):
        for step in range(3):  # The in-flight window of the previous stage is 2.
            session.mailbox.put(activation_frame(step=step))
            session.mailbox.put(Frame(FrameKind.LABELS, step, 0, {"labels": LABELS}))
            session.run_step(RunStep(step_index=step, num_micro_batches=1, num_targets=3))
    assert step == 2
    session.close()


def test_stream_that_begins_before_its_stage_is_configured_is_refused(host: StageHost) -> None:
    """Before, the stage does not know how large frames may be."""
    computing = host.ready()
    computing.run_step(0)
    with COMPUTE_LOCK:
        host.stream(host.opening(computing.configure)).send_frame(activation_frame())
        computing.waits_for_nothing()
        new = host.open(host.configure(1))  # It waits for its turn.
        new.next_of_any_kind()
        with pytest.raises(WrongStateError, match="expects no stream to stage 1"):
            host.stream(host.opening(new.configure)).receive()
    new.expect("configured")
    new.run_step(0)
    host.stream(host.opening(new.configure)).send_frame(activation_frame())
    new.expect("step_done")


@pytest.mark.parametrize("codec", [CODEC_FP32, *LOSSY_CODECS])
def test_every_codec_may_send_the_largest_micro_batch(host: StageHost, codec: Codec) -> None:
    """A row of the tiny model is half a tile of int4, and decoding makes whole tiles."""
    session = StageSession(host.configure(), host.resources)
    session.configure()
    rows, length = 16, 4
    tensors = {
        "activation": torch.randn(rows, length, 16),
        "attention_mask": torch.ones(rows, length, dtype=torch.int64),
    }
    header, _ = encode_frame(Frame(FrameKind.FORWARD, 0, 0, tensors), codec)
    FrameAssembler(session._frame_limits).begin(header)
    session.close()
