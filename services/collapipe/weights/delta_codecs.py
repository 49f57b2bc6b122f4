"""Encodes what a round has changed in the weights of a unit, with error feedback.

A host sends the new weights minus the global weights that the round began with, in fewer bytes. What the
encoding loses is the residual. The host keeps it and adds it to the change of the next round, so that every change
arrives in the end. The receiver has the same global weights, and decodes what the sender knows, too:
`EncodedDelta.weights` has the bits that `decode_delta` returns on any host.

An encoded delta is a set of named tensors, so it travels as a `TensorBlob`. The tensor NAME of a unit is one of:

- missing, if it has not changed,
- `NAME//CODEC`, the bytes of a codec of `DELTA_CODECS`,
- `NAME` itself, with its new values, if it is not fp32 or if the codec would not save bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from collapipe.codec_table import UploadCodecName
from collapipe.errors import CorruptDataError
from collapipe.tensors.encoding import Bfloat16Codec, Int8RowCodec, LossyCodec

_CHUNK = 4096
_KEPT = 64
"""Values of a chunk that are sent: 1.56 %."""
_LEVEL_BYTES, _CODE_BYTES, _INDEX_BYTES = 2 * 2, _KEPT // 4, _KEPT * 3 // 2
_CHUNK_BYTES = _LEVEL_BYTES + _CODE_BYTES + _INDEX_BYTES


class TopKCodec:
    """Keeps the 64 values of largest magnitude of each 4096, with 2 bits each (SparseLoCo, arXiv 2508.15706).

    The values of a tensor are cut into chunks, regardless of its shape; the last chunk is filled with zeros. A
    value is encoded as its sign and one of two magnitudes of its chunk: the mean of the kept magnitudes
    above their mean, and the mean of the others. If a chunk has values that are not finite, they decode to values
    that are not finite either.

    Each part of the encoding has all chunks in order: first the two bfloat16 magnitudes, the smaller one first; then
    16 bytes with four values each, the first in the low bits, where bit 0 means negative and bit 1 the larger
    magnitude; then the ascending positions, two in three bytes.
    """

    def encoded_bytes(self, shape: tuple[int, ...]) -> int:
        return -(-prod(shape) // _CHUNK) * _CHUNK_BYTES

    def encode(self, tensor: Tensor) -> Tensor:
        if not tensor.numel():
            return torch.empty(0, dtype=torch.uint8)
        chunks = pad(tensor.reshape(-1), (0, -tensor.numel() % _CHUNK)).reshape(-1, _CHUNK)
        positions = chunks.abs().topk(_KEPT, dim=1, sorted=False).indices.sort(dim=1).values
        values = chunks.gather(1, positions)
        magnitudes = values.abs()
        is_large = magnitudes > magnitudes.mean(dim=1, keepdim=True)
        levels = torch.stack([_mean(magnitudes, ~is_large), _mean(magnitudes, is_large)], dim=1)
        codes = (values < 0).to(torch.uint8) + 2 * is_large.to(torch.uint8)
        first, second = positions[:, ::2], positions[:, 1::2]
        packed = torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], dim=2)
        return torch.cat(
            [
                levels.to(torch.bfloat16).reshape(-1).view(torch.uint8),
                (codes.reshape(-1, 4) * _PLACES).sum(dim=1, dtype=torch.uint8),
                packed.to(torch.uint8).reshape(-1),
            ]
        )

    def decode(self, data: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Returns the fp32 tensor, which is 0 at all other positions.

        Raises:
            CorruptDataError: The positions of a chunk do not ascend.
        """
        num_chunks = data.numel() // _CHUNK_BYTES
        parts = [num_chunks * size for size in (_LEVEL_BYTES, _CODE_BYTES, _INDEX_BYTES)]
        level_data, code_data, position_data = torch.split(data, parts)
        levels = level_data.view(torch.bfloat16).to(torch.float32).reshape(num_chunks, 2)
        codes = (code_data.unsqueeze(1) // _PLACES % 4).reshape(num_chunks, _KEPT)
        low, middle, high = position_data.to(torch.int64).reshape(-1, 3).unbind(dim=1)
        positions = torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=1)
        positions = positions.reshape(num_chunks, _KEPT)
        if not (positions.diff(dim=1) > 0).all():
            raise CorruptDataError(
                "the positions of a chunk of top_k do not ascend: send the weights again"
            )
        magnitudes = levels.gather(1, (codes >> 1).to(torch.int64))
        values = torch.where(codes & 1 == 1, -magnitudes, magnitudes)
        chunks = torch.zeros(num_chunks, _CHUNK, dtype=torch.float32)
        chunks.scatter_(1, positions, values)
        return chunks.reshape(-1)[: prod(shape)].reshape(shape)


