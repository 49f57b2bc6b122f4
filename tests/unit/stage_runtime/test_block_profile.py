"""The cost of a block on this host, and on the processor that it emulates."""

import itertools
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from emulated_links import ChangingEmulation
from prometheus_client import REGISTRY

from collapipe.emulation.device_profiles import DEVICE_PROFILES
from collapipe.emulation.emulation_file import EmulationFile
from collapipe.errors import InvalidInputError
from collapipe.job import TrainingConfig
from collapipe.models import ModelAdapter, adapter
from collapipe.stage_runtime import (
    CPU,
    EmulatedProcessor,
    block_profile,
    compute_device,
    emulated_processor,
)
from collapipe.stage_runtime.block_profile import (
    BlockProfile,
    count_stash_bytes,
    fit_costs,
    make_side,
    profile_block,
)
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.stage_runtime.operation_counts import StageWork, Work
from collapipe.work_shares import FORWARD_SHARE

from .chains import WHOLE, TinyModel
from .conftest import MakeAdapter

PI = DEVICE_PROFILES["raspberry-pi-4"]


@pytest.fixture(autouse=True)
def _no_time_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_profile, "_TIME_BOX_SECONDS", 0.0)


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterator[float]], None]:
    """Replaces the clock of profiles by given readings."""

    def set_readings(readings: Iterator[float]) -> None:
        for module in (block_profile, compute_device):
            monkeypatch.setattr(
                module, "time", SimpleNamespace(perf_counter=lambda: next(readings))
            )

    return set_readings


def emulate(emulation: ChangingEmulation, time_scale: float = 1, **device: float) -> None:
    """Makes `device-0-0` a slow Raspberry Pi in the emulation file."""
    pi: dict[str, object] = {"profile": "raspberry-pi-4", **device}
    emulation.set(devices={"device-0-0": pi}, time_scale=time_scale)


@pytest.fixture
def processor(emulation: ChangingEmulation) -> EmulatedProcessor:
    emulate(emulation)
    return EmulatedProcessor(emulation.file, "device-0-0")


def measure(bert: ModelAdapter, *sizes: int, length: int = 8) -> BlockProfile:
    return profile_block(bert, CPU, sizes, length)


def test_bytes_grow_with_the_length_and_not_with_the_size(bert: ModelAdapter) -> None:
    parameters = sum(p.numel() for p in bert.build_unit(1).parameters())
    two, four, longer = measure(bert, 2), measure(bert, 1, 4), measure(bert, 2, length=16)
    assert two.num_parameters == parameters
    assert two.state_bytes == 16 * parameters
    assert two.seconds_per_sample > 0
    one = two.stash_bytes_per_sample
    assert four.stash_bytes_per_sample == one
    assert longer.stash_bytes_per_sample >= 2 * one * 0.9
    activation = 8 * 16 * 4
    assert 5 * activation < one < 100 * activation


