from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from collapipe.errors import CorruptDataError, NotFoundError
from collapipe.job import TrainingConfig
from collapipe.models import ModelAdapter
from collapipe.stage_runtime import ResidentUnit, ResidentUnits
from collapipe.stage_runtime.resident_units import StateDigests
from collapipe.weights.tensor_blob import TensorBlob

from .chains import States, held_unit

BLOCK = 1
WAYS = {
    "adamw": TrainingConfig(),
    "sgd with momentum": TrainingConfig(optimizer="sgd", momentum=0.9),
    "sgd": TrainingConfig(optimizer="sgd"),
}


def step(unit: ResidentUnit, seed: int) -> None:
    """Updates a unit with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in unit.parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    unit.update(1e-2, 0.5)


class Shelf:
    """Stores blobs by their digest, and records which blobs are fetched."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.fetched: list[tuple[int, str]] = []

    def keep(self, unit: ResidentUnit) -> StateDigests:
        digests = unit.seal()
        for blob in unit.blobs():
            self.blobs[blob.digest] = b"".join(blob.read())
        return digests

    def fetch(self, unit_index: int, digest: str) -> bytes:
        self.fetched.append((unit_index, digest))
        return self.blobs[digest]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def no_fetch(unit_index: int, digest: str) -> bytes:
    raise AssertionError(f"fetched {digest} of unit {unit_index}")


def parameters_of(unit: ResidentUnit) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in unit.module.named_parameters()}


@pytest.mark.parametrize("training", WAYS.values(), ids=WAYS.keys())
def test_moved_unit_trains_on_bit_for_bit(
    bert: ModelAdapter, shelf: Shelf, training: TrainingConfig
) -> None:
    stays, moved = held_unit(bert, BLOCK, training), held_unit(bert, BLOCK, training)
    for seed in (1, 2):
        step(stays, seed)
    digests = shelf.keep(stays)
    moved.load(digests, shelf.fetch)
    assert moved.digests == digests
    for unit in (stays, moved):
        step(unit, 3)
    expected = parameters_of(stays)
    for name, tensor in parameters_of(moved).items():
        assert torch.equal(tensor, expected[name])
    assert moved.seal() == stays.seal()


def test_optimizer_state_is_stored_under_the_names_of_parameters(
    bert: ModelAdapter, shelf: Shelf
) -> None:
    unit = held_unit(bert, BLOCK, WAYS["adamw"])
    step(unit, 1)
    unit.seal()
    _, optimizer = unit.blobs()
    held = TensorBlob(
        {
            f"{name}//{key}": value
            for name, parameter in unit.module.named_parameters()
            for key, value in unit.optimizer.state[parameter].items()
        }
    )
    assert held.digest == optimizer.digest


def test_optimizer_that_has_not_stepped_has_no_digest(bert: ModelAdapter) -> None:
    for training in WAYS.values():
        assert held_unit(bert, BLOCK, training).seal().optimizer == ""


def test_loading_an_initial_state_forgets_the_moments(bert: ModelAdapter, shelf: Shelf) -> None:
    unit = held_unit(bert, BLOCK, WAYS["adamw"])
    initial = shelf.keep(unit)
    step(unit, 1)
    unit.load(initial, shelf.fetch)
    assert unit.digests == initial
    assert not unit.optimizer.state


