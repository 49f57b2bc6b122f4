"""Codecs: activations and their gradients in fewer bytes, at the price of precision.

Only what is computed again every step is encoded. A value that is not finite arrives as one, so that an overflow shows
in the loss instead of training on.
"""

from math import prod

import torch
from torch import Tensor

from collapipe.codec_names import CODEC_NAMES
from collapipe.errors import InvalidInputError
from collapipe.v1 import tensor_pb2

_INT8_MAX = 127
_SCALE_BYTES = 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Below it a float has fewer digits, and a value over its scale may exceed 127."""


def encoded_bytes(codec: tensor_pb2.Codec, shape: tuple[int, ...]) -> int:
    """Bytes of an encoded fp32 tensor.

    Args:
        codec: A lossy one.
        shape: Of the tensor.

    Raises:
        InvalidInputError: The codec is not known.
    """
    if codec == tensor_pb2.CODEC_BFLOAT16:
        return prod(shape) * 2
    if codec == tensor_pb2.CODEC_INT8_ROWS:
        return _num_rows(shape) * _SCALE_BYTES + prod(shape)
    raise InvalidInputError(_unknown(codec))


def encode(tensor: Tensor, codec: tensor_pb2.Codec) -> Tensor:
    """Encodes an fp32 tensor.

    Args:
        tensor: On the CPU, of any shape.
        codec: A lossy one.

    Returns:
        The bytes, uint8 of shape (encoded_bytes,). bfloat16: rounded to nearest, even. int8: the scale of each row of the
        last dimension, its largest magnitude over 127, then its values over that scale, rounded to nearest, even; a row
        with a value that is not finite has a scale that is not either.

    Raises:
        InvalidInputError: The codec is not known.
    """
    if codec == tensor_pb2.CODEC_BFLOAT16:
        return tensor.to(torch.bfloat16).reshape(-1).view(torch.uint8)
    if codec == tensor_pb2.CODEC_INT8_ROWS:
        return _encode_rows(tensor)
    raise InvalidInputError(_unknown(codec))


def decode(data: Tensor, codec: tensor_pb2.Codec, shape: tuple[int, ...]) -> Tensor:
    """Decodes to fp32.

    Args:
        data: uint8 of shape (encoded_bytes,), as `encode` returns.
        codec: A lossy one.
        shape: Of the tensor.

    Raises:
        InvalidInputError: The codec is not known.
    """
    if codec == tensor_pb2.CODEC_BFLOAT16:
        return data.view(torch.bfloat16).to(torch.float32).reshape(shape)
    if codec == tensor_pb2.CODEC_INT8_ROWS:
        num_rows = _num_rows(shape)
        if not num_rows:
            return torch.empty(shape)
        scales = data[: num_rows * _SCALE_BYTES].view(torch.float32)
        rows = data[num_rows * _SCALE_BYTES :].view(torch.int8).reshape(num_rows, -1)
        return rows.to(torch.float32).mul_(scales.unsqueeze(1)).reshape(shape)
    raise InvalidInputError(_unknown(codec))


def _encode_rows(tensor: Tensor) -> Tensor:
    num_rows = _num_rows(tuple(tensor.shape))
    data = torch.empty(num_rows * _SCALE_BYTES + tensor.numel(), dtype=torch.uint8)
    if not num_rows:
        return data
    rows = tensor.reshape(num_rows, -1)
    scales = rows.abs().amax(dim=1) / _INT8_MAX
    scales.masked_fill_(scales < _LEAST_SCALE, 0.0)
    usable = torch.isfinite(scales) & (scales > 0)
    scaled = rows / scales.unsqueeze(1)
    if not usable.all():
        # what no division scales becomes 0, times a scale of 0, infinity or NaN: 0 or NaN
        scaled.masked_fill_(~usable.unsqueeze(1), 0.0)
    data[: num_rows * _SCALE_BYTES] = scales.view(torch.uint8)
    data[num_rows * _SCALE_BYTES :].view(torch.int8).copy_(scaled.round_().reshape(-1))
    return data


def _num_rows(shape: tuple[int, ...]) -> int:
    """Rows of the last dimension; a scalar is one row, and an empty tensor has none."""
    return prod(shape[:-1]) if prod(shape) else 0


def _unknown(codec: int) -> str:
    return (
        f"codec {codec} is not known: a link has one of "
        f"{', '.join(f'{number} ({name})' for number, name in CODEC_NAMES.items())}"
    )
