"""What the kernel offers: memory limits, shaped links, a clock that somebody keeps, its temperature."""

import contextlib
import ctypes
import gzip
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from collapipe.telemetry.sensors import processor_celsius
from collapipe_client.doctor.check import Check

_TRIAL_SECONDS = 5
_QDISCS = {
    "htb": ["default", "1"],
    "tbf": ["rate", "1mbit", "burst", "32kb", "latency", "50ms"],
    "netem": ["delay", "1ms"],
}
"""By the queueing discipline: arguments that it takes."""
_TIME_ERROR = 5
"""What adjtimex(2) returns when nobody keeps the clock."""
_CLOCK_WARN_SECONDS = 1.0
_CLOCK_FAIL_SECONDS = 60.0
"""Of two clocks so far apart, the logs and traces of a round cannot be laid side by side."""
_HOT_CELSIUS = 80.0
"""A Raspberry Pi slows down from here on, others a little later."""
_THROTTLED = {
    0: "under-voltage now",
    1: "slowed down now",
    2: "throttled now",
    3: "at its temperature limit now",
    16: "under-voltage since the start",
    18: "throttled since the start",
}
"""Bits of the firmware of a Raspberry Pi."""
_UNDER_VOLTAGE_BITS = (1 << 0) | (1 << 16)


@dataclass(frozen=True)
class CgroupFacts:
    """Control groups of this machine.

    Args:
        version: 1 or 2; 0 where there are none.
        memory: Whether they limit memory.
    """

    version: int
    memory: bool


def find_cgroups(root: Path = Path("/")) -> CgroupFacts:
    """Reads which control groups are on."""
    unified = _text(root / "sys/fs/cgroup/cgroup.controllers")
    if unified is not None:
        return CgroupFacts(2, "memory" in unified.split())
    table = _text(root / "proc/cgroups")
    if table is None:
        return CgroupFacts(0, False)
    rows = (line.split() for line in table.splitlines() if not line.startswith("#"))
    return CgroupFacts(1, any(row[0] == "memory" and row[-1] == "1" for row in rows if row))


def check_memory_cgroup(cgroups: CgroupFacts, command_line: Path) -> Check:
    """Memory limits of containers and of systemd's MemoryMax need it.

    Args:
        cgroups: As found.
        command_line: The file with the kernel's arguments on a Raspberry Pi.
    """
    name = "memory cgroup"
    if cgroups.memory:
        return Check(name, "ok", f"on (cgroup v{cgroups.version})")
    if not cgroups.version:
        return Check(name, "warn", "no control groups here", "memory limits hold nobody back here")
    remedy = "start the kernel with cgroup_enable=memory cgroup_memory=1"
    if command_line.exists():
        remedy = f"sudo sed -i '1s/$/ cgroup_enable=memory cgroup_memory=1/' {command_line} && sudo reboot"
    return Check(
        name,
        "warn",
        f"off (cgroup v{cgroups.version}): memory limits of containers and of systemd do nothing",
        remedy,
    )


def boot_command_line(root: Path = Path("/")) -> Path:
    """Where a Raspberry Pi keeps its kernel's arguments: moved in its system of Debian 12."""
    moved = root / "boot/firmware/cmdline.txt"
    return moved if moved.exists() else root / "boot/cmdline.txt"


def find_qdiscs() -> dict[str, bool | None]:
    """Whether the kernel has each queueing discipline; `None` where nobody can tell."""
    return {kind: _try_qdisc(kind, line) for kind, line in _QDISCS.items()}


def _try_qdisc(kind: str, arguments: Sequence[str]) -> bool | None:
    """Tries it in a network of its own, which needs no root and harms nobody; else reads what is installed."""
    own_network = ["unshare", "--user", "--map-root-user", "--net"]
    line = [*own_network, "tc", "qdisc", "add", "dev", "lo", "root", kind, *arguments]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        tried = subprocess.run(
            line, capture_output=True, text=True, check=False, timeout=_TRIAL_SECONDS
        )
        if tried.returncode == 0:
            return True
        if "kind is unknown" in tried.stderr or "No such file" in tried.stderr:
            return False
    release = platform.release()
    return qdisc_installed(kind, kernel_configuration(release), kernel_modules(release))


def qdisc_installed(kind: str, configuration: str | None, modules: str | None) -> bool | None:
    """Judges by what lies on the disk.

    Args:
        kind: The queueing discipline.
        configuration: The kernel's; `None` where it is not shown.
        modules: Names of its modules, built in or not; `None` where they are not shown.
    """
    if modules is not None and f"sch_{kind}.ko" in modules:
        return True
    option = f"CONFIG_NET_SCH_{kind.upper()}"
    lines = configuration.splitlines() if configuration is not None else []
    if f"{option}=y" in lines:
        return True
    if f"# {option} is not set" in lines or (f"{option}=m" in lines and modules is not None):
        return False
    return None


