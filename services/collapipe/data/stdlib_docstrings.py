"""The docstrings of Python's standard library with their package as label: real text on every machine."""

import ast
import hashlib
import sysconfig
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from collapipe.data.rows import Row
from collapipe.errors import InvalidInputError

_LEFT_OUT = ("idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages")
_MIN_WORDS = 4
_NUM_PACKAGES = 16
_MAX_WORDS_OF_PROMPT = 40
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
_PARTS_WITH_STATEMENTS = ("body", "cases", "handlers", "orelse", "finalbody")


def load_docstrings() -> list[Row]:
    """Parses the library's sources without importing them; keeps the packages with most docstrings.

    The rows are sorted by their hash, so the first rows are a random sample of all packages.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    rows = [
        row
        for path in sorted(root.rglob("*.py"))
        for row in _docstrings(path, path.relative_to(root))
    ]
    packages = Counter(row.group for row in rows)
    if len(packages) < _NUM_PACKAGES:
        raise InvalidInputError(
            f"{root}: has docstrings of {len(packages)} packages, fewer than {_NUM_PACKAGES}: "
            "this Python has no sources of its library: "
            'set data.source = "files"'
        )
    by_size = sorted(packages, key=lambda package: (-packages[package], package))
    kept = set(by_size[:_NUM_PACKAGES])
    return sorted((row for row in rows if row.group in kept), key=_order)


def ask_for_package(row: Row) -> Row:
    """Makes a row of `load_docstrings` a prompt, the beginning of the docstring, with the package as its answer."""
    beginning = " ".join(row.key.split()[:_MAX_WORDS_OF_PROMPT])
    return replace(row, texts=(f"{beginning}\nPackage:", f" {row.group}"))


def _docstrings(path: Path, relative: Path) -> Iterator[Row]:
    if "test" in str(relative) or relative.parts[0] in _LEFT_OUT:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Old sources have invalid escape sequences.
            tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return  # The library contains samples of bad syntax.
    label = relative.parts[0].removesuffix(".py")
    nodes: deque[ast.AST] = deque([tree])
    while nodes:  # The order of `ast.walk`, without expressions, which are most nodes.
        node = nodes.popleft()
        for part in _PARTS_WITH_STATEMENTS:
            nodes.extend(getattr(node, part, ()))
        if isinstance(node, _WITH_DOCSTRING):
            words = (ast.get_docstring(node) or "").split()
            if len(words) >= _MIN_WORDS:
                yield Row(str(path), getattr(node, "lineno", 1), (" ".join(words),), (label,))


def _order(row: Row) -> tuple[bytes, str]:
    return hashlib.sha256(row.key.encode()).digest(), row.group
