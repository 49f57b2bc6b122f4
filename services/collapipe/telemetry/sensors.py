"""Energy and temperature of this host, from what Linux shows in /sys.

Each probe may be absent, forbidden or broken, alone and at any time: that is visible in `collapipe_sensor_present`
and does no harm; without any, energy is estimated by design (8).
"""

import logging
import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from collapipe.telemetry import metrics

logger = logging.getLogger(__name__)

_MAX_WATTS = 10_000.0
_MAX_GAP_SECONDS = 60.0
"""Two readings further apart say nothing of what was between them: the host slept."""
_WHOLE_BOARD_RAILS = ("VDD_IN", "POM_5V_IN")
"""The rail that feeds all others, on the Jetson modules that have one; elsewhere the rails add up."""
_CELSIUS = (-40.0, 150.0)
_PROCESSOR_ZONES = ("cpu", "pkg", "soc", "core")


class _EnergyProbe(Protocol):
    name: str

    def joules(self, now: float) -> float | None:
        """Energy used since the last call, 0 at the first; `None` when it cannot be read."""


class Probes:
    """Samples every probe in a thread, from now until it is closed.

    Args:
        root: Where /sys is mounted.
        interval_seconds: Between two samples: power that is only shown as of now is integrated over it.
    """

    def __init__(self, root: Path, interval_seconds: float) -> None:
        self._energy: tuple[_EnergyProbe, ...] = (_Rails(root), _Rapl(root), _Battery(root))
        self._zones = _Zones(root)
        self._interval_seconds = interval_seconds
        self._present: dict[str, bool] = {}
        self._closing = threading.Event()
        self.sample(time.monotonic())  # what is present shows before the first round
        logger.info(
            "probes that work here: %s",
            ", ".join(name for name, present in self._present.items() if present) or "none",
        )
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)
        self._thread.start()

    def sample(self, now: float) -> None:
        """Reads every probe once, at a time of the monotonic clock."""
        for probe in self._energy:
            joules = probe.joules(now)
            self._note(probe.name, joules is not None)
            if joules is not None:
                metrics.energy_used(probe.name, joules)
        celsius = self._zones.celsius()
        self._note(self._zones.name, celsius is not None)
        if celsius is not None:
            metrics.temperature(self._zones.name, celsius)

    def close(self) -> None:
        """Ends the thread; a reading that hangs in the kernel is not waited for."""
        self._closing.set()
        self._thread.join(2 * self._interval_seconds)

    def _run(self) -> None:
        while not self._closing.wait(self._interval_seconds):
            self.sample(time.monotonic())

    def _note(self, probe: str, present: bool) -> None:
        if self._present.get(probe) is not present:
            self._present[probe] = present
            metrics.probe_present(probe, present=present)


def start_probes(root: Path = Path("/sys"), interval_seconds: float = 1.0) -> Probes:
    """Starts to feed energy and temperature of this host into its metrics."""
    return Probes(root, interval_seconds)


def processor_celsius(root: Path = Path("/sys")) -> float | None:
    """The temperature of the hottest zone of the processor; `None` where no sensor shows one."""
    return _Zones(root).celsius()


