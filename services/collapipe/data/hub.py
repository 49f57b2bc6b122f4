"""Rows of a data set of the Hugging Face hub, through the package `datasets`."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from collapipe.data.data_files import DataFile
from collapipe.data.tables import Table, make_rows
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig


def load_hub_rows(split: str, kind: str, data: DataConfig, folders: Sequence[Path] = ()) -> Table:
    """Downloads a split such as "train[:1000]", unless the cache of `datasets` has it.

    Without a network, the newest version in the cache is read.

    Args:
        folders: Folders that must hold the files of this machine that are read. Empty for any place.

    Raises:
        InvalidInputError: The split cannot be had, or a row is wrong.
        NotPermittedError: A file of this machine is in none of the folders.
    """
    name = data.hub_name
    if name is None:
        raise InvalidInputError(
            'data.source is "hub" but data.hub_name is not set: name the data set'
        )
    try:
        import datasets  # type: ignore[import-untyped]  # Optional: only jobs with such data need it.
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            'data.source is "hub", which needs the package datasets: pip install datasets'
        ) from error
    if name in datasets.packaged_modules._PACKAGED_DATASETS_MODULES:
        raise InvalidInputError(
            f"data.hub_name is {name!r}, with which datasets would read all files of the directory in which the control unit runs: name a "
            "data set or a folder, or use files"
        )
    try:
        if folders:
            # A folder may have links, and its README.md may name any file.
            builder = datasets.load_dataset_builder(name)
            for file in chain(*(builder.config.data_files or {}).values()):
                if not file.startswith("hf://"):
                    DataFile(file, Path(file), folders).open().close()
        table = datasets.load_dataset(name, split=split)
    except ConnectionError as error:
        raise InvalidInputError(
            f"data set {name!r}, split {split!r}, is not in the local cache ({datasets.config.HF_DATASETS_CACHE}), and the hub cannot be "
            f"reached: {error}; load it once with a network, copy the cache of a machine that has it, or bring the rows as files"
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InvalidInputError(
            f"data set {name!r}, split {split!r}, cannot be loaded from the hub: {error}; check "
            "data.hub_name, the split and the network of the control unit, or bring the rows as "
            "files"
        ) from error
    classes = {column: names for column in table.features if (names := _class_names(table, column))}
    return make_rows(table, classes, kind, data, f"{name}[{split}]")


def _class_names(table: Any, column: str) -> list[str] | None:
    """Returns the names of the labels if they are stored as numbers."""
    feature = table.features[column]
    feature = getattr(feature, "feature", feature)  # A list has the feature of its items.
    return getattr(feature, "names", None)
