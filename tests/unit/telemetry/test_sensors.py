import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from collapipe.telemetry.sensors import SensorReader

HWMON = "bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"
OLDER = "bus/i2c/drivers/ina3221x/6-0040/iio:device0"
BATTERY = "class/power_supply/BAT0"
ENERGY = "class/powercap/intel-rapl:0/energy_uj"

Files = dict[str, str | float]
"""Contents of files below /sys."""


def rails(*rails: tuple[str, float, float]) -> Files:
    """Returns the files of a board with these labels, millivolts and milliamperes."""
    files: Files = {}
    for channel, (label, millivolts, milliamperes) in enumerate(rails, 1):
        files[f"{HWMON}/in{channel}_label"] = label
        files[f"{HWMON}/in{channel}_input"] = millivolts
        files[f"{HWMON}/curr{channel}_input"] = milliamperes
    return files


def package(energy: float, zone: str = "0", name: str = "package-0") -> Files:
    directory = f"class/powercap/intel-rapl:{zone}"
    limit = {f"{directory}/name": name, f"{directory}/max_energy_range_uj": 100_000_000}
    return {**limit, f"{directory}/energy_uj": energy}


def value(name: str, sensor: str) -> float:
    return REGISTRY.get_sample_value(f"collapipe_{name}", {"sensor": sensor}) or 0.0


