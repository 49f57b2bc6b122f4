"""Imitates a slower processor: does the real work, then waits until the emulated device would be done.

If the real work takes longer than the emulated device would need, the metric
`collapipe_emulation_overrun_seconds_total` counts the excess. Measurements with a large excess are not valid.
"""

import time

from collapipe.emulation.device_profiles import device_profile
from collapipe.emulation.emulation_file import EmulationFile
from collapipe.stage_runtime.operation_counts import Work
from collapipe.telemetry import metrics


class EmulatedProcessor:
    """The processor that the emulation file gives to one host. Without such an entry, it never waits."""

    def __init__(self, emulation: EmulationFile, host_id: str) -> None:
        self._emulation = emulation
        self._host_id = host_id

    def seconds(self, work: Work, overhead_share: float) -> float | None:
        """Returns how long the emulated device needs, or `None` if this host emulates no device.

        Args:
            overhead_share: Share of the fixed seconds of a micro-batch that belongs to this work.

        Raises:
            InvalidInputError: The emulation file cannot be used.
        """
        emulation = self._emulation.current()
        device = emulation.devices.get(self._host_id)
        if device is None:
            return None
        profile = device_profile(device.profile)
        seconds = overhead_share * profile.seconds_per_micro_batch
        seconds += work.flops / profile.flops_per_second
        seconds += work.moved_bytes / profile.memory_bytes_per_second
        return emulation.time_scale * device.slowdown * seconds

    def occupy(self, started: float, work: Work, overhead_share: float) -> None:
        """Waits until the emulated device would have done the work that began at `started`."""
        seconds = self.seconds(work, overhead_share)
        if seconds is None:
            return
        left = started + seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
        else:
            metrics.EMULATION_OVERRUN_SECONDS.inc(-left)
