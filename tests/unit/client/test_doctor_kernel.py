import platform
import subprocess
from pathlib import Path

import pytest

from collapipe_client.doctor.kernel import (
    check_clock,
    check_clock_offset,
    check_memory_cgroup,
    check_temperature,
    clock_is_synchronised,
    throttled_flags,
)


def _write(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="ascii")
    return file


@pytest.mark.parametrize(
    ("path", "text", "result", "version"),
    [
        ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io pids\n", "warn", "v2"),
        ("sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory\n", "ok", "v2"),
        ("proc/cgroups", "#subsys_name h n e\ncpu 3 1 1\nmemory 0 95 0\n", "warn", "v1"),
        ("proc/cgroups", "#subsys_name h n e\ncpu 3 1 1\nmemory 9 95 1\n", "ok", "v1"),
    ],
)
def test_memory_cgroup_is_found_in_both_versions(
    tmp_path: Path, path: str, text: str, result: str, version: str
) -> None:
    without = check_memory_cgroup(tmp_path)
    assert (without.result, without.found) == ("warn", "no control groups here")
    _write(tmp_path, path, text)
    check = check_memory_cgroup(tmp_path)
    assert (check.result, f"cgroup {version}" in check.found) == (result, True)
    assert bool(check.remedy) == (result != "ok")


@pytest.mark.parametrize("path", ["boot/firmware/cmdline.txt", "boot/cmdline.txt"])
def test_remedy_for_a_disabled_memory_cgroup_is_a_command_that_enables_it(
    tmp_path: Path, path: str
) -> None:
    file = _write(tmp_path, path, "console=tty1 root=PARTUUID=1 rootwait\n")
    _write(tmp_path, "sys/fs/cgroup/cgroup.controllers", "cpuset cpu io pids\n")
    check = check_memory_cgroup(tmp_path)
    assert check.result == "warn"
    edit = check.remedy.removeprefix("sudo ").partition(" && ")[0]
    subprocess.run(["sh", "-c", edit], check=True)
    assert file.read_text(encoding="ascii").endswith(
        "rootwait cgroup_enable=memory cgroup_memory=1\n"
    )


def test_unsynchronised_clock_and_unknown_clock_have_different_remedies() -> None:
    assert [check_clock(kept).result for kept in (True, False, None)] == ["ok", "warn", "warn"]
    assert check_clock(False).remedy != check_clock(None).remedy


@pytest.mark.skipif(platform.system() != "Linux", reason="adjtimex(2) is Linux's")
def test_kernel_says_whether_it_is_synchronised() -> None:
    assert clock_is_synchronised() in (True, False)


@pytest.mark.parametrize(
    ("offset", "uncertainty", "result"),
    [(0.4, 0.1, "ok"), (-3.0, 0.1, "warn"), (3.0, 2.5, "ok"), (3600.0, 0.1, "fail")],
)
def test_clock_offset_is_judged_less_its_uncertainty(
    offset: float, uncertainty: float, result: str
) -> None:
    check = check_clock_offset(offset, uncertainty)
    assert check.result == result
    assert ("ahead" in check.found) == (offset > 0)


@pytest.mark.parametrize(
    ("celsius", "throttled", "result", "word"),
    [
        (52.0, 0, "ok", "52"),
        (None, None, "ok", "no sensor"),
        (84.0, 0, "warn", "84"),
        (60.0, 0x50000, "warn", "under-voltage"),
        (60.0, 0x40000, "warn", "throttled since"),
    ],
)
def test_heat_and_weak_power_supplies_give_a_warning(
    celsius: float | None, throttled: int | None, result: str, word: str
) -> None:
    check = check_temperature(celsius, throttled)
    assert (check.result, word in check.found) == (result, True)
    if throttled == 0x50000:
        assert "supply" in check.remedy


def test_flags_of_the_firmware_are_read_as_hexadecimal(tmp_path: Path) -> None:
    _write(tmp_path, "sys/devices/platform/soc/soc:firmware/get_throttled", "50005\n")
    assert throttled_flags(tmp_path) == 0x50005
