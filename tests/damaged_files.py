"""Files as a full disk, a bad disk or a wrong restore leaves them."""

import copy
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

_WRONG = [-1, 1 << 70, math.nan, math.inf, 1e308, "x", None, [], {}, [1], {"a": 1}]


def damage(path: Path) -> Iterator[str]:
    """Damages a file in one way after the other, and yields how. At the end, the file is as it was."""
    yield from flip(path)
    data = path.read_bytes()
    for how, damaged in (
        ("cut to half", data[: len(data) // 2]),
        ("cut to nothing", b""),
        ("zeros", bytes(len(data))),
    ):
        path.write_bytes(damaged)
        yield how
    path.unlink()
    path.mkdir()
    yield "a directory"
    shutil.rmtree(path)
    path.write_bytes(data)


def flip(path: Path) -> Iterator[str]:
    """Flips a bit in the middle of a file, and yields once. At the end, the file is as it was."""
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 1 << 5
    path.write_bytes(flipped)
    yield "a flipped bit"
    path.write_bytes(data)


class Document(Protocol):
    """A file, or something else that has a text."""

    def read_text(self, encoding: str) -> str: ...
    def write_text(self, data: str, encoding: str) -> object: ...


def damage_values(path: Document) -> Iterator[str]:
    """Replaces each value of a JSON document by wrong ones, and yields which. At the end, the document is as it was."""
    text = path.read_text("utf-8")
    for place in _places(json.loads(text)):
        for wrong in _WRONG:
            document = copy.deepcopy(json.loads(text))
            if place:
                parent = document
                for key in place[:-1]:
                    parent = parent[key]
                parent[place[-1]] = wrong
            else:
                document = wrong
            path.write_text(json.dumps(document), "utf-8")
            yield f"{'.'.join(map(str, place)) or 'all'} = {wrong!r}"
    path.write_text(text, "utf-8")


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    if isinstance(value, dict):
        items = list(value.items())
    else:  # The elements of a list are alike.
        items = list(enumerate(value))[:2] if isinstance(value, list) else []
    for key, each in items:
        yield from _places(each, (*place, key))
