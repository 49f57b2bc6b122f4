import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from collapipe.telemetry.sensors import Probes, start_probes

ALL = ("ina3221", "rapl", "battery", "thermal")


def write(root: Path, path: str, content: str | float) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{content}\n")
    return file


class Sampled:
    """Probes of a made /sys whose clock the test moves."""

    def __init__(self, root: Path) -> None:
        self.probes = Probes(root, interval_seconds=3600)
        self._now = (
            time.monotonic() + 1000
        )  # beyond the gap: the reading of the start does not count
        self.probes.sample(self._now)

    def joules(self, probe: str, seconds: float) -> float:
        """What a probe counts over one more sample, so much later."""
        before = value("collapipe_energy_joules_total", probe)
        self._now += seconds
        self.probes.sample(self._now)
        return value("collapipe_energy_joules_total", probe) - before


def value(name: str, probe: str) -> float:
    found = REGISTRY.get_sample_value(name, {"probe": probe})
    assert found is not None
    return found


def present() -> set[str]:
    return {probe for probe in ALL if value("collapipe_sensor_present", probe)}


@pytest.fixture
def sampled(tmp_path: Path) -> Iterator["type[Sampled]"]:
    """Makes probes of `tmp_path`, and closes them."""
    made: list[Sampled] = []

    class Closing(Sampled):
        def __init__(self, root: Path) -> None:
            super().__init__(root)
            made.append(self)

    yield Closing
    for one in made:
        one.probes.close()


HWMON = "bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon3"


def rail(root: Path, channel: int, label: str, millivolts: float, milliamperes: float) -> None:
    write(root, f"{HWMON}/in{channel}_label", label)
    write(root, f"{HWMON}/in{channel}_input", millivolts)
    write(root, f"{HWMON}/curr{channel}_input", milliamperes)


def test_host_without_probes_says_so_and_runs(tmp_path: Path, sampled: type[Sampled]) -> None:
    sampled(tmp_path / "nothing")
    assert present() == set()


def test_rail_of_the_whole_board_counts_alone(tmp_path: Path, sampled: type[Sampled]) -> None:
    rail(tmp_path, 1, "VDD_IN", 5000, 2000)
    rail(tmp_path, 2, "VDD_CPU_GPU_CV", 5000, 800)
    write(tmp_path, f"{HWMON}/in7_input", 9)
    probes = sampled(tmp_path)
    assert present() == {"ina3221"}
    assert probes.joules("ina3221", 2.0) == pytest.approx(20.0)
    rail(tmp_path, 1, "VDD_IN", 5000, 4000)
    assert probes.joules("ina3221", 1.0) == pytest.approx((10 + 20) / 2)


def test_rails_that_nothing_feeds_together_add_up(tmp_path: Path, sampled: type[Sampled]) -> None:
    rail(tmp_path, 1, "VDD_GPU_SOC", 10000, 1000)
    rail(tmp_path, 2, "VDD_CPU_CV", 10000, 500)
    rail(tmp_path, 3, "off", 10000, 500)
    write(tmp_path, f"{HWMON}/in3_enable", 0)
    assert sampled(tmp_path).joules("ina3221", 1.0) == pytest.approx(15.0)


def test_rails_of_the_older_driver_are_read(tmp_path: Path, sampled: type[Sampled]) -> None:
    device = "bus/i2c/drivers/ina3221x/6-0040/iio:device0"
    write(tmp_path, f"{device}/in_power0_input", 4000)
    write(tmp_path, f"{device}/rail_name_0", "POM_5V_IN")
    write(tmp_path, f"{device}/in_power1_input", 1000)
    assert sampled(tmp_path).joules("ina3221", 1.0) == pytest.approx(4.0)


def package(root: Path, zone: str, energy: float | str, name: str = "package-0") -> Path:
    write(root, f"class/powercap/{zone}/name", name)
    write(root, f"class/powercap/{zone}/max_energy_range_uj", 100_000_000)
    return write(root, f"class/powercap/{zone}/energy_uj", energy)


def test_packages_add_up_and_nothing_counts_twice(tmp_path: Path, sampled: type[Sampled]) -> None:
    zones = {
        "intel-rapl:0": package(tmp_path, "intel-rapl:0", 1_000_000),
        "intel-rapl:1": package(tmp_path, "intel-rapl:1", 1_000_000, "package-1"),
        "intel-rapl:0:0": package(tmp_path, "intel-rapl:0:0", 1_000_000, "core"),
        "intel-rapl:2": package(tmp_path, "intel-rapl:2", 1_000_000, "psys"),
    }
    probes = sampled(tmp_path)
    assert present() == {"rapl"}
    for file in zones.values():
        file.write_text("4000000\n")
    assert probes.joules("rapl", 1.0) == pytest.approx(3.0 + 3.0)


def test_counter_of_a_package_wraps_around(tmp_path: Path, sampled: type[Sampled]) -> None:
    counter = package(tmp_path, "intel-rapl:0", 99_000_000)
    probes = sampled(tmp_path)
    counter.write_text("2000000\n")
    assert probes.joules("rapl", 1.0) == pytest.approx(3.0)