def test_only_blobs_that_differ_are_fetched(bert: ModelAdapter, shelf: Shelf) -> None:
    unit = held_unit(bert, BLOCK, WAYS["adamw"])
    step(unit, 1)
    old = shelf.keep(unit)
    averaged = {name: tensor * 0.5 for name, tensor in unit.module.state_dict().items()}
    blob = TensorBlob(averaged)
    shelf.blobs[blob.digest] = b"".join(blob.read())
    unit.load(StateDigests(blob.digest, old.optimizer), shelf.fetch)
    assert shelf.fetched == [(BLOCK, blob.digest)]
    assert unit.digests == StateDigests(blob.digest, old.optimizer)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: {name: tensor[:1] for name, tensor in state.items()},
        lambda state: dict(list(state.items())[1:]),
        lambda state: state | {"more": torch.zeros(1)},
        lambda state: {},
    ],
    ids=["other shapes", "one is missing", "one too many", "none"],
)
def test_weights_that_do_not_fit_are_corrupt(
    bert: ModelAdapter,
    shelf: Shelf,
    spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    unit = held_unit(bert, BLOCK, WAYS["adamw"])
    blob = TensorBlob({k: v.contiguous() for k, v in spoil(dict(unit.module.state_dict())).items()})
    shelf.blobs[blob.digest] = b"".join(blob.read())
    with pytest.raises(CorruptDataError, match="unit 1 cannot load its weights"):
        unit.load(StateDigests(blob.digest, ""), shelf.fetch)


def test_content_under_another_digest_is_corrupt(bert: ModelAdapter, shelf: Shelf) -> None:
    unit = held_unit(bert, BLOCK, WAYS["adamw"])
    digests = shelf.keep(unit)
    other = held_unit(bert, BLOCK, WAYS["adamw"])
    step(other, 1)
    wanted = StateDigests("0" * 64, "")
    shelf.blobs["0" * 64] = shelf.blobs[digests.weights]
    with pytest.raises(CorruptDataError, match="instead of"):
        other.load(wanted, shelf.fetch)


# --- all units of a host


@pytest.fixture
def resident(bert: ModelAdapter) -> ResidentUnits:
    return ResidentUnits(bert, TrainingConfig(), torch.device("cpu"))


@pytest.fixture
def initial(shelf: Shelf, bert_states: States) -> dict[int, StateDigests]:
    """The digests of every unit's initial weights, whose blobs are on the shelf."""
    wanted = {}
    for index, state in enumerate(bert_states):
        blob = TensorBlob(state)
        shelf.blobs[blob.digest] = b"".join(blob.read())
        wanted[index] = StateDigests(blob.digest, "")
    return wanted


def test_units_that_are_held_are_reused_and_others_fetched(
    resident: ResidentUnits, shelf: Shelf, initial: dict[int, StateDigests]
) -> None:
    first = {index: initial[index] for index in (2, 1)}
    units, num_reused = resident.take(first, shelf.fetch)
    assert ([unit.unit_index for unit in units], num_reused) == ([1, 2], 0)
    again, num_reused = resident.take({index: initial[index] for index in (1, 2, 3)}, shelf.fetch)
    assert num_reused == 2
    assert again[:2] == units
    assert [unit_index for unit_index, _ in shelf.fetched] == [1, 2, 3]


def test_unit_that_an_unfinished_attempt_changed_is_not_reused(
    resident: ResidentUnits, shelf: Shelf, initial: dict[int, StateDigests]
) -> None:
    (unit,), _ = resident.take({BLOCK: initial[BLOCK]}, shelf.fetch)
    step(unit, 1)
    (unit,), num_reused = resident.take({BLOCK: initial[BLOCK]}, shelf.fetch)
    assert num_reused == 0
    assert len(shelf.fetched) == 2
    assert TensorBlob(unit.module.state_dict()).digest == initial[BLOCK].weights
    assert not unit.optimizer.state


def test_gradients_of_an_attempt_that_was_aborted_before_its_first_update_are_cleared(
    resident: ResidentUnits, shelf: Shelf, initial: dict[int, StateDigests]
) -> None:
    (unit,), _ = resident.take({BLOCK: initial[BLOCK]}, shelf.fetch)
    for parameter in unit.parameters:
        parameter.grad = torch.ones_like(parameter)
    resident.drop_unsealed()
    (unit,), num_reused = resident.take({BLOCK: initial[BLOCK]}, shelf.fetch)
    assert num_reused == 1
    assert [parameter.grad for parameter in unit.parameters] == [None] * len(unit.parameters)


def test_drop_unsealed_keeps_sealed_units(
    resident: ResidentUnits, shelf: Shelf, initial: dict[int, StateDigests]
) -> None:
    units, _ = resident.take({1: initial[1], 2: initial[2]}, shelf.fetch)
    step(units[0], 1)
    resident.drop_unsealed()
    assert resident.blob(initial[2].weights).digest == initial[2].weights
    with pytest.raises(NotFoundError, match=initial[1].weights):
        resident.blob(initial[1].weights)
    _, num_reused = resident.take({1: initial[1], 2: initial[2]}, shelf.fetch)
    assert num_reused == 1


def test_weights_and_optimizer_state_of_a_sealed_unit_are_served(
    resident: ResidentUnits, shelf: Shelf, initial: dict[int, StateDigests]
) -> None:
    (unit,), _ = resident.take({BLOCK: initial[BLOCK]}, shelf.fetch)
    step(unit, 1)
    with pytest.raises(NotFoundError):
        resident.blob(initial[BLOCK].weights)
    digests = unit.seal()
    for digest in (digests.weights, digests.optimizer):
        assert resident.blob(digest).digest == digest


def test_retain_drops_every_other_unit(
    resident: ResidentUnits, shelf: Shelf, initial: dict[int, StateDigests]
) -> None:
    resident.take({1: initial[1], 2: initial[2]}, shelf.fetch)
    resident.retain([2, 3])
    with pytest.raises(NotFoundError):
        resident.blob(initial[1].weights)
    resident.take({2: initial[2]}, no_fetch)


def test_half_loaded_unit_is_dropped(
    resident: ResidentUnits, shelf: Shelf, initial: dict[int, StateDigests]
) -> None:
    resident.take({BLOCK: initial[BLOCK]}, shelf.fetch)

    def lose(unit_index: int, digest: str) -> bytes:
        raise NotFoundError("gone")

    with pytest.raises(NotFoundError, match="gone"):
        resident.take({BLOCK: StateDigests("0" * 64, "")}, lose)
    _, num_reused = resident.take({BLOCK: initial[BLOCK]}, shelf.fetch)
    assert num_reused == 0
