"""Encodes tensors as the frames that cross a stream between two stages, and decodes them."""

from collapipe.tensors.encoding import decoded_width as decoded_width
from collapipe.tensors.frames import ACTIVATION as ACTIVATION
from collapipe.tensors.frames import CHUNK_BYTES as CHUNK_BYTES
from collapipe.tensors.frames import LABELS as LABELS
from collapipe.tensors.frames import MAX_BYTES_OF_KINDS as MAX_BYTES_OF_KINDS
from collapipe.tensors.frames import MAX_FRAME_BYTES as MAX_FRAME_BYTES
from collapipe.tensors.frames import Frame as Frame
from collapipe.tensors.frames import FrameAssembler as FrameAssembler
from collapipe.tensors.frames import FrameKind as FrameKind
from collapipe.tensors.frames import encode_frame as encode_frame
