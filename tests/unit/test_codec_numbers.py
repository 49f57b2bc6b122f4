from typing import get_args

import pytest

from collapipe.codec_numbers import CODEC_NAMES, CODECS_BY_NAME
from collapipe.codec_table import CODECS, CodecName
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.tensors.encoding import LOSSY_CODECS
from collapipe.v1 import tensor_pb2


def test_every_codec_has_a_cost_a_number_and_an_implementation() -> None:
    numbers = set(tensor_pb2.Codec.values()) - {tensor_pb2.CODEC_UNSPECIFIED}
    assert tuple(CODECS) == get_args(CodecName)
    assert set(CODEC_NAMES) == numbers
    assert set(CODEC_NAMES.values()) == set(CODECS)
    assert {CODECS_BY_NAME[name] for name in CODECS} == numbers
    assert set(LOSSY_CODECS) == numbers - {tensor_pb2.CODEC_FP32}


def test_job_with_an_unknown_codec_is_refused() -> None:
    job = {"task": {"kind": "ner"}, "schedule": {"codecs": ["fp32", "int2"]}}
    with pytest.raises(
        InvalidInputError, match=r"codecs\.1 = 'int2': .*'fp32', 'bf16', 'int8' or 'int4'"
    ):
        JobConfig.from_dict(job, "job.toml")
