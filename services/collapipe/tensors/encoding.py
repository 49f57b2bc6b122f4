"""The lossy codecs: they encode an fp32 tensor in fewer bytes and lose precision.

Infinite and NaN values decode to values that are not finite either, so that an overflow shows in the loss.
"""

from math import prod
from typing import Protocol

import torch
from torch import Tensor

from collapipe.v1 import tensor_pb2

_INT8_MAX = 127
_SCALE_BYTES = 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Smaller scales have fewer digits, so that a value divided by its scale could exceed 127."""


class LossyCodec(Protocol):
    """Encodes fp32 tensors on the CPU."""

    def encoded_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the size of an encoded tensor."""

    def encode(self, tensor: Tensor) -> Tensor:
        """Returns the encoded bytes: uint8 of shape (encoded_bytes,)."""

    def decode(self, data: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Returns the fp32 tensor of a shape from its encoded bytes."""


class Bfloat16Codec:
    """Rounds each value to the nearest bfloat16; ties go to the even one."""

    def encoded_bytes(self, shape: tuple[int, ...]) -> int:
        return prod(shape) * 2

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.to(torch.bfloat16).reshape(-1).view(torch.uint8)

    def decode(self, data: Tensor, shape: tuple[int, ...]) -> Tensor:
        return data.view(torch.bfloat16).to(torch.float32).reshape(shape)


class Int8RowCodec:
    """Encodes each row of the last dimension as 8-bit integers and one fp32 scale.

    The scale of a row is its largest magnitude divided by 127. Each value is divided by the scale of its row
    and rounded to the nearest integer; ties go to the even one. The scales of all rows precede the integers.
    The scale of a row with an infinite or NaN value is infinite or NaN.
    """

    def encoded_bytes(self, shape: tuple[int, ...]) -> int:
        return _num_rows(shape) * _SCALE_BYTES + prod(shape)

    def encode(self, tensor: Tensor) -> Tensor:
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
            # Integers of 0 decode to 0 with a scale of 0, and to NaN with an infinite or NaN scale.
            scaled.masked_fill_(~usable.unsqueeze(1), 0.0)
        data[: num_rows * _SCALE_BYTES] = scales.view(torch.uint8)
        data[num_rows * _SCALE_BYTES :].view(torch.int8).copy_(scaled.round_().reshape(-1))
        return data

    def decode(self, data: Tensor, shape: tuple[int, ...]) -> Tensor:
        num_rows = _num_rows(shape)
        if not num_rows:
            return torch.empty(shape)
        scales = data[: num_rows * _SCALE_BYTES].view(torch.float32)
        rows = data[num_rows * _SCALE_BYTES :].view(torch.int8).reshape(num_rows, -1)
        return rows.to(torch.float32).mul_(scales.unsqueeze(1)).reshape(shape)


def _num_rows(shape: tuple[int, ...]) -> int:
    """Returns the rows of the last dimension: 1 for a scalar, 0 for an empty tensor."""
    return prod(shape[:-1]) if prod(shape) else 0


LOSSY_CODECS: dict[tensor_pb2.Codec, LossyCodec] = {
    tensor_pb2.CODEC_BF16: Bfloat16Codec(),
    tensor_pb2.CODEC_INT8: Int8RowCodec(),
}
