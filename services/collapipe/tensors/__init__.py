"""Encodes tensors as the frames that cross a stream between two stages, and decodes them.

`frames` makes frames and puts them together again; `codecs` has the lossy codecs for activations.
"""

from collapipe.tensors.frames import (
    ACTIVATION,
    CHUNK_BYTES,
    Frame,
    FrameAssembler,
    FrameKind,
    encode_frame,
)

__all__ = [
    "ACTIVATION",
    "CHUNK_BYTES",
    "Frame",
    "FrameAssembler",
    "FrameKind",
    "encode_frame",
]
