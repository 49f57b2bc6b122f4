"""Tests the contents and the size of the images."""

import json
import shutil
from pathlib import Path

import pytest

from containers.base_image import PYTHON_IMAGE
from containers.engine import Engine
from containers.engine_images import ROOT, TARGETS, build, tag, torch_arguments

pytestmark = pytest.mark.timeout(900)

LARGEST_MB = {
    "scheduler": 790,
    "edge-server": 1400,
    "control-unit": 1630,
    "device-agent": 1280,
    "client": 250,
}
"""Largest size of all layers, with torch for CPUs only. Each is about a tenth above the measured size."""
LEFT_OUT = {
    "scheduler": ("torch", "transformers"),
    "edge-server": ("cvxpy", "scipy"),
    "control-unit": ("cvxpy",),
    "device-agent": ("cvxpy", "scipy", "pandas", "pyarrow"),
    "client": ("torch", "transformers"),
}
MODULES = {
    "scheduler": "collapipe.scheduler.app",
    "edge-server": "collapipe.edge_server.app",
    "control-unit": "collapipe.control_unit.app",
    "device-agent": "collapipe.device_agent.app",
    "client": "collapipe_client.cli",
}
LOCKED = ("--rm", "--network=none", "--read-only", "--cap-drop=ALL", "--tmpfs=/tmp")
"""Options for a container without network, disk and privileges."""


def inspect(engine: Engine, target: str) -> dict[str, object]:
    return json.loads(engine.run("image", "inspect", tag(target)))[0]


def python(engine: Engine, target: str, code: str) -> str:
    return engine.run("run", *LOCKED, "--entrypoint=python", tag(target), "-c", code)


def layers(engine: Engine, target: str) -> list[str]:
    return inspect(engine, target)["RootFS"]["Layers"]


@pytest.mark.parametrize("target", TARGETS)
def test_image_is_small(images: Engine, target: str) -> None:
    megabytes = inspect(images, target)["Size"] / 1e6
    print(f"{tag(target)}: {megabytes:.0f} MB")
    assert megabytes < LARGEST_MB[target]


@pytest.mark.parametrize("target", TARGETS)
def test_image_has_no_library_that_it_does_not_use(images: Engine, target: str) -> None:
    code = f"import importlib.util as u; print([n for n in {LEFT_OUT[target]!r} if u.find_spec(n)])"
    assert python(images, target, code) == "[]"


@pytest.mark.parametrize("target", TARGETS)
def test_image_has_no_compiler(images: Engine, target: str) -> None:
    tools = ("gcc", "g++", "cc", "clang", "ld", "make")
    code = f"import shutil; print([name for name in {tools!r} if shutil.which(name)])"
    assert python(images, target, code) == "[]"


@pytest.mark.parametrize("target", TARGETS)
def test_image_runs_as_an_unprivileged_user(images: Engine, target: str) -> None:
    assert python(images, target, "import os; print(os.getuid(), os.getgid())") == "10001 10001"


@pytest.mark.parametrize("target", TARGETS)
def test_service_imports_without_network_disk_and_privileges(images: Engine, target: str) -> None:
    code = f"import {MODULES[target]}; print('imported')"
    assert python(images, target, code) == "imported"


@pytest.mark.parametrize("target", TARGETS)
def test_entrypoint_prints_its_options(images: Engine, target: str) -> None:
    printed = images.run("run", *LOCKED, tag(target), "--help")
    assert "usage" in printed.lower()


def test_images_with_torch_share_it(images: Engine) -> None:
    device, edge, control = (
        layers(images, target) for target in ("device-agent", "edge-server", "control-unit")
    )
    assert device[:-1] == edge[: len(device) - 1] == control[: len(device) - 1]
    sizes = images.run("history", "--human=false", "--format={{.Size}}", tag("device-agent"))
    assert int(sizes.split()[0]) < 20e6  # the layer that is not shared contains our code
    assert max(map(int, sizes.split())) > 300e6  # torch


def test_changed_code_changes_the_last_layer_only(images: Engine, tmp_path: Path) -> None:
    before = layers(images, "device-agent")
    for name in ("services", "clients", "requirements", "deploy/docker"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    with (tmp_path / "services/collapipe/errors.py").open("a", encoding="utf-8") as file:
        file.write("\nCHANGED = True\n")
    with torch_arguments(images) as arguments:
        build(images, "device-agent", PYTHON_IMAGE, arguments, context=tmp_path, version="changed")
    try:
        changed = json.loads(images.run("image", "inspect", tag("device-agent", "changed")))[0]
        after = changed["RootFS"]["Layers"]
        assert after[:-1] == before[:-1]
        assert after[-1] != before[-1]
    finally:
        images.run("image", "rm", tag("device-agent", "changed"))


def test_scheduler_loads_the_search_that_the_image_has_compiled(images: Engine) -> None:
    _, _, start, name = inspect(images, "scheduler")["Config"]["Entrypoint"]
    loads = start.replace("-m collapipe.scheduler", "-c")
    assert loads != start
    code = (
        "from collapipe.allocation.search import labels; labels.compile_search(); "
        "print(sum(labels.with_segments.stats.cache_hits.values()))"
    )
    arguments = ("--entrypoint=sh", tag("scheduler"), "-c", loads, name, code)
    assert images.run("run", *LOCKED, *arguments) == "1"
