"""Whether an emulated testbed was one: real work that does not fit into this machine makes every timing worthless.

Emulated devices compute for real and then wait. That holds as long as all real work together leaves
the processors of this machine some rest, and none of it takes longer than the emulated device would.
Whoever reports timings asks for the verdict first.
"""

import os
import time
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from typing_extensions import Self

from collapipe.documents import read_document
from collapipe.errors import WrongStateError
from collapipe_client.local_testbed import LocalTestbed
from collapipe_client.processes import ProcessRecord
from collapipe_client.workspace import Workspace

MAX_REAL_CORES = 1.5
"""Most real work of all processes together, in processor seconds a second."""
MAX_OVERRUN_RATIO = 0.02
"""Most time that real work took beyond the emulated devices, over their busy time."""

_PROC = Path("/proc")
_SCRAPE_SECONDS = 5.0
_BUSY = (
    "collapipe_stage_forward_seconds_sum",
    "collapipe_stage_backward_seconds_sum",
    "collapipe_stage_update_seconds_total",
)
_OVERRUN = "collapipe_emulation_overrun_seconds_total"


@dataclass(frozen=True)
class EmulationReport:
    """What was measured.

    Args:
        wall_seconds: How long it was measured.
        real_seconds: Processor time of all processes of the testbed.
        busy_seconds: Time that the emulated devices computed for training, as they told.
        overrun_seconds: Real work beyond what they would have taken.
    """

    wall_seconds: float
    real_seconds: float
    busy_seconds: float
    overrun_seconds: float

    @property
    def real_cores(self) -> float:
        """Processors that real work kept busy, on average."""
        return self.real_seconds / self.wall_seconds

    @property
    def overrun_ratio(self) -> float:
        """Overrun over busy time; infinite when something overran and nothing was busy."""
        if not self.overrun_seconds:
            return 0.0
        return self.overrun_seconds / self.busy_seconds if self.busy_seconds else float("inf")

    def check(self) -> None:
        """Raises `WrongStateError` when the emulation does not hold."""
        if self.real_cores > MAX_REAL_CORES:
            raise WrongStateError(
                f"the emulation does not hold: real work took {self.real_cores:.2f} cores "
                f"({self.real_seconds:.1f} processor seconds in {self.wall_seconds:.1f} s), the "
                f"limit is {MAX_REAL_CORES:g}: raise time_scale of the emulation, or use a smaller "
                "model or fewer devices"
            )
        if self.overrun_ratio > MAX_OVERRUN_RATIO:
            raise WrongStateError(
                f"the emulation does not hold: real work took {self.overrun_seconds:.2f} s longer "
                f"than the emulated devices would have, {self.overrun_ratio:.1%} of the "
                f"{self.busy_seconds:.1f} s that they were busy, the limit is "
                f"{MAX_OVERRUN_RATIO:.0%}: raise time_scale of the emulation, or emulate slower "
                "devices"
            )


class EmulationCheck:
    """Watches a testbed while something is measured on it.

        with EmulationCheck(testbed) as check:
            ...
        report = check.verdict()

    Args:
        testbed: A testbed that is started and emulates devices.
    """

    def __init__(self, testbed: LocalTestbed) -> None:
        self._testbed = testbed
        self._before: _Reading | None = None
        self._after: _Reading | None = None

    def __enter__(self) -> Self:
        self._before, self._after = self._read(), None
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self._after = self._read()

    def verdict(self) -> EmulationReport:
        """Tells what was measured, if the emulation held.

        Raises:
            WrongStateError: It did not, or nothing can be said about it.
        """
        report = self.report()
        report.check()
        return report

    def report(self) -> EmulationReport:
        """Tells what was measured; raises `WrongStateError` when nothing can be said."""
        before, after = self._before, self._after
        if before is None or after is None:
            raise WrongStateError("nothing was watched: use EmulationCheck in `with`, to its end")
        changed = {p.name for p in {*before.processes} ^ {*after.processes}}
        if changed:
            raise WrongStateError(
                f"{', '.join(sorted(changed))} ended or began while the emulation was watched: "
                "nobody knows their work; measure again"
            )
        return EmulationReport(
            wall_seconds=after.time - before.time,
            real_seconds=after.real_seconds - before.real_seconds,
            busy_seconds=after.busy_seconds - before.busy_seconds,
            overrun_seconds=after.overrun_seconds - before.overrun_seconds,
        )

    def _read(self) -> "_Reading":
        emulation = self._testbed.emulation
        if emulation is None or not emulation.devices:
            raise WrongStateError("the testbed emulates no device: there is nothing to watch")
        processes = self._testbed.processes
        pages = [
            _scrape(self._testbed.workspace, process.name)
            for process in processes
            if process.name in emulation.devices
        ]
        return _Reading(
            time.monotonic(),
            processes,
            sum(map(processor_seconds, processes)),
            sum(add_up(page, _BUSY) for page in pages),
            sum(add_up(page, (_OVERRUN,)) for page in pages),
        )


@dataclass(frozen=True)
class _Reading:
    time: float
    processes: Sequence[ProcessRecord]
    real_seconds: float
    busy_seconds: float
    overrun_seconds: float


def processor_seconds(process: ProcessRecord) -> float:
    """Processor time of a process since it started, in all its threads; raises `WrongStateError`."""
    try:
        stat = (_PROC / str(process.pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        stat = ""
    if not stat or not process.alive:
        raise WrongStateError(
            f"{process.name} (pid {process.pid}) has ended, or this machine has no /proc: its real "
            "work is not known"
        )
    # the second field is the command in parentheses and may itself hold spaces and parentheses
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def add_up(page: str, names: Iterable[str]) -> float:
    """Adds up every series of some names on a page of metrics."""
    wanted = set(names)
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name in wanted
    )


def _scrape(workspace: Workspace, name: str) -> str:
    address = (read_document(workspace.ready_file(name)) or {}).get("metrics_address")
    try:
        with urllib.request.urlopen(
            f"http://{address}/metrics", timeout=_SCRAPE_SECONDS
        ) as response:
            return str(response.read(), "utf-8")
    except (OSError, ValueError) as error:
        raise WrongStateError(
            f"the metrics of {name} at {address} cannot be read ({error}): nobody knows whether "
            "its emulation held"
        ) from None
