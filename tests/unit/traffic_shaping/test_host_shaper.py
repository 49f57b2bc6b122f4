"""The shaper process without tc; tests/integration/traffic_shaping runs it with tc."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collapipe.errors import InvalidInputError
from collapipe.traffic_shaping.shaper_process import host_shaper
from collapipe.traffic_shaping.shaper_process.host_addresses import HostAddresses
from collapipe.traffic_shaping.shaper_process.host_shaper import HostShaper
from collapipe.traffic_shaping.shaper_process.status import why_unshaped
from collapipe.traffic_shaping.tc.classes import Root, ShapedClass
from collapipe.traffic_shaping.tc.disciplines import Discipline, Netem, TokenBucket

FAR = "10.78.0.2"


@dataclass
class FakeInterface:
    """Keeps the disciplines that the kernel would have, by address."""

    name: str = "near0"
    index: int = 1
    has_netem: bool = True
    disciplines: dict[str, Discipline] = field(default_factory=dict)

    def read(self) -> Root:
        numbered = enumerate(self.disciplines.items(), start=1)
        classes = {number: ShapedClass(*one) for number, one in numbered}
        return Root(self.name, "c01e:", bool(classes), classes=classes)

    def change(self, root: Root, desired: Mapping[str, Discipline]) -> list[str]:
        if not self.has_netem and any(isinstance(one, Netem) for one in desired.values()):
            raise InvalidInputError("Error: Specified qdisc kind is unknown.")
        lines = [] if desired == self.disciplines else ["changed"]
        self.disciplines = dict(desired)
        return lines

    def remove(self) -> list[str]:
        self.disciplines = {}
        return []


class Shaped:
    """A shaper process, and its files."""

    def __init__(self, folder: Path) -> None:
        self.interface = FakeInterface()
        self.links, self._status = folder / "links.json", folder / "near.json"
        self.shaper = HostShaper(
            "near",
            self.links,
            self.interface,  # type: ignore[arg-type]
            self._status,
            lambda host: HostAddresses((host,), 0.0) if host[0].isdigit() else None,
        )

    def apply(self, **link: Any) -> dict[str, Any]:
        """Shapes the link to FAR, and returns the status. Without conditions, the file stays as it is."""
        if link:
            self.links.write_text(json.dumps({"hosts": ["near"], "links": {f"near>{FAR}": link}}))
        self.shaper.read()
        self.shaper.apply(0.0)
        return dict(json.loads(self._status.read_text()))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0, time=lambda: 0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(host_shaper, "time", clock)
    for name in ("switch_offloads_off", "switch_offloads_on"):
        monkeypatch.setattr(host_shaper, name, lambda *_: ())
    return clock


@pytest.fixture
def shaped(tmp_path: Path, clock: SimpleNamespace) -> Shaped:
    return Shaped(tmp_path)


def test_shaping_that_another_program_removed_is_restored(
    shaped: Shaped, clock: SimpleNamespace
) -> None:
    shaped.apply(rate_bps=8e6)
    before = shaped.interface.disciplines
    assert list(before) == [FAR]
    shaped.interface.disciplines = {}
    shaped.apply()  # It was checked just now.
    assert not shaped.interface.disciplines
    clock.now += 11
    shaped.apply()
    assert shaped.interface.disciplines == before


def test_kernel_without_netem_holds_the_rate_and_the_rest_is_reported(
    shaped: Shaped, caplog: pytest.LogCaptureFixture
) -> None:
    shaped.interface.has_netem = False
    for rate_bps in (8e6, 4e6):
        status = shaped.apply(rate_bps=rate_bps, delay_seconds=0.1)
        bucket = shaped.interface.disciplines[FAR]
        assert isinstance(bucket, TokenBucket) and bucket.rate_bps == rate_bps
        assert status["in_force"] and not status["netem"]
        assert "netem" in status["problems"][0]
    assert len(caplog.records) == 1


def test_unusable_file_leaves_the_shaping_unchanged(shaped: Shaped) -> None:
    assert shaped.apply(rate_bps=8e6)["in_force"]
    before = shaped.interface.disciplines
    status = shaped.apply(rate_bps=1)
    assert not status["in_force"]
    assert str(shaped.links) in status["problems"][0]
    assert shaped.interface.disciplines == before
    status = shaped.apply(rate_bps=8e6)
    assert status["in_force"] and not status["problems"]


def test_host_without_an_address_is_reported_and_does_not_delay_the_others(shaped: Shaped) -> None:
    links = {"hosts": ["near", FAR, "nobody"], "links": {"near>*": {"rate_bps": 8e6}}}
    shaped.links.write_text(json.dumps(links))
    assert shaped.apply()["problems"][0].endswith(": nobody")
    assert list(shaped.interface.disciplines) == [FAR]


def test_interface_with_another_index_is_shaped_at_once(shaped: Shaped) -> None:
    shaped.apply(rate_bps=8e6)
    shaped.interface.disciplines = {}
    shaped.apply()  # It was checked just now.
    assert not shaped.interface.disciplines
    shaped.interface.index = 2
    shaped.apply()
    assert list(shaped.interface.disciplines) == [FAR]


def test_links_are_unshaped_for_a_reason(shaped: Shaped, tmp_path: Path) -> None:
    def reason() -> str:
        return why_unshaped(tmp_path / "links.json", "near")

    status = tmp_path / "applied" / "near.json"
    assert "no shaper process of near" in reason()
    status.parent.mkdir()
    status.write_text(json.dumps(shaped.apply(delay_seconds=0.1)))
    assert reason() == ""
    shaped.interface.has_netem = False
    shaped.interface.disciplines = {}
    status.write_text(json.dumps(shaped.apply(delay_seconds=0.2)))
    assert "no netem" in reason()
    status.write_text(json.dumps(shaped.apply(rate_bps=8e6)))
    assert reason() == ""
    shaped.links.write_text('{"links": {"near>')
    status.write_text(json.dumps(shaped.apply()))
    assert "cannot be used" in reason()
    status.write_text("{")
    assert str(status) in reason()
