"""The lossy codecs: they encode an fp32 tensor in fewer bytes and lose precision.

Infinite and NaN values decode to values that are not finite either, so that an overflow shows in the loss.
"""

from math import prod
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from collapipe.v1 import tensor_pb2

_INT8_MAX = 127
_SCALE_BYTES = 4
_LEAST_SCALE = torch.finfo(torch.float32).tiny
"""Smaller scales have fewer digits, so that a value divided by its scale could exceed 127."""

_TILE = 32
"""Values of a tile of int4. A larger tile saves bytes of scales, but one large value makes all of it coarser."""
_TILE_BYTES = _TILE // 2
_TILE_SCALE_BYTES = 2
_INT4_LEVELS = 16
_FP32_BYTES = 4


class LossyCodec(Protocol):
    """Encodes fp32 tensors on the CPU."""

    def encoded_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the size of an encoded tensor."""

    def encode(self, tensor: Tensor) -> Tensor:
        """Returns the encoded bytes: uint8 of shape (encoded_bytes,)."""

    def decode(self, data: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Returns the fp32 tensor of a shape from its encoded bytes."""


class FrameCodec(LossyCodec, Protocol):
    """A codec of frames, which come from other hosts."""

    def decoding_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the size of the largest tensor that decoding makes."""


class Bfloat16Codec:
    """Rounds each value to the nearest bfloat16; ties go to the even one."""

    def encoded_bytes(self, shape: tuple[int, ...]) -> int:
        return prod(shape) * 2

    def decoding_bytes(self, shape: tuple[int, ...]) -> int:
        return prod(shape) * _FP32_BYTES

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

    def decoding_bytes(self, shape: tuple[int, ...]) -> int:
        return prod(shape) * _FP32_BYTES

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
            return torch.empty(shape, dtype=torch.float32)
        scales = data[: num_rows * _SCALE_BYTES].view(torch.float32)
        rows = data[num_rows * _SCALE_BYTES :].view(torch.int8).reshape(num_rows, -1)
        return rows.to(torch.float32).mul_(scales.unsqueeze(1)).reshape(shape)


class Int4HadamardCodec:
    """Encodes tiles of 32 values, after a Hadamard rotation, as 4-bit integers and one bfloat16 scale.

    A tile is a part of a row of the last dimension; the last tile of a row is filled with zeros. The rotation
    spreads a large value over its tile, where it would otherwise make the other values coarse (TAH-Quant,
    arXiv 2506.01352). The levels of a tile are the odd multiples of its scale from -15 to 15, and the
    scale is a sixteenth of the largest rotated magnitude. So there is no level 0, but a tile of zeros has scale 0.

    The scales of all tiles come first. Byte *i* of a tile has value *i* in its low bits, and value *i* + 16 in
    its high bits. A tile with an infinite or NaN value has such a scale, and so has one whose rotation overflows.

    Decoding gives the same bits everywhere: it rotates small integers, so no sum is rounded.
    """

    def __init__(self) -> None:
        rotation = torch.ones(1, 1, dtype=torch.float32)
        while len(rotation) < _TILE:  # Sylvester's construction
            rotation = torch.cat(
                (torch.cat((rotation, rotation), 1), torch.cat((rotation, -rotation), 1))
            )
        self._signs = rotation
        """Symmetric and, up to the factor 1 / sqrt(32), its own inverse."""
        self._rotation = rotation / _TILE**0.5

    def encoded_bytes(self, shape: tuple[int, ...]) -> int:
        return self._num_tiles(shape) * (_TILE_SCALE_BYTES + _TILE_BYTES)

    def decoding_bytes(self, shape: tuple[int, ...]) -> int:
        return self._num_tiles(shape) * _TILE * _FP32_BYTES

    def encode(self, tensor: Tensor) -> Tensor:
        num_tiles = self._num_tiles(tuple(tensor.shape))
        data = torch.empty(num_tiles * (_TILE_SCALE_BYTES + _TILE_BYTES), dtype=torch.uint8)
        if not num_tiles:
            return data
        rows = tensor.reshape(_num_rows(tuple(tensor.shape)), -1)
        if missing := -rows.shape[1] % _TILE:
            rows = pad(rows, (0, missing))
        rotated = rows.reshape(num_tiles, _TILE) @ self._rotation
        scales = (rotated.abs().amax(dim=1, keepdim=True) / _INT4_LEVELS).to(torch.bfloat16)
        scales.masked_fill_(scales < _LEAST_SCALE, 0.0)
        steps = 2 * scales.to(torch.float32)
        finite = torch.isfinite(steps)
        if not finite.all():
            rotated.masked_fill_(~finite, 0.0)
        rotated.div_(steps.masked_fill_(steps == 0, 1.0)).add_(_INT4_LEVELS // 2)
        levels = rotated.clamp_(0, _INT4_LEVELS - 1).to(torch.uint8)
        data[: num_tiles * _TILE_SCALE_BYTES] = scales.reshape(-1).view(torch.uint8)
        packed = data[num_tiles * _TILE_SCALE_BYTES :].view(num_tiles, _TILE_BYTES)
        torch.bitwise_or(levels[:, :_TILE_BYTES], levels[:, _TILE_BYTES:] << 4, out=packed)
        return data

    def decode(self, data: Tensor, shape: tuple[int, ...]) -> Tensor:
        num_tiles, num_rows = self._num_tiles(shape), _num_rows(shape)
        if not num_tiles:
            return torch.empty(shape, dtype=torch.float32)
        scales = data[: num_tiles * _TILE_SCALE_BYTES].view(torch.bfloat16).to(torch.float32)
        packed = data[num_tiles * _TILE_SCALE_BYTES :].view(num_tiles, _TILE_BYTES)
        levels = torch.empty(num_tiles, _TILE, dtype=torch.float32)
        levels[:, :_TILE_BYTES] = packed & (_INT4_LEVELS - 1)
        levels[:, _TILE_BYTES:] = packed >> 4
        levels.mul_(2).sub_(_INT4_LEVELS - 1)
        tiles = (levels @ self._signs).mul_((scales / _TILE**0.5).unsqueeze(1))
        width = prod(shape) // num_rows
        return tiles.reshape(num_rows, -1)[:, :width].reshape(shape)

    @staticmethod
    def _num_tiles(shape: tuple[int, ...]) -> int:
        num_rows = _num_rows(shape)
        return num_rows * -(-prod(shape) // (num_rows * _TILE)) if num_rows else 0


def _num_rows(shape: tuple[int, ...]) -> int:
    """Returns the rows of the last dimension: 1 for a scalar, 0 for an empty tensor."""
    return prod(shape[:-1]) if prod(shape) else 0


LOSSY_CODECS: dict[tensor_pb2.Codec, FrameCodec] = {
    tensor_pb2.CODEC_BF16: Bfloat16Codec(),
    tensor_pb2.CODEC_INT8: Int8RowCodec(),
    tensor_pb2.CODEC_INT4: Int4HadamardCodec(),
}


def decoded_width(width: int) -> int:
    """Returns the most values that decoding a row of so many values makes."""
    return max(codec.decoding_bytes((width,)) for codec in LOSSY_CODECS.values()) // _FP32_BYTES
