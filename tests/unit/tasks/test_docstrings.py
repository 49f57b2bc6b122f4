"""The docstrings of the standard library as the data of a job. tests/integration/test_real_data.py reads the real ones."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from collapipe.data import stdlib_docstrings
from collapipe.data.rows import Row
from collapipe.data.stdlib_docstrings import ask_for_package, load_docstrings
from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig
from collapipe.tasks import load_task

JobMaker = Callable[..., JobConfig]
MODULE = '''"""The text of module {name}."""

class One:
    """The text of a class in {name}."""

    if True:
        def method(self):
            """The text of a method
            in {name}."""

def short():
    """Three words only."""

try:
    pass
except ValueError:
    async def last():
        """The text behind an error in {name}."""
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A library of 17 packages: package i has 4 docstrings of enough words in each of its 3 i + 3 modules."""
    for index in range(17):
        for number in range(3 * index + 3):
            path = tmp_path / f"p{index}" / f"m{number}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(MODULE.format(name=f"p{index}.m{number}"), encoding="utf-8")
    for folder in ("test", "idlelib"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text(100 * MODULE, encoding="utf-8")
    (tmp_path / "p5/bad_syntax.py").write_text("(", encoding="utf-8")
    found = SimpleNamespace(get_paths=lambda: {"stdlib": str(tmp_path)})
    monkeypatch.setattr(stdlib_docstrings, "sysconfig", found)
    return tmp_path


def test_docstrings_are_of_the_sixteen_largest_packages_in_an_order_that_mixes_them(
    library: Path,
) -> None:
    rows = load_docstrings()
    expected = {f"p{index}": 4 * (3 * index + 3) for index in range(1, 17)}
    assert Counter(row.group for row in rows) == expected
    assert len({row.group for row in rows[:100]}) > 8
    [row] = [each for each in rows if each.key == "The text of a method in p7.m0."]
    assert (row.file, row.line, row.labels) == (str(library / "p7/m0.py"), 7, ("p7",))
    for path in (library / "p3").iterdir():
        path.unlink()
    assert {row.group for row in load_docstrings()} == {f"p{i}" for i in range(17)} - {"p3"}
    for path in (library / "p4").iterdir():
        path.unlink()
    with pytest.raises(InvalidInputError, match=f"{library}: .* 15 .* 16:"):
        load_docstrings()


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("kind", ["causal_lm", "instruction"])
def test_docstrings_are_divided_by_package_and_instructions_ask_for_it(
    make_job: JobMaker, kind: str
) -> None:
    """With skewed classes, the clusters have much more different shares of a package than without."""
    differences = []
    for sharding in ("iid", "dirichlet"):
        data = {"source": "stdlib_docstrings", "sharding": sharding, "max_held_out_rows": 50}
        job = make_job(kind, data, model={"family": "gpt2"}, clusters=2, seed=1)
        first = load_task(job, 0, None)
        shares = []
        for task in (first, load_task(job, 1, first.vocabulary)):
            task.set_labels([])
            groups = Counter(example.row.group for example in task._train)
            shares.append({group: count / task.num_rows for group, count in groups.items()})
        names = {*shares[0], *shares[1]}
        differences.append(
            sum(abs(shares[0].get(name, 0) - shares[1].get(name, 0)) for name in names)
        )
    assert differences[1] > 2 * differences[0]
    for example in first._train[:20] if kind == "instruction" else []:
        prompt, answer = example.row.texts
        assert prompt.startswith("The text ") and prompt.endswith("\nPackage:")
        assert answer == f" {example.row.group}"


def test_docstrings_load_as_a_classification_of_packages(library: Path, make_job: JobMaker) -> None:
    data = {"source": "stdlib_docstrings", "max_rows": 300}
    task = load_task(make_job("classification", data), 0, None)
    assert task.num_rows == 300
    assert set(task.labels) == {f"p{index}" for index in range(1, 17)}
    assert task.refresh() == 300
    with pytest.raises(InvalidInputError, match=r"task\.kind is 'ner'"):
        load_task(make_job("ner", data), 0, None)
    long = ask_for_package(Row("a", 1, ("word " * 50,), ("p",)))
    assert long.texts == (" ".join(["word"] * 40) + "\nPackage:", " p")
