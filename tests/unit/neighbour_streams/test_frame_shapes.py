"""Which tensors a frame may have, by its kind."""

import math
from collections.abc import Callable

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from collapipe.job import ModelConfig, TaskConfig
from collapipe.models import ModelAdapter, adapter_for, create_config_json
from collapipe.neighbour_streams.frame_shapes import FrameShapes
from collapipe.tensors import Frame, FrameKind
from collapipe.v1.plan_pb2 import SessionSettings


def mistake(
    adapter: ModelAdapter, kind: FrameKind, *, has_tokens: bool = False, **tensors: Tensor
) -> str:
    shapes = FrameShapes(SessionSettings(max_length=4), adapter, 3, has_tokens=has_tokens)
    return shapes.mistake_in(Frame(kind, 0, 0, tensors))


def values(*shape: int, value: float = 1.0) -> Tensor:
    return torch.full(shape, value)


def numbers(*shape: int, value: int = 1) -> Tensor:
    return torch.full(shape, value, dtype=torch.int64)


ACTIVATION = values(3, 4, 16)


@pytest.mark.parametrize(
    ("kind", "tensors"),
    [
        (FrameKind.FORWARD, {"activation": ACTIVATION, "attention_mask": numbers(3, 4)}),
        (FrameKind.FORWARD, {"activation": values(3, 2, 16), "attention_mask": numbers(3, 4)}),
        (FrameKind.EVALUATE, {"activation": values(1, 9, 16), "attention_mask": numbers(1, 9)}),
        (FrameKind.BACKWARD, {}),
        (FrameKind.BACKWARD, {"activation": ACTIVATION}),
        (FrameKind.PREDICTION, {"predictions": numbers(3)}),
        (FrameKind.PREDICTION, {"predictions": numbers(3, 4, value=2)}),
        (FrameKind.GENERATE, {"activation": values(1, 4, 16)}),
        (FrameKind.END_GENERATION, {}),
    ],
)
def test_frames_that_stages_send_are_possible(
    bert: ModelAdapter, kind: FrameKind, tensors: dict[str, Tensor]
) -> None:
    assert mistake(bert, kind, **tensors) == ""


@pytest.mark.parametrize(
    ("kind", "tensors", "said"),
    [
        (FrameKind.BACKWARD, {"activation": values(3, 4, 8)}, "[3, 4, 8]"),
        (FrameKind.BACKWARD, {"attention_mask": numbers(3, 4)}, "attention_mask instead"),
        (FrameKind.PREDICTION, {}, "none instead of predictions"),
        (FrameKind.PREDICTION, {"predictions": numbers(3, value=3)}, "3, where 0 to 2"),
        (FrameKind.PREDICTION, {"predictions": numbers(3, value=-1)}, "-1 to -1, where 0 to 2"),
        (FrameKind.PREDICTION, {"predictions": numbers(3, 4, 1)}, "[3, 4, 1]"),
        (FrameKind.PREDICTION, {"predictions": values(3, 3)}, "[3, 3]"),
        (FrameKind.PREDICTION, {"predictions": values(3, 2)}, "[3, 2]"),
        (FrameKind.PREDICTION, {"predictions": numbers(3).int()}, "torch.int32"),
        (FrameKind.GENERATE, {"activation": values(1, 4000, 16)}, "at most"),
        (FrameKind.GENERATE, {"activation": values(2, 4, 16)}, "1 to 1 rows"),
        (FrameKind.BACKWARD, {"activation": values(2, 4, 16)}, "3 to 3 rows"),
        (
            FrameKind.EVALUATE,
            {"activation": values(4, 4, 16), "attention_mask": numbers(4, 4)},
            "1 to 3 rows",
        ),
        (
            FrameKind.EVALUATE,
            {"activation": values(2, 3, 16), "attention_mask": numbers(2, 4)},
            "no mask of",
        ),
        (FrameKind.END_GENERATION, {"activation": ACTIVATION}, "instead of none"),
    ],
)
def test_other_frames_are_not(
    bert: ModelAdapter, kind: FrameKind, tensors: dict[str, Tensor], said: str
) -> None:
    assert said in mistake(bert, kind, **tensors)


@pytest.mark.parametrize(
    ("value", "said"),
    # What is not finite is told as a divergence.
    [(1.0, ""), (math.nan, ""), (math.inf, ""), (-1.0, "-1.0"), (1e20, "0 to 1e+15")],
)
def test_sums_of_a_language_model_are_in_a_range(
    make_tokenizer: Callable[[str], Tokenizer], value: float, said: str
) -> None:
    model, task = ModelConfig(family="gpt2"), TaskConfig(kind="causal_lm", max_length=4)
    config_json = create_config_json(model, task, [], make_tokenizer("gpt2"))
    adapter = adapter_for("gpt2", "causal_lm", config_json)
    found = mistake(adapter, FrameKind.PREDICTION, predictions=values(3, 2, value=value))
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(("token", "is_possible"), [(0, True), (-1, False), (1 << 40, False)])
def test_stage_before_the_embedding_gets_tokens_that_the_model_knows(
    bert: ModelAdapter, token: int, is_possible: bool
) -> None:
    frame = {"input_ids": numbers(3, 4, value=token), "attention_mask": numbers(3, 4)}
    said = mistake(bert, FrameKind.FORWARD, has_tokens=True, **frame)
    assert (said == "") == is_possible
    assert "activation" in mistake(bert, FrameKind.FORWARD, **frame)
