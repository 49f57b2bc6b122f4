"""Reads the pages of reports."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path


@dataclass
class Cell:
    """The text of a cell, and the exact numbers that it carries."""

    text: str = ""
    values: list[str] = field(default_factory=list)


class Page(HTMLParser):
    """A page: its text, tables as rows of cells, the texts of each picture, and addresses of other sites or files."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = ""
        self.tables: list[list[list[Cell]]] = []
        self.pictures: list[list[str]] = []
        source = path.read_text(encoding="utf-8")
        self.addresses = re.findall(r"https?://|//[a-z]|@import|<(?:link|script|img)", source)
        self._inside: list[str] = []
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        target = given.get("href") or given.get("xlink:href") or given.get("src") or "#"
        if not target.startswith("#"):
            self.addresses.append(target)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append(Cell())
        elif tag == "data":
            if "td" in self._inside:
                self.tables[-1][-1][-1].values.append(given["value"] or "")
        elif tag == "svg":
            self.pictures.append([])
        if tag != "meta":
            self._inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._inside and self._inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" in self._inside:
            return
        self.text += data
        if "td" in self._inside or "th" in self._inside:
            self.tables[-1][-1][-1].text += data
        if "text" in self._inside:
            self.pictures[-1].append(data.strip())