def kernel_configuration(release: str, root: Path = Path("/")) -> str | None:
    """What the running kernel was built with."""
    with contextlib.suppress(OSError):
        return gzip.decompress((root / "proc/config.gz").read_bytes()).decode()
    return _text(root / f"boot/config-{release}")


def kernel_modules(release: str, root: Path = Path("/")) -> str | None:
    """Names of the modules of the running kernel."""
    folder = root / "lib/modules" / release
    texts = [_text(folder / name) for name in ("modules.dep", "modules.builtin")]
    return None if texts[0] is None else "".join(text for text in texts if text)


def check_shaping(qdiscs: dict[str, bool | None], *, wanted: bool = False) -> Check:
    """Only emulated links need netem, and only `shaper = "tc"` needs htb: real ones are what they are.

    Args:
        qdiscs: As `find_qdiscs` answers.
        wanted: Whether the service is to hold its links to their rates by `tc`.
    """
    absent = [kind for kind, there in qdiscs.items() if there is False]
    unknown = [kind for kind, there in qdiscs.items() if there is None]
    words = {True: "there", False: "absent", None: "unknown"}
    found = ", ".join(f"{kind} {words[there]}" for kind, there in qdiscs.items())
    if wanted and "htb" in absent:
        return Check("shaping", "fail", found, 'set shaper = "pacing", which needs no kernel')
    if "netem" in absent:
        return Check(
            "shaping",
            "warn",
            found,
            "delay and loss cannot be emulated here, only rates: for a testbed with them use a kernel with "
            "CONFIG_NET_SCH_NETEM; real links need none",
        )
    if absent or unknown:
        return Check(
            "shaping",
            "warn",
            found,
            "to emulate links, see what `sudo tc qdisc add dev lo root netem delay 0ms` says (undo it with `sudo tc "
            "qdisc del dev lo root`; tc is in iproute2)",
        )
    return Check("shaping", "ok", found)


class _Timex(ctypes.Structure):
    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_long * 32),  # more than any kernel writes
    ]


def clock_is_kept() -> bool | None:
    """Whether somebody synchronises the clock, as the kernel knows it; `None` where it does not say."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.byref(_Timex()))
    except (AttributeError, OSError):
        return None
    return None if state < 0 else bool(state != _TIME_ERROR)


def check_clock(kept: bool | None) -> Check:
    """Certificates have dates, and logs of several boxes are read side by side."""
    if kept is None:
        return Check("clock", "warn", "unknown whether it is synchronised", "timedatectl")
    if not kept:
        return Check(
            "clock",
            "warn",
            "nobody synchronises it",
            "sudo timedatectl set-ntp true (without systemd: sudo apt install chrony)",
        )
    return Check("clock", "ok", "synchronised")


def check_clock_offset(offset_seconds: float, uncertainty_seconds: float) -> Check:
    """This clock against the scheduler's.

    Args:
        offset_seconds: Positive when this clock is ahead.
        uncertainty_seconds: How far off the offset may be.
    """
    name = "clock of the scheduler"
    ahead = "ahead of" if offset_seconds > 0 else "behind"
    found = f"{abs(offset_seconds):.2f} s {ahead} it, give or take {uncertainty_seconds:.2f} s"
    beyond = abs(offset_seconds) - uncertainty_seconds
    if beyond > _CLOCK_WARN_SECONDS:
        return Check(
            name,
            "fail" if beyond > _CLOCK_FAIL_SECONDS else "warn",
            found,
            "synchronise both, on each: sudo timedatectl set-ntp true",
        )
    return Check(name, "ok", found)


def check_temperature(celsius: float | None, throttled: int | None) -> Check:
    """A device that slows itself down upsets every plan.

    Args:
        celsius: Of the processor; `None` where no sensor shows it.
        throttled: The word that a Raspberry Pi's firmware keeps; `None` elsewhere.
    """
    warm = "no sensor" if celsius is None else f"{celsius:.0f} °C"
    happened = [text for bit, text in _THROTTLED.items() if throttled and throttled & (1 << bit)]
    found = ", ".join([warm, *happened])
    if throttled and throttled & _UNDER_VOLTAGE_BITS:
        return Check(
            "temperature",
            "warn",
            found,
            "use the supply that belongs to the board, and a short cable",
        )
    if happened or (celsius is not None and celsius >= _HOT_CELSIUS):
        return Check("temperature", "warn", found, "cool it: a fan, or a case that is open")
    return Check("temperature", "ok", found)


def throttled_word(root: Path = Path("/")) -> int | None:
    """What a Raspberry Pi's firmware says about voltage and temperature."""
    text = _text(root / "sys/devices/platform/soc/soc:firmware/get_throttled")
    if text is None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            text = subprocess.run(
                ["vcgencmd", "get_throttled"],
                capture_output=True,
                text=True,
                check=False,
                timeout=_TRIAL_SECONDS,
            ).stdout.partition("=")[2]
    try:
        return int(text or "", 16)
    except ValueError:
        return None


def temperature() -> float | None:
    """Of the processor, in degrees Celsius."""
    return processor_celsius()


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