_PLACES = torch.tensor([1, 4, 16, 64], dtype=torch.uint8)
"""Factors of the four values of a byte."""

DELTA_CODECS: Mapping[str, LossyCodec] = {
    "bf16": Bfloat16Codec(),
    "int8": Int8RowCodec(),
    "top_k": TopKCodec(),
}

_DECAY: Mapping[UploadCodecName, float] = {"top_k": 0.95}
"""Factor of the residual in each round; 1 for a codec that is not named. SparseLoCo uses 0.95, because a value that is sent
rounds later is stale by then."""


@dataclass(frozen=True)
class EncodedDelta:
    """The encoded change of a unit.

    Args:
        tensors: What to send.
        weights: The weights that the receiver decodes.
        residual: By the names of the weights, for the next round. A tensor without a residual is missing.
    """

    tensors: dict[str, Tensor]
    weights: dict[str, Tensor]
    residual: dict[str, Tensor]


def encode_delta(
    codec_name: UploadCodecName,
    weights: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    residual: Mapping[str, Tensor],
) -> EncodedDelta:
    """Encodes the change from `base` to `weights`, which have equal names, shapes and element types.

    Args:
        codec_name: With `fp32`, tensors that have changed are sent whole, with what is left of earlier rounds.
        residual: What the round before has lost. The residual of a missing name is 0.
    """
    encoded = EncodedDelta({}, {}, {})
    codec, decay = DELTA_CODECS.get(codec_name), _DECAY.get(codec_name, 1.0)
    for name, tensor in weights.items():
        new, old = tensor.detach().cpu(), base[name].cpu()
        shape = tuple(new.shape)
        if name in residual:
            new = new + decay * residual[name].cpu()
        encoded.weights[name] = new
        if torch.equal(new, old):
            continue
        if codec and new.dtype is torch.float32 and codec.encoded_bytes(shape) < new.nbytes:
            change = new - old
            data = codec.encode(change)
            decoded = codec.decode(data, shape)
            encoded.tensors[f"{name}//{codec_name}"] = data
            encoded.weights[name] = old + decoded
            encoded.residual[name] = change - decoded
        else:
            encoded.tensors[name] = new
    return encoded


def decode_delta(tensors: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of `EncodedDelta`, from what was sent and the weights that the round began with.

    Raises:
        CorruptDataError: A tensor is unknown, is sent twice, or has another size or element type than its codec needs.
    """
    weights = dict(base)
    sent = set()
    for key, tensor in tensors.items():
        name, _, codec_name = key.partition("//")
        if name not in weights or name in sent:
            reason = "is sent twice" if name in sent else "is no tensor of the unit"
            raise CorruptDataError(f"a delta contains {key!r}, but {name!r} {reason}")
        sent.add(name)
        weights[name] = _decode(key, codec_name, tensor, weights[name])
    return weights


def _decode(key: str, codec_name: str, tensor: Tensor, old: Tensor) -> Tensor:
    shape = tuple(old.shape)
    if not codec_name:
        expected, dtype = shape, old.dtype
    elif codec_name in DELTA_CODECS and old.dtype is torch.float32:
        expected, dtype = (DELTA_CODECS[codec_name].encoded_bytes(shape),), torch.uint8
    else:
        raise CorruptDataError(
            f"a delta contains {key!r}, whose codec this version does not know for {old.dtype}: "
            f"use one of {', '.join(DELTA_CODECS)} for fp32"
        )
    if (tuple(tensor.shape), tensor.dtype) != (expected, dtype):
        raise CorruptDataError(
            f"a delta contains {key!r} with shape {list(tensor.shape)} and type {tensor.dtype} instead of "
            f"{list(expected)} and {dtype}"
        )
    return old + DELTA_CODECS[codec_name].decode(tensor, shape) if codec_name else tensor


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """Returns the mean of the chosen values of each row, or 0 without any."""
    return (values * chosen).sum(dim=1) / chosen.sum(dim=1).clamp(min=1)
