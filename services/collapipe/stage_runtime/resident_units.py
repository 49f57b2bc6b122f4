"""Holds units with their optimizer states in memory, between rounds, named by their content.

For each unit, a plan gives the digests of the state that the unit must have. A host reuses a unit whose digests match, and
fetches the state of every other unit. A unit that an aborted attempt has changed has no digests, so it is
never reused.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collapipe.errors import CorruptDataError, NotFoundError
from collapipe.job import TrainingConfig
from collapipe.models import ModelAdapter
from collapipe.stage_runtime.optimizer import make_optimizer, update_parameters
from collapipe.weights.tensor_blob import TensorBlob, load_tensors

Fetch = Callable[[int, str], bytes]
"""Fetches a blob of a unit: (unit index, digest) to bytes."""


@dataclass(frozen=True)
class StateDigests:
    """The digests of a unit's weights and of its optimizer state."""

    weights: str
    optimizer: str
    """Empty for an optimizer that has taken no step."""


class ResidentUnit:
    """One unit in memory: its module, its optimizer, and the blobs of both if it is sealed."""

    def __init__(self, unit_index: int, module: nn.Module, training: TrainingConfig) -> None:
        self.unit_index = unit_index
        self.module = module
        self._named_parameters = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._training = training
        self.optimizer = make_optimizer(self.parameters, training)
        self._weights_blob: TensorBlob | None = None
        self._optimizer_blob: TensorBlob | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._named_parameters.values())

    @property
    def digests(self) -> StateDigests | None:
        """The digests of the content. `None` after an update, until `seal`."""
        if self._weights_blob is None:
            return None
        blob = self._optimizer_blob
        return StateDigests(self._weights_blob.digest, blob.digest if blob else "")

    def update(self, learning_rate: float, gradient_scale: float) -> None:
        self._weights_blob = self._optimizer_blob = None
        update_parameters(self.optimizer, learning_rate, gradient_scale)

    def seal(self) -> StateDigests:
        """Makes blobs of the present content, so that it can be served, and returns their digests."""
        if self._weights_blob is None:
            self._weights_blob = TensorBlob(self.module.state_dict())
            state = self._optimizer_tensors()
            self._optimizer_blob = TensorBlob(state) if state else None
        digests = self.digests
        assert digests is not None
        return digests

    def load(self, wanted: StateDigests, fetch: Fetch) -> None:
        """Brings the unit into a wanted state. Fetches only the blobs that differ.

        Raises:
            CorruptDataError: The fetched state does not fit the unit, or has other digests.
        """
        held = self.digests
        if held is None or held.weights != wanted.weights:
            self._load_weights(load_tensors(fetch(self.unit_index, wanted.weights)))
        if held is None or held.optimizer != wanted.optimizer:
            data = fetch(self.unit_index, wanted.optimizer) if wanted.optimizer else None
            self._load_optimizer(load_tensors(data) if data is not None else {})
        self._weights_blob = self._optimizer_blob = None
        if self.seal() != wanted:
            raise CorruptDataError(
                f"unit {self.unit_index} was loaded but has content {self.digests} instead of {wanted}"
            )

    def blobs(self) -> Iterator[TensorBlob]:
        """Yields the blobs of a sealed unit."""
        yield from (blob for blob in (self._weights_blob, self._optimizer_blob) if blob is not None)

    def _load_weights(self, tensors: dict[str, Tensor]) -> None:
        try:
            self.module.load_state_dict(tensors)
        except RuntimeError as error:
            raise CorruptDataError(
                f"unit {self.unit_index} cannot load its weights: {error}"
            ) from None

    def _load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        self.optimizer = make_optimizer(self.parameters, self._training)
        for full_name, tensor in tensors.items():
            name, _, key = full_name.rpartition("//")
            parameter = self._named_parameters.get(name)
            if parameter is not None:
                self.optimizer.state[parameter][key] = tensor.to(parameter.device)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        """Returns the optimizer state, for example "layer.weight//exp_avg"."""
        return {
            f"{name}//{key}": value
            for name, parameter in self._named_parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }


class ResidentUnits:
    """The units of one job that a host holds for one cluster."""

    def __init__(
        self, adapter: ModelAdapter, training: TrainingConfig, device: torch.device
    ) -> None:
        self.adapter = adapter
        self._training = training
        self._device = device
        self._units: dict[int, ResidentUnit] = {}

    def take(self, wanted: dict[int, StateDigests], fetch: Fetch) -> tuple[list[ResidentUnit], int]:
        """Brings units into wanted states, given by unit index.

        Returns:
            The units in order, and how many of them were held in the wanted state already.
        """
        units, num_reused = [], 0
        for unit_index, digests in sorted(wanted.items()):
            unit = self._units.get(unit_index)
            if unit is None:
                module = self.adapter.build_unit(unit_index).to(self._device)
                unit = ResidentUnit(unit_index, module, self._training)
            # An attempt that was aborted before its first update leaves gradients behind.
            unit.optimizer.zero_grad()
            if unit.digests == digests:
                num_reused += 1
            else:
                self._units.pop(unit_index, None)  # if `load` fails, the half-loaded unit is gone
                unit.load(digests, fetch)
            self._units[unit_index] = unit
            units.append(unit)
        return units, num_reused

    def retain(self, unit_indices: Iterable[int]) -> None:
        """Keeps only the units with these indices."""
        keep = set(unit_indices)
        self._units = {index: unit for index, unit in self._units.items() if index in keep}

    def drop_unsealed(self) -> None:
        """Drops the units that an unfinished attempt has changed."""
        self.retain([index for index, unit in self._units.items() if unit.digests is not None])

    def blob(self, digest: str) -> TensorBlob:
        """Finds a blob of a unit; raises `NotFoundError`."""
        for unit in list(self._units.values()):
            for blob in unit.blobs():
                if blob.digest == digest:
                    return blob
        raise NotFoundError(f"blob {digest} is not held here")