def test_heads_do_not_wait_while_a_profile_waits_for_the_load_of_a_model(
    bert: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: set[bool] = set()

    class WatchedLock:
        def __enter__(self) -> None:
            held.add(COMPUTE_LOCK.locked())

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(adapter, "MAKING_MODELS", WatchedLock())
    del bert.meta_model  # It is built again.
    count_stash_bytes(bert, 1, make_side(bert, 1, 8))
    assert held == {False}


def test_half_blocks_have_the_shares_of_a_layer(
    bert: ModelAdapter, half_bert: ModelAdapter, processor: EmulatedProcessor
) -> None:
    whole, halves = measure(bert, 2, 4), measure(half_bert, 2, 4)
    assert whole.work_shares == whole.stash_shares == (1.0,)
    assert 2 * halves.num_parameters == whole.num_parameters
    assert 2 * halves.state_bytes == whole.state_bytes
    assert 2 * halves.stash_bytes_per_sample == pytest.approx(whole.stash_bytes_per_sample, rel=0.1)
    for shares in (halves.work_shares, halves.stash_shares):
        assert len(shares) == 2
        assert min(shares) > 0
        assert sum(shares) == pytest.approx(2)
    # The time of an emulated device follows the operations, and its fixed cost counts once for a stage.
    whole, halves = (profile_block(model, CPU, (2, 8), 8, processor) for model in (bert, half_bert))
    assert 2 * halves.seconds_per_sample == pytest.approx(whole.seconds_per_sample)
    assert halves.seconds_per_micro_batch == pytest.approx(whole.seconds_per_micro_batch)
    # The attention has 4 * 16^2 weights and 2 * 8 * 16 products of values, the feed-forward network 2 * 16 * 24 weights.
    attention, feed_forward = 4 * 16**2 + 2 * 8 * 16, 2 * 16 * 24
    assert halves.work_shares[0] == pytest.approx(2 * attention / (attention + feed_forward))


def test_medians_of_each_size_give_both_costs(
    bert: ModelAdapter, set_clock: Callable[[Iterator[float]], None]
) -> None:
    # Three repetitions of two sizes. The last repetition is an outlier.
    durations = [0.5, 0.9, 0.5, 0.9, 7.0, 5.0]
    set_clock(iter([0.0, *(t for seconds in durations for t in (0.0, seconds)), 0.0]))
    measured = measure(bert, 2, 4)
    assert measured.seconds_per_sample == pytest.approx(0.2)
    assert measured.seconds_per_micro_batch == pytest.approx(0.1)


def test_time_of_a_length_that_was_not_timed_grows_like_its_operations(
    make_adapter: MakeAdapter,
    set_clock: Callable[[Iterator[float]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    # Attention has dropout here, so torch computes it as products of matrices, which its counter counts.
    llama = make_adapter("llama", dropout=0.1, max_length=512, max_position_embeddings=512)
    set_clock(map(float, itertools.count()))  # Every pass takes a second.
    monkeypatch.setattr(block_profile, "_TIMED_TOKENS", 16)
    timed, longer = measure(llama, 1, length=16), measure(llama, 1, length=512)
    assert timed.seconds_per_sample == 1
    flops = []
    for length in (16, 512):
        with FlopCounterMode(display=False) as counter:
            llama.build_unit(1)(torch.randn(1, length, 16), make_side(llama, 1, length))
        flops.append(counter.get_total_flops())
    assert flops[1] > 100 * flops[0]
    assert longer.seconds_per_sample == pytest.approx(flops[1] / flops[0], rel=1e-6)


@pytest.mark.parametrize(
    ("seconds", "per_sample", "per_micro_batch"),
    [
        ({2: 0.5, 8: 1.1}, 0.1, 0.3),
        ({1: 0.2, 2: 0.3, 4: 0.5}, 0.1, 0.1),
        ({4: 2.0}, 0.5, 0.0),  # a single size
        ({2: 1.0, 4: 4.0}, 0.9, 0.0),  # the fit would make o negative
        ({2: 1.0, 4: 0.5}, 0.2, 0.0),  # noise: the larger micro-batch was faster
    ],
)
def test_fit_separates_the_cost_of_a_sample_from_that_of_a_micro_batch(
    seconds: dict[int, float], per_sample: float, per_micro_batch: float
) -> None:
    assert fit_costs(seconds) == pytest.approx((per_sample, per_micro_batch))


def test_profiling_at_the_same_time_changes_no_bit_of_training(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train() -> None:
        chain = tiny.chain(WHOLE, training=TrainingConfig())
        tiny.assert_equals_a_plain_loop(chain, num_steps=5, size=2)

    train()  # The profile would change the random numbers of the plain loop, which is run once.
    monkeypatch.setattr(block_profile, "_TIME_BOX_SECONDS", 600.0)
    rounds = itertools.count()
    trained = threading.Event()
    started = threading.Event()

    def until_trained() -> float:
        if next(rounds) > 10:
            started.set()
        return 1e9 if trained.is_set() else 0.0

    monkeypatch.setattr(block_profile, "time", SimpleNamespace(perf_counter=until_trained))
    profiling = threading.Thread(target=measure, args=(tiny.adapter, 1), daemon=True)
    profiling.start()
    try:
        assert started.wait(60)
        train()
        assert profiling.is_alive()
    finally:
        trained.set()
        profiling.join(60)


@pytest.mark.parametrize(("sizes", "length"), [((), 8), ((0, 2), 8), ((2,), 0)])
def test_profile_without_samples_or_tokens_is_refused(
    bert: ModelAdapter, sizes: tuple[int, ...], length: int
) -> None:
    with pytest.raises(InvalidInputError, match=rf"\[{', '.join(map(str, sizes))}\].*{length}"):
        measure(bert, *sizes, length=length)


# --- an emulated processor


def test_emulated_profile_equals_the_seconds_of_an_emulated_run(
    bert: ModelAdapter, emulation: ChangingEmulation, processor: EmulatedProcessor
) -> None:
    emulate(emulation, time_scale=2, slowdown=3)
    emulated = profile_block(bert, CPU, (2, 8), 8, processor)
    work = StageWork([bert.build_unit(1)], 16)
    for rows in (2, 8, 5):
        side = {"attention_mask": torch.ones(rows, 8, dtype=torch.int64)}
        forward = processor.seconds(work.forward(side), FORWARD_SHARE)
        backward = processor.seconds(work.backward(side), 1 - FORWARD_SHARE)
        assert forward is not None
        assert backward is not None
        predicted = emulated.seconds_per_micro_batch + rows * emulated.seconds_per_sample
        assert predicted == pytest.approx(forward + backward)
    assert emulated.seconds_per_micro_batch == pytest.approx(2 * 3 * 9e-3)
    assert emulated.stash_bytes_per_sample == measure(bert, 8).stash_bytes_per_sample


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stops the clock at 100 s, and lists how long the emulated processor sleeps."""
    naps: list[float] = []
    clock = SimpleNamespace(perf_counter=lambda: 100.0, sleep=naps.append)
    monkeypatch.setattr(emulated_processor, "time", clock)
    return naps


def overrun() -> float:
    return REGISTRY.get_sample_value("collapipe_emulation_overrun_seconds_total") or 0.0


def test_seconds_are_those_of_the_present_emulation_file(
    emulation: ChangingEmulation, processor: EmulatedProcessor
) -> None:
    work = Work(flops=3 * PI.flops_per_second, moved_bytes=2 * PI.memory_bytes_per_second)
    expected = 5.0 + PI.seconds_per_micro_batch / 4
    assert processor.seconds(work, 0.25) == pytest.approx(expected)
    emulate(emulation, time_scale=0.5, slowdown=4)
    assert processor.seconds(work, 0.25) == pytest.approx(2 * expected)
    emulation.set()
    assert processor.seconds(work, 0.25) is None


def test_host_without_an_emulated_device_does_not_wait(
    emulation: ChangingEmulation, naps: list[float]
) -> None:
    before = overrun()
    for file in (emulation.file, EmulationFile(None)):
        real = EmulatedProcessor(file, "device-0-0")
        assert real.seconds(Work(1e12), 1.0) is None
        real.occupy(100.0, Work(1e12), 1.0)
    assert (naps, overrun()) == ([], before)


@pytest.mark.parametrize(
    ("taken", "slept", "excess"), [(0.75, [1.25], 0.0), (3.5, [], 1.5)], ids=["waits", "overruns"]
)
def test_processor_waits_for_what_real_work_did_not_take_and_counts_the_excess(
    processor: EmulatedProcessor,
    naps: list[float],
    taken: float,
    slept: list[float],
    excess: float,
) -> None:
    before = overrun()
    processor.occupy(100.0 - taken, Work(2 * PI.flops_per_second), 0.0)
    assert naps == pytest.approx(slept)
    assert overrun() - before == pytest.approx(excess)
