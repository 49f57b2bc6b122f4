"""The HTML of reports: one file each, which needs no other file and asks nothing of the internet."""

import html
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from collapipe.errors import InvalidInputError

TEXT_COLOUR = "#17202b"
"""Plots draw their text and axes in this colour, which the page replaces by the colour of its own text."""

_STYLE = """
:root { --back: #f3f5f8; --card: #ffffff; --text: #17202b; --quiet: #55626f; --line: #d5dbe2; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --back: #10151b; --card: #1a2129; --text: #e8edf2; --quiet: #a3b0bd; --line: #35404c; } }
@media print { :root { --back: #ffffff; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1200px; padding: 1rem; background: var(--back); color: var(--text); font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 0 0 .5rem; } h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
p, ul, dl { margin: .4rem 0; } ul { padding-left: 1.2rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .9rem 1rem; margin: 1rem 0; min-width: 0; }
section.apart { border-style: dashed; } .quiet, figcaption { color: var(--quiet); font-size: .9rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1.2rem; }
figure { margin: 0; min-width: 0; } figure svg { display: block; width: 100%; height: auto; color: var(--text); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .3rem .8rem .3rem 0; text-align: right; vertical-align: top; border-bottom: 1px solid var(--line); white-space: nowrap; }
thead th { white-space: normal; min-width: 4.5rem; vertical-align: bottom; } th:first-child, .words { text-align: left; } td.words { white-space: normal; min-width: 14rem; overflow-wrap: anywhere; }
tbody th { position: sticky; left: 0; background: var(--card); font-weight: 600; }
td small { color: var(--quiet); display: block; }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .2rem 1rem; } dt { color: var(--quiet); } dd { margin: 0; }
@media (max-width: 36rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .4rem; } }
pre { overflow-x: auto; background: var(--back); border-radius: 6px; padding: .6rem; font-size: .85rem; overflow-wrap: normal; }
summary { cursor: pointer; font-weight: 600; }
"""


class Html(str):
    """Text that is HTML already. All other text of a report is escaped."""

    __slots__ = ()


def join(*parts: object) -> Html:
    """Joins pieces of a page. Text that is no `Html` is escaped."""
    return Html("".join(p if isinstance(p, Html) else html.escape(str(p)) for p in parts))


def tag(name: str, *content: object, **attributes: str) -> Html:
    """Returns an element. The attribute `kind` is its class."""
    given = "".join(
        f' {"class" if key == "kind" else key}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value
    )
    return Html(f"<{name}{given}>{join(*content)}</{name}>")


def amount(value: float | None, scale: float = 1.0, *, digits: int = 3, unit: str = "") -> Html:
    """Returns a number for people, which carries the exact one; nothing for `None`.

    Args:
        scale: What the shown number is multiplied by.
    """
    if value is None or not math.isfinite(value):
        return Html("")
    scaled = round(value * scale, 9)
    shown = f"{scaled:.{digits}g}"
    if "e" in shown and 1 <= abs(scaled) < 1e9:
        shown = f"{scaled:,.0f}"
    return join(tag("data", shown, value=repr(value)), f" {unit}" if unit else "")


def section(title: str, *content: object, kind: str = "") -> Html:
    """Returns a part of a page with a heading."""
    return tag("section", tag("h2", title), *content, kind=kind)


def folded(title: str, *content: object) -> Html:
    """Returns what is shown after a click."""
    return tag("details", tag("summary", title), *content)


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """Returns a list of names with their values, without those that are empty."""
    return tag(
        "dl", *(join(tag("dt", name), tag("dd", value)) for name, value in pairs if value != "")
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> Html:
    """Returns a table that is scrolled sideways where it is too wide. The first cell of a row is its name.

    Long texts among the cells are wrapped.
    """
    listed = list(rows)
    head = [
        tag(
            "th",
            title,
            scope="col",
            kind="words" if listed and all(_is_words(row[index]) for row in listed) else "",
        )
        for index, title in enumerate(columns)
    ]
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *(tag("td", cell, kind="words" if _is_words(cell) else "") for cell in row[1:]),
        )
        for row in listed
    ]
    whole = tag("table", tag("thead", tag("tr", *head)), tag("tbody", *body))
    scrolled = tag("div", whole, kind="scroll", tabindex="0")
    return join(scrolled, tag("p", caption, kind="quiet")) if caption else scrolled


def _is_words(content: object) -> bool:
    return not isinstance(content, Html)


def items(lines: Iterable[object]) -> Html:
    """Returns a list with a point for each line."""
    return tag("ul", *(tag("li", line) for line in lines))


def write_page(path: Path, title: str, *content: object) -> None:
    """Writes a page; raises `InvalidInputError` if that fails. Another file of this name is replaced only by a whole one."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    whole = join(
        Html('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'),
        tag("title", title),
        Html(f"\n<style>{_STYLE}</style>\n</head>\n<body>\n"),
        tag("h1", title),
        *content,
        Html("\n</body>\n</html>\n"),
    )
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(whole, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise InvalidInputError(
            f"{path} cannot be written ({error.strerror}): choose another file"
        ) from error
