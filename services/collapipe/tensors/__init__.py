"""Tensors as bytes: frames of activations on a link, and safetensors blobs of weights."""

from collapipe.codec_names import CODEC_NAMES
from collapipe.tensors.blob import TensorBlob, load_tensors
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
    "CODEC_NAMES",
    "Frame",
    "FrameAssembler",
    "FrameKind",
    "TensorBlob",
    "encode_frame",
    "load_tensors",
]
