"""Transmit power and bandwidth of a link, and the rate that follows from them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import log, log1p

from collapipe.emulation.world import EmulationFile

NOMINAL_POWER_WATTS = 0.1
"""Transmit power of a radio that nobody has set: 20 dBm, what Wi-Fi may send at 2.4 GHz in most of the world."""

NOMINAL_BANDWIDTH_HZ = 20e6
"""Bandwidth of a radio link whose share nobody has set: one Wi-Fi channel."""


def rate_bps(
    bandwidth_hz: float, power_watts: float, gain: float, noise_watts_per_hertz: float
) -> float:
    """Rate of a radio link: design (1), Shannon's capacity.

    Args:
        bandwidth_hz: Share of the channel in Hz; without any, the rate is 0.
        power_watts: Transmit power in W.
        gain: Power gain from the sender to the receiver.
        noise_watts_per_hertz: Density of noise and interference at the receiver in W/Hz.

    Returns:
        bit/s.
    """
    if bandwidth_hz <= 0:
        return 0.0
    snr = power_watts * gain / (bandwidth_hz * noise_watts_per_hertz)
    return bandwidth_hz * log1p(snr) / log(2)


@dataclass(frozen=True)
class RadioState:
    """A radio link as its sender knows it."""

    gain: float
    """Power gain from the sender to the receiver."""
    noise_watts_per_hertz: float
    """Density of noise and interference at the receiver."""
    power_watts: float
    """Transmit power in force."""
    rate_bps: float
    """Rate to pace at in bit/s; 0 leaves it to the radio."""


class RadioDriver(ABC):
    """The radio of a host, if it has one."""

    @abstractmethod
    def transmit(
        self, sender: str, receiver: str, bandwidth_hz: float, power_watts: float
    ) -> RadioState | None:
        """Makes what follows go over the radio with a power, in a share of the channel.

        Called before every frame.

        Args:
            sender: This host.
            receiver: The host that it sends to.
            bandwidth_hz: Share of the channel in Hz; 0 when none was decided.
            power_watts: Transmit power in W; 0 leaves it as it is.

        Returns:
            What then holds; `None` when no radio leads to the receiver, or nothing is known of it.
        """


class NoRadioDriver(RadioDriver):
    """Wires everywhere."""

    def transmit(
        self, sender: str, receiver: str, bandwidth_hz: float, power_watts: float
    ) -> RadioState | None:
        """Does nothing."""
        return None


class EmulatedRadioDriver(RadioDriver):
    """The radio of an emulated world: its rate follows by design (1) from gain, noise, power and bandwidth.

    Each direction gets the rate of its own power in the whole share. Not emulated: that the two directions of a share
    exclude each other in time, the coding and protocol that real radios lose rate to, and loss.

    Args:
        emulation: The world; asked anew at every frame, so that a channel may fade.
    """

    def __init__(self, emulation: EmulationFile) -> None:
        self._emulation = emulation
        self._powers: dict[str, float] = {}

    def transmit(
        self, sender: str, receiver: str, bandwidth_hz: float, power_watts: float
    ) -> RadioState | None:
        """Sets the power of the link, and says what the channel then gives."""
        channel = self._emulation.current().radio(sender, receiver)
        if channel is None:
            return None
        power = power_watts or self._powers.get(receiver, NOMINAL_POWER_WATTS)
        self._powers[receiver] = power
        return RadioState(
            gain=channel.gain,
            noise_watts_per_hertz=channel.noise_watts_per_hertz,
            power_watts=power,
            rate_bps=rate_bps(
                bandwidth_hz or NOMINAL_BANDWIDTH_HZ,
                power,
                channel.gain,
                channel.noise_watts_per_hertz,
            ),
        )
