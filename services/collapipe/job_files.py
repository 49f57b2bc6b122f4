"""Bounds the files that a job can make a host read."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from collapipe.errors import InvalidInputError, NotPermittedError
from collapipe.job import JobConfig
from collapipe.pretrained_directories import hub_name

_FORMATS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
"""Suffixes of files that are read alone."""


def check_job_files(
    job: JobConfig, folders: Sequence[Path], cluster_index: int | None = None
) -> None:
    """Refuses a job that names a file outside of the folders from which jobs may read.

    Symbolic links are followed, also those to the files of a pretrained directory.

    Args:
        folders: Empty allows every file.
        cluster_index: The cluster whose rows are read; `None` if this host reads none.

    Raises:
        NotPermittedError: The job names such a file.
        InvalidInputError: The job has no such cluster, or a name cannot be a path.
    """
    if cluster_index is not None:
        job.check_cluster(cluster_index)
    folders = [folder.resolve() for folder in folders]
    for setting, name in _names(job, cluster_index):
        # Only the rows of a cluster are files of the data root. A library opens the others, which knows no such folder.
        is_data = setting in ("data.train", "data.held_out")
        for path in _paths(setting, str(place_of(name, folders)) if is_data else name):
            if folders and not any(path.is_relative_to(folder) for folder in folders):
                place = "" if str(path) == name else f" (it is at, or has a link to, {path})"
                raise NotPermittedError(
                    f"{setting} names {name}{place}, but on this host jobs may only read files in "
                    f"{' and '.join(map(str, folders))}: move the file there, or start the service with --data-root set to the folder "
                    "of the file"
                )


def place_of(name: str, folders: Sequence[Path]) -> Path:
    """Returns where a data file of a job is. A relative name begins at the first of the folders from which jobs may read."""
    path = Path(name)
    return path if name.startswith("~") or not folders else folders[0] / path


def _paths(setting: str, name: str) -> Iterator[Path]:
    """Yields where a file or a directory lies, and then where the files of a pretrained directory lie."""
    try:
        path = Path(name).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # A loop of links, no such user, or NUL.
        raise InvalidInputError(
            f"{setting} names {name!r:.200}, which is no path here ({error}): give the path of a file"
        ) from error
    yield path
    if setting == "model.pretrained" and path.is_dir():
        # Its chat template reaches all clusters, whatever file it is a link to.
        yield from (file.resolve() for file in path.iterdir())


def _names(job: JobConfig, cluster_index: int | None) -> Iterator[tuple[str, str]]:
    """Yields the files and directories that a host would read, each after its setting."""
    data, pretrained = job.data, job.model.pretrained
    # `minilm` is an installed package, and the user of the service owns the cache of the hub.
    if pretrained not in (None, "minilm") and not hub_name(pretrained):
        yield "model.pretrained", pretrained
    if cluster_index is None:
        return
    # The library `datasets` takes the name of a local folder, too.
    if data.source == "hub" and data.hub_name and Path(data.hub_name).expanduser().exists():
        yield "data.hub_name", data.hub_name
    if data.source != "files":
        return
    train = data.train[cluster_index] if isinstance(data.train, list) else data.train
    for setting, names in (("data.train", train), ("data.held_out", data.held_out)):
        for name in file_names(names, job.task.kind) if names else ():
            yield setting, name


def file_names(name: str, kind: str) -> list[str]:
    """Returns the files that a value of `data.train` names: two for parallel files, "SOURCE,TARGET"."""
    is_pair = name.count(",") == 1 and Path(name).suffix.lower() not in _FORMATS
    return (
        [part.strip() for part in name.split(",")] if kind == "translation" and is_pair else [name]
    )
