"""Rows of Parquet files, of JSON arrays, of folders that `datasets` has saved, and of its tables in memory.

They are read once. Their rows have no lines, so messages name the number of the row, from 1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from collapipe.data.columns import NUM_SAMPLES, find_columns
from collapipe.data.rows import (
    Row,
    make_row,
    parse_json,
    settle_columns_of,
)
from collapipe.errors import InvalidInputError
from collapipe.job import LABELLING_TASKS, DataConfig

_BATCH_ROWS = 1000
_PACKAGE = "needs the package datasets: pip install datasets"


@dataclass(frozen=True)
class Table:
    """The rows of a table, and which columns were taken by a guess."""

    rows: list[Row]
    columns: str


def read_json(path: str, stored: Path, kind: str, data: DataConfig) -> Table:
    """Reads the rows of a file with a JSON array of objects.

    Args:
        path: What messages call the file.
        stored: Where it is.

    Raises:
        InvalidInputError: The file or a row of it is wrong.
    """
    try:
        records = parse_json(stored.read_text("utf-8-sig"))
    except OSError as error:
        raise InvalidInputError(
            f"{path}: cannot be read: {error.strerror}; give another file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"{path}: begins with '[' but is no JSON array ({error}): correct it, or write one object in each line"
        ) from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict):
            raise InvalidInputError(
                f"{path}:{number}: is {record!r:.80}, not a JSON object: write a list of objects, such as "
                '[{"text": "...", "label": "..."}]'
            )
    return make_rows(records, {}, kind, data, path)


def read_parquet(path: str, stored: Path, kind: str, data: DataConfig) -> Table:
    """Reads the rows of a Parquet file. Only a part of the file is in memory beside them.

    Args:
        path: What messages call the file.
        stored: Where it is.

    Raises:
        InvalidInputError: The file or a row of it is wrong, or a package is missing.
    """
    try:
        import pyarrow as pa  # type: ignore[import-untyped]  # An optional package.
        import pyarrow.parquet as pq  # type: ignore[import-untyped]
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"{path}: is a Parquet file, which {_PACKAGE}") from error
    try:
        with pq.ParquetFile(stored) as file:
            features: Mapping[str, Any] = {}
            if b"huggingface" in (file.schema_arrow.metadata or {}):
                import datasets  # type: ignore[import-untyped]

                features = datasets.Features.from_arrow_schema(file.schema_arrow)
            records = (
                record for batch in file.iter_batches(_BATCH_ROWS) for record in batch.to_pylist()
            )
            return make_rows(records, features, kind, data, path)
    except FileNotFoundError as error:
        raise InvalidInputError(f"{path}: cannot be read: there is no such file") from error
    except (OSError, pa.ArrowException) as error:
        raise InvalidInputError(
            f"{path}: cannot be read as Parquet: {error}; write it with `to_parquet` of pandas or `datasets`"
        ) from error


def read_saved(path: str, stored: Path, kind: str, data: DataConfig) -> Table:
    """Reads the rows of a folder that `save_to_disk` of `datasets` has written.

    Args:
        path: What messages call the folder.
        stored: Where it is.

    Raises:
        InvalidInputError: The folder or a row in it is wrong, has several splits, or the package is missing.
    """
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise InvalidInputError(f"{path}: is a folder, which {_PACKAGE}") from error
    try:
        table = datasets.load_from_disk(str(stored))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"{path}: is a folder that `save_to_disk` of datasets did not write ({error}): name a file; or for a folder with the files "
            f'of a data set, set data.source = "hub", data.hub_name to the folder, and data.train to its split'
        ) from error
    if isinstance(table, datasets.DatasetDict):
        splits = list(table)
        raise InvalidInputError(
            f"{path}: has the splits {', '.join(splits)}: name one of them, such as {path}/{splits[0] if splits else 'train'}"
        )
    return make_rows(table, table.features, kind, data, path)


def make_rows(
    records: Iterable[dict[str, Any]],
    features: Mapping[str, Any],
    kind: str,
    data: DataConfig,
    name: str,
) -> Table:
    """Converts records to rows. Numbers of classes become their names.

    Args:
        features: The features of `datasets` by column; empty without any.
        name: What messages call the data.
    """
    records = iter(records)
    first = list(islice(records, NUM_SAMPLES))
    columns = ""
    if first:
        data, columns = settle_columns_of(first, kind, data, f"{name}:1")
    rows = []
    for number, record in enumerate(chain(first, records), start=1):
        if kind in LABELLING_TASKS and features:
            _, column = find_columns(record, kind, data, f"{name}:{number}")
            names = _class_names(features.get(column))
            if names:
                what = f"{name}:{number}: column {column!r}"
                record = {**record, column: _named(record[column], names, what)}
        rows.append(make_row(record, kind, data, name, number))
    return Table(rows, columns)


def _class_names(feature: Any) -> list[str] | None:
    """Returns the names of the labels if they are stored as numbers."""
    feature = getattr(feature, "feature", feature)  # A list has the feature of its items.
    return getattr(feature, "names", None)


def _named(value: Any, names: list[str], what: str) -> Any:
    if isinstance(value, list):
        return [_named(item, names, what) for item in value]
    if not isinstance(value, int) or not 0 <= value < len(names):
        raise InvalidInputError(
            f"{what} has {value!r}, but the data set names the classes 0 to {len(names) - 1}: remove the row, or give it a class"
        )
    return names[value]
