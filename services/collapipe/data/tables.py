"""Rows of Parquet files, of JSON arrays, of folders that `datasets` has saved, and of its tables in memory.

They are read once. Their rows have no lines, so messages name the number of the row, from 1.
"""

import importlib.util
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from collapipe.data.columns import NUM_SAMPLES, find_columns
from collapipe.data.data_files import MOST_CHARACTERS, DataFile
from collapipe.data.rows import (
    Row,
    make_row,
    parse_json,
    settle_columns_of,
)
from collapipe.errors import InvalidInputError
from collapipe.job import LABELLING_TASKS, DataConfig

_MOST_ARRAY_BYTES = 1 << 26
"""Largest JSON array. It may take 40 times its size of memory."""
_PACKAGE = "needs the package datasets: pip install datasets"


@dataclass(frozen=True)
class Table:
    """The rows of a table, and which columns were taken by a guess."""

    rows: list[Row]
    columns: str


def read_json(file: DataFile, kind: str, data: DataConfig) -> Table:
    """Reads the rows of a file with a JSON array of objects.

    Raises:
        InvalidInputError: The file or a row of it is wrong.
    """
    with file.open() as opened:
        content = opened.read(_MOST_ARRAY_BYTES + 1)
    if len(content) > _MOST_ARRAY_BYTES:
        raise InvalidInputError(
            f"{file.name}: is a JSON array of more than {_MOST_ARRAY_BYTES} bytes, which is read as a whole: write one object in each "
            "line, for example with `jq -c '.[]' OLD > NEW.jsonl`"
        )
    try:
        records = parse_json(content.decode("utf-8-sig"))
    except ValueError as error:
        raise InvalidInputError(
            f"{file.name}: begins with '[' but is no JSON array ({error}): correct it, or write one object in each line"
        ) from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise InvalidInputError(
                f"{file.name}:{number}: is {record!r:.80}, not a JSON object: write a list of objects, such as "
                '[{"text": "...", "label": "..."}]'
            )
    return make_rows(records, {}, kind, data, file.name)


def read_parquet(file: DataFile, kind: str, data: DataConfig) -> Table:
    """Reads the rows of a Parquet file.

    Raises:
        InvalidInputError: The file or a row of it is wrong, or a package is missing.
    """
    return _read_tables(file.name, [file], "parquet", kind, data)


def read_saved(folder: DataFile, kind: str, data: DataConfig) -> Table:
    """Reads the rows of a folder that `save_to_disk` of `datasets` has written.

    `datasets` itself would follow names in the folder to files outside of it.

    Raises:
        InvalidInputError: The folder or a row in it is wrong, has several splits, or the package is missing.
    """
    name = folder.name

    def file(inner: str) -> DataFile:
        return DataFile(f"{name}/{inner}", folder.path / inner, folder.folders)

    if (folder.path / "dataset_dict.json").exists():
        splits = _listed(file("dataset_dict.json"), lambda found: found["splits"])
        raise InvalidInputError(
            f"{name}: has the splits {', '.join(splits)}: name one of them, such as {name}/{splits[0] if splits else 'train'}"
        )
    if not (folder.path / "state.json").exists():
        raise InvalidInputError(
            f"{name}: is a folder that `save_to_disk` of datasets did not write (it has no state.json): name a file; or for a folder with "
            'the files of a data set, set data.source = "hub", data.hub_name to the folder, and data.train to its split'
        )
    files = _listed(
        file("state.json"), lambda found: [each["filename"] for each in found["_data_files"]]
    )
    outside = next((each for each in files if "/" in each or each == ".."), None)
    if outside is not None:
        raise InvalidInputError(
            f"{name}/state.json: names {outside!r:.200}, which is not in the folder: move the file there"
        )
    return _read_tables(name, [file(each) for each in files], "arrow", kind, data)


def _listed(file: DataFile, find: Callable[[Any], list[str]]) -> list[str]:
    """Returns names that a small file of `save_to_disk` lists."""
    with file.open() as opened:
        content = opened.read(MOST_CHARACTERS)
    try:
        names = find(parse_json(content.decode()))
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{file.name}: is not what `save_to_disk` of datasets writes ({error!r:.200}): write the data again"
        ) from error
    if not all(isinstance(name, str) for name in names):
        raise InvalidInputError(
            f"{file.name}: lists {names!r:.200}, but must list names: write the data again"
        )
    return names


def _read_tables(
    name: str, files: Sequence[DataFile], form: str, kind: str, data: DataConfig
) -> Table:
    """Reads the rows of files, each in a process of its own, which `table_process` describes."""
    if importlib.util.find_spec("pyarrow") is None:
        raise InvalidInputError(f"{name}: is a table, which {_PACKAGE}")
    classes: dict[str, list[str]] = {}
    records = (record for file in files for record in _records(file, form, classes))
    return make_rows(records, classes, kind, data, name)


def _records(file: DataFile, form: str, classes: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file as records, and first sets the names of classes by column."""
    command = [sys.executable, "-m", "collapipe.data.table_process", form]
    # Python looks for modules in the directory of a process first, which may be one of data.
    home = Path(__file__).parents[2]
    with (
        file.open() as opened,
        subprocess.Popen(command, stdin=opened, stdout=subprocess.PIPE, cwd=home) as process,
    ):
        assert process.stdout is not None
        try:
            value: Any = None
            for number in itertools.count():
                line = process.stdout.readline(MOST_CHARACTERS + 1)
                if len(line) > MOST_CHARACTERS:
                    raise InvalidInputError(
                        f"{file.name}:{number}: has more than {MOST_CHARACTERS} bytes in one row: split its text"
                    )
                if not line.endswith(b"\n"):
                    value = "the process that read it ended; the log says why"
                    break
                value = json.loads(line)
                if isinstance(value, str):
                    break
                if number:
                    yield value
                else:
                    classes |= value
        finally:
            process.kill()
    if value:
        raise InvalidInputError(
            f"{file.name}: cannot be read as {form.capitalize()} ({value}): write it with `to_parquet` of pandas or `datasets`, or write one "
            "JSON object in each line"
        )


def make_rows(
    records: Iterable[dict[str, Any]],
    classes: Mapping[str, Sequence[str]],
    kind: str,
    data: DataConfig,
    name: str,
) -> Table:
    """Converts records to rows. Numbers of classes become their names.

    Args:
        classes: The names of classes that are stored as numbers, by column.
        name: What messages call the data.
    """
    records = iter(records)
    first = list(islice(records, NUM_SAMPLES))
    columns = ""
    if first:
        data, columns = settle_columns_of(first, kind, data, f"{name}:1")
    rows = []
    for number, record in enumerate(chain(first, records), start=1):
        if kind in LABELLING_TASKS and classes:
            _, column = find_columns(record, kind, data, f"{name}:{number}")
            if names := classes.get(column):
                what = f"{name}:{number}: column {column!r}"
                record = {**record, column: _named(record[column], names, what)}
        rows.append(make_row(record, kind, data, name, number))
    return Table(rows, columns)


def _named(value: Any, names: Sequence[str], what: str) -> Any:
    if isinstance(value, list):
        return [_named(item, names, what) for item in value]
    if not isinstance(value, int) or not 0 <= value < len(names):
        raise InvalidInputError(
            f"{what} has {value!r}, but the data set names the classes 0 to {len(names) - 1}: remove the row, or give it a class"
        )
    return names[value]
