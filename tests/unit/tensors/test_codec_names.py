from collapipe.allocation.round_model.problem import CODECS
from collapipe.codec_names import CODEC_NAMES, CODECS_BY_NAME
from collapipe.v1 import tensor_pb2


def test_every_codec_has_the_name_that_plans_call_it() -> None:
    numbers = set(tensor_pb2.Codec.values()) - {tensor_pb2.CODEC_UNSPECIFIED}
    assert set(CODEC_NAMES) == numbers
    assert set(CODEC_NAMES.values()) == set(CODECS)
    assert {CODECS_BY_NAME[name] for name in CODECS} == numbers
