import contextlib
import queue
import re
import threading
from collections.abc import Callable

import pytest
import torch
from prometheus_client import REGISTRY
from torch import Tensor

from collapipe.errors import CollapipeError, PeerLostError, WrongStateError
from collapipe.job import TrainingConfig
from collapipe.models import Head, ModelAdapter
from collapipe.stage_host.session import StageSession
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.stage_runtime.stage_context import dropout_key
from collapipe.tensors import Frame, FrameAssembler, FrameKind, encode_frame
from collapipe.tensors.encoding import LOSSY_CODECS
from collapipe.v1.plan_pb2 import Attempt
from collapipe.v1.stage_pb2 import (
    FRAME_KIND_BACKWARD,
    FRAME_KIND_FORWARD,
    FRAME_KIND_GENERATE,
    FRAME_KIND_LABELS,
    FrameHeader,
    OpenLink,
    RunEvaluation,
    RunStageRequest,
    RunStep,
)
from collapipe.v1.tensor_pb2 import CODEC_FP32, CODEC_INT8, DATA_TYPE_FLOAT32, TensorHeader

from .stage_hosts import (
    CLUSTER,
    LABELS,
    NeighbourStream,
    Session,
    StageHost,
    StreamPart,
    activation_frame,
    train,
)


@pytest.fixture
def session(host: StageHost) -> Session:
    return host.ready()


@pytest.fixture
def stream(host: StageHost, session: Session) -> NeighbourStream:
    return host.stream(session.configure)


def test_step_over_a_stream_gives_the_numbers_of_a_plain_loop(
    bert: ModelAdapter,
    bert_states: list[dict[str, Tensor]],
    session: Session,
    stream: NeighbourStream,
) -> None:
    frame = activation_frame()
    session.run_step(0)
    stream.send_frame(frame)
    done = session.expect("step_done").step_done
    gradient = stream.receive()

    activation = frame.tensors["activation"].clone().requires_grad_()
    passed = activation
    for index, state in enumerate(bert_states[1:], start=1):
        unit = bert.build_unit(index).train()
        unit.load_state_dict(state)
        torch.manual_seed(dropout_key(0, CLUSTER, 0, 0, 0, index))
        if isinstance(unit, Head):
            side = {**frame.tensors, "labels": LABELS}
            passed = unit.loss_sum(passed, side, TrainingConfig().label_smoothing) / 3
        else:
            passed = unit(passed, frame.tensors)
    passed.backward()
    assert done.loss == passed.item()
    assert sum(done.squared_gradient_norms) > 0
    assert gradient is not None
    assert (gradient.kind, gradient.step_index, gradient.micro_batch) == (FrameKind.BACKWARD, 0, 0)
    assert activation.grad is not None
    assert torch.equal(gradient.tensors["activation"], activation.grad)


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
    stream = host.stream(configure)
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


# --- streams that do not belong to the attempt


@pytest.mark.parametrize(
    "change",
    [
        OpenLink(attempt=Attempt(job_id="other")),
        OpenLink(attempt=Attempt(round_index=1)),
        OpenLink(attempt=Attempt(attempt=1)),
        OpenLink(attempt=Attempt(plan_id="other")),
        OpenLink(stage_index=2),
        OpenLink(cluster_index=CLUSTER + 1),
    ],
    ids=["job", "round", "attempt", "plan", "stage", "cluster"],
)
def test_stream_of_another_attempt_is_refused_and_changes_nothing(
    host: StageHost, session: Session, change: OpenLink
) -> None:
    stranger = host.stream(session.configure, change)
    stranger.send_frame(activation_frame(1))
    with pytest.raises(WrongStateError, match=f"device-1 .*stage {change.stage_index or 1} "):
        stranger.receive()
    train(session, host.stream(session.configure))


def test_stream_to_the_first_stage_is_refused(host: StageHost) -> None:
    configure = host.configure()
    del configure.plan.stages[0]
    configure.stage_index = 0
    session = host.open(configure)
    session.expect("configured")
    opening = OpenLink(attempt=configure.attempt, cluster_index=CLUSTER)
    with pytest.raises(WrongStateError, match="stage 0"):
        NeighbourStream(host, opening).receive()
    session.close()