class Sensors:
    """Reads the sensors of a pretended /sys at times that the test chooses."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.reader = SensorReader(root, interval_seconds=3600)
        self._now = time.monotonic() + 1000  # Readings before are too long ago to count.

    def read(self, files: Files, seconds: float = 1.0) -> dict[str, float]:
        """Writes files, and reads again after some seconds. Returns the joules of the sensors that work."""
        for path, content in files.items():
            (self.root / path).parent.mkdir(parents=True, exist_ok=True)
            (self.root / path).write_text(f"{content}\n")
        before = {
            name: value("energy_joules_total", name) for name in ("ina3221", "rapl", "battery")
        }
        self._now += seconds
        self.reader.read(self._now)
        present = [name for name in (*before, "thermal") if value("sensor_present", name)]
        joules = {name: value("energy_joules_total", name) - before[name] for name in before}
        return {name: joules.get(name, 0.0) for name in present}


@pytest.fixture
def sensors(tmp_path: Path) -> Iterator[Sensors]:
    made = Sensors(tmp_path)
    yield made
    made.reader.close()


@pytest.mark.parametrize(
    ("sensor", "watts", "files"),
    [
        ("ina3221", 10.0, rails(("VDD_IN", 5000, 2000), ("VDD_CPU", 5000, 800))),
        ("ina3221", 15.0, rails(("VDD_GPU", 10000, 1000), ("VDD_CPU", 10000, 500))),
        ("ina3221", 9.0, rails(("a", 9000, 1000), ("off", 1000, 500)) | {f"{HWMON}/in2_enable": 0}),
        (
            "ina3221",
            4.0,
            {f"{OLDER}/in_power{n}_input": 4000 - n for n in (0, 1)}
            | {f"{OLDER}/rail_name_0": "POM_5V_IN"},
        ),
        ("battery", 12.0, {f"{BATTERY}/power_now": 12_000_000}),
        ("battery", 12.0, {f"{BATTERY}/power_now": -12_000_000}),
        ("battery", 2.0, {f"{BATTERY}/current_now": 1_000_000, f"{BATTERY}/voltage_now": 2e6}),
    ],
)
def test_power_is_measured_by_each_kind_of_sensor(
    sensor: str, watts: float, files: Files, sensors: Sensors
) -> None:
    assert sensors.read(files | {f"{BATTERY}/status": "Discharging"}) == {sensor: 0}
    assert sensors.read({}, seconds=0.5) == {sensor: pytest.approx(watts / 2)}


def test_energy_is_the_mean_of_two_powers_times_the_time_between_them(sensors: Sensors) -> None:
    sensors.read(rails(("VDD_IN", 5000, 2000)))
    found = sensors.read(rails(("VDD_IN", 5000, 4000)), seconds=2.0)
    assert found == {"ina3221": pytest.approx(2 * (10 + 20) / 2)}


def test_packages_add_up_and_nothing_counts_twice(sensors: Sensors) -> None:
    zones = {"0": "package-0", "1": "package-1", "0:0": "core", "2": "psys"}
    for energy, joules in ((1_000_000, 0), (4_000_000, 3 + 3)):
        files: Files = {}
        for zone, name in zones.items():
            files |= package(energy, zone, name)
        assert sensors.read(files) == {"rapl": pytest.approx(joules)}


@pytest.mark.parametrize(
    ("before", "after", "joules"), [(99_000_000, 2_000_000, 3.0), (0, 9e15, 0.0)]
)
def test_counter_of_a_package_may_wrap_around_but_not_jump(
    before: float, after: float, joules: float, sensors: Sensors
) -> None:
    sensors.read(package(before))
    assert sensors.read(package(after)) == {"rapl": pytest.approx(joules)}


def test_time_that_the_host_slept_is_not_counted(sensors: Sensors) -> None:
    sensors.read(package(0) | rails(("VDD_IN", 5000, 2000)))
    assert sensors.read(package(90_000_000), seconds=3600.0) == {"rapl": 0, "ina3221": 0}


def test_charging_battery_is_no_sensor(sensors: Sensors) -> None:
    assert not sensors.read({f"{BATTERY}/status": "Charging", f"{BATTERY}/power_now": 12_000_000})
    # It began to discharge at an unknown time within this second.
    assert sensors.read({f"{BATTERY}/status": "Discharging"}) == {"battery": 0}
    assert sensors.read({}) == {"battery": pytest.approx(12.0)}


def test_temperature_is_of_the_hottest_zone_of_the_processor(sensors: Sensors) -> None:
    zones = [("cpu-thermal", 51_500), ("CPU-therm", 62_250), ("wifi", 80_000), ("soc0", -256_000)]
    files: Files = {}
    for number, (kind, millicelsius) in enumerate(zones):
        zone = f"class/thermal/thermal_zone{number}"
        files |= {f"{zone}/type": kind, f"{zone}/temp": millicelsius}
    assert sensors.read(files) == {"thermal": 0}
    assert value("temperature_celsius", "thermal") == 62.25


@pytest.mark.parametrize("garbage", ["", "many", "nan", "inf", "-5", "1e300", "\x00\x80"])
def test_garbage_makes_a_sensor_absent_and_does_no_harm(sensors: Sensors, garbage: str) -> None:
    good = package(0) | rails(("VDD_IN", 5000, 2000))
    assert sensors.read(good) == {"ina3221": 0, "rapl": 0}
    assert sensors.read({ENERGY: garbage, f"{HWMON}/in1_input": garbage}) in ({}, {"rapl": 0})


def test_files_that_cannot_be_read_make_sensors_absent(sensors: Sensors) -> None:
    # A directory in the place of a file fails for root too; missing permissions would not.
    (sensors.root / ENERGY).mkdir(parents=True)
    name = "class/powercap/intel-rapl:0/name"
    assert sensors.read({name: "package-0", "class/thermal": "no directory"}) == {}


def test_sensor_that_returns_does_not_count_its_absence(sensors: Sensors) -> None:
    sensors.read(package(1_000_000))
    (sensors.root / ENERGY).unlink()
    assert sensors.read({}) == {}
    assert sensors.read(package(50_000_000)) == {"rapl": 0}
    assert sensors.read(package(51_000_000)) == {"rapl": pytest.approx(1.0)}


def test_sensors_are_read_until_they_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, ended = SensorReader.read, threading.Semaphore(0)

    def counted(self: SensorReader, now: float) -> list[str]:
        working = read(self, now)
        ended.release()
        return working

    monkeypatch.setattr(SensorReader, "read", counted)
    sensors = SensorReader(tmp_path, interval_seconds=0.001)
    for _ in range(3):
        assert ended.acquire(timeout=60)
    sensors.close()
    sensors._thread.join(60)
    assert not sensors._thread.is_alive()


def test_sensors_of_this_machine_can_be_read() -> None:
    SensorReader().close()
