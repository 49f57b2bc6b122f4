"""Rows of a data set of the Hugging Face hub, through the package `datasets`."""

from collapipe.data.tables import Table, make_rows
from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig


def load_hub_rows(split: str, kind: str, data: DataConfig) -> Table:
    """Downloads a split such as "train[:1000]", unless the cache of `datasets` has it.

    Without a network, the newest version in the cache is read.

    Raises:
        InvalidInputError: The split cannot be had, or a row is wrong.
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
    try:
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
    return make_rows(table, table.features, kind, data, f"{name}[{split}]")