def test_second_stream_is_refused_and_the_first_continues(
    host: StageHost, session: Session, stream: NeighbourStream
) -> None:
    train(session, stream)
    with pytest.raises(WrongStateError, match="device-1"):
        host.stream(session.configure).receive()
    answer = stream.receive()
    assert answer is not None
    assert answer.kind is FrameKind.BACKWARD


def test_stream_of_a_replaced_attempt_changes_nothing(
    host: StageHost, session: Session, stream: NeighbourStream
) -> None:
    stream.send_frame(activation_frame(1))
    new = host.ready(1)
    with pytest.raises(WrongStateError, match="device-1"):
        host.stream(session.configure).receive()
    stream.send_frame(activation_frame(1))
    train(new, host.stream(new.configure))


# --- damaged streams


def header(*shape: int, byte_length: int) -> StreamPart:
    tensor = TensorHeader(
        name="activation",
        data_type=DATA_TYPE_FLOAT32,
        codec=CODEC_FP32,
        shape=shape,
        byte_length=byte_length,
    )
    return StreamPart(frame=FrameHeader(kind=FRAME_KIND_FORWARD, tensors=[tensor]))


def of_kind(kind: int) -> StreamPart:
    return StreamPart(frame=FrameHeader(kind=kind))  # type: ignore[arg-type]


def flipped() -> list[StreamPart]:
    made, chunks = encode_frame(activation_frame())
    data = [bytearray(chunk) for chunk in chunks]
    data[0][17] ^= 4
    return [StreamPart(frame=made), *(StreamPart(chunk=bytes(chunk)) for chunk in data)]


LARGEST = header(3, 4, 36, byte_length=1728)
TOO_LARGE = header(433, byte_length=1732)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (flipped(), "CRC-32"),
        ([StreamPart(chunk=b"abc")], "chunk of 3 bytes"),
        ([header(4, byte_length=16)] * 2, "new frame"),
        ([header(1 << 40, byte_length=1 << 42)], "limit of 1728"),
        ([LARGEST, LARGEST], "new frame"),
        ([TOO_LARGE], "1732 .*limit of 1728"),
        ([of_kind(FRAME_KIND_GENERATE)], "kind GENERATE"),
        ([of_kind(9)], "kind 9"),
        ([of_kind(FRAME_KIND_BACKWARD)], "kind BACKWARD"),
        ([of_kind(FRAME_KIND_LABELS)], "kind LABELS"),
        ([StreamPart(open=OpenLink())], "carried open"),
        ([StreamPart()], "empty message"),
    ],
)
def test_damaged_stream_blames_the_sender_with_the_reason(
    session: Session, stream: NeighbourStream, parts: list[StreamPart], said: str
) -> None:
    session.run_step(0)
    for part in parts:
        stream.send(part)
    failed = session.expect("failed").failed
    assert re.search(said, failed.message)
    assert failed.blamed_host_id == "control-unit"
    assert session.next() is None


def forward(step: int = 0, number: int = 0, index: int = 0, **tensors: torch.Tensor) -> Frame:
    return Frame(FrameKind.FORWARD, step, number, tensors or activation_frame().tensors, index)


