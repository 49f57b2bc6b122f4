import gc
import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from collapipe.errors import CorruptDataError, NotFoundError
from collapipe.job import TrainingConfig
from collapipe.models import ModelAdapter
from collapipe.stage_runtime import CPU, ResidentUnit, ResidentUnits
from collapipe.stage_runtime.resident_units import StateDigests
from collapipe.weights.delta_codecs import decode_delta
from collapipe.weights.tensor_blob import TensorBlob, load_tensors

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


def test_optimizer_state_of_another_unit_is_corrupt(bert: ModelAdapter, shelf: Shelf) -> None:
    unit = held_unit(bert, BLOCK, WAYS["adamw"])
    weights = shelf.keep(unit).weights
    blob = TensorBlob({"other//exp_avg": torch.zeros(3)})
    shelf.blobs[blob.digest] = b"".join(blob.read())
    with pytest.raises(CorruptDataError, match="unit 1 has 0 tensors that fit"):
        unit.load(StateDigests(weights, blob.digest), shelf.fetch)


# --- all units of a host


@pytest.fixture
def resident(bert: ModelAdapter) -> ResidentUnits:
    return ResidentUnits(bert, TrainingConfig(), CPU)


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


# --- uploads


@pytest.mark.parametrize("way", WAYS)
def test_upload_is_a_delta_and_the_unit_continues_from_what_is_decoded(
    bert: ModelAdapter, shelf: Shelf, way: str
) -> None:
    stays, moved = held_unit(bert, BLOCK, WAYS[way]), held_unit(bert, BLOCK, WAYS[way])
    stays.upload_codec = moved.upload_codec = "int8"
    for seed in (1, 2):
        base = shelf.keep(stays)
        moved.load(base, shelf.fetch)
        uploads = []
        for unit in (stays, moved):
            step(unit, seed)
            step(unit, seed + 10)
            uploads.append(unit.upload())
        blob = uploads[0].blob
        assert uploads[0].base_digest == base.weights
        # What an upload has lost is part of the optimizer state, so it moves with the unit.
        assert uploads[1].blob.digest == blob.digest
        decoded = decode_delta(
            load_tensors(b"".join(blob.read())), load_tensors(shelf.blobs[base.weights])
        )
        assert stays.seal() == moved.seal()
        assert stays.seal().weights == TensorBlob(decoded).digest
        assert blob.total_bytes < len(shelf.blobs[base.weights]) / 2


def test_upload_without_an_update_or_a_codec_has_the_weights(bert: ModelAdapter) -> None:
    for upload_codec in ("top_k", "fp32"):
        unit = held_unit(bert, BLOCK, TrainingConfig())
        unit.upload_codec = upload_codec
        if upload_codec == "fp32":
            step(unit, 1)
        upload = unit.upload()
        assert (upload.blob.digest, upload.base_digest) == (unit.seal().weights, "")


def test_lossless_upload_adds_what_lossy_ones_have_lost(bert: ModelAdapter, shelf: Shelf) -> None:
    unit = held_unit(bert, BLOCK, TrainingConfig())
    unit.upload_codec = "top_k"
    shelf.keep(unit)
    step(unit, 1)
    unit.upload()
    base = shelf.keep(unit)
    lost = unit.optimizer.state
    residuals = {
        name: lost[parameter]["upload_residual"].clone()
        for name, parameter in unit.module.named_parameters()
        if "upload_residual" in lost[parameter]
    }
    assert residuals
    unit.upload_codec = "fp32"
    step(unit, 2)
    trained = {name: tensor.clone() for name, tensor in unit.module.state_dict().items()}
    upload = unit.upload()
    decoded = decode_delta(
        load_tensors(b"".join(upload.blob.read())), load_tensors(shelf.blobs[base.weights])
    )
    for name, tensor in unit.module.state_dict().items():
        expected = trained[name] + residuals[name] if name in residuals else trained[name]
        assert torch.equal(tensor, expected)
        assert torch.equal(tensor, decoded[name])
    # Nothing is left to send, so the next upload has the weights themselves.
    assert b"upload_residual" not in shelf.blobs[shelf.keep(unit).optimizer]
    step(unit, 3)
    assert unit.upload().base_digest == ""


