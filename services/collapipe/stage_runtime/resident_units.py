"""The units that a host holds between rounds, with their optimizer state, named by content.

A plan says which state of which unit it wants. What is at hand is used as it is, the rest is fetched, and
what an aborted attempt left behind can never be mistaken for it: its digest is unknown.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collapipe.errors import CorruptDataError, NotFoundError
from collapipe.job import TrainingConfig
from collapipe.models import ModelAdapter
from collapipe.stage_runtime.optimizer import make_optimizer
from collapipe.weights.tensor_blob import TensorBlob, load_tensors

Fetch = Callable[[int, str], bytes]
"""Fetches a blob of a unit: (unit index, digest) to bytes."""


@dataclass(frozen=True)
class StateDigests:
    """The content of a unit; an empty optimizer digest is an optimizer that has not stepped."""

    weights: str
    optimizer: str


class ResidentUnit:
    """One unit in memory: its module, its optimizer, and the digests of both while they are unchanged.

    Args:
        unit_index: Position in the model.
        module: The unit, already on the device that computes.
        training: How its parameters change.
    """

    def __init__(self, unit_index: int, module: nn.Module, training: TrainingConfig) -> None:
        self.unit_index = unit_index
        self.module = module
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self._names: dict[Tensor, str] = {
            p: name for name, p in module.named_parameters() if p.requires_grad
        }
        self._training = training
        self.optimizer = make_optimizer(self.parameters, training)
        self._weights: TensorBlob | None = None
        self._optimizer_blob: TensorBlob | None = None

    @property
    def digests(self) -> StateDigests | None:
        """The content; `None` once a step changed it, until `seal`."""
        if self._weights is None:
            return None
        blob = self._optimizer_blob
        return StateDigests(self._weights.digest, blob.digest if blob else "")

    def update(self, learning_rate: float, gradient_scale: float) -> None:
        """Takes one optimizer step and clears the gradients."""
        self._weights = self._optimizer_blob = None
        for parameter in self.parameters:
            if gradient_scale < 1.0 and parameter.grad is not None:
                parameter.grad.mul_(gradient_scale)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seal(self) -> StateDigests:
        """Names the present content, so that it can be served and found again."""
        if self._weights is None:
            self._weights = TensorBlob(self.module.state_dict())
            state = dict(self._optimizer_tensors())
            self._optimizer_blob = TensorBlob(state) if state else None
        digests = self.digests
        assert digests is not None
        return digests

    def load(self, wanted: StateDigests, fetch: Fetch) -> None:
        """Brings the unit into a wanted state, fetching only what differs.

        Raises:
            CorruptDataError: What was fetched does not fit the unit.
        """
        held = self.digests
        if held is None or held.weights != wanted.weights:
            self._load_weights(load_tensors(fetch(self.unit_index, wanted.weights)))
        if held is None or held.optimizer != wanted.optimizer:
            data = fetch(self.unit_index, wanted.optimizer) if wanted.optimizer else None
            self._load_optimizer(load_tensors(data) if data is not None else {})
        self._weights = self._optimizer_blob = None
        if self.seal() != wanted:
            raise CorruptDataError(
                f"unit {self.unit_index} was loaded but has content {self.digests} instead of {wanted}"
            )

    def blobs(self) -> Iterator[TensorBlob]:
        """What can be served of this unit."""
        yield from (blob for blob in (self._weights, self._optimizer_blob) if blob is not None)

    def _load_weights(self, tensors: dict[str, Tensor]) -> None:
        try:
            self.module.load_state_dict(tensors)
        except RuntimeError as error:
            raise CorruptDataError(
                f"unit {self.unit_index} cannot load its weights: {error}"
            ) from None

    def _load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        self.optimizer = make_optimizer(self.parameters, self._training)
        for parameter, name in self._names.items():
            prefix = f"{name}//"
            state = {
                key.removeprefix(prefix): tensor.to(parameter.device)
                for key, tensor in tensors.items()
                if key.startswith(prefix)
            }
            if state:
                self.optimizer.state[parameter] = state

    def _optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        for parameter, state in self.optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{self._names[parameter]}//{key}", value


class ResidentUnits:
    """The units of one job that a host holds for one cluster.

    Args:
        adapter: Builds units.
        training: How their parameters change.
        device: Where they compute.
    """

    def __init__(
        self, adapter: ModelAdapter, training: TrainingConfig, device: torch.device
    ) -> None:
        self.adapter = adapter
        self._training = training
        self._device = device
        self._units: dict[int, ResidentUnit] = {}

    def take(self, wanted: dict[int, StateDigests], fetch: Fetch) -> tuple[list[ResidentUnit], int]:
        """Holds units in wanted states; returns them in order, and how many were at hand unchanged."""
        units, num_reused = [], 0
        for unit_index, digests in sorted(wanted.items()):
            unit = self._units.get(unit_index)
            if unit is None:
                module = self.adapter.build_unit(unit_index).to(self._device)
                unit = ResidentUnit(unit_index, module, self._training)
            # an attempt that broke off before its first update left gradients, and the content unchanged
            unit.optimizer.zero_grad()
            if unit.digests == digests:
                num_reused += 1
            else:
                self._units.pop(unit_index, None)  # a failed load leaves no half-loaded unit
                unit.load(digests, fetch)
            self._units[unit_index] = unit
            units.append(unit)
        return units, num_reused

    def retain(self, unit_indices: Iterable[int]) -> None:
        """Drops every other unit."""
        keep = set(unit_indices)
        self._units = {index: unit for index, unit in self._units.items() if index in keep}

    def drop_unsealed(self) -> None:
        """Drops what an unfinished attempt changed."""
        self.retain([index for index, unit in self._units.items() if unit.digests is not None])

    def blob(self, digest: str) -> TensorBlob:
        """Finds a blob of a unit; raises `NotFoundError`."""
        for unit in list(self._units.values()):
            for blob in unit.blobs():
                if blob.digest == digest:
                    return blob
        raise NotFoundError(f"blob {digest} is not held here")