def values(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def mask(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (forward(1 << 31), "step 2147483648"),
        (forward(0, (1 << 32) - 1), "micro-batch 4294967295"),
        (forward(0, 0, 1 << 31), "slice 2147483648"),
        (Frame(FrameKind.FORWARD, 0, 0, {}), "tensors none instead of"),
        (forward(activation=values(3, 4, 16)), "tensors activation instead of"),
        (forward(attention_mask=mask(3, 4)), "tensors attention_mask instead of"),
        (forward(input_ids=mask(3, 4), attention_mask=mask(3, 4)), "tensors input_ids"),
        (forward(activation=values(3, 4, 16), attention_mask=mask(3, 4), labels=mask(3)), "labels"),
        (forward(activation=values(3, 4, 8), attention_mask=mask(3, 4)), r"\[3, 4, 8\]"),
        (forward(activation=values(192), attention_mask=mask(3, 4)), r"\[192\]"),
        (forward(activation=values(), attention_mask=mask(3, 4)), r"shape \[\]"),
        (forward(activation=values(0, 4, 16), attention_mask=mask(0, 4)), r"\[0, 4, 16\]"),
        (forward(activation=values(3, 0, 16), attention_mask=mask(3, 0)), r"\[3, 0, 16\]"),
        (forward(activation=values(3, 5, 16), attention_mask=mask(3, 5)), "at most 4 tokens"),
        (forward(activation=values(2, 4, 16), attention_mask=mask(2, 4)), "3 to 3 rows"),
        (forward(activation=values(4, 3, 16), attention_mask=mask(4, 3)), "3 to 3 rows"),
        (forward(activation=values(3, 4, 16), attention_mask=mask(3, 2)), "no mask of"),
        (
            forward(activation=values(3, 4, 16), attention_mask=mask(2, 4)),
            "attention_mask of shape",
        ),
        (forward(activation=values(3, 4, 16), attention_mask=values(3, 4)), "torch.float32"),
        (forward(activation=mask(3, 4, 16), attention_mask=mask(3, 4)), "torch.int64"),
        (forward(activation=values(3, 4, 16).half(), attention_mask=mask(3, 4)), "float16"),
    ],
)
def test_frame_with_which_no_stage_can_compute_blames_the_sender(
    session: Session,
    stream: NeighbourStream,
    caplog: pytest.LogCaptureFixture,
    frame: Frame,
    said: str,
) -> None:
    session.run_step(0)
    stream.send_frame(frame)
    failed = session.expect("failed").failed
    assert re.search(f"control-unit sent damaged data: .*{said}", failed.message)
    assert failed.blamed_host_id == "control-unit"
    assert session.next() is None
    assert "unexpectedly" not in caplog.text


def test_fewer_rows_of_an_evaluation_than_labels_blame_the_sender(
    session: Session, stream: NeighbourStream
) -> None:
    command = RunEvaluation(num_micro_batches=1, has_labels=True)
    session.send(RunStageRequest(run_evaluation=command))
    session.send_labels(Frame(FrameKind.LABELS, 0, 0, {"labels": LABELS}))
    tensors = {"activation": values(2, 4, 16), "attention_mask": mask(2, 4)}
    stream.send_frame(Frame(FrameKind.EVALUATE, 0, 0, tensors))
    failed = session.expect("failed").failed
    assert "2 rows of 4 tokens, which have labels of shape [3]" in failed.message
    assert failed.blamed_host_id == "control-unit"


def test_mask_of_more_tokens_than_the_frame_blames_the_sender(
    session: Session, stream: NeighbourStream
) -> None:
    session.run_step(0)
    stream.send_frame(forward(activation=values(3, 2, 16), attention_mask=mask(3, 4)))
    failed = session.expect("failed").failed
    assert "mask of 4 instead of 2 tokens" in failed.message
    assert failed.blamed_host_id == "control-unit"


def test_frame_of_another_step_blames_the_sender(session: Session, stream: NeighbourStream) -> None:
    session.run_step(0)
    stream.send_frame(activation_frame(step=7))
    failed = session.expect("failed").failed
    assert "FORWARD of step 7, micro-batch 0" in failed.message
    assert failed.blamed_host_id == "control-unit"


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (Frame(FrameKind.LABELS, 0, 1, {"labels": LABELS}), "step 0, micro-batch 1"),
        (Frame(FrameKind.LABELS, 0, 0, {"labels": LABELS.float()}), "torch.float32"),
        (Frame(FrameKind.LABELS, 0, 0, {"labels": LABELS + 1}), "from 0 to 2"),
        (Frame(FrameKind.LABELS, 0, 0, {"labels": LABELS, "mask": LABELS}), "labels, mask"),
        (Frame(FrameKind.FORWARD, 0, 0, {"labels": LABELS}), "FORWARD .*LABELS"),
    ],
)
def test_wrong_labels_fail_the_session(
    session: Session, stream: NeighbourStream, labels: Frame, said: str
) -> None:
    session.send(RunStageRequest(run_step=RunStep(num_micro_batches=1, num_targets=3)))
    session.send_labels(labels)
    stream.send_frame(activation_frame())
    assert re.search(said, session.expect("failed").failed.message)


