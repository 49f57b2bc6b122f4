"""What jobs, plans and metrics call the codecs; knows no torch, for the scheduler and the clients use it too."""

from collections.abc import Mapping

from collapipe.v1 import tensor_pb2

CODEC_NAMES: Mapping[tensor_pb2.Codec, str] = {
    tensor_pb2.CODEC_RAW: "fp32",
    tensor_pb2.CODEC_BFLOAT16: "bf16",
    tensor_pb2.CODEC_INT8_ROWS: "int8",
}
"""By number on the wire; any other number is no codec of a link."""

CODECS_BY_NAME: Mapping[str, tensor_pb2.Codec] = {
    name: codec for codec, name in CODEC_NAMES.items()
}
"""The other way round."""
