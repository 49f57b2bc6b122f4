import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from collapipe.telemetry.sensors import SensorReader

ALL = ("ina3221", "rapl", "battery", "thermal")


def write(root: Path, path: str, content: str | float) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{content}\n")
    return file


class Readings:
    """Reads the sensors of a pretended /sys at times that the test chooses."""

    def __init__(self, root: Path) -> None:
        self.reader = SensorReader(root, interval_seconds=3600)
        # The reading of the constructor is too long ago to count.
        self._now = time.monotonic() + 1000
        self.reader.read(self._now)

    def joules(self, sensor: str, seconds: float) -> float:
        """Reads again after some seconds and returns the energy that the sensor counted."""
        before = value("collapipe_energy_joules_total", sensor)
        self._now += seconds
        self.reader.read(self._now)
        return value("collapipe_energy_joules_total", sensor) - before


def value(name: str, sensor: str) -> float:
    found = REGISTRY.get_sample_value(name, {"sensor": sensor})
    assert found is not None
    return found


def present() -> set[str]:
    return {sensor for sensor in ALL if value("collapipe_sensor_present", sensor)}


MakeReadings = Callable[[], Readings]


@pytest.fixture
def readings(tmp_path: Path) -> Iterator[MakeReadings]:
    """Makes `Readings` of `tmp_path` and closes their sensors after the test."""
    made: list[Readings] = []

    def make() -> Readings:
        made.append(Readings(tmp_path))
        return made[-1]

    yield make
    for one in made:
        one.reader.close()


HWMON = "bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"


def rail(root: Path, channel: int, label: str, millivolts: float, milliamperes: float) -> None:
    write(root, f"{HWMON}/in{channel}_label", label)
    write(root, f"{HWMON}/in{channel}_input", millivolts)
    write(root, f"{HWMON}/curr{channel}_input", milliamperes)


def test_host_without_sensors_reads_none(readings: MakeReadings) -> None:
    readings()
    assert present() == set()


def test_rail_of_the_whole_board_counts_alone(tmp_path: Path, readings: MakeReadings) -> None:
    rail(tmp_path, 1, "VDD_IN", 5000, 2000)
    rail(tmp_path, 2, "VDD_CPU_GPU_CV", 5000, 800)
    write(tmp_path, f"{HWMON}/in7_input", 9)
    sensors = readings()
    assert present() == {"ina3221"}
    assert sensors.joules("ina3221", 2.0) == pytest.approx(20.0)
    rail(tmp_path, 1, "VDD_IN", 5000, 4000)
    assert sensors.joules("ina3221", 1.0) == pytest.approx((10 + 20) / 2)


def test_rails_without_a_common_one_add_up(tmp_path: Path, readings: MakeReadings) -> None:
    rail(tmp_path, 1, "VDD_GPU_SOC", 10000, 1000)
    rail(tmp_path, 2, "VDD_CPU_CV", 10000, 500)
    rail(tmp_path, 3, "off", 10000, 500)
    write(tmp_path, f"{HWMON}/in3_enable", 0)
    assert readings().joules("ina3221", 1.0) == pytest.approx(15.0)


def test_rails_of_the_older_driver_are_read(tmp_path: Path, readings: MakeReadings) -> None:
    device = "bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    write(tmp_path, f"{device}/in_power0_input", 4000)
    write(tmp_path, f"{device}/rail_name_0", "POM_5V_IN")
    write(tmp_path, f"{device}/in_power1_input", 1000)
    assert readings().joules("ina3221", 1.0) == pytest.approx(4.0)


def package(root: Path, zone: str, energy: float | str, name: str = "package-0") -> Path:
    write(root, f"class/powercap/{zone}/name", name)
    write(root, f"class/powercap/{zone}/max_energy_range_uj", 100_000_000)
    return write(root, f"class/powercap/{zone}/energy_uj", energy)


def test_packages_add_up_and_nothing_counts_twice(tmp_path: Path, readings: MakeReadings) -> None:
    zones = {
        "intel-rapl:0": package(tmp_path, "intel-rapl:0", 1_000_000),
        "intel-rapl:1": package(tmp_path, "intel-rapl:1", 1_000_000, "package-1"),
        "intel-rapl:0:0": package(tmp_path, "intel-rapl:0:0", 1_000_000, "core"),
        "intel-rapl:2": package(tmp_path, "intel-rapl:2", 1_000_000, "psys"),
    }
    sensors = readings()
    assert present() == {"rapl"}
    for file in zones.values():
        file.write_text("4000000\n")
    assert sensors.joules("rapl", 1.0) == pytest.approx(3.0 + 3.0)


def test_counter_of_a_package_wraps_around(tmp_path: Path, readings: MakeReadings) -> None:
    counter = package(tmp_path, "intel-rapl:0", 99_000_000)
    sensors = readings()
    counter.write_text("2000000\n")
    assert sensors.joules("rapl", 1.0) == pytest.approx(3.0)


