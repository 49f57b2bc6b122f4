"""Rows of a data set of the Hugging Face hub, through the package `datasets`."""

from typing import TYPE_CHECKING, Any

from collapipe.errors import InvalidInputError
from collapipe.job import DataConfig
from collapipe.tasks.rows import Row, make_row

if TYPE_CHECKING:
    import datasets  # type: ignore[import-untyped]


def load_hub_rows(split: str, kind: str, data: DataConfig) -> list[Row]:
    """Downloads a split such as "train[:1000]", unless the cache of `datasets` has it."""
    name = data.hub_name
    if name is None:
        raise InvalidInputError(
            'data.source is "hub" but data.hub_name is not set: name the data set'
        )
    try:
        import datasets  # An optional package: only jobs with data of the hub need it.
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            'data.source is "hub", which needs the package datasets: pip install datasets'
        ) from error
    try:
        table = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise InvalidInputError(
            f"data set {name!r}, split {split!r}, cannot be loaded from the hub: {error}; check "
            "data.hub_name, the split and the network of the control unit, or bring the rows as "
            "files"
        ) from error
    class_names = _class_names(table, data.label_column)
    rows = []
    for line, record in enumerate(table, start=1):
        if class_names:
            record[data.label_column] = _named(record[data.label_column], class_names)
        rows.append(make_row(record, kind, data, f"{name}[{split}]", line))
    return rows


def _class_names(table: "datasets.Dataset", label_column: str) -> list[str] | None:
    """Returns the names of the labels if the data set stores labels as numbers."""
    feature = table.features.get(label_column)
    feature = getattr(feature, "feature", feature)  # A list has the feature of its items.
    return getattr(feature, "names", None)


def _named(value: Any, names: list[str]) -> Any:
    return [names[item] for item in value] if isinstance(value, list) else names[value]
