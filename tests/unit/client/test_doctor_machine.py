"""Checks of one machine: its kernel, its clock, its memory and its packages."""

import platform
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
from collapipe_client.doctor.machine import (
    TorchFacts,
    check_memory,
    check_packages,
    check_swap,
    check_torch,
    check_userland,
    is_jetson,
)


def _write(root: Path, path: str, text: str) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="ascii")
    return file


@pytest.mark.parametrize("path", ["boot/firmware/cmdline.txt", "boot/cmdline.txt"])
def test_remedy_for_a_disabled_memory_cgroup_names_the_file_that_the_box_has(
    tmp_path: Path, path: str
) -> None:
    file = _write(tmp_path, path, "console=tty1 root=PARTUUID=1 rootwait\n")
    _write(tmp_path, "sys/fs/cgroup/cgroup.controllers", "cpuset cpu io pids\n")
    check = check_memory_cgroup(tmp_path)
    assert check.result == "warn"
    for words in (str(file), "cgroup_enable=memory", "cgroup_memory=1"):
        assert words in check.remedy


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


@pytest.mark.parametrize(
    ("of_box", "fails", "warns", "suffices"),
    [(False, 5 * 10**8, 4 * 10**9, 8 * 10**9), (True, 4 * 10**8, 8 * 10**8, 2 * 10**9)],
)
def test_memory_is_judged_by_what_the_demo_or_one_service_needs(
    of_box: bool, fails: int, warns: int, suffices: int
) -> None:
    checks = [check_memory(available, of_box=of_box) for available in (fails, warns, suffices)]
    assert [check.result for check in checks] == ["fail", "warn", "ok"]
    assert [bool(check.remedy) for check in checks] == [True, True, False]


def test_32_bit_python_fails_even_on_a_64_bit_kernel() -> None:
    check = check_userland(4, "aarch64")
    assert (check.result, "32-bit" in check.found) == ("fail", True)
    assert check_userland(8, "aarch64").result == "ok"
    assert check_userland(8, "riscv64").result == "warn"


def test_missing_package_names_the_lock() -> None:
    check = check_packages("device-agent", lambda name: name != "torch")
    assert (check.result, check.found) == ("warn", "missing torch")
    assert "deploy/install.py device-agent" in check.remedy
    assert check_packages("device-agent", lambda _: False, needed=True).result == "fail"


def test_torch_from_pypi_on_a_jetson_fails_where_cuda_is_wanted() -> None:
    check = check_torch(TorchFacts("2.8.0"), jetson=True, wanted="cuda", needed=True)
    assert (check.result, "JetPack" in check.found) == ("fail", True)
    assert check.remedy.startswith("python -m pip uninstall torch")
    of_vendor = TorchFacts("2.5.0a0", cuda="12.6", device="Orin")
    assert check_torch(of_vendor, jetson=True, wanted="cuda", needed=True).result == "ok"


@pytest.mark.parametrize("torch", [None, "ImportError: libcudart.so.12"])
def test_remedy_on_a_jetson_is_never_to_install_torch(torch: str | None) -> None:
    check = check_torch(torch, jetson=True, needed=True)
    assert (check.result, "pip install" in check.remedy) == ("fail", False)
    assert "deploy/jetson" in check.remedy


def test_torch_fails_without_cuda_if_it_is_wanted_and_absent_only_for_roles_that_compute() -> None:
    assert check_torch(TorchFacts("2.8.0"), jetson=False, wanted="cuda").result == "fail"
    assert check_torch(TorchFacts("2.8.0"), jetson=False).result == "ok"
    assert check_torch(None, jetson=False).result == "warn"
    assert check_torch(None, jetson=False, needed=True).result == "fail"


@pytest.mark.parametrize("marker", ["etc/nv_tegra_release", "proc/device-tree/model"])
def test_jetson_is_recognised_by_its_files(tmp_path: Path, marker: str) -> None:
    assert not is_jetson(tmp_path)
    _write(tmp_path, marker, "NVIDIA Jetson Orin Nano Developer Kit\0")
    assert is_jetson(tmp_path)
    _write(tmp_path, "proc/device-tree/model", "Raspberry Pi 5 Model B\0")
    assert is_jetson(tmp_path) == (marker == "etc/nv_tegra_release")


@pytest.mark.parametrize(
    ("lines", "result"),
    [
        ([], "ok"),
        (["/dev/zram0 partition 2097136 0 100"], "ok"),
        (["/var/swap file 524272 0 -2"], "warn"),
        (["/dev/zram0 partition 2097136 0 100", "/dev/mmcblk0p3 partition 99 0 -2"], "warn"),
    ],
)
def test_swap_on_a_card_gives_a_warning(tmp_path: Path, lines: list[str], result: str) -> None:
    rows = ["Filename Type Size Used Priority", *lines]
    table = _write(tmp_path, "swaps", "\n".join(rows))
    assert check_swap(table).result == result
