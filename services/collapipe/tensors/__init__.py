"""Encodes tensors as the frames that cross a stream between two stages, and decodes them."""

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
