"""An emulation file that a test changes, and a shaper that waits for nothing."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from collapipe.emulation.emulation_file import EmulationFile
from collapipe.traffic_shaping.pacing import ShapedLink, Shaper, Traffic, Wait


class ChangingEmulation:
    """An emulation file, and the object through which a host reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.set()
        self.file = EmulationFile(path)

    def set(self, **sections: object) -> None:
        self.path.write_text(json.dumps(sections))


class NotingShaper(Shaper):
    """Notes the bytes and the rate of each wait, and has chunks of 100 bytes."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, float]] = []
        self.kinds: list[Traffic] = []
        self.num_bursts = 0
        """Bursts that have not ended."""
        self.limits: list[float] = []

    @property
    def rates(self) -> list[float]:
        return [rate for _, rate in self.waits]

    def open(self) -> ShapedLink:
        return _NotingLink(self)


class _NotingLink(ShapedLink):
    def __init__(self, notes: NotingShaper) -> None:
        self.notes = notes

    def quantum_bytes(self, rate_bps: float, largest: int) -> int:
        return min(largest, 100)

    @contextmanager
    def burst(self, traffic: Traffic) -> Iterator[Wait]:
        self.notes.num_bursts += 1
        self.notes.kinds.append(traffic)
        try:
            yield lambda num_bytes, rate_bps: self.notes.waits.append((num_bytes, rate_bps))
        finally:
            self.notes.num_bursts -= 1

    def limit(self, rate_bps: float) -> None:
        self.notes.limits.append(rate_bps)
