import pytest
import torch

from collapipe.models import ModelAdapter
from collapipe.pipeline import profile
from collapipe.pipeline.profile import BlockProfile, profile_block


@pytest.fixture(autouse=True)
def _no_time_box(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_TIME_BOX_SECONDS", 0.0)


def measure(bert: ModelAdapter, rows: int, length: int) -> BlockProfile:
    return profile_block(bert, torch.device("cpu"), rows, length)


def test_state_is_weights_gradients_and_moments(bert: ModelAdapter) -> None:
    parameters = sum(p.numel() for p in bert.build_unit(1).parameters())
    assert measure(bert, 2, 8).state_bytes == 16 * parameters


def test_stash_grows_with_rows_and_length_but_not_with_the_weights(bert: ModelAdapter) -> None:
    one, rows, length = (measure(bert, *size).stash_bytes for size in ((2, 8), (4, 8), (2, 16)))
    assert rows == pytest.approx(2 * one, rel=0.1)
    assert length >= 2 * one * 0.9
    activation = 2 * 8 * 16 * 4
    assert 5 * activation < one < 100 * activation


def test_seconds_are_of_one_sample(bert: ModelAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(profile.time, "perf_counter", lambda: float(next(clock)))
    assert measure(bert, 4, 8).seconds_per_sample == pytest.approx(1 / 4)


def test_profile_of_the_same_block_gives_the_same_bytes(bert: ModelAdapter) -> None:
    first = measure(bert, 1, 4)
    assert first.seconds_per_sample > 0
    assert measure(bert, 1, 4).stash_bytes == first.stash_bytes
