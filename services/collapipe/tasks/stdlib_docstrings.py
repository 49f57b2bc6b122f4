"""The standard library's docstrings, labelled with their package: real text on every machine."""

import ast
import hashlib
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from collapipe.errors import InvalidInputError
from collapipe.tasks.rows import Row, TextRow

_LEFT_OUT = ("idlelib", "lib2to3", "turtledemo", "site-packages", "dist-packages")
_MIN_WORDS = 4
_NUM_PACKAGES = 16


def load_docstrings() -> list[Row]:
    """Parses the sources (nothing is imported) and keeps the packages with the most docstrings.

    The order is that of the rows' hashes: it has nothing to do with packages, so any first rows are
    a fair sample.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    rows = [
        row
        for path in sorted(root.rglob("*.py"))
        for row in _docstrings(path, path.relative_to(root))
    ]
    packages = Counter(row.label for row in rows)
    if len(packages) < _NUM_PACKAGES:
        raise InvalidInputError(
            f"{root}: has docstrings of {len(packages)} packages, fewer than {_NUM_PACKAGES}: "
            "this Python comes without the "
            'sources of its library; set data.source = "files"'
        )
    by_size = sorted(packages, key=lambda package: (-packages[package], package))
    kept = set(by_size[:_NUM_PACKAGES])
    return [*sorted((row for row in rows if row.label in kept), key=_order)]


def _docstrings(path: Path, relative: Path) -> Iterator[TextRow]:
    if "test" in str(relative) or relative.parts[0] in _LEFT_OUT:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in sources that are not ours
            tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return  # samples of bad syntax
    label = relative.parts[0].removesuffix(".py")
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if len(words) >= _MIN_WORDS:
                yield TextRow(str(path), getattr(node, "lineno", 1), " ".join(words), label)


def _order(row: TextRow) -> tuple[bytes, str]:
    return hashlib.sha256(row.text.encode()).digest(), row.label