def test_jump_that_no_processor_makes_is_not_counted(
    tmp_path: Path, sampled: type[Sampled]
) -> None:
    counter = package(tmp_path, "intel-rapl:0", 0)
    probes = sampled(tmp_path)
    counter.write_text("9e15\n")
    assert probes.joules("rapl", 1.0) == 0


def test_sleep_of_the_host_is_not_counted(tmp_path: Path, sampled: type[Sampled]) -> None:
    counter = package(tmp_path, "intel-rapl:0", 0)
    rail(tmp_path, 1, "VDD_IN", 5000, 2000)
    probes = sampled(tmp_path)
    counter.write_text("90000000\n")
    assert probes.joules("rapl", 3600.0) == 0
    assert probes.joules("ina3221", 3600.0) == 0


@pytest.mark.parametrize(
    "readings",
    [
        {"power_now": 12_000_000},
        {"power_now": -12_000_000},
        {"current_now": 1_000_000, "voltage_now": 12_000_000},
    ],
)
def test_battery_that_is_drawn_from_counts(
    tmp_path: Path, sampled: type[Sampled], readings: dict[str, int]
) -> None:
    write(tmp_path, "class/power_supply/BAT0/status", "Discharging")
    for name, reading in readings.items():
        write(tmp_path, f"class/power_supply/BAT0/{name}", reading)
    assert sampled(tmp_path).joules("battery", 0.5) == pytest.approx(6.0)


def test_battery_that_is_charged_is_no_probe(tmp_path: Path, sampled: type[Sampled]) -> None:
    status = write(tmp_path, "class/power_supply/BAT0/status", "Charging")
    write(tmp_path, "class/power_supply/BAT0/power_now", 12_000_000)
    probes = sampled(tmp_path)
    assert present() == set()
    status.write_text("Discharging\n")
    assert probes.joules("battery", 1.0) == 0  # unplugged at some time within it
    assert present() == {"battery"}
    assert probes.joules("battery", 1.0) == pytest.approx(12.0)


def test_temperature_is_of_the_hottest_zone_of_the_processor(
    tmp_path: Path, sampled: type[Sampled]
) -> None:
    zones = [("cpu-thermal", 51_500), ("CPU-therm", 62_250), ("wifi", 80_000), ("soc0", -256_000)]
    for number, (kind, millicelsius) in enumerate(zones):
        write(tmp_path, f"class/thermal/thermal_zone{number}/type", kind)
        write(tmp_path, f"class/thermal/thermal_zone{number}/temp", millicelsius)
    sampled(tmp_path)
    assert present() == {"thermal"}
    assert value("collapipe_temperature_celsius", "thermal") == 62.25


@pytest.mark.parametrize("garbage", ["", "many", "nan", "inf", "-5", "1e300", "\x00\x80"])
def test_garbage_makes_a_probe_absent_and_does_no_harm(
    tmp_path: Path, sampled: type[Sampled], garbage: str
) -> None:
    counter = package(tmp_path, "intel-rapl:0", 0)
    rail(tmp_path, 1, "VDD_IN", 5000, 2000)
    probes = sampled(tmp_path)
    assert present() == {"ina3221", "rapl"}
    counter.write_text(garbage)
    write(tmp_path, f"{HWMON}/in1_input", garbage)
    assert probes.joules("rapl", 1.0) == 0
    assert probes.joules("ina3221", 1.0) == 0
    assert present() <= {"rapl"}


def test_files_that_cannot_be_read_make_probes_absent(
    tmp_path: Path, sampled: type[Sampled]
) -> None:
    """A directory in a file's place fails for root too, as permissions do for others."""
    counter = package(tmp_path, "intel-rapl:0", 0)
    counter.unlink()
    counter.mkdir()
    (tmp_path / "class/thermal").write_text("no directory")
    sampled(tmp_path)
    assert present() == set()


def test_probe_that_comes_back_does_not_count_what_it_missed(
    tmp_path: Path, sampled: type[Sampled]
) -> None:
    counter = package(tmp_path, "intel-rapl:0", 1_000_000)
    probes = sampled(tmp_path)
    counter.unlink()
    assert probes.joules("rapl", 1.0) == 0
    assert present() == set()
    counter.write_text("50000000\n")
    assert probes.joules("rapl", 1.0) == 0
    assert present() == {"rapl"}
    counter.write_text("51000000\n")
    assert probes.joules("rapl", 1.0) == pytest.approx(1.0)


def test_probes_are_read_until_they_are_closed(tmp_path: Path) -> None:
    counter = package(tmp_path, "intel-rapl:0", 0)
    before = value("collapipe_energy_joules_total", "rapl")
    probes = start_probes(tmp_path, interval_seconds=0.01)
    deadline = time.monotonic() + 30
    for energy in itertools.count(1):
        counter.write_text(f"{energy * 1000}\n")
        if value("collapipe_energy_joules_total", "rapl") > before:
            break
        assert time.monotonic() < deadline
        time.sleep(0.01)
    probes.close()
    rested = value("collapipe_energy_joules_total", "rapl")
    counter.write_text("90000\n")
    time.sleep(0.1)
    assert value("collapipe_energy_joules_total", "rapl") == rested


def test_this_machine_can_be_asked() -> None:
    start_probes().close()
