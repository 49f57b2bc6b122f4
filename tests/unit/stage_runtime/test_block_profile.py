import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer

from collapipe.emulation.emulation_file import EmulatedDevice, Emulation, EmulationFile
from collapipe.errors import InvalidInputError
from collapipe.job import ModelConfig, TaskConfig, TrainingConfig
from collapipe.models import MAKING_MODELS, ModelAdapter, adapter_for, create_config_json
from collapipe.stage_runtime import CPU, EmulatedProcessor, block_profile, compute_device
from collapipe.stage_runtime.block_profile import (
    BlockProfile,
    count_stash_bytes,
    fit_costs,
    make_side,
    profile_block,
)
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.stage_runtime.operation_counts import StageWork
from collapipe.work_shares import FORWARD_SHARE

from .chains import (
    MakeBatch,
    States,
    assert_identical,
    make_chain,
    train_chain,
    train_plainly,
)


@pytest.fixture(autouse=True)
def _no_time_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_profile, "_TIME_BOX_SECONDS", 0.0)


@pytest.fixture
def llama(make_tokenizer: Callable[[str], Tokenizer]) -> ModelAdapter:
    """A tiny Llama whose attention has dropout."""
    config = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = ModelConfig(family="llama", config={**config, "attention_dropout": 0.1})
    task = TaskConfig(kind="causal_lm", max_length=512)
    document = create_config_json(model, task, [], make_tokenizer("llama"))
    return adapter_for("llama", "causal_lm", document)


def measure(bert: ModelAdapter, *sizes: int, length: int = 8) -> BlockProfile:
    return profile_block(bert, CPU, sizes, length)


def test_state_is_weights_gradients_and_moments(bert: ModelAdapter) -> None:
    parameters = sum(p.numel() for p in bert.build_unit(1).parameters())
    measured = measure(bert, 2)
    assert measured.num_parameters == parameters
    assert measured.state_bytes == 16 * parameters


def test_stash_bytes_of_a_sample_grow_with_its_length(bert: ModelAdapter) -> None:
    two, four, longer = measure(bert, 2), measure(bert, 1, 4), measure(bert, 2, length=16)
    one = two.stash_bytes_per_sample
    assert four.stash_bytes_per_sample == pytest.approx(one, rel=0.1)
    assert longer.stash_bytes_per_sample >= 2 * one * 0.9
    activation = 8 * 16 * 4
    assert 5 * activation < one < 100 * activation


def test_heads_do_not_wait_while_a_profile_waits_for_the_load_of_a_model(
    bert: ModelAdapter,
) -> None:
    side = make_side(bert, 1, 8)
    profile = threading.Thread(target=count_stash_bytes, args=(bert, 1, side))
    with MAKING_MODELS:
        profile.start()
        time.sleep(0.3)
        assert profile.is_alive()
        assert not COMPUTE_LOCK.locked()
    profile.join()


def test_profile_of_the_same_block_gives_the_same_bytes(bert: ModelAdapter) -> None:
    first = measure(bert, 1, length=4)
    assert first.seconds_per_sample > 0
    assert measure(bert, 1, length=4).stash_bytes_per_sample == first.stash_bytes_per_sample


def test_half_blocks_have_the_shares_of_a_layer(
    bert: ModelAdapter, half_bert: ModelAdapter, tmp_path: Path
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
    path = tmp_path / "emulation.json"
    devices = {"device-0-0": EmulatedDevice(profile="raspberry-pi-4")}
    path.write_text(Emulation(devices=devices).model_dump_json())
    processor = EmulatedProcessor(EmulationFile(path), "device-0-0")
    whole, halves = (profile_block(model, CPU, (2, 8), 8, processor) for model in (bert, half_bert))
    assert 2 * halves.seconds_per_sample == pytest.approx(whole.seconds_per_sample)
    assert halves.seconds_per_micro_batch == pytest.approx(whole.seconds_per_micro_batch)
    # The attention has 4 * 16^2 weights and 2 * 8 * 16 products of values, the feed-forward network 2 * 16 * 24 weights.
    attention, feed_forward = 4 * 16**2 + 2 * 8 * 16, 2 * 16 * 24
    assert halves.work_shares[0] == pytest.approx(2 * attention / (attention + feed_forward))


def test_medians_of_each_size_give_both_costs(
    bert: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three repetitions of two sizes. The last repetition is an outlier.
    durations = [0.5, 0.9, 0.5, 0.9, 7.0, 5.0]
    readings = iter([0.0, *(t for seconds in durations for t in (0.0, seconds)), 0.0])
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    for module in (block_profile, compute_device):
        monkeypatch.setattr(module, "time", clock)
    measured = measure(bert, 2, 4)
    assert measured.seconds_per_sample == pytest.approx(0.2)
    assert measured.seconds_per_micro_batch == pytest.approx(0.1)


def test_time_of_a_length_that_was_not_timed_grows_like_its_operations(
    llama: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    # Every pass takes a second, whatever the clock of this machine says.
    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    for module in (block_profile, compute_device):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(block_profile, "_TIMED_TOKENS", 16)
    timed, longer = measure(llama, 1, length=16), measure(llama, 1, length=512)
    assert timed.seconds_per_sample == 1
    flops = []
    for length in (16, 512):
        with FlopCounterMode(display=False) as counter:
            llama.build_unit(1)(torch.randn(1, length, 16), make_side(llama, 1, length))
        flops.append(counter.get_total_flops())
    # Attention has dropout here, so torch computes it as products of matrices, which its counter counts.
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


def test_emulated_profile_equals_the_seconds_of_an_emulated_run(
    bert: ModelAdapter, tmp_path: Path
) -> None:
    path = tmp_path / "emulation.json"
    devices = {"device-0-0": EmulatedDevice(profile="raspberry-pi-4", slowdown=3)}
    path.write_text(Emulation(devices=devices, time_scale=2).model_dump_json())
    processor = EmulatedProcessor(EmulationFile(path), "device-0-0")
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


def test_profiling_at_the_same_time_changes_no_bit_of_training(
    bert: ModelAdapter,
    bert_states: States,
    make_batch: MakeBatch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = TrainingConfig()
    steps = [[make_batch(2 * step), make_batch(2 * step + 1)] for step in range(10)]
    reference = train_plainly(bert, bert_states, training, steps)
    monkeypatch.setattr(block_profile, "_TIME_BOX_SECONDS", 600.0)
    rounds = itertools.count()
    trained = threading.Event()
    started = threading.Event()

    def until_trained() -> float:
        if next(rounds) > 10:
            started.set()
        return 1e9 if trained.is_set() else 0.0

    monkeypatch.setattr(block_profile, "time", SimpleNamespace(perf_counter=until_trained))
    profiling = threading.Thread(target=measure, args=(bert, 1), daemon=True)
    profiling.start()
    try:
        assert started.wait(60)
        chain = make_chain(bert, bert_states, training, [0, 5], [1])
        assert_identical(train_chain(chain, training, steps), reference)
        assert profiling.is_alive()
    finally:
        trained.set()
        profiling.join(60)


@pytest.mark.parametrize(("sizes", "length"), [((), 8), ((0, 2), 8), ((2,), 0)])
def test_profile_without_samples_or_tokens_is_refused(
    bert: ModelAdapter, sizes: tuple[int, ...], length: int
) -> None:
    with pytest.raises(InvalidInputError, match="at least 1"):
        measure(bert, *sizes, length=length)
