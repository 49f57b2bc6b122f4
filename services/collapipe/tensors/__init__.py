"""Tensors as bytes: frames of activations on a link, and safetensors blobs of weights."""

from collapipe.tensors.blob import TensorBlob, load_tensors
from collapipe.tensors.frames import CHUNK_BYTES, Frame, FrameAssembler, FrameKind, encode_frame

__all__ = [
    "CHUNK_BYTES",
    "Frame",
    "FrameAssembler",
    "FrameKind",
    "TensorBlob",
    "encode_frame",
    "load_tensors",
]
