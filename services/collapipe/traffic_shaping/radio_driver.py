"""Radio drivers: they set the transmit power of a link, and return the rate of the link."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.radio_rate import radio_rate_bps

NOMINAL_POWER_WATTS = 0.1
"""Transmit power of a radio without a setting: 20 dBm, which most countries allow for Wi-Fi at 2.4 GHz."""

NOMINAL_BANDWIDTH_HZ = 20e6
"""Bandwidth of a radio link without a share of the channel: one Wi-Fi channel."""


@dataclass(frozen=True)
class RadioState:
    """The state of a radio link at its sender."""

    gain: float
    """Power gain from the sender to the receiver."""
    noise_watts_per_hertz: float
    """Density of noise and interference at the receiver."""
    power_watts: float
    rate_bps: float
    """Rate to send at in bit/s; 0 means no limit."""


class RadioDriver(ABC):
    """The radio of a host."""

    @abstractmethod
    def transmit(
        self, sender: str, receiver: str, bandwidth_hz: float, power_watts: float
    ) -> RadioState | None:
        """Prepares the radio for the next frame of a link.

        Args:
            bandwidth_hz: Share of the channel; 0 if the plan has none.
            power_watts: Transmit power; 0 leaves the power unchanged.

        Returns:
            The state of the link, or `None` if the link uses no radio or its state is unknown.
        """


class EmulatedRadioDriver(RadioDriver):
    """An emulated radio: docs/scheduling.md (1) gives its rate.

    Each direction of a link gets the rate of the whole share, although only one direction can use the share
    at a time. The driver emulates neither coding, nor protocol overhead, nor loss. It reads the emulation for
    every frame, so that channels may fade.
    """

    def __init__(self, emulation: EmulationFile) -> None:
        self._emulation = emulation
        self._powers: dict[str, float] = {}

    def transmit(
        self, sender: str, receiver: str, bandwidth_hz: float, power_watts: float
    ) -> RadioState | None:
        radio = self._emulation.current().radio(sender, receiver)
        if radio is None:
            return None
        power = power_watts or self._powers.get(receiver, NOMINAL_POWER_WATTS)
        self._powers[receiver] = power
        bandwidth = bandwidth_hz or NOMINAL_BANDWIDTH_HZ
        rate_bps = radio_rate_bps(bandwidth, power, radio.gain, radio.noise_watts_per_hertz)
        return RadioState(radio.gain, radio.noise_watts_per_hertz, power, rate_bps)
