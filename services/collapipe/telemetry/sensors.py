"""Energy and temperature sensors of this host, read from /sys of Linux.

Any sensor can be missing, unreadable or broken at any time. The metric `collapipe_sensor_present` shows which
ones work. Without an energy sensor, a host computes its energy by docs/scheduling.md (8).
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

from collapipe.telemetry import metrics

logger = logging.getLogger(__name__)

_MAX_WATTS = 10_000.0
_MAX_GAP_SECONDS = 60.0
"""After a longer gap between two readings the host has slept, and its power in between is unknown."""
_WHOLE_BOARD_RAILS = ("VDD_IN", "POM_5V_IN")
"""The rail that feeds all others on some Jetson modules. On other modules, the rails add up."""
_MIN_CELSIUS, _MAX_CELSIUS = -40.0, 150.0
_PROCESSOR_ZONES = ("cpu", "pkg", "soc", "core")


class SensorReader:
    """Reads all sensors into metrics, in a thread, until it is closed.

    Args:
        root: Where /sys is mounted.
        interval_seconds: Time between two readings. Power is integrated over it.
    """

    def __init__(self, root: Path = Path("/sys"), interval_seconds: float = 1.0) -> None:
        self._root = root
        self._interval_seconds = interval_seconds
        self._energy_sensors = (
            _PowerSensor("ina3221", _board_watts, root),
            _PowerSensor("battery", _battery_watts, root),
            _EnergyCounters(root),
        )
        self._closing = threading.Event()
        # The first reading is here, so that the first scrape of Prometheus shows which sensors work.
        logger.info("working sensors: %s", ", ".join(self.read(time.monotonic())) or "none")
        self._thread = threading.Thread(target=self._run, name="sensors", daemon=True)
        self._thread.start()

    def read(self, now: float) -> list[str]:
        """Reads every sensor at a time of the monotonic clock; returns the names of those that work."""
        working = []
        for sensor in self._energy_sensors:
            joules = sensor.joules(now)
            metrics.SENSOR_PRESENT.labels(sensor.name).set(joules is not None)
            if joules is not None:
                working.append(sensor.name)
                metrics.ENERGY_JOULES.labels(sensor.name).inc(joules)
        celsius = processor_celsius(self._root)
        metrics.SENSOR_PRESENT.labels("thermal").set(celsius is not None)
        if celsius is not None:
            working.append("thermal")
            metrics.TEMPERATURE_CELSIUS.labels("thermal").set(celsius)
        return working

    def close(self) -> None:
        """Ends the thread. Does not wait long for a reading that hangs in the kernel."""
        self._closing.set()
        self._thread.join(2 * self._interval_seconds)

    def _run(self) -> None:
        while not self._closing.wait(self._interval_seconds):
            self.read(time.monotonic())


def processor_celsius(root: Path = Path("/sys")) -> float | None:
    """Returns the temperature of the hottest zone of the processor; without such zones, of any zone."""
    processor, all_zones = [], []
    for zone in _entries(root / "class/thermal", "thermal_zone*"):
        millicelsius = _number(zone / "temp")
        # A zone that is switched off shows -256 degrees.
        if millicelsius is None or not _MIN_CELSIUS < millicelsius / 1e3 < _MAX_CELSIUS:
            continue
        all_zones.append(millicelsius / 1e3)
        kind = (_text(zone / "type") or "").lower()
        if any(word in kind for word in _PROCESSOR_ZONES):
            processor.append(millicelsius / 1e3)
    return max(processor or all_zones, default=None)


class _PowerSensor:
    """Integrates measured power into energy, by the mean of two readings.

    Args:
        read_watts: Reads the power below the given /sys; `None` where it cannot be read.
    """

    def __init__(self, name: str, read_watts: Callable[[Path], float | None], root: Path) -> None:
        self.name = name
        self._read_watts = read_watts
        self._root = root
        self._last: tuple[float, float] | None = None

    def joules(self, now: float) -> float | None:
        """Returns the energy used since the last call, 0 at the first one, or `None` if it cannot be read."""
        before, self._last = self._last, None
        watts = self._read_watts(self._root)
        if watts is None or not 0 <= watts <= _MAX_WATTS:
            return None
        self._last = (now, watts)
        if before is None or now - before[0] > _MAX_GAP_SECONDS:
            return 0.0
        return (before[1] + watts) / 2 * (now - before[0])


def _board_watts(root: Path) -> float | None:
    """Returns the power of a Jetson board, from its INA3221 monitors."""
    rails = []
    for monitor in _entries(root, "bus/i2c/drivers/ina3221*/*/hwmon/hwmon*"):  # since JetPack 5
        for channel in (1, 2, 3):  # Higher channels are shunt voltages and sums.
            if _number(monitor / f"in{channel}_enable") == 0:
                continue
            millivolts = _number(monitor / f"in{channel}_input")
            milliamperes = _number(monitor / f"curr{channel}_input")
            if millivolts is not None and milliamperes is not None:
                label = _text(monitor / f"in{channel}_label")
                rails.append((label, millivolts * milliamperes / 1e6))
    for monitor in _entries(root, "bus/i2c/drivers/ina3221*/*/iio:device*"):  # before JetPack 5
        for channel in (0, 1, 2):
            milliwatts = _number(monitor / f"in_power{channel}_input")
            if milliwatts is not None:
                rails.append((_text(monitor / f"rail_name_{channel}"), milliwatts / 1e3))
    whole_board = [watts for label, watts in rails if label in _WHOLE_BOARD_RAILS]
    return sum(whole_board or [watts for _, watts in rails]) if rails else None


def _battery_watts(root: Path) -> float | None:
    """Returns the power that discharging batteries supply.

    A charging battery says nothing about the power that the device uses.
    """
    supplied = []
    for battery in _entries(root, "class/power_supply/BAT*"):
        if _text(battery / "status") != "Discharging":
            continue
        microwatts = _number(battery / "power_now")
        if microwatts is None:
            microamperes = _number(battery / "current_now")
            microvolts = _number(battery / "voltage_now")
            if microamperes is None or microvolts is None:
                continue
            microwatts = microamperes * microvolts / 1e6
        if microwatts:
            supplied.append(abs(microwatts) / 1e6)  # Some drivers show discharging as negative.
    return sum(supplied) if supplied else None


class _EnergyCounters:
    """The RAPL energy counters of the processor packages. Since Linux 5.10 only root may read them."""

    name = "rapl"

    def __init__(self, root: Path) -> None:
        self._root = root
        self._last: dict[Path, tuple[float, float]] = {}

    def joules(self, now: float) -> float | None:
        """Returns the energy used since the last call, 0 at the first one, or `None` if it cannot be read."""
        used: float | None = None
        for zone in _entries(self._root, "class/powercap/intel-rapl:*"):
            # A zone inside a package is part of its count. The zone of the platform contains all packages.
            if zone.name.count(":") > 1 or not (_text(zone / "name") or "").startswith("package"):
                continue
            counter = _number(zone / "energy_uj")
            if counter is None or counter < 0:
                self._last.pop(zone, None)
                continue
            used = (used or 0.0) + self._increase(zone, now, counter) / 1e6
        return used

    def _increase(self, zone: Path, now: float, counter: float) -> float:
        """Returns by how many microjoules the counter of a zone grew; 0 where that is unknown."""
        then, before = self._last.get(zone, (-math.inf, counter))
        self._last[zone] = (now, counter)
        seconds = now - then
        if seconds > _MAX_GAP_SECONDS:
            return 0.0
        grown = counter - before
        if grown < 0:  # The counter has wrapped around.
            grown += _number(zone / "max_energy_range_uj") or 0.0
        return grown if 0 <= grown <= _MAX_WATTS * 1e6 * seconds else 0.0


def _entries(directory: Path, pattern: str) -> list[Path]:
    """Returns the matching paths; none if the directory is unreadable. Devices can come and go."""
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
