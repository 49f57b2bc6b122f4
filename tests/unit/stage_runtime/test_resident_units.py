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
from collapipe.stage_runtime.resident_units import StateDigests, Upload
from collapipe.weights.delta_codecs import decode_delta
from collapipe.weights.tensor_blob import TensorBlob, load_tensors

from .chains import States, TinyModel, held_unit

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

    def put(self, tensors: dict[str, Tensor]) -> str:
        blob = TensorBlob(tensors)
        self.blobs[blob.digest] = b"".join(blob.read())
        return blob.digest

    def keep(self, unit: ResidentUnit) -> StateDigests:
        digests = unit.seal()
        for blob in unit.blobs():
            self.blobs[blob.digest] = b"".join(blob.read())
        return digests

    def decoded(self, upload: Upload, base: StateDigests) -> dict[str, Tensor]:
        """Returns the weights that an upload gives on top of its base."""
        delta = load_tensors(b"".join(upload.blob.read()))
        return decode_delta(delta, load_tensors(self.blobs[base.weights]))

    def fetch(self, unit_index: int, digest: str) -> bytes:
        self.fetched.append((unit_index, digest))
        return self.blobs[digest]


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def unit(bert: ModelAdapter) -> ResidentUnit:
    return held_unit(bert, BLOCK, WAYS["adamw"])


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
    assert moved.seal() == stays.seal()


def test_optimizer_state_is_stored_under_the_names_of_parameters(unit: ResidentUnit) -> None:
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


def test_loading_an_initial_state_forgets_the_moments(bert: ModelAdapter, shelf: Shelf) -> None:
    for training in WAYS.values():
        unit = held_unit(bert, BLOCK, training)
        initial = shelf.keep(unit)
        assert initial.optimizer == ""
        step(unit, 1)
        unit.load(initial, shelf.fetch)
        assert unit.digests == initial
        assert not unit.optimizer.state


def test_only_blobs_that_differ_are_fetched(unit: ResidentUnit, shelf: Shelf) -> None:
    step(unit, 1)
    old = shelf.keep(unit)
    averaged = shelf.put({n: tensor * 0.5 for n, tensor in unit.module.state_dict().items()})
    unit.load(StateDigests(averaged, old.optimizer), shelf.fetch)
    assert shelf.fetched == [(BLOCK, averaged)]
    assert unit.digests == StateDigests(averaged, old.optimizer)


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
    unit: ResidentUnit, shelf: Shelf, spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> None:
    spoilt = spoil(dict(unit.module.state_dict()))
    digest = shelf.put({name: tensor.contiguous() for name, tensor in spoilt.items()})
    with pytest.raises(CorruptDataError, match="unit 1.*weights"):
        unit.load(StateDigests(digest, ""), shelf.fetch)


def test_optimizer_state_of_another_unit_is_corrupt(unit: ResidentUnit, shelf: Shelf) -> None:
    weights = shelf.keep(unit).weights
    other = shelf.put({"other//exp_avg": torch.zeros(3)})
    with pytest.raises(CorruptDataError, match="unit 1 has 0 tensors"):
        unit.load(StateDigests(weights, other), shelf.fetch)


# --- all units of a host


class Host:
    """The units of a host, and a shelf with every unit's initial weights."""

    def __init__(self, units: ResidentUnits, states: States) -> None:
        self.units = units
        self.shelf = Shelf()
        blobs = [self.shelf.put(state) for state in states]
        self.initial = [StateDigests(digest, "") for digest in blobs]

    def take(self, *indices: int) -> tuple[list[ResidentUnit], int]:
        """Takes units in their initial state. Returns them, and how many of them were reused."""
        wanted = {index: self.initial[index] for index in indices}
        return self.units.take(wanted, self.shelf.fetch)

    def trained(self) -> tuple[ResidentUnit, str]:
        """Trains a block, and returns it with the digest of its optimizer state, which is kept."""
        (unit,), _ = self.take(BLOCK)
        step(unit, 1)
        digest = unit.seal().optimizer
        self.units.keep_moments([digest])
        return unit, digest


@pytest.fixture
def host(tiny: TinyModel) -> Host:
    return Host(ResidentUnits(tiny.adapter, TrainingConfig(), CPU), tiny.states)


def test_units_that_are_held_are_reused_and_others_fetched(host: Host) -> None:
    units, num_reused = host.take(2, 1)
    assert ([unit.unit_index for unit in units], num_reused) == ([1, 2], 0)
    again, num_reused = host.take(1, 2, 3)
    assert num_reused == 2
    assert again[:2] == units
    assert [unit_index for unit_index, _ in host.shelf.fetched] == [1, 2, 3]
    host.units.retain([2, 3])
    with pytest.raises(NotFoundError):
        host.units.blob(host.initial[1].weights)
    host.shelf.fetched.clear()
    assert host.take(2, 3)[1] == 2
    assert not host.shelf.fetched


