"""A report whose names, messages and metrics are HTML, markup of plots and control characters."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from collapipe_client.job_plots import draw_plots
from collapipe_client.job_report import write_job_report

from .test_job_report import records

WORDS = "<img src=x onerror=alert(1)></title></script></style><script>alert(1)</script>\"' &lt;\x00\u2028\u202e\\g<0>\\1"
MATH = r"$\frac{$ _x $x$"


class Elements(HTMLParser):
    """Counts elements and collects attributes, as a browser would make them."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}


def hostile(name: str) -> Any:
    """Records in which every text that others choose is `name`."""
    link = {"from": name, "to": name, "codec": name, "limit_bps": 2e7}
    cluster: dict[str, Any] = {
        "cluster": 0,
        "pipeline": [{"id": name, "units": name}] * 2,
        "links": [link],
    }
    cluster |= {"needs_bytes": {name: 1e6}, "busy": {name: 0.5}, "computing_seconds": {name: 1.0}}
    cluster["phases"] = dict.fromkeys(("configure", "evaluation", "training", "gather"), 1.0)
    round_: dict[str, Any] = {"seconds": 4.0, "losses": [1.0], "clusters": [cluster], "why": [name]}
    round_ |= {"metrics": {name: 0.5}, "queues": {name: 1.0}, "holders": [[[name, name]]]}
    evaluation = {"metric": name, "value": 0.5, "rows": 9, "round": 1, "metrics": {name: 0.5}}
    evaluation["definitions"] = {name: name}
    told: dict[str, Any] = {
        "evaluation": evaluation,
        "trouble": [name],
        "message": name,
        "name": name,
    }
    told |= {"owner": name, "id": name[:64], "events": [{"at": 1.7e9, "text": name}]}
    return records(round_, round_, **told)


@pytest.mark.parametrize("name", [WORDS, MATH, "w" * 10_000], ids=["html", "math", "long"])
def test_report_of_hostile_words_has_the_elements_of_any_report(tmp_path: Path, name: str) -> None:
    pages = []
    for each in ("a name", name):
        path, found = tmp_path / "report.html", hostile(each)
        write_job_report(path, found, draw_plots(found), json.dumps(each))
        pages.append(Elements(path.read_text(encoding="utf-8")))
    assert pages[1].names == pages[0].names
    assert pages[1].attributes == pages[0].attributes


def test_long_names_leave_room_for_the_curves() -> None:
    *_, queues = draw_plots(hostile("w" * 256))
    width, height = map(float, re.findall(r'viewBox="0 0 (\S+) (\S+)"', queues.html())[0])
    assert width < 4 * height
