"""A real Wi-Fi interface, driven with `iw`."""

import logging
import re
import threading
import time
from collections.abc import Sequence
from math import log10

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.commands import run_command
from collapipe.traffic_shaping.radio import NOMINAL_POWER_WATTS, RadioDriver, RadioState

logger = logging.getLogger(__name__)

_READ_SECONDS = 1.0
"""How long a reading of the interface holds: a frame comes every few milliseconds."""
_NEEDS = (
    "iw needs a Wi-Fi interface and, to set its power, CAP_NET_ADMIN; without, use --radio none"
)
_THERMAL_WATTS_PER_HERTZ = 4.0e-21
"""Noise of any receiver at room temperature, where the driver does not tell what it hears."""
_MEGA = 1e6


class WifiRadioDriver(RadioDriver):
    """Sets the transmit power of a Wi-Fi interface, and reads what it tells of its link.

    Wi-Fi divides its channel by time and not by bandwidth: a share of the channel is enacted as the same share of the
    bit rate that the driver chose. The gain is that of the way back: the signal heard from the access point over the power
    set here, so it takes both to send at the same power.

    Args:
        interface: For example "wlan0".
        command: How to run iw.

    Raises:
        InvalidInputError: There is no iw, or it does not know the interface.
    """

    def __init__(self, interface: str, command: Sequence[str] = ("iw",)) -> None:
        self._interface = interface
        self._command = list(command)
        self._lock = threading.Lock()
        self._power_watts = 0.0
        self._is_refused = False
        self._read_at = float("-inf")
        self._state: tuple[float, float, float, float, float] | None = None
        self._run("info")

    def transmit(
        self, sender: str, receiver: str, bandwidth_hz: float, power_watts: float
    ) -> RadioState | None:
        """Sets the power of the interface, for all its receivers, and tells what the driver says."""
        with self._lock:  # links of several clusters send from threads of their own
            if power_watts and power_watts != self._power_watts and not self._is_refused:
                self._set_power(power_watts)
            if time.monotonic() - self._read_at > _READ_SECONDS:
                self._state = self._read()
                self._read_at = time.monotonic()
            if self._state is None:
                return None
            gain, noise, power, bit_rate, width = self._state
        share = min(bandwidth_hz / width, 1.0)
        return RadioState(gain, noise, power, bit_rate * share)

    def _set_power(self, power_watts: float) -> None:
        milli_dbm = round(100 * 10 * log10(1000 * power_watts))
        try:
            self._run("set", "txpower", "fixed", str(milli_dbm))
        except InvalidInputError as error:
            self._is_refused = True  # once said is enough
            logger.warning("the transmit power stays as it is: %s", error)
        else:
            self._power_watts = power_watts
            self._read_at = float("-inf")

    def _read(self) -> tuple[float, float, float, float, float] | None:
        """Gain, noise density in W/Hz, power in W, bit rate in bit/s and channel width in Hz."""
        try:
            link, info = self._run("link"), self._run("info")
        except InvalidInputError as error:
            logger.warning("nothing is known of the radio: %s", error)
            return None
        signal, bit_rate = _number(link, r"signal: (\S+) dBm"), _number(link, r"tx bitrate: (\S+) ")
        width = _number(info, r"width: (\d+) MHz")
        if signal is None or bit_rate is None or width is None:
            return None  # not connected
        power_dbm = _number(info, r"txpower (\S+) dBm")
        power = _watts(power_dbm) if power_dbm is not None else NOMINAL_POWER_WATTS
        return (
            _watts(signal) / power,
            self._noise_watts_per_hertz(width * _MEGA),
            power,
            bit_rate * _MEGA,
            width * _MEGA,
        )

    def _noise_watts_per_hertz(self, width_hz: float) -> float:
        try:
            survey = self._run("survey", "dump")
        except InvalidInputError:  # not every driver surveys
            survey = ""
        noise = _number(survey, r"\[in use\]\s+noise:\s*(\S+) dBm")
        return _watts(noise) / width_hz if noise is not None else _THERMAL_WATTS_PER_HERTZ

    def _run(self, *arguments: str) -> str:
        return run_command([*self._command, "dev", self._interface, *arguments], _NEEDS)


def _number(text: str, pattern: str) -> float | None:
    found = re.search(pattern, text)
    return float(found.group(1)) if found else None


def _watts(dbm: float) -> float:
    return float(10 ** (dbm / 10) / 1000)
