"""Makes the pictures of the terminal for the documents: a job at work, in 80 and in 140 columns.

    python -m benchmarks.terminal_pictures

A testbed of six devices trains a small model on the data of the preset `demo`, over links of 30 Mbit/s, until its third round is
half done.
"""

import io
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.page_pictures import small_demo
from collapipe.emulation.emulation_file import Emulation
from collapipe_client import LocalTestbed
from collapipe_client.live_picture import render
from collapipe_client.view_state import JobView, apply_event

_PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
_WIDTHS = (80, 140)


def main() -> None:
    """Makes the pictures."""
    emulation = Emulation.model_validate({"links": {"*": {"rate_bps": 30e6}}})
    view = JobView()
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalTestbed([3, 3], Path(folder), emulation=emulation) as testbed,
        testbed.client() as client,
    ):
        job_id = client.submit(small_demo())
        for event in client.watch(job_id):
            view = apply_event(view, event)
            steps = [cluster.steps_done for cluster in view.clusters]
            if view.round_index == 2 and min(steps) >= 5:
                break
        snapshot = client.snapshot(job_id)
        client.cancel(job_id)
    for width in _WIDTHS:
        drawing = draw(view, snapshot, width)
        (_PICTURES / f"terminal-{width}.svg").write_text(drawing, "utf-8")


def draw(view: JobView, snapshot: Mapping[str, Any], width: int, above: Iterable[str] = ()) -> str:
    """Draws the live view as SVG, below lines that were printed before."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True)
    for line in above:
        console.print(line, markup=False)
    console.print(render(view, time.time(), snapshot, width=width))
    drawing = console.export_svg(title="collapipe train --preset demo")
    # The font would come from another site. A viewer takes its own.
    drawing = re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL)
    return "".join(f"{line.rstrip()}\n" for line in drawing.splitlines())


if __name__ == "__main__":
    main()
