"""The codecs: encodings that a link may use for activations and their gradients, and for uploads of weights.

Jobs are validated against this table, and plans are decided with it. docs/architecture.md names the files of a
new codec.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

CodecName = Literal["fp32", "bf16", "int8", "int4"]
"""On the wire, the codec "int8" is the enum value CODEC_INT8, and so on."""

UploadCodecName = Literal["fp32", "bf16", "int8", "top_k"]
"""How new weights are sent to the edge server: `fp32` as they are, the others as what the round has changed."""


@dataclass(frozen=True)
class CodecCost:
    """What an encoding costs in bytes, precision and time."""

    bytes_ratio: float
    """Encoded bytes divided by the bytes of the same tensor in fp32."""
    relative_error: float
    """Error relative to the encoded values that one transfer adds: eps of docs/scheduling.md (11)."""
    seconds_per_byte: float
    """Time to encode and decode one byte of fp32."""


CODECS: Mapping[CodecName, CodecCost] = {
    "fp32": CodecCost(bytes_ratio=1.0, relative_error=0.0, seconds_per_byte=0.0),
    "bf16": CodecCost(bytes_ratio=0.5, relative_error=2.0**-9, seconds_per_byte=0.07e-9),
    "int8": CodecCost(bytes_ratio=0.253, relative_error=2.0**-7, seconds_per_byte=0.18e-9),
    "int4": CodecCost(bytes_ratio=0.141, relative_error=2.0**-3.5, seconds_per_byte=0.65e-9),
}
"""The times were measured on one core of a laptop-class processor with `python -m benchmarks.codecs`."""

UPLOAD_CODECS: Mapping[UploadCodecName, CodecCost] = {
    "fp32": CODECS["fp32"],
    "bf16": CODECS["bf16"],
    "int8": CODECS["int8"],
    "top_k": CodecCost(bytes_ratio=0.0071, relative_error=0.94, seconds_per_byte=0.6e-9),
}
"""The error of `top_k` is that of Gaussian values. A round sends the largest 1.6 % of them, and later rounds the rest."""
