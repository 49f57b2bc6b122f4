"""The locks in requirements/ have what pyproject.toml, the images and torch need, on every machine."""

import importlib.metadata
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_CHECKOUT = Path(__file__).parents[2]
_PYPROJECT = tomllib.loads((_CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))
_PROJECT = _PYPROJECT["project"]
_EXTRAS = _PROJECT["optional-dependencies"]
_LOCKED_EXTRAS = {
    "base": [],
    "client": ["client"],
    "control": ["control"],
    "dev": list(_EXTRAS),
    "device": ["device"],
    "edge": ["edge"],
    "scheduler": ["scheduler"],
}
_PYTHONS = ("3.10", "3.11", "3.12", "3.13")
_FILES = sorted((_CHECKOUT / "requirements").glob("*.txt"))


@cache
def _entries(name: str) -> list[tuple[Requirement, str]]:
    """Returns the requirements of a lock, with the text of their hashes."""
    text = (_CHECKOUT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    text = re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    split = (line.partition(" --hash=") for line in text.splitlines() if line)
    return [(Requirement(needed), mark + hashes) for needed, mark, hashes in split]


def _needed(lines: Iterable[str]) -> Iterator[Requirement]:
    """Yields requirements, with those of the extras of this project that they name."""
    for line in lines:
        requirement = Requirement(line)
        if requirement.name == "collapipe":
            yield from _needed(needs for extra in requirement.extras for needs in _EXTRAS[extra])
        else:
            yield requirement


def _applies(requirement: Requirement, environment: dict[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": "", **environment})


@pytest.mark.parametrize("python", _PYTHONS)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("name", [*_LOCKED_EXTRAS, "build"])
def test_lock_has_allowed_version_of_each_requirement(name: str, machine: str, python: str) -> None:
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.18",
        "platform_machine": machine,
        "sys_platform": "linux",
    }
    if name == "build":
        lines = [*_PYPROJECT["build-system"]["requires"], *_PYPROJECT["dependency-groups"]["build"]]
    else:
        lines = [*_PROJECT["dependencies"], *(f"collapipe[{e}]" for e in _LOCKED_EXTRAS[name])]
    found = [entry for entry, _ in _entries(name) if _applies(entry, environment)]
    versions = {canonicalize_name(entry.name): str(entry.specifier)[2:] for entry in found}
    assert len(versions) == len(found), "a package has two versions"
    wrong = [
        str(needs)
        for needs in _needed(lines)
        if _applies(needs, environment)
        and not needs.specifier.contains(versions.get(canonicalize_name(needs.name), "0"), True)
    ]
    assert wrong == [], "run `make lock`"


@pytest.mark.parametrize("name", [path.stem for path in _FILES])
def test_each_locked_package_has_a_version_and_hashes(name: str) -> None:
    assert _entries(name)
    for entry, hashes in _entries(name):
        assert re.fullmatch(r"==[^,*]+", str(entry.specifier)), entry
        assert re.fullmatch(r"( +--hash=sha256:[0-9a-f]{64})+ *", hashes), entry


@pytest.mark.parametrize("name", [name for name in _LOCKED_EXTRAS if name != "dev"])
def test_lock_has_all_that_its_packages_need(name: str) -> None:
    environment = {key: str(value) for key, value in default_environment().items()}
    entries = [entry for entry, _ in _entries(name) if _applies(entry, environment)]
    locked = {canonicalize_name(entry.name) for entry in entries}
    with_torch = locked | ({"torch"} if "transformers" in locked else set())
    missing = {
        f"{package} needs {needs}"
        for package in with_torch
        for needs in map(Requirement, importlib.metadata.requires(package) or ())
        if _applies(needs, environment) and canonicalize_name(needs.name) not in with_torch
    }
    # A build of torch for GPUs needs their libraries, which pip installs with it.
    gpu = re.compile(r"torch needs (nvidia|cuda|triton)")
    assert {line for line in missing if not gpu.match(line)} == set()


def test_images_install_only_locked_packages() -> None:
    text = (_CHECKOUT / "deploy/docker/Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    installed = re.findall(r"\bpip3? install (.*?)(?= *(?:&&|;;|\n))", text)
    unlocked = [line for line in installed if "--no-deps --require-hashes" not in line]
    assert set(unlocked) == {
        '--quiet "${TORCH:-torch==2.13.0}"',
        "--quiet --no-deps /wheels/*.whl",
        "--no-deps /wheels/*.whl",
    }
    locks = {path.name for path in _FILES}
    for run in re.findall(r"^RUN .*", text, re.MULTILINE):
        mounted = set(re.findall(r"source=requirements/(\S+),target=/\1", run))
        assert set(re.findall(r"-r /(\S+)", run)) == mounted <= locks
