"""A wheel has all that CollaPipe needs: it trains in an empty folder, without the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
PACKAGES = {"services/collapipe": "collapipe", "clients/collapipe_client": "collapipe_client"}
pytestmark = pytest.mark.timeout(600)

TINY = [
    *("clusters=1", "devices_per_cluster=1", "training.rounds=1", "training.local_steps=1"),
    *("data.max_rows=64", "data.max_held_out_rows=8"),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel that is built from a copy of the checkout, because setuptools writes into the folder."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    shutil.copytree(REPOSITORY, folder / "source", ignore=ignored, symlinks=True)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*build, "--wheel-dir", folder, folder / "source"], check=True)
    return next(folder.glob("*.whl"))


def test_wheel_has_every_file_of_the_packages(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", *PACKAGES], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    needed = {name.partition("/")[2] for name in listed.stdout.splitlines()}
    assert {"collapipe/scheduler/web/static/index.html", "collapipe_client/cli.py"} < needed
    assert needed - set(zipfile.ZipFile(wheel).namelist()) == set()


def test_installed_wheel_trains_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    subprocess.run([*install, "--no-index", wheel], check=True)
    # The libraries are those of this environment. A line of a .pth file does not read the .pth files there, by which
    # this environment has the checkout.
    own = next((environment / "lib").glob("python*/site-packages"))
    (own / "libraries.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n")
    folder = tmp_path / "empty"
    folder.mkdir()

    def run(*command: str) -> str:
        done = subprocess.run(
            [environment / "bin" / command[0], *command[1:]],
            cwd=folder,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    places = run("python", "-c", "import collapipe, collapipe_client as c; print(collapipe, c)")
    assert places.count(str(own)) == 2
    assert "Train a model" in run("collapipe", "--help")
    settings = [part for value in TINY for part in ("--set", value)]
    told = run("collapipe", "train", "--preset", "demo", *settings)
    assert "final: " in told
    assert (folder / "collapipe-models" / "demo" / "model.safetensors").is_file()
