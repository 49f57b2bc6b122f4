"""Checks whether the emulation of a testbed kept up with the emulated devices.

An emulated device does the real computation and then waits. Its timings are right only if this machine has
idle processors, and if the real computation takes no longer than on the emulated device.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import psutil
from prometheus_client.parser import text_string_to_metric_families

from collapipe.emulation.device_profiles import MAX_OVERRUN_RATIO
from collapipe.errors import WrongStateError
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.processes import ProcessRecord

MAX_REAL_CORES = 1.5
"""Largest processor time of all processes together, in seconds per second."""

_BUSY = (
    "collapipe_stage_forward_seconds_sum",
    "collapipe_stage_backward_seconds_sum",
    "collapipe_stage_update_seconds_total",
)
_OVERRUN = ("collapipe_emulation_overrun_seconds_total",)


@dataclass(frozen=True)
class EmulationReading:
    """The counters of a testbed at one moment, or their growth: the later reading minus the earlier one.

    Args:
        processes: The processes of the testbed.
        wall_seconds: Time of the monotonic clock.
        real_seconds: Processor time of all processes of the testbed.
        busy_seconds: Time in which the emulated devices computed for training.
        overrun_seconds: Time by which the real work exceeded that of the emulated devices.
    """

    processes: Sequence[ProcessRecord]
    wall_seconds: float
    real_seconds: float
    busy_seconds: float
    overrun_seconds: float

    @classmethod
    def of(cls, testbed: LocalTestbed) -> "EmulationReading":
        """Reads the counters of a started testbed. Raises `WrongStateError` if one cannot be read."""
        emulation = testbed.emulation
        if emulation is None or not emulation.devices:
            raise WrongStateError(
                "the testbed emulates no device, so there is nothing to check: start it with --emulation"
            )
        pages = [
            testbed.metrics(process.name)
            for process in testbed.processes
            if process.name in emulation.devices
        ]
        return cls(
            testbed.processes,
            time.monotonic(),
            sum(map(processor_seconds, testbed.processes)),
            sum(sum_of_metrics(page, _BUSY) for page in pages),
            sum(sum_of_metrics(page, _OVERRUN) for page in pages),
        )

    def __sub__(self, earlier: "EmulationReading") -> "EmulationReading":
        """Raises `WrongStateError` if a process ended or began between the readings."""
        changed = {process.name for process in {*earlier.processes} ^ {*self.processes}}
        if changed:
            raise WrongStateError(
                f"{', '.join(sorted(changed))} ended or began during the measurement, so their "
                "work is unknown: measure again"
            )
        return EmulationReading(
            self.processes,
            self.wall_seconds - earlier.wall_seconds,
            self.real_seconds - earlier.real_seconds,
            self.busy_seconds - earlier.busy_seconds,
            self.overrun_seconds - earlier.overrun_seconds,
        )

    @property
    def real_cores(self) -> float:
        """The mean number of processors that real work used."""
        return self.real_seconds / self.wall_seconds

    @property
    def overrun_ratio(self) -> float:
        """The ratio of overrun to busy time; infinite for overrun without busy time."""
        if not self.overrun_seconds:
            return 0.0
        return self.overrun_seconds / self.busy_seconds if self.busy_seconds else float("inf")

    def check(self) -> None:
        """Raises `WrongStateError` if this growth exceeds a limit, because the emulation did not keep up."""
        if self.real_cores > MAX_REAL_CORES:
            raise WrongStateError(
                f"the emulation did not keep up: real work took {self.real_cores:.2f} cores "
                f"({self.real_seconds:.1f} processor seconds in {self.wall_seconds:.1f} s), the "
                f"limit is {MAX_REAL_CORES:g}: raise time_scale of the emulation, or use a smaller "
                "model or fewer devices"
            )
        if self.overrun_ratio > MAX_OVERRUN_RATIO:
            raise WrongStateError(
                f"the emulation did not keep up: real work took {self.overrun_seconds:.2f} s longer "
                f"than on the emulated devices, {self.overrun_ratio:.1%} of the "
                f"{self.busy_seconds:.1f} s that they were busy, the limit is "
                f"{MAX_OVERRUN_RATIO:.0%}: raise time_scale of the emulation, or emulate slower "
                "devices"
            )


def processor_seconds(process: ProcessRecord) -> float:
    """Returns the processor time of a process since its start. Raises `WrongStateError` if it has ended."""
    try:
        times = psutil.Process(process.pid).cpu_times()
    except psutil.Error:
        times = None
    if times is None or not process.alive:
        raise WrongStateError(
            f"{process.name} (pid {process.pid}) has ended, so its real work is unknown: measure again"
        )
    return times.user + times.system


def sum_of_metrics(page: str, names: Collection[str]) -> float:
    """Sums all series with one of the names on a page of metrics."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name in names
    )
