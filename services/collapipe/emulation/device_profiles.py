"""What devices can do: figures for emulation, and for planning with devices that nobody has profiled yet.

Sources of the figures:

- HPL: github.com/geerlingguy/top500-benchmark, whole board, double precision, with watts at the wall. A NEON or AVX unit
  does twice as many operations in single precision. Eager training in torch is taken to reach half of that: norms,
  softmax and dropout are bound by memory (estimated; a block of MiniLM reaches 0.8 of a large product on one core of
  an EPYC server, which has more bandwidth for an operation than a board).
- Memory bandwidth: of the boards' data sheets, of which plain streaming reaches about half (estimated).
- Seconds of a micro-batch: the calls of Python and torch that do not grow with it. A block of MiniLM has 2.5 ms on one core
  of that server; the others in proportion to single-thread speed (estimated), which between the two Raspberry Pis
  is the ratio of their sysbench results (leoncode.co.uk/articles/raspberry-pi-benchmarks).
- Link rates: of the standard where it is wired, and what remains of 802.11 at a few metres where it is not (estimated).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from collapipe.errors import InvalidInputError


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One kind of device."""

    flops_per_second: float
    """Sustained single-precision operations a second in training, forward and backward."""
    memory_bytes_per_second: float
    """Sustained rate of plain streaming: bounds optimizer steps and gradients of embedding tables."""
    seconds_per_micro_batch: float
    """What a micro-batch costs whatever its size: o of design (2)."""
    memory_bytes: int
    """What training may use: G of design (10)."""
    busy_watts: float
    """Power beyond idle while it computes: design (8)."""
    idle_watts: float
    """Power of an idle board, with its network."""
    wired_rate_bps: float
    """Rate of its cable, in bit/s."""
    wireless_rate_bps: float
    """Typical rate of its radio, in bit/s."""


DEVICE_PROFILES: Mapping[str, DeviceProfile] = {
    "raspberry-pi-4": DeviceProfile(
        flops_per_second=12e9,  # HPL: 11.889 GFLOP/s (issue 13), times 2 (single precision), times 0.5
        memory_bytes_per_second=4e9,  # LPDDR4-2400, 32 bit: 9.6 GB/s
        seconds_per_micro_batch=9e-3,
        memory_bytes=3_000_000_000,  # the board of 4 GB, less system, Python and torch (estimated)
        busy_watts=4.2,  # HPL: 7.2 W (issue 13), less idle
        idle_watts=3.0,  # chipwired.com, watt meter at the wall
        wired_rate_bps=940e6,  # Gigabit Ethernet, less framing
        wireless_rate_bps=100e6,  # 802.11ac, one antenna (estimated)
    ),
    "raspberry-pi-5": DeviceProfile(
        flops_per_second=30e9,  # HPL: 30.249 GFLOP/s (issue 18), times 2, times 0.5
        memory_bytes_per_second=8e9,  # LPDDR4X-4267, 32 bit: 17 GB/s
        seconds_per_micro_batch=5e-3,
        memory_bytes=6_500_000_000,  # the board of 8 GB, less system, Python and torch (estimated)
        busy_watts=7.7,  # HPL: 11 W (issue 18), less idle
        idle_watts=3.3,  # 0.65 A at 5 V (github.com/iiab/iiab, issue 4050)
        wired_rate_bps=940e6,
        wireless_rate_bps=200e6,  # 802.11ac, one antenna at 80 MHz (estimated)
    ),
    "jetson-orin-nano": DeviceProfile(
        # NVIDIA's data sheet: 1024 CUDA cores at 625 MHz, 2 operations each: 1.28 TFLOP/s, times 0.4 (estimated)
        flops_per_second=500e9,
        memory_bytes_per_second=34e9,  # data sheet: 68 GB/s
        seconds_per_micro_batch=6e-3,  # its cores launch some hundred kernels (estimated)
        memory_bytes=5_500_000_000,  # 8 GB, shared with its processor, less system, CUDA and torch (estimated)
        busy_watts=8.0,  # data sheet: the power mode of 15 W, less idle
        idle_watts=7.0,  # of a complete device (github.com/ID-Robots/clawbox, pull request 277)
        wired_rate_bps=940e6,
        wireless_rate_bps=300e6,  # 802.11ac, two antennas (estimated)
    ),
    "laptop": DeviceProfile(
        # HPL of a Core i7-6820HQ, four cores of 2015: 100 GFLOP/s (kreier.github.io/benchmark), times 2, times 0.5
        flops_per_second=100e9,
        memory_bytes_per_second=17e9,  # DDR4-2133, two channels: 34 GB/s
        seconds_per_micro_batch=2.5e-3,
        memory_bytes=12_000_000_000,  # 16 GB, less system, desktop, Python and torch (estimated)
        busy_watts=37.0,  # Intel's data sheet: 45 W of design power, less idle
        idle_watts=8.0,  # estimated, screen off
        wired_rate_bps=940e6,
        wireless_rate_bps=300e6,  # 802.11ac, two antennas (estimated)
    ),
}


def device_profile(name: str) -> DeviceProfile:
    """Finds a profile by its name; raises `InvalidInputError`."""
    profile = DEVICE_PROFILES.get(name)
    if profile is None:
        raise InvalidInputError(
            f"there is no device profile {name!r}: use one of {', '.join(DEVICE_PROFILES)}"
        )
    return profile
