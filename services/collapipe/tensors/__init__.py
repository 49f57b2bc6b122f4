"""Tensors on the wire: raw bytes behind a typed header, cut into chunks, checked by CRC-32."""

from collapipe.tensors.frames import CHUNK_BYTES, Frame, FrameAssembler, FrameKind, encode_frame

__all__ = ["CHUNK_BYTES", "Frame", "FrameAssembler", "FrameKind", "encode_frame"]
