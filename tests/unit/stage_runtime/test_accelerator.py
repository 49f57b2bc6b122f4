"""Tests of the seam to an accelerator, with a stand-in whose copies and clock run late."""

import gc
import itertools
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from collapipe.job import TrainingConfig
from collapipe.models import ModelAdapter
from collapipe.stage_runtime import (
    ResidentUnit,
    accelerator,
    block_profile,
    forward_stage,
    stage,
)
from collapipe.stage_runtime.accelerator import Accelerator, PinnedMemory
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.stage_runtime.resident_units import ResidentUnits
from collapipe.stage_runtime.stage_context import dropout_key
from collapipe.telemetry.spans import Span, SpanLog
from collapipe.tensors import Frame, FrameAssembler, FrameKind, encode_frame
from collapipe.weights.tensor_blob import TensorBlob
from collapipe.weights.transfer import Readable

from .chains import CLUSTER, HALVES, ROUND, SEED, THIRDS, TRAINING, WHOLE, Chain, TinyModel
from .late_streams import LateStreams, exact_clock

_UNIT_SECONDS = 0.02
"""How long the device computes for each pass of a unit."""
_ROUNDING = 1e-9
"""What differences of clock readings may lose, in seconds."""


def put_over_the_wire(put: Callable[[Frame], None]) -> Callable[[Frame], None]:
    def send(frame: Frame) -> None:
        header, chunks = encode_frame(frame)
        assembler = FrameAssembler()
        arrived = assembler.begin(header)
        for chunk in chunks:
            arrived = assembler.add(chunk)
        assert arrived is not None
        put(arrived)

    return send


def chain_on_accelerators(
    tiny: TinyModel, cuts: list[int], training: TrainingConfig = TRAINING, **options: Any
) -> tuple[Chain, list[LateStreams]]:
    """Makes a chain with an accelerator for each stage. Frames between stages are encoded and decoded."""
    streams = [LateStreams() for _ in cuts[1:]]
    devices = [Accelerator(each) for each in streams]
    chain = tiny.chain(cuts, training=training, devices=devices, **options)
    for index, one in enumerate(chain.stages):
        if index + 1 < len(chain.stages):
            one._send_forward = put_over_the_wire(chain.mailboxes[index + 1].put)
        if index:
            one._send_backward = put_over_the_wire(chain.mailboxes[index - 1].put)
    return chain, streams


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("recompute", [(), (0, 1)], ids=["stash", "recompute"])
def test_training_gives_the_results_of_a_plain_loop(
    tiny: TinyModel, recompute: tuple[int, ...], split: bool
) -> None:
    training = TRAINING.model_copy(update={"split_backward": split})
    chain, _ = chain_on_accelerators(tiny, THIRDS, training, recompute=recompute)
    tiny.assert_equals_a_plain_loop(chain, num_steps=2, size=4)


def test_predictions_equal_those_of_a_cpu(tiny: TinyModel) -> None:
    batches = tiny.batches(3)
    chain, _ = chain_on_accelerators(tiny, THIRDS)
    expected = tiny.chain(THIRDS).evaluate(batches)
    assert all(map(torch.equal, chain.evaluate(batches), expected))
    assert len(expected) == 3


def test_thread_that_computes_does_not_wait_for_the_copies_of_a_frame(tiny: TinyModel) -> None:
    chain, (streams, _) = chain_on_accelerators(tiny, HALVES)
    send = chain.stages[0]._send_forward
    done: list[tuple[int, int]] = []

    def watch(frame: Frame) -> None:
        before = streams.downloads.num_done
        send(frame)
        done.append((before, streams.downloads.num_done))

    chain.stages[0]._send_forward = watch
    chain.train(0, tiny.batches(2))
    (before_first, after_first), (before_second, after_second) = done
    assert 0 == before_first < after_first == before_second < after_second


def busy(chain: Chain, streams: LateStreams) -> None:
    """Makes each pass of each unit take time on the device, but hardly any in the thread that gives the work."""

    def spend(*_: object) -> None:
        streams.compute.spend(_UNIT_SECONDS)
        time.sleep(0.001)  # lets other threads run

    for unit in chain.units:
        unit.module.register_forward_hook(spend)
        if unit.unit_index:
            unit.module.register_full_backward_hook(spend)