class _Integrator:
    """Makes energy of power, by the mean of two readings."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None

    def joules(self, now: float, watts: float | None) -> float | None:
        before, self._last = self._last, None
        if watts is None or not 0 <= watts <= _MAX_WATTS:
            return None
        self._last = (now, watts)
        if before is None or now - before[0] > _MAX_GAP_SECONDS:
            return 0.0
        return (before[1] + watts) / 2 * (now - before[0])


class _Rails:
    """The INA3221 monitors of a Jetson: hwmon since JetPack 5, the iio driver before."""

    name = "ina3221"

    def __init__(self, root: Path) -> None:
        self._drivers = root / "bus/i2c/drivers"
        self._integrator = _Integrator()

    def joules(self, now: float) -> float | None:
        rails = self._rails()
        whole = [watts for label, watts in rails if label in _WHOLE_BOARD_RAILS]
        measured = whole or [watts for _, watts in rails]
        return self._integrator.joules(now, sum(measured) if measured else None)

    def _rails(self) -> list[tuple[str, float]]:
        found = []
        for monitor in _entries(self._drivers, "ina3221*/*/hwmon/hwmon*"):
            for channel in (1, 2, 3):  # above are shunt voltages and sums
                if _number(monitor / f"in{channel}_enable") == 0:
                    continue
                millivolts = _number(monitor / f"in{channel}_input")
                milliamperes = _number(monitor / f"curr{channel}_input")
                if millivolts is not None and milliamperes is not None:
                    label = _text(monitor / f"in{channel}_label") or ""
                    found.append((label, millivolts * milliamperes / 1e6))
        for monitor in _entries(self._drivers, "ina3221*/*/iio:device*"):
            for channel in (0, 1, 2):
                milliwatts = _number(monitor / f"in_power{channel}_input")
                if milliwatts is not None:
                    label = _text(monitor / f"rail_name_{channel}") or ""
                    found.append((label, milliwatts / 1e3))
        return found


class _Rapl:
    """The energy counters of a processor's packages; since Linux 5.10 only root may read them."""

    name = "rapl"

    def __init__(self, root: Path) -> None:
        self._zones = root / "class/powercap"
        self._last: dict[Path, tuple[float, float]] = {}

    def joules(self, now: float) -> float | None:
        used: float | None = None
        for zone in _entries(self._zones, "intel-rapl:*"):
            # a zone within a package is counted there, the platform's would count everything twice
            if zone.name.count(":") > 1 or not (_text(zone / "name") or "").startswith("package"):
                continue
            counter = _number(zone / "energy_uj")
            if counter is None or counter < 0:
                self._last.pop(zone, None)
                continue
            used = (used or 0.0) + self._grown(zone, now, counter) / 1e6
        return used

    def _grown(self, zone: Path, now: float, counter: float) -> float:
        then, before = self._last.get(zone, (-math.inf, counter))
        self._last[zone] = (now, counter)
        seconds = now - then
        if seconds > _MAX_GAP_SECONDS:
            return 0.0
        grown = counter - before
        if grown < 0:
            grown += _number(zone / "max_energy_range_uj") or 0.0
        return grown if 0 <= grown <= _MAX_WATTS * 1e6 * seconds else 0.0


class _Battery:
    """What batteries give; while they are charged, nobody knows what the device uses."""

    name = "battery"

    def __init__(self, root: Path) -> None:
        self._supplies = root / "class/power_supply"
        self._integrator = _Integrator()

    def joules(self, now: float) -> float | None:
        given = [watts for watts in map(self._watts, _entries(self._supplies, "BAT*")) if watts]
        return self._integrator.joules(now, sum(given) if given else None)

    @staticmethod
    def _watts(battery: Path) -> float | None:
        if _text(battery / "status") != "Discharging":
            return None
        microwatts = _number(battery / "power_now")
        if microwatts is None:
            microamperes = _number(battery / "current_now")
            microvolts = _number(battery / "voltage_now")
            if microamperes is None or microvolts is None:
                return None
            microwatts = microamperes * microvolts / 1e6
        return abs(microwatts) / 1e6  # some drivers count what is drawn as negative


class _Zones:
    """The hottest zone of the processor, or of all where none is named so."""

    name = "thermal"

    def __init__(self, root: Path) -> None:
        self._root = root / "class/thermal"

    def celsius(self) -> float | None:
        processor, all_zones = [], []
        for zone in _entries(self._root, "thermal_zone*"):
            millicelsius = _number(zone / "temp")
            if millicelsius is None or not _CELSIUS[0] < millicelsius / 1e3 < _CELSIUS[1]:
                continue  # a zone that is switched off shows -256 degrees
            all_zones.append(millicelsius / 1e3)
            kind = (_text(zone / "type") or "").lower()
            if any(word in kind for word in _PROCESSOR_ZONES):
                processor.append(millicelsius / 1e3)
        return max(processor or all_zones, default=None)


def _entries(directory: Path, pattern: str) -> Iterable[Path]:
    """What matches now: devices come and go, and a directory may be closed to us."""
    try:
        return sorted(directory.glob(pattern))
    except OSError:
        return []


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None


def _number(path: Path) -> float | None:
    try:
        value = float(_text(path) or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
