"""The rate of a radio link: docs/scheduling.md (1)."""

from math import inf, log, log1p


def radio_rate_bps(
    bandwidth_hz: float,
    power_watts: float,
    gain: float,
    noise_watts_per_hertz: float,
    efficiency: float = 1.0,
    most_bits_per_hertz: float = inf,
) -> float:
    """Returns the rate of a radio link in bit/s: Shannon's capacity, or what the highest modulation carries.

    Args:
        bandwidth_hz: Share of the channel; infinity gives the limit of the rate for a wide channel.
        gain: Power gain from the sender to the receiver.
        noise_watts_per_hertz: Density of noise and interference at the receiver.
        efficiency: The measured rate of the link, divided by this rate.
        most_bits_per_hertz: Bits that the highest modulation carries in each second and hertz.
    """
    if bandwidth_hz <= 0 or power_watts <= 0:
        return 0.0
    if bandwidth_hz == inf:
        return efficiency * power_watts * gain / noise_watts_per_hertz / log(2)
    signal_to_noise = power_watts * gain / (bandwidth_hz * noise_watts_per_hertz)
    return efficiency * bandwidth_hz * min(log1p(signal_to_noise) / log(2), most_bits_per_hertz)