def spans_of(log: SpanLog, *names: str) -> list[Span]:
    spans = [span for span in log.of_round("job", 0, 0) if span.name in names]
    return sorted(spans, key=lambda span: span.started)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> SpanLog:
    log = SpanLog()
    log.begin_round("job", 0, 0)
    for module in (stage, forward_stage):
        monkeypatch.setattr(module, "SPANS", log)
    return log


def test_times_are_those_of_the_device(tiny: TinyModel, log: SpanLog) -> None:
    training = TRAINING.model_copy(update={"clip_norm": 0.0})
    chain, (streams,) = chain_on_accelerators(tiny, WHOLE, training)
    busy(chain, streams)
    batches = tiny.batches(2)
    [result] = chain.train(0, batches)
    # The device has a clock of its own, so this machine's speed does not matter.
    # Each micro-batch passes four units, whose hooks run, and the head, whose loss is computed without a hook.
    passes = len(batches) * 4
    times, seconds = result.times, chain.observers[0].seconds
    assert times.forward_seconds >= passes * _UNIT_SECONDS - _ROUNDING
    assert times.backward_seconds >= (passes - len(batches)) * _UNIT_SECONDS - _ROUNDING
    # The thread waited for the second micro-batch while the device still computed the first one.
    together = times.forward_seconds + times.backward_seconds + times.waiting_seconds
    assert together <= times.total_seconds + _ROUNDING
    assert sum(seconds["FORWARD"]) == pytest.approx(times.forward_seconds)
    assert sum(seconds["BACKWARD"]) == pytest.approx(times.backward_seconds)
    [embedding, *_], [forward, *_] = chain.observers[0].end_unit_seconds, seconds["FORWARD"]
    assert _UNIT_SECONDS - _ROUNDING <= embedding < forward
    spans = spans_of(log, "forward", "backward", "update")
    assert [span.name for span in spans] == ["forward", "backward"] * 2 + ["update"]
    assert all(span.ended <= time.perf_counter() for span in spans)