def test_unit_that_an_unfinished_attempt_changed_is_not_reused(host: Host) -> None:
    (unit,), _ = host.take(BLOCK)
    step(unit, 1)
    (unit,), num_reused = host.take(BLOCK)
    assert num_reused == 0
    assert len(host.shelf.fetched) == 2
    assert TensorBlob(unit.module.state_dict()).digest == host.initial[BLOCK].weights
    assert not unit.optimizer.state


def test_gradients_of_an_attempt_that_was_aborted_before_its_first_update_are_cleared(
    host: Host,
) -> None:
    (unit,), _ = host.take(BLOCK)
    for parameter in unit.parameters:
        parameter.grad = torch.ones_like(parameter)
    host.units.drop_unsealed()
    (unit,), num_reused = host.take(BLOCK)
    assert num_reused == 1
    assert [parameter.grad for parameter in unit.parameters] == [None] * len(unit.parameters)


def test_sealed_units_are_served_and_unsealed_ones_dropped(host: Host) -> None:
    (first, second), _ = host.take(1, 2)
    step(first, 1)
    with pytest.raises(NotFoundError):
        host.units.blob(host.initial[1].weights)
    digests = first.seal()
    for digest in (digests.weights, digests.optimizer, host.initial[2].weights):
        assert host.units.blob(digest).digest == digest
    step(second, 1)
    host.units.drop_unsealed()
    with pytest.raises(NotFoundError, match=host.initial[2].weights):
        host.units.blob(host.initial[2].weights)
    assert host.units.blob(digests.weights).digest == digests.weights
    _, num_reused = host.units.take({1: digests, 2: host.initial[2]}, host.shelf.fetch)
    assert num_reused == 1


def test_half_loaded_unit_is_dropped(host: Host) -> None:
    host.take(BLOCK)
    with pytest.raises(KeyError):
        host.units.take({BLOCK: StateDigests("0" * 64, "")}, host.shelf.fetch)
    assert host.take(BLOCK)[1] == 0


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
        decoded = shelf.decoded(uploads[0], base)
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
    decoded = shelf.decoded(upload, base)
    for name, tensor in unit.module.state_dict().items():
        expected = trained[name] + residuals[name] if name in residuals else trained[name]
        assert torch.equal(tensor, expected)
        assert torch.equal(tensor, decoded[name])
    # Nothing is left to send, so the next upload has the weights themselves.
    assert b"upload_residual" not in shelf.blobs[shelf.keep(unit).optimizer]
    step(unit, 3)
    assert unit.upload().base_digest == ""


# --- optimizer states that are kept for a copy


def test_kept_state_stays_readable_while_its_unit_trains_on_and_moves_away(host: Host) -> None:
    unit, digest = host.trained()
    kept = host.units.blob(digest)
    pieces = iter(kept.read(10))
    first = next(pieces)
    for seed in (2, 3):
        step(unit, seed)  # in the middle of the transfer
    rest = b"".join(pieces)
    data = b"".join(host.units.blob(digest).read())
    assert hashlib.sha256(data).hexdigest() == digest
    assert first + rest == data[10:]
    host.units.retain([])
    assert b"".join(host.units.blob(digest).read()) == data


def test_unit_of_a_late_round_gets_its_kept_state_back(host: Host) -> None:
    unit, digest = host.trained()
    step(unit, 2)
    host.units.drop_unsealed()  # the round was late
    host.units.keep_moments([digest])
    host.shelf.fetched.clear()
    wanted = StateDigests(host.initial[BLOCK].weights, digest)
    (again,), _ = host.units.take({BLOCK: wanted}, host.shelf.fetch)
    assert host.shelf.fetched == [(BLOCK, wanted.weights)]
    assert again is not unit
    assert again.optimizer_blob is not None
    assert again.optimizer_blob.digest == digest
    step(again, 3)  # It may be late again.
    assert hashlib.sha256(b"".join(host.units.blob(digest).read())).hexdigest() == digest


def test_state_is_freed_when_it_is_no_longer_wanted(host: Host) -> None:
    unit, digest = host.trained()
    step(unit, 2)
    kept: Any = host.units.blob(digest)
    freed = [weakref.ref(tensor) for _, tensor in kept._blob._tensors]
    del kept
    host.units.keep_moments([])
    gc.collect()
    assert freed and not any(reference() is not None for reference in freed)
    with pytest.raises(NotFoundError):
        host.units.blob(digest)


def test_update_copies_no_state_that_is_no_longer_wanted(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit, _ = host.trained()
    host.units.keep_moments([])
    monkeypatch.setattr(TensorBlob, "copy", lambda blob: pytest.fail("a state was copied"))
    step(unit, 2)
