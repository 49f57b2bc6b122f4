"""Device profiles: figures for emulation, and for planning with devices that have not been profiled yet.

Sources of the figures:

- HPL is the benchmark of github.com/geerlingguy/top500-benchmark. It uses the whole board in double precision, and reports
  the power at the wall. A NEON or AVX unit does twice as many operations in single precision. Eager training in torch
  is estimated to reach half of that rate, because norms, softmax and dropout are limited by the memory. (On one core of an
  EPYC server, which has more memory bandwidth per operation, a block of MiniLM reaches 0.8 of a large matrix product.)
- The memory bandwidth is half of the figure in the data sheet of the board: an estimate for plain streaming.
- The seconds of a micro-batch are the calls of Python and torch whose time does not depend on the batch size. A block of
  MiniLM takes 2.5 ms on one core of that server. The other figures are estimates in proportion to single-thread speed. The
  ratio of the two Raspberry Pis is from sysbench (leoncode.co.uk/articles/raspberry-pi-benchmarks).
- The rates of cables are those of the standard. The rates of radios are estimates for 802.11 at a few metres.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from collapipe.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """A kind of device."""

    flops_per_second: float
    """Sustained single-precision operations per second in training, forward and backward."""
    memory_bytes_per_second: float
    """Sustained rate of plain streaming. It limits optimizer steps and gradients of embedding tables."""
    seconds_per_micro_batch: float
    """Time of a micro-batch that does not depend on its size: o in docs/scheduling.md (2)."""
    memory_bytes: int
    """Memory that training may use: G in docs/scheduling.md (10)."""
    busy_watts: float
    """Power above idle while the device computes: docs/scheduling.md (8)."""
    idle_watts: float
    """Power of the idle board with its network interface."""
    wired_rate_bps: float
    """Rate of the network cable in bit/s."""
    wireless_rate_bps: float
    """Typical rate of the radio in bit/s."""


DEVICE_PROFILES: Mapping[str, DeviceProfile] = {
    "raspberry-pi-4": DeviceProfile(
        flops_per_second=12e9,  # HPL: 11.889 GFLOP/s (issue 13), times 2 (single precision), times 0.5
        memory_bytes_per_second=4e9,  # LPDDR4-2400, 32 bit: 9.6 GB/s
        seconds_per_micro_batch=9e-3,
        memory_bytes=3_000_000_000,  # the 4 GB board without system, Python and torch (estimated)
        busy_watts=4.2,  # HPL: 7.2 W (issue 13), minus idle
        idle_watts=3.0,  # chipwired.com, watt meter at the wall
        wired_rate_bps=940e6,  # Gigabit Ethernet without framing
        wireless_rate_bps=100e6,  # 802.11ac, one antenna (estimated)
    ),
    "raspberry-pi-5": DeviceProfile(
        flops_per_second=30e9,  # HPL: 30.249 GFLOP/s (issue 18), times 2, times 0.5
        memory_bytes_per_second=8e9,  # LPDDR4X-4267, 32 bit: 17 GB/s
        seconds_per_micro_batch=5e-3,
        memory_bytes=6_500_000_000,  # the 8 GB board without system, Python and torch (estimated)
        busy_watts=7.7,  # HPL: 11 W (issue 18), minus idle
        idle_watts=3.3,  # 0.65 A at 5 V (github.com/iiab/iiab, issue 4050)
        wired_rate_bps=940e6,
        wireless_rate_bps=200e6,  # 802.11ac, one antenna at 80 MHz (estimated)
    ),
    "jetson-orin-nano": DeviceProfile(
        # NVIDIA's data sheet: 1024 CUDA cores at 625 MHz, 2 operations each, is 1.28 TFLOP/s; times 0.4 (estimated)
        flops_per_second=500e9,
        memory_bytes_per_second=34e9,  # data sheet: 68 GB/s
        seconds_per_micro_batch=6e-3,  # its CPU launches some hundred kernels (estimated)
        memory_bytes=5_500_000_000,  # 8 GB, shared with the CPU, without system, CUDA and torch (estimated)
        busy_watts=8.0,  # data sheet: the power mode of 15 W, minus idle
        idle_watts=7.0,  # a complete device (github.com/ID-Robots/clawbox, pull request 277)
        wired_rate_bps=940e6,
        wireless_rate_bps=300e6,  # 802.11ac, two antennas (estimated)
    ),
    "laptop": DeviceProfile(
        # HPL of a Core i7-6820HQ, four cores of 2015: 100 GFLOP/s (kreier.github.io/benchmark), times 2, times 0.5
        flops_per_second=100e9,
        memory_bytes_per_second=17e9,  # DDR4-2133, two channels: 34 GB/s
        seconds_per_micro_batch=2.5e-3,
        memory_bytes=12_000_000_000,  # 16 GB without system, desktop, Python and torch (estimated)
        busy_watts=37.0,  # Intel's data sheet: 45 W of design power, minus idle
        idle_watts=8.0,  # estimated, screen off
        wired_rate_bps=940e6,
        wireless_rate_bps=300e6,  # 802.11ac, two antennas (estimated)
    ),
}


def device_profile(name: str) -> DeviceProfile:
    """Returns the device profile with this name.

    Raises:
        InvalidInputError: No profile has this name.
    """
    profile = DEVICE_PROFILES.get(name)
    if profile is None:
        raise InvalidInputError(
            f"there is no device profile {name!r}: use one of {', '.join(DEVICE_PROFILES)}"
        )
    return profile
