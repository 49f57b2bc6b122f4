"""Loads jobs from TOML files and presets, and applies the changes of `--set`."""

import inspect
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from collapipe.errors import InvalidInputError
from collapipe.job import FAMILIES, JobConfig
from collapipe.mistakes import did_you_mean, suggest_key
from collapipe.pretrained_directories import hub_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PRESETS = resources.files("collapipe_client") / "presets"
_MOST_BYTES = 10_000_000
"""Largest file of settings."""
_DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".conll", ".txt")
_EXAMPLES = {
    "classification": (
        "rows.jsonl, one row a line (or rows.csv, .tsv or .parquet with these columns)",
        '{"text": "Where is my card?", "label": "card_arrival"}',
        "jsonl",
    ),
    "ner": (
        "rows.conll, one word, a tab and its tag a line, and an empty line after each sentence (or rows.jsonl, .csv, .tsv or "
        ".parquet with the columns tokens and tags)",
        "Anna\tB-person\n    lives\tO\n    in\tO\n    Bonn\tB-location",
        "conll",
    ),
    "translation": (
        "rows.jsonl, one pair a line (or rows.csv, .tsv or .parquet with these columns, or two parallel text files, as "
        "SOURCE.txt,TARGET.txt)",
        '{"source": "A man rides a horse.", "target": "Ein Mann reitet ein Pferd."}',
        "jsonl",
    ),
    "causal_lm": (
        "rows.txt, one text a line (or rows.jsonl, .csv, .tsv or .parquet with the column text)",
        "Once upon a time, a lamp stood by the river.",
        "txt",
    ),
    "instruction": (
        "rows.jsonl, one prompt and its completion a line (or a chat a line, as a list in the column messages; or rows.csv, "
        ".tsv or .parquet with these columns)",
        '{"prompt": "What is the capital of France?", "completion": " Paris"}',
        "jsonl",
    ),
}
"""By kind of task: the format of a data file, an example row, and the suffix of the file's name."""


def preset_names() -> list[str]:
    """Lists the names of the presets."""
    files = [entry.name for entry in _PRESETS.iterdir()]
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def load_preset(name: str, settings: Sequence[str] = ()) -> JobConfig:
    """Makes a job from a preset.

    Args:
        settings: Changes in the form of --set, for example "training.rounds=5".

    Raises:
        InvalidInputError: There is no such preset, or a setting is wrong.
    """
    if name not in preset_names():
        hint = did_you_mean(name, preset_names())
        raise InvalidInputError(
            f"unknown preset {name!r}: {hint}Presets: {', '.join(preset_names())}"
        )
    document = tomllib.loads((_PRESETS / f"{name}.toml").read_text("utf-8"))
    return _apply_settings(document, settings, f"preset {name!r}")


def load_job(path: Path, settings: Sequence[str] = (), *, local: bool = True) -> JobConfig:
    """Reads a job file.

    Args:
        settings: Changes in the form of --set, for example "training.rounds=5".
        local: Whether the services run on this machine. If so, paths that are relative to the file's folder
            become absolute. Otherwise they are paths on other machines and stay unchanged.

    Raises:
        InvalidInputError: The file or a setting is wrong.
    """
    remedy = f"give a job file, or a preset with --preset {'|'.join(preset_names())}"
    if path.suffix.lower() in _DATA_SUFFIXES:
        raise InvalidInputError(
            f"{path} is taken as a job file, but its name is that of training rows: give them with "
            f"--preset classification --set data.train={path}, for example, or name the job file .toml"
        )
    document = read_toml(path, remedy)
    if local:
        document = _absolute_paths(document, path.absolute().parent)
    return _apply_settings(document, settings, str(path))


def read_job(
    job_file: Path | None,
    preset: str | None,
    settings: Sequence[str],
    *,
    is_local: bool,
    devices: Mapping[int, int] = MappingProxyType({}),
) -> JobConfig:
    """Loads the job that a command names: `load_job` or `load_preset`.

    Args:
        devices: Number of devices of each cluster that is up, by its index. A preset takes its clusters from it.

    Raises:
        InvalidInputError: The command names no job or two, or the job is wrong.
    """
    if job_file is not None and preset is None:
        return load_job(job_file, settings, local=is_local)
    if preset is not None and job_file is None:
        return load_preset(preset, [*_settings_of(devices, settings), *settings])
    if job_file is not None:
        raise InvalidInputError(
            f"{job_file} is taken as a job file, beside --preset {preset}: leave one out, or put a value with a space in quotes, such "
            "as --device-memory '3 GB'"
        )
    raise InvalidInputError(
        f"give either a job file or --preset {'|'.join(preset_names())}, for example: "
        "collapipe train --preset demo"
    )