def test_implausible_jump_of_a_counter_is_not_counted(
    tmp_path: Path, readings: MakeReadings
) -> None:
    counter = package(tmp_path, "intel-rapl:0", 0)
    sensors = readings()
    counter.write_text("9e15\n")
    assert sensors.joules("rapl", 1.0) == 0


def test_time_that_the_host_slept_is_not_counted(tmp_path: Path, readings: MakeReadings) -> None:
    counter = package(tmp_path, "intel-rapl:0", 0)
    rail(tmp_path, 1, "VDD_IN", 5000, 2000)
    sensors = readings()
    counter.write_text("90000000\n")
    assert sensors.joules("rapl", 3600.0) == 0
    assert sensors.joules("ina3221", 3600.0) == 0


@pytest.mark.parametrize(
    "files",
    [
        {"power_now": 12_000_000},
        {"power_now": -12_000_000},
        {"current_now": 1_000_000, "voltage_now": 12_000_000},
    ],
)
def test_discharging_battery_counts(
    tmp_path: Path, readings: MakeReadings, files: dict[str, int]
) -> None:
    write(tmp_path, "class/power_supply/BAT0/status", "Discharging")
    for name, reading in files.items():
        write(tmp_path, f"class/power_supply/BAT0/{name}", reading)
    assert readings().joules("battery", 0.5) == pytest.approx(6.0)


def test_charging_battery_is_no_sensor(tmp_path: Path, readings: MakeReadings) -> None:
    status = write(tmp_path, "class/power_supply/BAT0/status", "Charging")
    write(tmp_path, "class/power_supply/BAT0/power_now", 12_000_000)
    sensors = readings()
    assert present() == set()
    status.write_text("Discharging\n")
    # It began to discharge at an unknown time within this second.
    assert sensors.joules("battery", 1.0) == 0
    assert present() == {"battery"}
    assert sensors.joules("battery", 1.0) == pytest.approx(12.0)


def test_temperature_is_of_the_hottest_zone_of_the_processor(
    tmp_path: Path, readings: MakeReadings
) -> None:
    zones = [("cpu-thermal", 51_500), ("CPU-therm", 62_250), ("wifi", 80_000), ("soc0", -256_000)]
    for number, (kind, millicelsius) in enumerate(zones):
        write(tmp_path, f"class/thermal/thermal_zone{number}/type", kind)
        write(tmp_path, f"class/thermal/thermal_zone{number}/temp", millicelsius)
    readings()
    assert present() == {"thermal"}
    assert value("collapipe_temperature_celsius", "thermal") == 62.25


@pytest.mark.parametrize("garbage", ["", "many", "nan", "inf", "-5", "1e300", "\x00\x80"])
def test_garbage_makes_a_sensor_absent_and_does_no_harm(
    tmp_path: Path, readings: MakeReadings, garbage: str
) -> None:
    counter = package(tmp_path, "intel-rapl:0", 0)
    rail(tmp_path, 1, "VDD_IN", 5000, 2000)
    sensors = readings()
    assert present() == {"ina3221", "rapl"}
    counter.write_text(garbage)
    write(tmp_path, f"{HWMON}/in1_input", garbage)
    assert sensors.joules("rapl", 1.0) == 0
    assert sensors.joules("ina3221", 1.0) == 0
    assert present() <= {"rapl"}


def test_files_that_cannot_be_read_make_sensors_absent(
    tmp_path: Path, readings: MakeReadings
) -> None:
    """A directory in the place of a file fails for root too; missing permissions would not."""
    counter = package(tmp_path, "intel-rapl:0", 0)
    counter.unlink()
    counter.mkdir()
    (tmp_path / "class/thermal").write_text("no directory")
    readings()
    assert present() == set()


def test_sensor_that_returns_does_not_count_its_absence(
    tmp_path: Path, readings: MakeReadings
) -> None:
    counter = package(tmp_path, "intel-rapl:0", 1_000_000)
    sensors = readings()
    counter.unlink()
    assert sensors.joules("rapl", 1.0) == 0
    assert present() == set()
    counter.write_text("50000000\n")
    assert sensors.joules("rapl", 1.0) == 0
    assert present() == {"rapl"}
    counter.write_text("51000000\n")
    assert sensors.joules("rapl", 1.0) == pytest.approx(1.0)


def test_sensors_are_read_until_they_are_closed(tmp_path: Path) -> None:
    counter = package(tmp_path, "intel-rapl:0", 0)
    before = value("collapipe_energy_joules_total", "rapl")
    sensors = SensorReader(tmp_path, interval_seconds=0.01)
    deadline = time.monotonic() + 30
    for energy in itertools.count(1):
        counter.write_text(f"{energy * 1000}\n")
        if value("collapipe_energy_joules_total", "rapl") > before:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    sensors.close()
    rested = value("collapipe_energy_joules_total", "rapl")
    counter.write_text("90000\n")
    time.sleep(0.1)
    assert value("collapipe_energy_joules_total", "rapl") == rested


def test_sensors_of_this_machine_can_be_read() -> None:
    SensorReader().close()
