"""The number on the wire of each codec, and the name for each number.

This module imports no torch, because the scheduler and the clients use it, too.
"""

from collections.abc import Mapping
from typing import cast

from collapipe.codec_table import CODECS, CodecName
from collapipe.v1 import tensor_pb2

CODECS_BY_NAME: Mapping[CodecName, tensor_pb2.Codec] = {
    name: cast(tensor_pb2.Codec, tensor_pb2.Codec.Value(f"CODEC_{name.upper()}")) for name in CODECS
}
CODEC_NAMES: Mapping[tensor_pb2.Codec, CodecName] = {
    number: name for name, number in CODECS_BY_NAME.items()
}
