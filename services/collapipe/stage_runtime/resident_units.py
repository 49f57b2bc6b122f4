"""Holds units with their optimizer states in memory, between rounds, named by their content.

For each unit, a plan gives the digests of the state that the unit must have. A host reuses a unit whose digests match, and
fetches the state of every other unit. Frozen weights never change, and come from files. A unit that an aborted attempt has changed has no digests, so it is
never reused.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from collapipe.codec_table import UploadCodecName
from collapipe.errors import CorruptDataError, NotFoundError, WrongStateError
from collapipe.job import TrainingConfig
from collapipe.models import (
    ModelAdapter,
    divide_state,
    frozen_names,
    is_quantised,
    load_quantised,
)
from collapipe.secure_aggregation.fixed_point import to_ring
from collapipe.secure_aggregation.masks import MaskKeys, MaskStream
from collapipe.stage_runtime.compute_device import CPU, ComputeDevice
from collapipe.stage_runtime.optimizer import make_optimizer, update_parameters
from collapipe.stage_runtime.private_updates import UpdatePrivacy, make_private
from collapipe.stage_runtime.row_gradients import use_row_gradients
from collapipe.stage_runtime.weight_gradients import use_split_backward
from collapipe.weights.delta_codecs import encode_delta
from collapipe.weights.tensor_blob import TensorBlob, load_tensors

Fetch = Callable[[int, str], bytes]
"""Fetches a blob of a unit: (unit index, digest) to bytes, whose digest `Fetch` has checked."""


@dataclass(frozen=True)
class StateDigests:
    """The digests of a unit's trained weights and of its optimizer state."""

    weights: str
    optimizer: str
    """Empty for an optimizer that has taken no step."""


@dataclass(frozen=True)
class Upload:
    """What the edge server gets of a unit after a round.

    Args:
        base_digest: Digest of the weights that an encoded delta or a masked change refers to. Empty if the blob has the
            weights themselves.
    """

    unit_index: int
    blob: TensorBlob
    base_digest: str = ""


_MASKED_AT_ONCE = 1 << 18
"""Values that are in memory in double precision at a time."""
_RESIDUAL = "upload_residual"
"""Entry of the optimizer state of a parameter: what uploads have lost so far."""


class KeptMoments:
    """An optimizer state that must stay readable until it is copied, although its unit trains on.

    The next update of the unit would change the tensors. So the unit calls `detach` before, which copies them if
    they are still needed.
    """

    def __init__(self, blob: TensorBlob) -> None:
        self.digest = blob.digest
        self.total_bytes = blob.total_bytes
        self._blob = blob
        self._lock = threading.Lock()

    def read(self, offset: int = 0) -> Iterator[bytes]:
        """Yields the bytes from an offset on, in pieces of at most 1 MiB."""
        while offset < self.total_bytes:
            with self._lock:
                piece = bytes(next(self._blob.read(offset)))
            yield piece
            offset += len(piece)

    def detach(self) -> None:
        """Makes later changes of the unit's tensors harmless."""
        with self._lock:
            self._blob = self._blob.copy()


