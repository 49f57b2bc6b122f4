"""Provides base images: pulls them from a registry, or builds substitutes from Debian packages.

    python -m containers.base_image    # in tests/, with a running engine: provides the Python image

The substitute for python:3.11-slim has the same Python, the same commands and the same paths. It trusts the
certificates that this machine trusts. The substitute for prom/prometheus has the same command and user.
"""

import hashlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from containers.engine import CommandError, Engine, cache_directory, docker_engine, run

PYTHON_IMAGE = "python:3.11-slim"
_SUITE = "bookworm"
"""The Debian release whose python3 is 3.11."""
_PACKAGES = "python3,python3-pip,python3-venv,ca-certificates,netbase,tzdata"
_CERTIFICATES = Path("/usr/local/share/ca-certificates")
_IMPORT = (
    *("--change", "ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"),
    *("--change", "ENV LANG=C.UTF-8", "--change", 'CMD ["python3"]'),
)
_BUILD_SECONDS = 600.0

# The official image contains busybox, too: the health check needs its wget.
_PROMETHEUS = f"""
FROM {PYTHON_IMAGE}
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus busybox \\
    && rm -rf /var/lib/apt/lists/* && ln -s /usr/bin/busybox /usr/local/bin/wget \\
    && mkdir -p /prometheus && chown nobody:nogroup /prometheus
USER nobody
EXPOSE 9090
VOLUME ["/prometheus"]
WORKDIR /prometheus
ENTRYPOINT ["/bin/prometheus"]
CMD ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"]
"""


def ensure_python_image(engine: Engine) -> str:
    """Makes `PYTHON_IMAGE` available to builds, and returns its name."""
    if not _has_or_pulls(engine, PYTHON_IMAGE):
        engine.run("import", *_IMPORT, str(_root_archive()), PYTHON_IMAGE, timeout=_BUILD_SECONDS)
    return PYTHON_IMAGE


def ensure_image(engine: Engine, tag: str) -> bool:
    """Makes the image of a service available: pulls it, or builds a substitute.

    Returns:
        False if the image cannot be pulled and has no substitute.
    """
    if _has_or_pulls(engine, tag):
        return True
    if "/prometheus:" not in tag:
        return False
    ensure_python_image(engine)
    # `docker build --tag` rejects a name with a digest, so build the substitute without it.
    engine.run(
        "build", "--tag", tag.partition("@")[0], "-", stdin=_PROMETHEUS, timeout=_BUILD_SECONDS
    )
    return "@" not in tag


def _has_or_pulls(engine: Engine, tag: str) -> bool:
    if engine.has_image(tag):
        return True
    try:
        engine.run("pull", "--quiet", tag, timeout=_BUILD_SECONDS)
    except CommandError:
        return False
    return True


def _root_archive() -> Path:
    """Returns an archive of the substitute's file system. The cache keeps one archive for each recipe."""
    mirror, certificates = debian_mirror(), sorted(_CERTIFICATES.glob("*.crt"))
    recipe = [_SUITE, _PACKAGES, mirror, _pip_configuration()]
    recipe += [path.read_text(encoding="utf-8") for path in certificates]
    recipe.append(inspect.getsource(_imitate_official_image))
    key = hashlib.sha256("\0".join(recipe).encode()).hexdigest()[:16]
    archive = cache_directory() / f"python-{key}.tar.gz"
    if archive.is_file():
        return archive
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        pytest.skip(
            f"{PYTHON_IMAGE} cannot be pulled, and only root with debootstrap can build a substitute: "
            "apt-get install debootstrap"
        )
    with tempfile.TemporaryDirectory(prefix="collapipe-base-") as name:
        root = Path(name)
        run(
            ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", _SUITE, name, mirror],
            timeout=_BUILD_SECONDS,
        )
        _imitate_official_image(root, certificates)
        partial = archive.with_suffix(f".{os.getpid()}")
        run(
            ["tar", "-C", name, "--use-compress-program=gzip -1", "-cf", str(partial), "."],
            timeout=_BUILD_SECONDS,
        )
        partial.replace(archive)
    return archive


def _imitate_official_image(root: Path, certificates: list[Path]) -> None:
    """Gives Debian's Python the paths of the official image, and installs this machine's certificates."""
    for marker in root.glob("usr/lib/python3.*/EXTERNALLY-MANAGED"):
        marker.unlink()
    for name, target in (("python", "python3"), ("python3", "python3"), ("pip", "pip3")):
        (root / "usr/local/bin" / name).symlink_to(f"/usr/bin/{target}")
    for path in certificates:
        shutil.copy(path, root / "usr/local/share/ca-certificates")
    run(["chroot", str(root), "update-ca-certificates"])
    (root / "etc/pip.conf").write_text(_pip_configuration(), encoding="utf-8")
    for pattern in ("var/cache/apt/archives/*.deb", "var/lib/apt/lists/*"):
        for path in root.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for folder in ("doc", "man", "locale"):
        shutil.rmtree(root / "usr/share" / folder)


def _pip_configuration() -> str:
    """Returns a pip.conf with the index and proxy of this machine's pip, and the system's certificates."""
    lines = ["[global]", "cert = /etc/ssl/certs/ca-certificates.crt"]
    for name in ("index-url", "proxy"):
        value = pip_setting(name)
        if value and urlsplit(value).scheme in ("http", "https"):
            lines.append(f"{name} = {value}")
    return "\n".join(lines) + "\n"


def pip_setting(name: str) -> str:
    """Returns a setting of this machine's pip, from its environment or its files; empty if it is not set."""
    value = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
    if value is not None:
        return value
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", f"global.{name}"],
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def debian_mirror() -> str:
    """Returns the Debian mirror from COLLAPIPE_DEBIAN_MIRROR, or from the apt sources of a Debian machine."""
    if named := os.environ.get("COLLAPIPE_DEBIAN_MIRROR"):
        return named
    release = Path("/etc/os-release").read_text(encoding="utf-8")
    if re.search(r"^ID=debian$", release, re.MULTILINE):
        for path in [
            Path("/etc/apt/sources.list"),
            *sorted(Path("/etc/apt/sources.list.d").glob("*")),
        ]:
            text = path.read_text(encoding="utf-8") if path.is_file() else ""
            for found in re.finditer(r"^(?:URIs:|deb(?: \[[^]]*\])?)\s+(\S+)", text, re.MULTILINE):
                if "security" not in found[1] and found[1].rstrip("/").endswith("debian"):
                    return found[1]
    raise RuntimeError(
        "the apt sources of this machine name no Debian mirror: set COLLAPIPE_DEBIAN_MIRROR to one"
    )


if __name__ == "__main__":
    with docker_engine() as running:
        print(ensure_python_image(running))
