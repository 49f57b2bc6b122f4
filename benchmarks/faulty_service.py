"""Runs a service that has a fault while a file says so: `FAULT_FILE=... python faulty_service.py MODULE ARGUMENTS`.

The file contains one of the faults below. A clock that is wrong changes what Python's `time` says, not the monotonic clock.
"""

import os
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from collapipe.neighbour_streams import outgoing_link
from collapipe.tensors import ACTIVATION, Frame, encode_frame

NOT_FINITE, DAMAGED_BYTES = "not finite", "damaged bytes"
"""What a device sends to its neighbours."""
CLOCKS = {"clock a day ahead": 86400.0, "clock a day back": -86400.0}
"""Each wrong clock with its error in seconds."""

_true_time = time.time


def _fault() -> str:
    try:
        return Path(os.environ["FAULT_FILE"]).read_text()
    except FileNotFoundError:
        return ""


def _time() -> float:
    return _true_time() + CLOCKS.get(_fault(), 0.0)


def _encode_frame(frame: Frame, *settings: Any) -> tuple[Any, Iterator[bytes]]:
    fault = _fault()
    if fault == NOT_FINITE and ACTIVATION in frame.tensors:
        bad = torch.full_like(frame.tensors[ACTIVATION], torch.nan)
        frame = frame.with_tensors({**frame.tensors, ACTIVATION: bad})
    header, chunks = encode_frame(frame, *settings)
    if fault == DAMAGED_BYTES:
        chunks = (bytes(byte ^ 0x55 for byte in chunk) for chunk in chunks)
    return header, chunks


if __name__ == "__main__":
    time.time = _time
    outgoing_link.encode_frame = _encode_frame  # type: ignore[assignment]
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
