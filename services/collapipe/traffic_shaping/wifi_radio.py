"""The driver of a real Wi-Fi interface, which uses the program `iw`."""

import logging
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from math import inf, log10

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.radio_driver import NOMINAL_POWER_WATTS, RadioDriver, RadioState
from collapipe.traffic_shaping.run_command import run_command

logger = logging.getLogger(__name__)

_READ_SECONDS = 1.0
"""How long a reading stays valid. A reading starts several processes, which is too slow for every frame."""
_REMEDY = "iw needs a Wi-Fi interface and, to set its power, CAP_NET_ADMIN; without them, use --radio none"
_THERMAL_WATTS_PER_HERTZ = 4.0e-21
"""Noise of any receiver at room temperature, for Wi-Fi drivers that report no noise."""
_MEGA = 1e6


class WifiRadioDriver(RadioDriver):
    """Sets the transmit power of a Wi-Fi interface, and reads the state of its link.

    Wi-Fi divides its channel by time and not by bandwidth. So a share of the channel becomes the same share
    of the bit rate that the interface has chosen. The gain is measured in the opposite direction, as the
    received signal over the transmit power of this host. It is right if the access point
    sends with the same power.

    Args:
        iw: The program iw and its first arguments.

    Raises:
        InvalidInputError: iw is missing, or does not know the interface.
    """

    def __init__(self, interface: str, iw: Sequence[str] = ("iw",)) -> None:
        self._interface = interface
        self._iw = list(iw)
        self._lock = threading.Lock()
        self._power_watts = 0.0
        self._can_set_power = True
        self._read_at = -inf
        self._state: RadioState | None = None
        """The state if the link uses the whole channel."""
        self._channel_hz = 0.0
        self._run("info")

    def transmit(
        self, sender: str, receiver: str, bandwidth_hz: float, power_watts: float
    ) -> RadioState | None:
        """Sets the power of the interface for all receivers, and returns the state of its link."""
        with self._lock:  # Links of several clusters send in different threads.
            if power_watts and power_watts != self._power_watts and self._can_set_power:
                self._set_power(power_watts)
            if time.monotonic() - self._read_at > _READ_SECONDS:
                self._state = self._read()
                self._read_at = time.monotonic()
            if self._state is None:
                return None
            share = min(bandwidth_hz / self._channel_hz, 1.0)
            return replace(self._state, rate_bps=self._state.rate_bps * share)

    def _set_power(self, power_watts: float) -> None:
        milli_dbm = round(100 * 10 * log10(1000 * power_watts))
        try:
            self._run("set", "txpower", "fixed", str(milli_dbm))
        except InvalidInputError as error:
            self._can_set_power = False  # A further try would fail before every frame.
            logger.warning("the transmit power stays unchanged: %s", error)
        else:
            self._power_watts = power_watts
            self._read_at = -inf

    def _read(self) -> RadioState | None:
        """Reads the link; `None` if the interface is not connected."""
        try:
            link, info = self._run("link"), self._run("info")
        except InvalidInputError as error:
            logger.warning("the state of the radio is unknown: %s", error)
            return None
        signal, bit_rate = _number(link, r"signal: (\S+) dBm"), _number(link, r"tx bitrate: (\S+) ")
        width = _number(info, r"width: (\d+) MHz")
        if signal is None or bit_rate is None or width is None:
            return None
        power_dbm = _number(info, r"txpower (\S+) dBm")
        power = _watts(power_dbm) if power_dbm is not None else NOMINAL_POWER_WATTS
        self._channel_hz = width * _MEGA
        noise = self._read_noise_watts_per_hertz()
        return RadioState(_watts(signal) / power, noise, power, bit_rate * _MEGA)

    def _read_noise_watts_per_hertz(self) -> float:
        try:
            survey = self._run("survey", "dump")
        except InvalidInputError:  # Some Wi-Fi drivers have no survey.
            survey = ""
        noise = _number(survey, r"\[in use\]\s+noise:\s*(\S+) dBm")
        return _THERMAL_WATTS_PER_HERTZ if noise is None else _watts(noise) / self._channel_hz

    def _run(self, *arguments: str) -> str:
        return run_command([*self._iw, "dev", self._interface, *arguments], _REMEDY)


def _number(text: str, pattern: str) -> float | None:
    found = re.search(pattern, text)
    return float(found.group(1)) if found else None


def _watts(dbm: float) -> float:
    return float(10 ** (dbm / 10) / 1000)
