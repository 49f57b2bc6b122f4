"""Checks what the kernel reports: memory limits, the clock, and the temperature."""

import contextlib
import ctypes
import subprocess
from pathlib import Path

from collapipe_client.doctor.check import Check

_COMMAND_SECONDS = 5
_TIMEX_BYTES = 512
"""More than the size of `struct timex` on any system."""
_TIME_ERROR = 5
"""The result of adjtimex(2) if nothing synchronises the clock."""
_CLOCK_WARN_SECONDS = 1.0
_CLOCK_FAIL_SECONDS = 60.0
"""With a larger offset, nobody can compare the logs and traces of two hosts."""
_HOT_CELSIUS = 80.0
"""A Raspberry Pi slows down above this temperature. Other devices slow down at slightly higher ones."""
_THROTTLED = {
    0: "under-voltage now",
    1: "slowed down now",
    2: "throttled now",
    3: "at its temperature limit now",
    16: "under-voltage since the start",
    18: "throttled since the start",
}
"""Bits of the flags that the firmware of a Raspberry Pi shows."""
_UNDER_VOLTAGE_BITS = (1 << 0) | (1 << 16)


def check_memory_cgroup(root: Path = Path("/")) -> Check:
    """Checks for the memory cgroup, which the limits of containers and systemd's MemoryMax need."""
    controllers = text_of(root / "sys/fs/cgroup/cgroup.controllers")
    table = text_of(root / "proc/cgroups")
    if controllers is not None:
        version, is_on = 2, "memory" in controllers.split()
    elif table is not None:
        rows = [line.split() for line in table.splitlines()]
        version, is_on = 1, any(row[0] == "memory" and row[-1] == "1" for row in rows if row)
    else:
        remedy = "memory limits have no effect on this machine"
        return Check.warn("memory cgroup", "no control groups here", remedy)
    if is_on:
        return Check.ok("memory cgroup", f"on (cgroup v{version})")
    arguments = "cgroup_enable=memory cgroup_memory=1"
    remedy = f"start the kernel with {arguments}"
    # A Raspberry Pi has the kernel's arguments in a file, which Debian 12 has moved.
    for command_line in (root / "boot/firmware/cmdline.txt", root / "boot/cmdline.txt"):
        if command_line.exists():
            remedy = f"sudo sed -i '1s/$/ {arguments}/' {command_line} && sudo reboot"
            break
    found = f"off (cgroup v{version}): memory limits of containers and of systemd have no effect"
    return Check.warn("memory cgroup", found, remedy)


def clock_is_synchronised() -> bool | None:
    """Asks the kernel whether a service synchronises the clock; `None` if that is unknown."""
    timex = ctypes.create_string_buffer(_TIMEX_BYTES)  # With zeros, adjtimex changes nothing.
    try:
        state: int = ctypes.CDLL(None).adjtimex(timex)
    except (AttributeError, OSError):
        return None
    return None if state < 0 else state != _TIME_ERROR


def check_clock(synchronised: bool | None) -> Check:
    """Checks the clock, because certificates have dates, and users compare the logs of several machines."""
    if synchronised is None:
        remedy = "see what `timedatectl` says"
        return Check.warn("clock", "unknown whether it is synchronised", remedy)
    if not synchronised:
        remedy = "sudo timedatectl set-ntp true (without systemd: sudo apt install chrony)"
        return Check.warn("clock", "not synchronised", remedy)
    return Check.ok("clock", "synchronised")


def check_clock_offset(offset_seconds: float, uncertainty_seconds: float) -> Check:
    """Compares this clock with the scheduler's.

    Args:
        offset_seconds: Positive if this clock is ahead.
        uncertainty_seconds: Largest error of the offset.
    """
    name = "clock of the scheduler"
    ahead = "ahead of" if offset_seconds > 0 else "behind"
    found = f"{abs(offset_seconds):.2f} s {ahead} it, plus or minus {uncertainty_seconds:.2f} s"
    least_offset = abs(offset_seconds) - uncertainty_seconds
    remedy = "synchronise both clocks; on each machine: sudo timedatectl set-ntp true"
    if least_offset > _CLOCK_FAIL_SECONDS:
        return Check.fail(name, found, remedy)
    if least_offset > _CLOCK_WARN_SECONDS:
        return Check.warn(name, found, remedy)
    return Check.ok(name, found)


def throttled_flags(root: Path = Path("/")) -> int | None:
    """Reads the flags of a Raspberry Pi's firmware about voltage and temperature; `None` elsewhere."""
    text = text_of(root / "sys/devices/platform/soc/soc:firmware/get_throttled")
    if text is None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            text = subprocess.run(
                ["vcgencmd", "get_throttled"],
                capture_output=True,
                text=True,
                check=False,
                timeout=_COMMAND_SECONDS,
            ).stdout.partition("=")[2]
    try:
        return int(text or "", 16)
    except ValueError:
        return None


def check_temperature(celsius: float | None, throttled: int | None) -> Check:
    """Checks the temperature and the power supply, because plans assume that a device does not slow down.

    Args:
        celsius: Temperature of the processor; `None` without a sensor.
        throttled: The result of `throttled_flags`.
    """
    flags = throttled or 0
    problems = [text for bit, text in _THROTTLED.items() if flags & (1 << bit)]
    found = ", ".join(["no sensor" if celsius is None else f"{celsius:.0f} °C", *problems])
    if flags & _UNDER_VOLTAGE_BITS:
        remedy = "use the power supply of the board, and a short cable"
        return Check.warn("temperature", found, remedy)
    if problems or (celsius is not None and celsius >= _HOT_CELSIUS):
        return Check.warn("temperature", found, "cool it with a fan or an open case")
    return Check.ok("temperature", found)


def text_of(path: Path) -> str | None:
    """Returns the text of a file; `None` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