def _settings_of(devices: Mapping[int, int], given: Sequence[str]) -> list[str]:
    """Returns the settings with which a job uses the clusters that are up, unless its user has said which."""
    values = {key.strip(): value for key, _, value in (each.partition("=") for each in given)}
    if not devices or values.keys() & {"use_clusters", "devices_per_cluster"}:
        return []
    wanted = values.get("clusters", str(len(devices))).strip()
    indices = sorted(devices)[: int(wanted)] if wanted.isdecimal() else []
    settings = [
        f"clusters={len(indices)}",
        f"devices_per_cluster={[devices[index] for index in indices]}",
        f"use_clusters={indices}",
    ]
    # More clusters than are up are refused later.
    return (
        settings[: 3 if indices != list(range(len(indices))) else 2]
        if wanted == str(len(indices))
        else []
    )


def read_toml(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a TOML file.

    Raises:
        InvalidInputError: The file cannot be read, or is not TOML. The message ends with the remedy.
    """
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise InvalidInputError(
                f"{path} has {size / 1e6:.0f} MB, but such a file has at most {_MOST_BYTES / 1e6:.0f} MB: {remedy}"
            )
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidInputError(f"{path} does not exist: {remedy}") from error
    except OSError as error:
        raise InvalidInputError(f"{path} cannot be read ({error.strerror}): {remedy}") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path}: is not a text in UTF-8 ({error}): {remedy}") from error
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInputError(f"{path}: is not valid TOML: {error}; correct the file") from error
    return document


def parse_setting(setting: str) -> tuple[list[str], Any]:
    """Reads a setting of the form `key=value`, and returns the parts of the key and the value.

    The value is read as TOML if the result has the type of the key, and otherwise as plain text. So
    `training.rounds=5` gives a number, and `name=5` a text. An empty value gives `None`: the key is to be
    removed, so that its default applies.

    Raises:
        InvalidInputError: The setting has another form, or there is no such key.
    """
    key, separator, text = setting.partition("=")
    key = key.strip()
    if not separator or not key:
        raise InvalidInputError(
            f"--set {setting}: not of the form KEY=VALUE, for example --set training.rounds=5"
        )
    expected_type = _type_of(key)
    if not text.strip():
        return key.split("."), None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        TypeAdapter(expected_type).validate_python(value)
    except (tomllib.TOMLDecodeError, ValidationError, RecursionError):
        return key.split("."), text.strip()
    return key.split("."), value


def with_local_paths(job: JobConfig) -> JobConfig:
    """Makes the paths of a job absolute, because the services of this machine run in other folders.

    Raises:
        InvalidInputError: A file does not exist or may not be read.
    """
    document = _absolute_paths(job.model_dump(exclude_unset=True), Path.cwd())
    absolute = JobConfig.from_dict(document, f"job {job.name!r}")
    data = absolute.data
    if data.source == "files":
        for key, paths in (("train", data.train), ("held_out", data.held_out)):
            listed = [paths] if isinstance(paths, str) else paths or []
            for path in (path for text in listed for path in text.split(",")):
                if not os.access(path, os.R_OK):
                    if any(each in path for each in "*?["):
                        raise InvalidInputError(
                            f"data.{key}: {path} is a pattern, but CollaPipe expands no patterns: put the rows into one file, for example with "
                            f'`cat`, or give each cluster a file with --set \'data.train=["A", "B"]\''
                        )
                    raise InvalidInputError(
                        f"data.{key}: {path} does not exist or may not be read: give another with --set data.{key}=PATH"
                    )
    return absolute


def check_family(job: JobConfig) -> None:
    """Refuses a model family that is unknown or cannot do the task; raises `InvalidInputError`."""
    family = job.model.family
    if job.task.kind in FAMILIES.get(family, ()):
        return
    able = [name for name, tasks in FAMILIES.items() if job.task.kind in tasks]
    hint = "" if family in FAMILIES else did_you_mean(family, list(FAMILIES))
    raise InvalidInputError(
        f"model.family is {family!r}, which is no family for {job.task.kind}: {hint}{'Use' if hint else 'use'} one of {', '.join(able)}, for example with "
        f"--set model.family={able[0]}"
    )


def check_has_data(job: JobConfig) -> None:
    """Refuses a job that names no data.

    Raises:
        InvalidInputError: The message shows the form of a data file and the options that name it.
    """
    if job.data.source == "stdlib_docstrings" or job.data.train is not None:
        return
    if job.data.source == "hub":
        raise InvalidInputError(
            "data.train is not set: name the split of the data set, for example --set "
            "data.train=train --set data.held_out=validation"
        )
    form, example, suffix = _EXAMPLES[job.task.kind]
    raise InvalidInputError(
        f"data.train is not set: the job {job.name!r} ({job.task.kind}) needs your files. Format: "
        f"{form}:\n"
        f"    {example}\n"
        f"Give them with: --set data.train=train.{suffix} --set data.held_out=held_out.{suffix}"
    )


def _apply_settings(document: dict[str, Any], settings: Sequence[str], origin: str) -> JobConfig:
    for setting in settings:
        keys, value = parse_setting(setting)
        section = document
        for key in keys[:-1]:
            section = section.setdefault(key, {})
            if not isinstance(section, dict):
                raise InvalidInputError(f"{origin}: {key!r} is not a section: write [{key}]")
        if value is None:
            section.pop(keys[-1], None)
        else:
            section[keys[-1]] = value
    return JobConfig.from_dict(document, f"{origin} with --set" if settings else origin)


def _type_of(key: str) -> Any:
    """Returns the type of a dotted key. Raises `InvalidInputError` if no job has it."""
    types = _types_of_keys(JobConfig)
    if key in types:
        return types[key]
    parts = key.split(".")
    sections = [".".join(parts[:length]) for length in range(1, len(parts))]
    if any(typing.get_origin(types.get(section)) is dict for section in sections):
        return Any  # The section, for example model.config, may have any keys.
    keys_below = [known for known in types if known.startswith(f"{key}.")]
    if keys_below:
        raise InvalidInputError(
            f"--set {key}: is a section; give one of its keys: {', '.join(keys_below)}"
        )
    raise InvalidInputError(f"--set {key}: unknown key {key!r}; {suggest_key(key, list(types))}")


def _types_of_keys(section: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Returns the type of every key of a section and of the sections in it, by its dotted name."""
    types: dict[str, Any] = {}
    for name, field in section.model_fields.items():
        inner: list[type[BaseModel]] = [
            each
            for each in (field.annotation, *typing.get_args(field.annotation))
            if inspect.isclass(each) and issubclass(each, BaseModel)
        ]
        for each in inner:
            types |= _types_of_keys(each, f"{prefix}{name}.")
        if field.annotation not in inner:  # A section that may be missing is a key, too.
            types[prefix + name] = field.annotation
    return types


def _absolute_paths(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Makes the paths in a job document absolute. It skips values of a wrong type, which validation refuses."""

    def absolute(value: Any) -> Any:
        if isinstance(value, list):
            return [absolute(item) for item in value]
        if not isinstance(value, str):
            return value
        return ",".join(str(folder / os.path.expanduser(part.strip())) for part in value.split(","))

    document = dict(document)
    data, model = document.get("data"), document.get("model")
    if isinstance(data, dict) and data.get("source") == "hub":
        name = data.get("hub_name")
        if isinstance(name, str) and (folder / os.path.expanduser(name)).is_dir():
            document["data"] = {**data, "hub_name": absolute(name)}
    if isinstance(data, dict) and data.get("source", "files") == "files":
        paths = {key: absolute(data[key]) for key in ("train", "held_out") if data.get(key)}
        document["data"] = {**data, **paths}
    if (
        isinstance(model, dict)
        and isinstance(pretrained := model.get("pretrained"), str)
        and pretrained != "minilm"
        and not hub_name(pretrained, folder)
    ):
        document["model"] = {**model, "pretrained": str(folder / Path(pretrained).expanduser())}
    return document
