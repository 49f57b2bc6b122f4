"""Jobs as users give them: a file or a preset, and `--set` on top."""

import difflib
import sys
import types
import typing
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError

from collapipe.errors import InvalidInputError
from collapipe.job import JobConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_EXAMPLES = {
    "classification": (
        "rows.jsonl, one row a line",
        '{"text": "Where is my card?", "label": "card_arrival"}',
        "jsonl",
    ),
    "ner": (
        "rows.conll, a word, a tab and its tag a line, an empty line after each sentence",
        "Anna\tB-person\n    lives\tO\n    in\tO\n    Bonn\tB-location",
        "conll",
    ),
    "translation": (
        "rows.jsonl, one pair a line (or two text files, line by line, as SOURCE.txt,TARGET.txt)",
        '{"en": "A man rides a horse.", "de": "Ein Mann reitet ein Pferd."}',
        "jsonl",
    ),
}


def preset_names() -> list[str]:
    """Names of the presets."""
    folder = resources.files("collapipe_client") / "presets"
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )


def load_preset(name: str, settings: Sequence[str] = ()) -> JobConfig:
    """Makes a job from a preset.

    Args:
        name: For example "demo".
        settings: Changes as on the command line, for example "training.rounds=5".

    Raises:
        InvalidInputError: There is no such preset, or a setting is wrong.
    """
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise InvalidInputError(
            f"unknown preset {name!r}: {hint}Presets: {', '.join(preset_names())}"
        )
    text = (resources.files("collapipe_client") / "presets" / f"{name}.toml").read_text("utf-8")
    return _apply_settings(tomllib.loads(text), settings, f"preset {name!r}")


def load_job(path: Path, settings: Sequence[str] = (), *, local: bool = True) -> JobConfig:
    """Reads a job file.

    Args:
        path: The file.
        settings: Changes as on the command line, for example "training.rounds=5".
        local: Whether paths in the file are of this machine, relative to the file's folder.
            Otherwise they are left as they are, for the machines that the services run on.

    Raises:
        InvalidInputError: The file or a setting is wrong.
    """
    document = read_toml(
        path, f"give a job file, or a preset with --preset {'|'.join(preset_names())}"
    )
    if local:
        document = _absolute_paths(document, path.absolute().parent)
    return _apply_settings(document, settings, str(path))


def read_toml(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a TOML file; `remedy` says what to do when it is not there.

    Raises:
        InvalidInputError: It is not there, or cannot be read.
    """
    try:
        document: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidInputError(f"{path} does not exist: {remedy}") from error
    except OSError as error:
        raise InvalidInputError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path}: is not valid TOML: {error}") from error
    return document


def parse_setting(setting: str) -> tuple[list[str], Any]:
    """Reads `key=value`.

    The value is read as TOML where the key's type takes that, as plain text otherwise:
    `training.rounds=5` is a number, `name=5` a text. An empty value takes the key out, so that its
    default holds.

    Returns:
        The key's parts, and the value (`None` to take the key out).

    Raises:
        InvalidInputError: It is not of this form, or there is no such key.
    """
    key, separator, text = setting.partition("=")
    key = key.strip()
    if not separator or not key:
        raise InvalidInputError(
            f"--set {setting}: not of the form KEY=VALUE, for example --set training.rounds=5"
        )
    expected = _type_of(key)
    if not text.strip():
        return key.split("."), None
    try:
        value = tomllib.loads(f"value = {text}")["value"]
        TypeAdapter(expected).validate_python(value)
    except (tomllib.TOMLDecodeError, ValidationError):
        return key.split("."), text.strip()
    return key.split("."), value


def with_local_paths(job: JobConfig) -> JobConfig:
    """Makes the paths of a job absolute, for services of this machine that run in other folders.

    Raises:
        InvalidInputError: A file is not there.
    """
    document = _absolute_paths(job.model_dump(exclude_unset=True), Path.cwd())
    absolute = JobConfig.from_dict(document, f"job {job.name!r}")
    data = absolute.data
    if data.source == "files":
        for key, paths in (("train", data.train), ("held_out", data.held_out)):
            for path in _each_path(paths):
                if not Path(path).is_file():
                    raise InvalidInputError(
                        f"data.{key}: {path} is not a file: give another with --set data.{key}=PATH"
                    )
    return absolute


def check_has_data(job: JobConfig) -> None:
    """Refuses a job that names no data, and shows what to give.

    Raises:
        InvalidInputError: With the format of the file and the command line.
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
    return JobConfig.from_dict(
        document, origin + "".join(f" --set {setting}" for setting in settings)
    )


def _type_of(key: str) -> Any:
    """Finds the type of a dotted key in the job's schema."""
    section: Any = JobConfig
    parts = key.split(".")
    for index, part in enumerate(parts):
        if typing.get_origin(section) is dict:
            return Any
        fields = section.model_fields if _is_section(section) else {}
        if part not in fields:
            known = _dotted_keys(JobConfig)
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise InvalidInputError(
                f"--set {key}: unknown key {'.'.join(parts[: index + 1])!r}; {hint}"
            )
        section = fields[part].annotation
    if _is_section(section):
        raise InvalidInputError(
            f"--set {key}: is a section; give one of its keys: "
            + ", ".join(f"{key}.{name}" for name in section.model_fields)
        )
    return section


def _dotted_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            keys += _dotted_keys(typing.cast(type[BaseModel], field.annotation), f"{prefix}{name}.")
        else:
            keys.append(prefix + name)
    return keys


def _is_section(annotation: Any) -> bool:
    return (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    )


def _absolute_paths(document: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Makes the paths in a job document absolute.

    What is not of the right type is left for validation.
    """

    def absolute(value: Any) -> Any:
        if isinstance(value, list):
            return [absolute(item) for item in value]
        if not isinstance(value, str):
            return value
        return ",".join(str(folder / Path(part.strip()).expanduser()) for part in value.split(","))

    document = dict(document)
    data, model = document.get("data"), document.get("model")
    if isinstance(data, dict) and data.get("source", "files") == "files":
        paths = {key: absolute(data[key]) for key in ("train", "held_out") if data.get(key)}
        document["data"] = {**data, **paths}
    if isinstance(model, dict) and model.get("pretrained") not in (None, "minilm"):
        document["model"] = {**model, "pretrained": absolute(model["pretrained"])}
    return document


def _each_path(paths: str | list[str] | None) -> list[str]:
    listed = [paths] if isinstance(paths, str) else paths or []
    return [part for path in listed for part in path.split(",")]