class ResidentUnit:
    """One unit in memory: its module, its optimizer, and the blobs of both if it is sealed."""

    def __init__(
        self,
        unit_index: int,
        module: nn.Module,
        training: TrainingConfig,
        device: ComputeDevice = CPU,
    ) -> None:
        self.unit_index = unit_index
        self.module = module
        self._device = device
        self._named_parameters = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._frozen_names = frozen_names(module)
        self._tables = use_row_gradients(module)
        self.split_layers = use_split_backward(module) if training.split_backward else []
        """The layers that can defer the gradients of their weights."""
        self._training = training
        self.optimizer = make_optimizer(self.parameters, training)
        self._weights_blob: TensorBlob | None = None
        self._optimizer_blob: TensorBlob | None = None
        self._is_sealed = False
        self._base: tuple[str, dict[str, Tensor]] | None = None
        """Digest and copy of the weights before the first update of a round, if the upload is a delta, private or masked."""
        self.upload_codec: UploadCodecName = "fp32"
        """How the weights are pushed after this round."""
        self.privacy: UpdatePrivacy | None = None
        """How the change of this round becomes private before it is pushed, if it does."""
        self.is_masked = False
        """Whether what is pushed after this round is masked."""
        self.kept: KeptMoments | None = None
        """The present optimizer state, if it is kept for a copy."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self._named_parameters.values())

    @property
    def optimizer_blob(self) -> TensorBlob | None:
        """The optimizer state of a sealed unit; `None` before the first step."""
        return self._optimizer_blob

    @property
    def digests(self) -> StateDigests | None:
        """The digests of the content. `None` after an update, until `seal`."""
        if not self._is_sealed or self._weights_blob is None:
            return None
        blob = self._optimizer_blob
        return StateDigests(self._weights_blob.digest, blob.digest if blob else "")

    def gradients(self) -> Iterator[Tensor | None]:
        """Yields a tensor with the norm of each gradient; see `RowGradients.used_gradient`."""
        tables = self._tables
        for parameter in self.parameters:
            yield tables[parameter].used_gradient() if parameter in tables else parameter.grad

    def update(self, learning_rate: float, gradient_scale: float) -> None:
        if self.kept is not None:
            self.kept.detach()
            self.kept = None
        digests = self.digests
        # Without a codec, what earlier uploads have lost is still to be sent, so that nothing gets lost for good.
        is_special = self.privacy is not None or self.is_masked
        needs_base = self.upload_codec != "fp32" or self._has_residual() or is_special
        if digests is not None and needs_base:
            state = self._trained_state()
            self._base = digests.weights, {name: state[name].clone() for name in state}
        self._unseal()
        update_parameters(self.optimizer, learning_rate, gradient_scale)

    def weights_blob(self) -> TensorBlob:
        """Returns the present weights as a blob, which may be used until the next update."""
        if self._weights_blob is None:
            self._weights_blob = self._blob(self._trained_state())
        return self._weights_blob

    def upload(self) -> Upload:
        """Returns what to push after the last update of a round.

        If it is an encoded delta, the unit continues from the weights that the edge server decodes. With a single
        cluster, these are the next global weights, so nothing is fetched. With the codec `fp32`, the upload adds
        what earlier uploads have lost to the weights. Nothing is left then, so the next upload is no delta.

        The unit also continues from the weights of a private upload.

        Raises:
            DivergedError: The change has no finite norm, so it cannot be made private.
            WrongStateError: The weights before the round are lost, so the change cannot be made private.
        """
        if self._base is None:
            if self.privacy is not None and not self._is_sealed:
                raise WrongStateError(
                    f"unit {self.unit_index} has changed, but the weights before the round are lost, so its change cannot be made "
                    "private: run the round again"
                )
            return Upload(self.unit_index, self.weights_blob())
        base_digest, base = self._base
        if self.privacy is not None:
            self._make_private(self.privacy, base_digest, base)
            self._base = None
            return Upload(self.unit_index, self.weights_blob())
        states = {name: self.optimizer.state[one] for name, one in self._named_parameters.items()}
        residual = {name: state[_RESIDUAL] for name, state in states.items() if _RESIDUAL in state}
        encoded = encode_delta(self.upload_codec, self._trained_state(), base, residual)
        self._load_weights(encoded.weights)
        for state in states.values():
            state.pop(_RESIDUAL, None)
        for name, tensor in encoded.residual.items():
            states[name][_RESIDUAL] = tensor.to(base[name].device)
        self._base = None
        return Upload(self.unit_index, TensorBlob(encoded.tensors), base_digest)

    def masked_upload(self, num_samples: int, total_samples: int, masks: MaskKeys) -> Upload:
        """Returns the change of a round with masks, as int32. Integer tensors, which are constants, are left out.

        If the change becomes private, the unit continues from the private weights.

        Args:
            num_samples: Rows of the cluster.
            total_samples: As in `to_ring`.

        Raises:
            CollapipeError: As `to_ring` and `upload`.
        """
        assert self._base is not None
        base_digest, base = self._base
        if self.privacy is not None:
            self._make_private(self.privacy, base_digest, base)
        stream, masked = MaskStream(masks), {}
        # The edge server takes the stream in this order, too.
        for name, tensor in sorted(self._trained_state().items()):
            if not tensor.is_floating_point():
                continue
            weights, before = tensor.reshape(-1), base[name].reshape(-1)
            masked[name] = torch.empty(tensor.shape, dtype=torch.int32)
            values = masked[name].view(-1).numpy().view("<u4")  # the same memory
            for first in range(0, len(values), _MASKED_AT_ONCE):
                part = slice(first, first + _MASKED_AT_ONCE)
                change = to_ring(weights[part], before[part], num_samples, total_samples, name)
                values[part] = change.cpu().numpy().view("<u4")
                values[part] += stream.take(len(change))
        self._base = None
        return Upload(self.unit_index, TensorBlob(masked), base_digest)

    def _make_private(
        self, privacy: UpdatePrivacy, base_digest: str, base: Mapping[str, Tensor]
    ) -> None:
        digests = base_digest, self.weights_blob().digest
        make_private(self._named_parameters, base, privacy, digests)
        self._unseal()

    def seal(self) -> StateDigests:
        """Makes blobs of the present content, so that it can be served, and returns their digests."""
        if not self._is_sealed:
            self.weights_blob()
            state = self._optimizer_tensors()
            self._optimizer_blob = self._blob(state) if state else None
            self._is_sealed = True
        digests = self.digests
        assert digests is not None
        return digests

    def load(self, wanted: StateDigests, fetch: Fetch) -> None:
        """Brings the unit into a wanted state. Fetches only the blobs that differ.

        Raises:
            CorruptDataError: The fetched state does not fit the unit.
        """
        self._base = None
        held = self.digests
        if held is None or held.weights != wanted.weights:
            self._load_weights(load_tensors(fetch(self.unit_index, wanted.weights)))
        if held is None or held.optimizer != wanted.optimizer:
            data = fetch(self.unit_index, wanted.optimizer) if wanted.optimizer else None
            self._load_optimizer(load_tensors(data) if data is not None else {})
        # `fetch` has checked the digests, so nothing is hashed again here.
        state = self._optimizer_tensors()
        if bool(state) != bool(wanted.optimizer):
            raise CorruptDataError(
                f"the optimizer state of unit {self.unit_index} has {len(state)} tensors that fit the unit: it is "
                "of another job"
            )
        self._weights_blob = self._blob(self._trained_state(), wanted.weights)
        self._optimizer_blob = self._blob(state, wanted.optimizer) if state else None
        self._is_sealed = True

    def blobs(self) -> Iterator[TensorBlob]:
        """Yields the blobs of a sealed unit, its weights first."""
        if self._is_sealed:
            yield from (b for b in (self._weights_blob, self._optimizer_blob) if b is not None)

    def _blob(self, tensors: Mapping[str, Tensor], digest: str = "") -> TensorBlob:
        return TensorBlob(tensors, digest, self._device.reader)

    def _has_residual(self) -> bool:
        return any(_RESIDUAL in state for state in self.optimizer.state.values())

    def _unseal(self) -> None:
        self._weights_blob = self._optimizer_blob = None
        self._is_sealed = False

    def load_frozen(self, path: Path | None) -> None:
        """Loads the frozen parameters, one after the other; raises `CorruptDataError`.

        Args:
            path: A blob with their names in a model without LoRA. `None` for a unit without frozen parameters.
        """
        names, state = self._frozen_names, self.module.state_dict()
        try:
            if path is None:
                if names:
                    raise ValueError("no file of them was named")
                return
            with safe_open(path, "pt") as file, torch.no_grad():
                if set(file.keys()) != set(names):
                    raise ValueError(f"{path} has other tensors")
                for name, own_name in names.items():
                    tensor = file.get_tensor(name)
                    layer = self.module.get_submodule(own_name.rpartition(".")[0])
                    if own_name.endswith(".weight") and is_quantised(layer):
                        load_quantised(layer, tensor)
                        continue
                    own = state[own_name]
                    if (tensor.shape, tensor.dtype) != (own.shape, own.dtype):
                        raise ValueError(
                            f"{name} has shape {list(tensor.shape)} and type {tensor.dtype} in {path}"
                        )
                    own.copy_(tensor)
        except (ValueError, SafetensorError) as error:
            raise CorruptDataError(
                f"unit {self.unit_index} cannot load its frozen weights: {error}: run the same version everywhere"
            ) from error

    def _trained_state(self) -> dict[str, Tensor]:
        return divide_state(self.module.state_dict(), self._frozen_names)[0]

    def _load_weights(self, tensors: dict[str, Tensor]) -> None:
        try:
            missing, unexpected = self.module.load_state_dict(tensors, strict=False)
            wrong = [*unexpected, *(set(missing) - set(self._frozen_names.values()))]
            if wrong:
                raise RuntimeError(f"{wrong[0]} is missing, or has no place in the unit")
        except RuntimeError as error:
            raise CorruptDataError(
                f"unit {self.unit_index} cannot load its weights: {error}"
            ) from None

    def _load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        self.optimizer = make_optimizer(self.parameters, self._training)
        self.kept = None
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
        self, adapter: ModelAdapter, training: TrainingConfig, device: ComputeDevice
    ) -> None:
        self.adapter = adapter
        self._training = training
        self._device = device
        self._units: dict[int, ResidentUnit] = {}
        self._kept: dict[str, KeptMoments] = {}
        self.are_hidden = False
        """Whether hosts outside of the cluster may not fetch them, because their optimizer states tell what a cluster has trained."""

    def take(
        self,
        wanted: dict[int, StateDigests],
        fetch: Fetch,
        upload_codec: UploadCodecName = "fp32",
        frozen_files: Mapping[int, Path] | None = None,
        privacy: Mapping[int, UpdatePrivacy] | None = None,
        *,
        is_masked: bool = False,
        is_hidden: bool = False,
    ) -> tuple[list[ResidentUnit], int]:
        """Brings units into wanted states, given by unit index.

        Args:
            upload_codec: How the weights are pushed after this round.
            frozen_files: The frozen parameters, by unit index.
            privacy: How changes become private, by unit index.
            is_masked: Whether what is pushed after this round is masked.
            is_hidden: Whether hosts outside of the cluster may not fetch the units from now on.

        Returns:
            The units in order, and how many of them were held in the wanted state already.
        """
        self.are_hidden = self.are_hidden or is_hidden
        units, num_reused = [], 0

        def fetch_unless_kept(unit_index: int, digest: str) -> bytes:
            kept = self._kept.get(digest)
            return b"".join(kept.read()) if kept is not None else fetch(unit_index, digest)

        for unit_index, digests in sorted(wanted.items()):
            unit = self._units.get(unit_index)
            if unit is None:
                module = self.adapter.build_unit(unit_index).to(self._device.torch_device)
                unit = ResidentUnit(unit_index, module, self._training, self._device)
                unit.load_frozen((frozen_files or {}).get(unit_index))
            # An attempt that was aborted before its first update leaves gradients behind.
            unit.optimizer.zero_grad()
            if unit.digests == digests:
                num_reused += 1
            else:
                self._units.pop(unit_index, None)  # if `load` fails, the half-loaded unit is gone
                unit.load(digests, fetch_unless_kept)
            unit.upload_codec, unit.is_masked = upload_codec, is_masked
            unit.privacy = (privacy or {}).get(unit_index)
            self._units[unit_index] = unit
            units.append(unit)
        return units, num_reused

    def keep_moments(self, digests: Iterable[str]) -> None:
        """Keeps these optimizer states readable, as far as they are here, and no others.

        Call it before `take`, while the units still have them. A state stays until this method is called without it.
        """
        wanted = set(digests)
        kept = {digest: state for digest, state in self._kept.items() if digest in wanted}
        for unit in self._units.values():
            blob = unit.optimizer_blob
            if blob is None or blob.digest not in wanted:
                unit.kept = None
            elif blob.digest not in kept:
                unit.kept = kept[blob.digest] = KeptMoments(blob)
        self._kept = kept  # Other threads look for blobs meanwhile.

    def retain(self, unit_indices: Iterable[int]) -> None:
        """Keeps only the units with these indices."""
        keep = set(unit_indices)
        self._units = {index: unit for index, unit in self._units.items() if index in keep}

    def drop_unsealed(self) -> None:
        """Drops the units that an unfinished attempt has changed."""
        self.retain([index for index, unit in self._units.items() if unit.digests is not None])

    def blob(self, digest: str) -> TensorBlob | KeptMoments:
        """Finds a blob of a unit, or a kept optimizer state; raises `NotFoundError`."""
        kept = self._kept.get(digest)
        if kept is not None:
            return kept
        for unit in list(self._units.values()):
            for blob in unit.blobs():
                if blob.digest == digest:
                    return blob
        raise NotFoundError(f"blob {digest} is not held here")
