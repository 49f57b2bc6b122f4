"""The processor of a host, as stages use it: it computes, measures times, and exchanges tensors with the host.

Here it is a CPU, where work is done when the call returns, and tensors need no copies. `accelerator.py` does the same
for a processor with memory of its own, which works behind the thread that gives it work.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from collapipe.tensors import Frame

Report = Callable[[float, float], None]
"""Told when an action started and ended, in seconds of `time.perf_counter`."""


class Timing:
    """An action of a stage that has started."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        """When this thread started the action. An accelerator may start later."""

    def stop(self, *reports: Report) -> None:
        """Ends the action. Calls `reports` when the times are known: now, or in `DeviceQueue.settle`."""
        ended = time.perf_counter()
        for report in reports:
            report(self.started, ended)


class DeviceQueue:
    """What one thread of a host gives to the processor, in order."""

    def start(self) -> Timing:
        """Starts an action. Call it and `Timing.stop` with `COMPUTE_LOCK` held, unless the action is a wait."""
        return Timing()

    def settle(self) -> None:
        """Waits until all work is done, and calls the reports of all actions in order."""

    def to_device(self, frame: Frame) -> dict[str, Tensor]:
        """Returns the tensors of a frame for computing. Call it without `COMPUTE_LOCK`."""
        return dict(frame.tensors)

    def to_host(self, frame: Frame) -> Frame:
        """Returns a frame whose tensors the host can read. They must come from actions that have stopped."""
        return frame


class ComputeDevice:
    """The processor of a host. One process uses one."""

    torch_device = torch.device("cpu")
    """Where torch holds weights and activations."""

    def queue(self) -> DeviceQueue:
        return DeviceQueue()

    def seed(self, key: int) -> None:
        """Seeds the random numbers that the processor draws next."""
        # `torch.manual_seed` sets the same state. But for each kind of accelerator that this process does not
        # use, it formats the call stack, which takes a millisecond.
        torch.default_generator.manual_seed(key)

    def reader(self) -> Callable[[Tensor], Tensor]:
        """Returns a function that copies tensors to the host, as they are after the work given so far.

        Any thread may call the function.
        """
        return Tensor.cpu


CPU = ComputeDevice()
"""The processor of a host without an accelerator."""
