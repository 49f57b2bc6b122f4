"""Tests that the reference is right, and that a comparison with it finds every kind of mistake."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from collapipe.job import JobConfig, TrainingConfig
from reference import centralized
from reference.centralized import MiniBatch, learning_rate, train_cluster
from reference.comparison import first_difference
from reference.fedavg import Contribution, average
from reference.federated_job import Client, copy_weights, make_clients, train_job
from reference.tiny_jobs import make_job

FAMILIES = list(centralized.HEADS)


@pytest.mark.parametrize(
    ("warm_up", "decay", "expected"),
    [
        (0, "constant", [1.0, 1.0, 1.0, 1.0]),
        (2, "constant", [0.5, 1.0, 1.0, 1.0]),
        (0, "linear", [1.0, 0.75, 0.5, 0.25]),
        (2, "linear", [0.5, 1.0, 1.0, 0.5]),
        (0, "inverse_sqrt", [1.0, math.sqrt(1 / 2), math.sqrt(1 / 3), 0.5]),
        (2, "inverse_sqrt", [0.5, 1.0, math.sqrt(2 / 3), math.sqrt(2 / 4)]),
    ],
)
def test_learning_rate_follows_schedule(warm_up: int, decay: str, expected: list[float]) -> None:
    training = TrainingConfig.model_validate(
        {"learning_rate": 1.0, "warm_up_steps": warm_up, "decay": decay}
    )
    assert [learning_rate(training, step, 4) for step in range(4)] == pytest.approx(expected)


@pytest.mark.parametrize(("family", "kind"), FAMILIES, ids=map("-".join, FAMILIES))
def test_each_unit_is_seeded_once_for_each_micro_batch_and_draws_no_number_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    used: Counter[tuple[int, ...]] = Counter()
    genuine = centralized.dropout_key
    monkeypatch.setattr(
        centralized, "dropout_key", lambda *key: used.update([key]) or genuine(*key)
    )
    job = make_job(tmp_path, family, kind, training={"local_steps": 1})
    torch.manual_seed(1)
    first = train_job(job)
    expected = {
        (job.seed, 0, round_index, 0, micro_batch, unit)
        for round_index in range(2)
        for micro_batch in range(4)
        for unit in range(5)
    }
    assert used == dict.fromkeys(expected, 1)
    # The result must not depend on torch's random state.
    torch.manual_seed(2)
    assert first_difference(first.weights, train_job(job).weights) is None


def test_dropout_key_of_known_position() -> None:
    assert centralized.dropout_key(7, 0, 1, 2, 3, 4) == 7273609236136225936


@pytest.mark.parametrize(("clip_norm", "factor"), [(0.0, 1.0), (6.0, 1.0), (2.5, 0.5)])
def test_gradients_are_clipped_by_their_common_norm(clip_norm: float, factor: float) -> None:
    model = torch.nn.Linear(1, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0]]), torch.tensor([4.0])
    centralized.clip_gradients(model, clip_norm)
    found = [model.weight.grad.item(), model.bias.grad.item()]
    assert found == pytest.approx([3 * factor, 4 * factor])


def test_average_is_weighted_by_samples_whatever_the_order_of_arrival() -> None:
    values = torch.Generator().manual_seed(0)
    arrived = [
        Contribution(index, samples, {"w": torch.randn(50, generator=values)})
        for index, samples in enumerate([3, 7, 11])
    ]
    averaged = average(arrived)
    assert first_difference(averaged, average(arrived[::-1])) is None
    expected = sum(c.num_samples * c.weights["w"] for c in arrived) / 21
    torch.testing.assert_close(averaged["w"], expected)


def test_moments_stay_with_the_client(tmp_path: Path) -> None:
    trained = train_job(make_job(tmp_path, num_rows=(9, 13)))
    first, second = trained.optimizer_states
    assert first.keys() == second.keys()
    assert {first[name].item() for name in first if name.endswith("//step")} == {4.0}
    assert first_difference(first, second) is not None


def test_micro_batch_mode_steps_after_every_micro_batch(tmp_path: Path) -> None:
    job = make_job(tmp_path, training={"update_per": "micro_batch"})
    trained = train_job(job)
    assert len(trained.losses[0]) == job.total_steps == 16
    steps = [value for name, value in trained.optimizer_states[0].items() if "//step" in name]
    assert {step.item() for step in steps} == {16.0}


# Each of the following tests makes one mistake in the reference, and the comparison must find it.

Change = Callable[[Client, list[MiniBatch]], None]


def run_round(
    job: JobConfig, change: Change = lambda client, mini_batches: None
) -> dict[str, Tensor]:
    """Runs one round of one cluster after `change` has modified the model or the mini-batches."""
    client = make_clients(job)[0]
    mini_batches = [client.draw_mini_batch() for _ in range(job.training.local_steps)]
    change(client, mini_batches)
    train_cluster(client.model, client.optimizer, mini_batches, job)
    return {**copy_weights(client.model), **client.optimizer_state()}


def flip_lowest_bit_of_one_weight(client: Client, _: list[MiniBatch]) -> None:
    weight = client.model.get_parameter("bert.encoder.layer.1.output.dense.weight")
    weight.data.view(torch.int32)[0, 0] ^= 1


def swap_two_micro_batches(_: Client, mini_batches: list[MiniBatch]) -> None:
    """Swaps the second and third: the sum of the first two does not depend on their order."""
    first, second, third, fourth = mini_batches[0]
    mini_batches[0] = [first, third, second, fourth]


def pad_one_micro_batch_further(_: Client, mini_batches: list[MiniBatch]) -> None:
    first, *others = mini_batches[0]
    grown = {name: pad(first[name], (0, 3)) for name in ("input_ids", "attention_mask")}
    mini_batches[0] = [{**first, **grown}, *others]


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@pytest.mark.parametrize(
    "change",
    [flip_lowest_bit_of_one_weight, swap_two_micro_batches, pad_one_micro_batch_further],
)
def test_changed_input_is_found(tmp_path: Path, change: Change) -> None:
    """Without dropout, only the arithmetic can differ."""
    job = make_job(tmp_path, model_config=NO_DROPOUT)
    genuine = run_round(job)
    assert first_difference(genuine, run_round(job)) is None
    assert first_difference(genuine, run_round(job, change)) is not None


def flip_one_bit_of_a_frozen_weight(client: Client, _: list[MiniBatch]) -> None:
    weight = client.model.get_parameter("model.layers.1.mlp.up_proj.weight")
    assert not weight.requires_grad
    weight.data.view(torch.int32)[0, 0] ^= 1 << 20


def test_changed_frozen_weight_is_found_in_the_adapter(tmp_path: Path) -> None:
    job = make_job(tmp_path, "llama", "causal_lm", lora={})

    def adapter_after(change: Change) -> dict[str, Tensor]:
        return {name: t for name, t in run_round(job, change).items() if "lora_" in name}

    genuine = adapter_after(lambda client, mini_batches: None)
    changed = adapter_after(flip_one_bit_of_a_frozen_weight)
    assert genuine
    assert first_difference(genuine, changed) is not None


@pytest.mark.parametrize("lora", [None, {"lora_dropout": 0.1}])
def test_changed_dropout_key_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any] | None
) -> None:
    job = make_job(tmp_path, lora=lora, model_config=NO_DROPOUT if lora else {})
    genuine = run_round(job)
    key_of = centralized.dropout_key

    def with_one_changed(*position: int) -> int:
        return key_of(*position) + (position[3:] == (1, 2, 1))

    monkeypatch.setattr(centralized, "dropout_key", with_one_changed)
    assert first_difference(genuine, run_round(job)) is not None


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return run_round(make_job(tmp_path_factory.mktemp("genuine")))


@pytest.mark.parametrize(
    "change",
    [
        {"schedule": {"num_micro_batches": 2}},
        {"training": {"clip_norm": 0.0}},
        {"training": {"epsilon": 1.01e-8}},
        {"training": {"weight_decay": 0.11}},
        {"training": {"learning_rate": 1.0000001e-2}},
        {"training": {"update_per": "micro_batch"}},
        {"seed": 8},
    ],
    ids=str,
)
def test_changed_setting_is_found(
    genuine: dict[str, Tensor], tmp_path: Path, change: dict[str, Any]
) -> None:
    assert first_difference(genuine, run_round(make_job(tmp_path, **change))) is not None


def test_difference_names_the_tensor_and_the_distance() -> None:
    expected = {"a": torch.zeros(3), "b": torch.tensor([1.0, 2.0])}
    actual = {"a": torch.zeros(3), "b": torch.tensor([1.0, 2.5])}
    assert "b: 1 of 2 elements, by 0.5" in str(first_difference(expected, actual))
    assert "['b']" in str(first_difference(expected, {"a": torch.zeros(3)}))
