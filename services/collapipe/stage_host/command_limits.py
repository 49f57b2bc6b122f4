"""What a control unit may command a stage that is configured."""

import math

from collapipe.rpc import impossible_value
from collapipe.v1 import plan_pb2, stage_pb2

_MOST_STEP = (1 << 31) - 1
"""Spans have 32 bits for a step, with a sign."""
_MASK_BYTES = 32
_ANY = {"seed": math.inf}


def mistake_in(request: stage_pb2.RunStageRequest, plan: plan_pb2.Plan) -> str:
    """Returns what is impossible in a command, in words; empty if nothing is."""
    if wrong := impossible_value(request, _ANY):
        return wrong
    scale = 0.0
    match request.WhichOneof("command"):
        case "run_step":
            step = request.run_step
            scale = step.pending_gradient_scale
            if not 0 < step.num_micro_batches <= plan.num_micro_batches:
                return f"{step.num_micro_batches} as num_micro_batches, where 1 to {plan.num_micro_batches} are possible"
            if step.step_index > _MOST_STEP:
                return f"{step.step_index} as step_index, where at most {_MOST_STEP} is possible"
        case "run_generation":
            number, most = request.run_generation.num_sequences, plan.stages[0].in_flight
            if number > most:
                return f"{number} as num_sequences, where at most {most} are possible"
        case "finish":
            scale = request.finish.pending_gradient_scale
            for masks in request.finish.masks:
                for key in (*masks.added, *masks.subtracted):
                    if len(key) != _MASK_BYTES:
                        return f"a key of {len(key)} bytes for a mask of unit {masks.unit_index}, which needs {_MASK_BYTES}"
    if scale > 1:
        return f"{scale} as pending_gradient_scale, where 0 to 1 is possible"
    return ""