def test_passes_of_two_stages_on_one_device_do_not_overlap(
    tiny: TinyModel, log: SpanLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the clocks of the host and of the device are compared to within a time slice of this machine.
    monkeypatch.setattr(accelerator, "time", SimpleNamespace(perf_counter=exact_clock))
    streams = LateStreams()
    device = Accelerator(streams)
    threads = []
    for _ in range(2):
        chain = tiny.chain(WHOLE, [2], devices=[device])
        busy(chain, streams)
        threads.append(threading.Thread(target=chain.train, args=(0, tiny.batches(2))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a chain still trains after 60 s"
    spans = spans_of(log, "forward", "backward")
    assert len(spans) == 2 * 2 * 2
    overlaps = [first.ended - second.started for first, second in itertools.pairwise(spans)]
    assert max(overlaps) < 1e-6


def test_device_draws_dropout_from_the_keys_of_the_units(tiny: TinyModel) -> None:
    chain, streams = chain_on_accelerators(tiny, HALVES)
    chain.train(0, tiny.batches(1))
    keys = [dropout_key(SEED, CLUSTER, ROUND, 0, 0, unit) for unit in range(5)]
    assert [each.keys for each in streams] == [keys[:2], keys[2:]]


class _Reads(TorchDispatchMode):
    """Lists the operations for whose result the thread has to wait on an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(
            word in func.__name__
            for word in ("local_scalar", "nonzero", "unique", "masked_select", "is_nonzero")
        ):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_losses_and_norms_are_not_read_one_by_one(tiny: TinyModel) -> None:
    chain, _ = chain_on_accelerators(tiny, HALVES)
    reads = _Reads()

    def run(one: stage.Stage) -> object:
        with nullcontext() if one is chain.stages[0] else reads:
            return one.run_step(0, 2, 6, 0.0)

    chain.feed(FrameKind.FORWARD, 0, tiny.batches(2), chain.cut)
    chain.run_in_parallel(run)
    # transformers asks once for each micro-batch whether it is padded. Losses and norms are read at the end.
    assert reads.names == ["_local_scalar_dense.default"] * 2


# --- weights


def content(blob: Readable) -> bytes:
    return b"".join(map(bytes, blob.read()))


def test_weights_are_read_as_they_were_when_the_blob_was_made() -> None:
    streams = LateStreams()
    device, weights = Accelerator(streams), torch.zeros(3)
    streams.compute.submit(lambda: torch.nn.init.constant_(weights, 7.0))
    blob = TensorBlob({"weights": weights}, reader=device.reader)
    later: list[bool] = []
    streams.compute.submit(lambda: later.append(True))
    expected = TensorBlob({"weights": torch.full((3,), 7.0)})
    assert content(blob) == content(expected)
    assert blob.digest == expected.digest
    assert later == []  # A reader does not wait for work that the device was given later.


def test_copy_of_a_blob_is_read_after_the_work_that_made_it() -> None:
    device = Accelerator(LateStreams())
    blob = TensorBlob({"weights": torch.ones(3)}, reader=device.reader)
    expected = content(blob)
    with COMPUTE_LOCK:
        device.queue().start()  # a step that begins after the blob was made
        copy = blob.copy()
    assert content(copy) == expected


def test_kept_moments_are_read_as_before_the_update(bert: ModelAdapter) -> None:
    device = Accelerator(LateStreams())
    unit, plain = (
        ResidentUnit(1, bert.build_unit(1), TRAINING, *devices) for devices in ((device,), ())
    )
    plain.module.load_state_dict(unit.module.state_dict())
    units = ResidentUnits(bert, TRAINING, device)
    units._units[1] = unit
    for one in (unit, plain):
        _update(one, seed=0)
    digests = unit.seal()
    assert digests == plain.seal()
    units.keep_moments([digests.optimizer])
    _update(unit, seed=1)
    assert plain.optimizer_blob is not None
    assert content(units.blob(digests.optimizer)) == content(plain.optimizer_blob)
    assert unit.seal().optimizer != digests.optimizer


def _update(unit: ResidentUnit, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in unit.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    unit.update(1e-2, 1.0)


# --- profile


def test_profile_takes_the_time_of_the_device(
    bert: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, build = LateStreams(), bert.build_unit

    def build_unit(index: int) -> torch.nn.Module:
        module = build(index)
        module.register_forward_hook(lambda *_: streams.compute.spend(_UNIT_SECONDS))
        return module

    monkeypatch.setattr(bert, "build_unit", build_unit)
    monkeypatch.setattr(block_profile, "_TIME_BOX_SECONDS", 0.0)
    profile = block_profile.profile_block(bert, Accelerator(streams), [2], 8)
    assert profile.seconds_per_sample >= _UNIT_SECONDS / 2 - _ROUNDING


# --- pinned memory


def test_pinned_memory_has_a_limit_and_is_given_back() -> None:
    pinned: list[int] = []

    def allocate(tensor: Tensor) -> Tensor:
        pinned.append(tensor.nbytes)
        return torch.empty_like(tensor)

    memory = PinnedMemory(allocate, 1024)
    held = [memory.like(torch.zeros(size)) for size in (100, 100, 65, 1)]
    assert [tensor.numel() for tensor in held] == [100, 100, 65, 1]
    assert pinned == [400, 400]  # 512 bytes each
    assert memory.used_bytes == 1024
    held.clear()
    gc.collect()
    assert memory.used_bytes == 0
    assert memory.like(torch.zeros(65)).numel() == 65
    assert pinned == [400, 400, 260]


def test_pinned_memory_of_a_frame_is_in_use_until_it_is_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = LateStreams()
    device = Accelerator(streams)
    # A real device does not copy at once when its compute stream is told to wait.
    monkeypatch.setattr(streams.compute, "wait", lambda event: None)
    queue, used = device.queue(), []
    for number in range(3):
        queue.to_device(Frame(FrameKind.FORWARD, 0, number, {"t": torch.ones(16)}))
        used.append(device.pinned.used_bytes)
        if number:
            streams.uploads.run_until(number + 1)
    assert used == [64, 128, 64]


def test_training_with_little_pinned_memory_gives_the_same_results(tiny: TinyModel) -> None:
    devices = [Accelerator(LateStreams(), 1024) for _ in range(2)]
    tiny.assert_equals_a_plain_loop(tiny.chain(HALVES, devices=devices), num_steps=1, size=5)
    gc.collect()
    assert [device.pinned.used_bytes for device in devices] == [0, 0]
