"""A processor that is slower than this machine's: real work, then waiting until the emulated device would be done.

Nothing is computed differently, so no bit of a result changes. Work that takes longer here than the emulated
device would need cannot be hidden: it is counted, and whoever measures has to look at the count.
"""

import time

from collapipe.emulation.device_profiles import device_profile
from collapipe.emulation.world import EmulationFile
from collapipe.stage_runtime.operation_counts import Work
from collapipe.telemetry import metrics

FORWARD_SHARE = 1 / 3
"""Share of a micro-batch's fixed seconds that its forward pass takes, as of its operations; the backward pass has the rest."""


class EmulatedProcessor:
    """The processor of one host, as the emulation says at the moment; this machine's own when it says nothing.

    Args:
        emulation: The emulated world.
        host_id: The host.
    """

    def __init__(self, emulation: EmulationFile, host_id: str) -> None:
        self._emulation = emulation
        self._host_id = host_id

    def seconds(self, work: Work, overhead_share: float) -> float | None:
        """How long the emulated device needs; `None` when none is emulated.

        Args:
            work: What is to be done.
            overhead_share: Share of a micro-batch's fixed seconds that belongs to it.

        Raises:
            InvalidInputError: The emulation file cannot be used.
        """
        world = self._emulation.current()
        device = world.devices.get(self._host_id)
        if device is None:
            return None
        profile = device_profile(device.profile)
        seconds = overhead_share * profile.seconds_per_micro_batch
        seconds += work.flops / profile.flops_per_second
        seconds += work.moved_bytes / profile.memory_bytes_per_second
        return world.time_scale * device.slowdown * seconds

    def occupy(self, started: float, work: Work, overhead_share: float) -> None:
        """Waits until the emulated device would have done work that began at a time and is done here.

        Args:
            started: By `time.perf_counter`.
            work: What was done.
            overhead_share: As for `seconds`.
        """
        seconds = self.seconds(work, overhead_share)
        if seconds is None:
            return
        left = started + seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
        else:
            metrics.EMULATION_OVERRUN_SECONDS.inc(-left)