# --- optimizer states that are kept for a copy


def trained(
    resident: ResidentUnits, shelf: Shelf, wanted: StateDigests
) -> tuple[ResidentUnit, str]:
    """Trains a block, and returns it with the digest of its optimizer state, which is kept."""
    (unit,), _ = resident.take({BLOCK: wanted}, shelf.fetch)
    step(unit, 1)
    digest = unit.seal().optimizer
    resident.keep_moments([digest])
    return unit, digest


def states_of(unit: ResidentUnit) -> dict[str, Tensor]:
    blob = unit.optimizer_blob
    assert blob is not None
    return load_tensors(b"".join(blob.read()))


def test_kept_state_stays_readable_while_its_unit_trains_on(
    resident: ResidentUnits, shelf: Shelf, initial: dict[int, StateDigests]
) -> None:
    unit, digest = trained(resident, shelf, initial[BLOCK])
    kept = resident.blob(digest)
    pieces = iter(kept.read(10))
    first = next(pieces)
    for seed in (2, 3):
        step(unit, seed)  # in the middle of the transfer
    rest = b"".join(pieces)
    data = b"".join(resident.blob(digest).read())
    assert hashlib.sha256(data).hexdigest() == digest
    assert first + rest == data[10:]


def test_state_of_a_unit_that_has_moved_away_stays_readable(
    resident: ResidentUnits, shelf: Shelf, initial: dict[int, StateDigests]
) -> None:
    _, digest = trained(resident, shelf, initial[BLOCK])
    resident.retain([])
    assert hashlib.sha256(b"".join(resident.blob(digest).read())).hexdigest() == digest


def test_unit_of_a_late_round_gets_its_kept_state_back(
    resident: ResidentUnits, shelf: Shelf, initial: dict[int, StateDigests]
) -> None:
    unit, digest = trained(resident, shelf, initial[BLOCK])
    expected = {name: tensor.clone() for name, tensor in states_of(unit).items()}
    step(unit, 2)
    resident.drop_unsealed()  # the round was late
    resident.keep_moments([digest])
    shelf.fetched.clear()
    wanted = StateDigests(initial[BLOCK].weights, digest)
    (again,), _ = resident.take({BLOCK: wanted}, shelf.fetch)
    assert shelf.fetched == [(BLOCK, wanted.weights)]
    assert again is not unit
    found = states_of(again)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    step(again, 3)  # It may be late again.
    assert hashlib.sha256(b"".join(resident.blob(digest).read())).hexdigest() == digest


def test_state_is_freed_when_it_is_no_longer_wanted(
    resident: ResidentUnits, shelf: Shelf, initial: dict[int, StateDigests]
) -> None:
    unit, digest = trained(resident, shelf, initial[BLOCK])
    step(unit, 2)
    freed = [weakref.ref(tensor) for tensor in tensors_of(resident.blob(digest))]
    resident.keep_moments([])
    gc.collect()
    assert freed and not any(reference() is not None for reference in freed)
    with pytest.raises(NotFoundError):
        resident.blob(digest)


def test_update_copies_no_state_that_is_no_longer_wanted(
    resident: ResidentUnits,
    shelf: Shelf,
    initial: dict[int, StateDigests],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unit, _ = trained(resident, shelf, initial[BLOCK])
    resident.keep_moments([])
    monkeypatch.setattr(TensorBlob, "copy", lambda blob: pytest.fail("a state was copied"))
    step(unit, 2)


def tensors_of(kept: Any) -> list[Tensor]:
    return [tensor for _, tensor in kept._blob._tensors]
