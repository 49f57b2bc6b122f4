"""Runs a control unit that lies about its rounds while a file says so, or a scheduler that is less patient with it:
`LIE_FILE=... python lying_service.py MODULE ARGUMENTS`.

The file contains one of the lies below, and in the next line the indices of the rounds in which it is told.
"""

import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc

from collapipe.errors import InvalidInputError
from collapipe.v1 import control_unit_pb2, job_pb2

OTHER_UNITS, OTHER_DIGEST, REFUSED = "other units", "other digest", "refused"
FOR_EVER, NO_KEYS = "signs of life for ever", "no keys"
_SILENCES = 2.0
"""The scheduler waits for progress for 3 times as many silences."""

Responses = Iterator[control_unit_pb2.RunRoundResponse]


def _lie(round_index: int) -> str:
    lie, rounds = Path(os.environ["LIE_FILE"]).read_text().split("\n")
    return lie if str(round_index) in rounds.split() else ""


def _make_control_unit_lie() -> None:
    from collapipe.control_unit.servicer import ControlUnitServicer

    run_round = ControlUnitServicer.RunRound

    def lying(self: Any, request: Any, context: grpc.ServicerContext) -> Responses:
        lie = _lie(request.attempt.round_index)
        if lie == REFUSED:
            raise InvalidInputError("the file rows.jsonl is missing")
        while lie == FOR_EVER and context.is_active():
            told = job_pb2.RoundProgress(steps_done=1, training_began=True, waiting_for="patience")
            yield control_unit_pb2.RunRoundResponse(progress=told)
            time.sleep(0.5)
        for response in run_round(self, request, context):
            if lie == OTHER_UNITS and response.HasField("prepared"):
                del response.prepared.state.units[0]
            if lie == OTHER_DIGEST and response.HasField("prepared"):
                response.prepared.state.units[0].weights_digest = 64 * "0"
            yield response

    make_keys = ControlUnitServicer.MakeMaskingKeys

    def refusing(self: Any, request: Any, context: grpc.ServicerContext) -> Any:
        if _lie(request.attempt.round_index) == NO_KEYS:
            raise InvalidInputError("no keys today")
        return make_keys(self, request, context)

    ControlUnitServicer.RunRound = lying  # type: ignore[method-assign]
    ControlUnitServicer.MakeMaskingKeys = refusing  # type: ignore[method-assign]


def _make_scheduler_impatient() -> None:
    from collapipe.job_life import stage_progress

    # `patch` fails if a name does not exist.
    patch.multiple(stage_progress, _LEAST_SILENCES=_SILENCES, _FIRST_STEP_SECONDS=_SILENCES).start()


if __name__ == "__main__":
    del sys.argv[0]
    if sys.argv[0] == "collapipe.scheduler":
        _make_scheduler_impatient()
    else:
        _make_control_unit_lie()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