BROKEN = "previous stage broke its stream"


def test_stream_that_breaks_during_a_step_fails_the_session(
    session: Session, stream: NeighbourStream
) -> None:
    session.run_step(0, num_micro_batches=2)
    stream.send_frame(activation_frame(0))
    assert stream.receive() is not None
    stream.vanish()
    assert BROKEN in session.expect("failed").failed.message


def replace_begin(monkeypatch: pytest.MonkeyPatch, before: Callable[[], None]) -> None:
    """Has `before` called before an activation is decoded."""
    begin = FrameAssembler.begin

    def replaced(assembler: FrameAssembler, header: FrameHeader) -> Frame | None:
        if header.kind == FRAME_KIND_FORWARD:
            before()
        return begin(assembler, header)

    monkeypatch.setattr(FrameAssembler, "begin", replaced)


def test_frame_that_this_host_cannot_use_is_told_with_its_reason(
    session: Session, stream: NeighbourStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("no such operation")

    session.run_step(0, num_micro_batches=2)
    replace_begin(monkeypatch, refuse)
    stream.send_frame(activation_frame(0))
    assert "RuntimeError: no such operation" in session.expect("failed").failed.message


def test_stream_that_breaks_while_a_frame_is_decoded_is_named_as_broken(
    session: Session,
    stream: NeighbourStream,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    decoding: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    goes_on = threading.Event()

    def wait() -> None:
        decoding.put(threading.current_thread())
        assert goes_on.wait(60)

    session.run_step(0, num_micro_batches=2)
    replace_begin(monkeypatch, wait)
    stream.send_frame(activation_frame(0))
    thread = decoding.get(timeout=60)
    stream.vanish()
    assert BROKEN in session.expect("failed").failed.message
    goes_on.set()
    thread.join(60)
    assert "unexpectedly" not in caplog.text


def test_stream_that_breaks_after_the_last_step_lets_the_session_finish(
    session: Session, stream: NeighbourStream
) -> None:
    train(session, stream)
    stream.vanish()
    session.next_of_any_kind()  # a sign of life: meanwhile the host has noticed that the stream broke
    assert session.finish(1.0)


def test_stream_ends_with_its_session(
    host: StageHost, session: Session, stream: NeighbourStream
) -> None:
    train(session, stream)
    session.finish(1.0)
    session.close()
    answers: list[Frame | None] = [stream.receive(), stream.receive()]
    assert answers[1] is None
    with pytest.raises(WrongStateError, match="device-1"):
        host.stream(session.configure).receive()


def test_failed_session_ends_its_stream(session: Session, stream: NeighbourStream) -> None:
    session.send(RunStageRequest())
    session.expect("failed")
    with contextlib.suppress(CollapipeError):
        assert stream.receive() is None


def test_previous_stage_that_takes_no_gradients_cannot_fill_the_memory(host: StageHost) -> None:
    session = StageSession(host.configure(), host.resources)
    session.configure()
    with pytest.raises(PeerLostError, match="control-unit .*2 frames"):
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
        host.stream(computing.configure).send_frame(activation_frame())
        computing.waits_for_nothing()
        new = host.open(host.configure(1))  # It waits for its turn.
        new.next_of_any_kind()
        with pytest.raises(WrongStateError, match="device-1 .*stage 1"):
            host.stream(new.configure).receive()
    new.expect("configured")
    train(new, host.stream(new.configure))


def test_every_codec_may_send_the_largest_micro_batch(host: StageHost) -> None:
    """A row of the tiny model is half a tile of int4, and decoding makes whole tiles."""
    session = StageSession(host.configure(), host.resources)
    session.configure()
    rows, length = 3, 4
    tensors = {
        "activation": torch.randn(rows, length, 16),
        "attention_mask": torch.ones(rows, length, dtype=torch.int64),
    }
    for codec in (CODEC_FP32, *LOSSY_CODECS):
        header, _ = encode_frame(Frame(FrameKind.FORWARD, 0, 0, tensors), codec)
        FrameAssembler(session._frame_limits).begin(header)
    session.close()
