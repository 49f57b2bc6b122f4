"""How plots of reports look, and what they become: SVG, PNG, and a picture inside a page.

It needs matplotlib, which the extra `simulation` has.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import BytesIO, StringIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collapipe_client.report_page import TEXT_COLOUR, Html, tag

WIDTH, HEIGHT = 5.4, 3.0
"""Of one panel, in inches. So text stays readable where the picture is as wide as a phone."""
_DOTS_PER_INCH = 200


@dataclass(frozen=True)
class Plot:
    """A picture.

    Args:
        name: Of its files, without the ending.
        caption: What it shows, in whole sentences.
    """

    name: str
    title: str
    caption: str
    figure: Figure

    def save(self, directory: Path) -> list[Path]:
        """Writes the SVG and the PNG file."""
        files = [directory / f"{self.name}.svg", directory / f"{self.name}.png"]
        files[0].write_text(self._svg(), encoding="utf-8")
        data = BytesIO()
        with style(self.name):
            self.figure.savefig(
                data,
                format="png",
                dpi=_DOTS_PER_INCH,
                facecolor="white",
                bbox_inches="tight",
                metadata={"Software": None},
            )
        files[1].write_bytes(data.getvalue())
        return files

    def html(self) -> Html:
        """Returns the picture as a part of a page. It names no other file, and its text has the colour of the page."""
        picture = re.sub(
            r"<metadata>.*?</metadata>|<\?xml.*?\?>|<!DOCTYPE.*?>", "", self._svg(), flags=re.S
        )
        picture = re.sub(r' xmlns(:xlink)?="[^"]*"', "", picture)
        # Identities are those of the whole page, and each plot brings its own.
        own = re.sub(
            r"\W", "-", self.name, flags=re.ASCII
        )  # The name may be one that a host chose.
        picture = re.sub(r'(id="|href="#|url\(#)', rf"\1{own}-", picture)
        picture = picture.replace(TEXT_COLOUR, "currentColor")
        picture = picture.replace("<svg ", f'<svg role="img" aria-label="{escape(self.title)}" ', 1)
        return tag("figure", Html(picture), tag("figcaption", self.caption))

    def _svg(self) -> str:
        text = StringIO()
        with style(self.name):
            self.figure.savefig(
                text,
                format="svg",
                transparent=True,
                bbox_inches="tight",
                metadata={"Date": None, "Creator": None},
            )
        return text.getvalue()


@contextmanager
def style(salt: str) -> Iterator[None]:
    """Makes plots look alike. Draw and save them inside.

    Args:
        salt: The same numbers with the same salt give the same file.
    """
    with matplotlib.rc_context(
        {
            "svg.hashsalt": salt,
            "svg.fonttype": "none",  # Text stays text.
            "text.parse_math": False,  # A name may contain "$".
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            **dict.fromkeys(
                ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"),
                TEXT_COLOUR,
            ),
        }
    ):
        yield


def panels(title: str, subtitle: str, count: int = 1) -> tuple[Figure, list[Axes]]:
    """Returns an empty figure with a title and panels below each other."""
    figure = Figure(figsize=(WIDTH, HEIGHT * count), layout="constrained")
    drawn = figure.subplots(count, 1, sharex=True, squeeze=False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
    drawn[0, 0].set_title(subtitle, loc="left", fontsize=8, x=0.0)
    return figure, list(drawn[:, 0])
