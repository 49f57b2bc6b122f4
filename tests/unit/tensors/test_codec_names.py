from typing import get_args

from collapipe.codec_names import CODEC_NAMES, CODECS_BY_NAME
from collapipe.codecs import CODECS, CodecName
from collapipe.tensors.codecs import LOSSY_CODECS
from collapipe.v1 import tensor_pb2


def test_every_codec_has_a_cost_a_number_and_an_implementation() -> None:
    numbers = set(tensor_pb2.Codec.values()) - {tensor_pb2.CODEC_UNSPECIFIED}
    assert tuple(CODECS) == get_args(CodecName)
    assert set(CODEC_NAMES) == numbers
    assert set(CODEC_NAMES.values()) == set(CODECS)
    assert {CODECS_BY_NAME[name] for name in CODECS} == numbers
    assert set(LOSSY_CODECS) == numbers - {tensor_pb2.CODEC_FP32}
