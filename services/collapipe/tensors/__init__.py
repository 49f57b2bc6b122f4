"""Tensors as bytes: the frames of activations that cross a stream between two stages."""

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
