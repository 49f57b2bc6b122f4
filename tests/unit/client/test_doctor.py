from pathlib import Path

import pytest

from collapipe_client.doctor.machine import (
    TorchFacts,
    ask_torch,
    check_memory,
    check_packages,
    check_swap,
    check_torch,
    check_userland,
    is_jetson,
)


@pytest.mark.parametrize(
    ("available", "result"), [(5 * 10**8, "fail"), (4 * 10**9, "warn"), (8 * 10**9, "ok")]
)
def test_memory_is_judged_by_what_the_demo_needs(available: int, result: str) -> None:
    check = check_memory(available)
    assert check.result == result
    assert bool(check.remedy) == (result != "ok")


@pytest.mark.parametrize(
    ("available", "result"), [(4 * 10**8, "fail"), (8 * 10**8, "warn"), (2 * 10**9, "ok")]
)
def test_memory_of_a_box_is_judged_by_what_one_service_needs(available: int, result: str) -> None:
    assert check_memory(available, of_box=True).result == result


def test_32_bit_python_fails_even_on_a_64_bit_kernel() -> None:
    check = check_userland(4, "aarch64")
    assert (check.result, "32-bit" in check.found) == ("fail", True)
    assert check_userland(8, "aarch64").result == "ok"
    assert check_userland(8, "riscv64").result == "warn"


def test_missing_package_names_the_lock() -> None:
    check = check_packages("device-agent", lambda name: name != "torch")
    assert (check.result, check.found) == ("warn", "missing torch")
    assert "requirements/device.txt" in check.remedy
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


def test_torch_without_cuda_fails_where_the_settings_want_cuda() -> None:
    assert check_torch(TorchFacts("2.8.0"), jetson=False, wanted="cuda").result == "fail"
    assert check_torch(TorchFacts("2.8.0"), jetson=False).result == "ok"


def test_missing_torch_fails_only_for_roles_that_compute() -> None:
    assert check_torch(None, jetson=False).result == "warn"
    assert check_torch(None, jetson=False, needed=True).result == "fail"


def test_torch_of_this_machine_reports_its_version() -> None:
    pytest.importorskip("torch", reason="no torch here: pip install torch")
    found = ask_torch()
    assert isinstance(found, TorchFacts)
    assert found.version.startswith("2.")


@pytest.mark.parametrize("marker", ["etc/nv_tegra_release", "proc/device-tree/model"])
def test_jetson_is_recognised_by_its_files(tmp_path: Path, marker: str) -> None:
    assert not is_jetson(tmp_path)
    (tmp_path / marker).parent.mkdir(parents=True)
    (tmp_path / marker).write_text("NVIDIA Jetson Orin Nano Developer Kit\0", encoding="ascii")
    assert is_jetson(tmp_path)


def test_raspberry_pi_is_no_jetson(tmp_path: Path) -> None:
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "proc/device-tree/model").write_text("Raspberry Pi 5 Model B\0", encoding="ascii")
    assert not is_jetson(tmp_path)


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
    table = tmp_path / "swaps"
    table.write_text("\n".join(["Filename Type Size Used Priority", *lines]), encoding="ascii")
    assert check_swap(table).result == result
