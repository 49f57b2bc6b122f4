"""What the answers of a stage to its control unit may contain."""

import math

from collapipe.rpc import SHOWN, impossible_value
from collapipe.v1 import plan_pb2, stage_pb2

_MOST_BYTES = 1 << 20
"""Largest answer. A thousand units, with their digests and the norms of all their parameters, need half of it."""
_MOST_SQUARE = 1e300
"""More than the square of any norm. Sums of many squares stay finite."""
_ANY = {"loss": math.inf, "squared_gradient_norms": math.inf}
"""The control unit tells values that are not finite as a divergence."""


def mistake_in(response: stage_pb2.RunStageResponse, stage: plan_pb2.Stage) -> str:
    """Returns what cannot be true in an answer of a stage, in words; empty if nothing is wrong."""
    if response.ByteSize() > _MOST_BYTES:
        return f"an answer of {response.ByteSize()} bytes, over the limit of {_MOST_BYTES}"
    match response.WhichOneof("event"):
        case None:
            return "an answer without a content"
        case "failed":  # Its message is shortened, and whom it may blame is checked elsewhere.
            return ""
        case "step_done":
            for square in response.step_done.squared_gradient_norms:
                if square < 0 or _MOST_SQUARE < square < math.inf:
                    return f"{square} as a squared norm, which must be from 0 to {_MOST_SQUARE:g}"
        case "finished":
            indices = [unit.unit_index for unit in response.finished.units]
            if indices != list(range(stage.start_unit, stage.stop_unit)):
                return f"the units {str(indices)[:SHOWN]}, but it has {stage.start_unit} to {stage.stop_unit - 1}"
    return impossible_value(response, _ANY)
