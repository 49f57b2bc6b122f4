"""Keeps frozen linear layers in 4 bits with the library `bitsandbytes`: QLoRA, Dettmers et al. 2023, arXiv 2305.14314.

The type is NF4 with double quantisation. A host quantises frozen weights when it loads them. Their files, digests and
transfers are those of full precision.
"""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor, nn

from collapipe.errors import InvalidInputError
from collapipe.models.lora import is_of_lora

_BLOCK, _BLOCKS_PER_SCALE = 64, 256
"""Weights that share a scale of 8 bits, and such scales that share one of fp32."""
_MAPPED_BYTES = 1 << 20
"""Each pass unpacks a layer for a moment. Tensors from this size on return their memory to the system at once."""
_AT_ONCE = 1 << 20
"""Weights that are quantised at once, because this needs 14 bytes for each of them meanwhile."""


def quantise_layers(unit: nn.Module, compute_dtype: torch.dtype) -> None:
    """Replaces the frozen linear layers of a unit on the meta device. The weights of the new ones are zero.

    Raises:
        InvalidInputError: `bitsandbytes` is not installed.
    """
    library = quantisation_library()
    _return_memory_at_once()
    for name, layer in frozen_linear_layers(unit):
        in_features, out_features = _features(layer)
        quantised: Any = library.nn.Linear4bit(
            in_features,
            out_features,
            bias=layer.bias is not None,
            compute_dtype=compute_dtype,
            quant_type="nf4",
            device="meta",
        )
        quantised.bias = layer.bias
        # On some processors, an evaluation would convert the weights for a kernel that computes in bfloat16.
        quantised.support_avx512bf16_for_cpu = False
        quantised.is_transposed = _is_transposed(layer)
        quantised.register_state_dict_post_hook(_drop_scales)
        num_weights = in_features * out_features
        packed = torch.zeros(math.ceil(num_weights / 2), 1, dtype=torch.uint8)
        scales = torch.zeros(math.ceil(num_weights / _BLOCK), dtype=torch.float32)
        shape = torch.Size((out_features, in_features))
        _set_weight(quantised, packed, _state(scales, shape, compute_dtype))
        unit.set_submodule(name, quantised)


def frozen_linear_layers(module: nn.Module) -> list[tuple[str, Any]]:
    """Returns the names and layers that `quantise_layers` replaces. The layers of GPT-2 are called `Conv1D`."""
    return [
        (name, layer)
        for name, layer in module.named_modules()
        if (type(layer) is nn.Linear or _is_transposed(layer))
        and not any(parameter.requires_grad for parameter in layer.parameters())
        and not is_of_lora(f"{name}.")
    ]


def is_quantised(layer: nn.Module) -> bool:
    """Returns whether `quantise_layers` made a layer."""
    return hasattr(layer, "is_transposed")


def load_quantised(layer: Any, weight: Tensor) -> None:
    """Quantises the weight of a layer that `quantise_layers` made.

    Raises:
        ValueError: The weight has a wrong shape or type.
    """
    weight = weight.T if layer.is_transposed else weight
    wanted = (layer.out_features, layer.in_features), layer.compute_dtype
    if (weight.shape, weight.dtype) != wanted:
        raise ValueError(f"a weight of {layer} has shape {list(weight.shape)} and {weight.dtype}")
    # The CPU quantises, so that the values do not depend on the device.
    packed, state = _quantise(weight)
    _set_weight(layer, packed, state, layer.weight.device)


@torch.no_grad()
def round_to_quantised(module: nn.Module) -> None:
    """Gives the frozen linear layers of a module the values that they have after quantisation."""
    functional = quantisation_library().functional
    for _, layer in frozen_linear_layers(module):
        is_transposed = _is_transposed(layer)
        weight = layer.weight.T if is_transposed else layer.weight
        rounded = functional.dequantize_4bit(*_quantise(weight))
        layer.weight.copy_(rounded.T if is_transposed else rounded)


def quantised_bytes(num_weights: int) -> int:
    """Returns the memory of the quantised weights of a layer: half a byte for each, and their scales."""
    scales = math.ceil(num_weights / _BLOCK)
    return math.ceil(num_weights / 2) + scales + 4 * math.ceil(scales / _BLOCKS_PER_SCALE)


def _is_transposed(layer: nn.Module) -> bool:
    """Returns whether a layer is a `Conv1D` of `transformers`, whose import is slow."""
    return type(layer).__name__ == "Conv1D"


def _features(layer: Any) -> tuple[int, int]:
    if _is_transposed(layer):
        return layer.nx, layer.nf
    return layer.in_features, layer.out_features


def _quantise(weight: Tensor) -> tuple[Tensor, Any]:
    """Returns what `quantize_4bit` returns for a whole weight on the CPU, but needs less memory meanwhile."""
    functional = quantisation_library().functional
    packed, scales = [], []
    for part in torch.split(weight.reshape(-1), _AT_ONCE):
        quantised, state = functional.quantize_4bit(part, blocksize=_BLOCK, quant_type="nf4")
        packed.append(quantised)
        scales.append(state.absmax)
    return torch.cat(packed), _state(torch.cat(scales), weight.shape, weight.dtype)


def _state(scales: Tensor, shape: torch.Size, dtype: torch.dtype) -> Any:
    """Quantises the scales themselves, [blocks of weights], and returns what `bitsandbytes` needs beside a packed weight."""
    functional = quantisation_library().functional
    offset = scales.mean()
    quantised, of_scales = functional.quantize_blockwise(
        scales - offset, blocksize=_BLOCKS_PER_SCALE
    )
    return functional.QuantState(
        absmax=quantised,
        shape=shape,
        dtype=dtype,
        blocksize=_BLOCK,
        code=functional.get_4bit_type("nf4", device="cpu"),
        quant_type="nf4",
        offset=offset,
        state2=of_scales,
    )


def _set_weight(layer: Any, packed: Tensor, state: Any, device: str | torch.device = "cpu") -> None:
    parameter = quantisation_library().nn.Params4bit(
        packed, requires_grad=False, quant_state=state, quant_type="nf4", bnb_quantized=True
    )
    layer.weight = parameter.to(device)
    layer.weight._is_hf_initialized = True  # `transformers` draws no numbers for it


def _return_memory_at_once() -> None:
    """Sets glibc's M_MMAP_THRESHOLD for this process. Freed tensors would otherwise stay as gaps in its heap."""
    try:
        ctypes.CDLL(None).mallopt(-3, _MAPPED_BYTES)
    except (AttributeError, OSError):
        return  # Other systems have no mallopt.


def _drop_scales(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    """Leaves only the names of full precision in a state."""
    for name in [name for name in state if name.startswith(f"{prefix}weight.")]:
        del state[name]


def quantisation_library() -> Any:
    """Imports `bitsandbytes`; raises `InvalidInputError` if it is not installed."""
    try:
        import bitsandbytes
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            "model.base_quantisation is set, but this host has no bitsandbytes: pip install -e '.[quantisation]' in the folder of the repository, or "
            "remove the setting"
        ) from error
    return bitsandbytes
