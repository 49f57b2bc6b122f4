"""Builds the images of this checkout as a user does. torch comes from where this machine's pip finds it."""

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

from containers.base_image import ensure_python_image, pip_setting
from containers.engine import Engine

ROOT = Path(__file__).parents[2]
TARGETS = ("scheduler", "edge-server", "control-unit", "device-agent", "client")
VERSION = "test"
"""Version in the tags of test images, so that the images of a user are not replaced."""
_BUILD_SECONDS = 900.0
_WHEELS_PORT = 18999
"""A fixed port. The URL is a build argument, and Docker reuses a layer only if its arguments are the same."""


def tag(target: str, version: str = VERSION) -> str:
    """Returns the image tag of a target, as in the compose files."""
    return f"collapipe/{target}:{version}"


def build_images(engine: Engine) -> None:
    """Builds every target."""
    base = ensure_python_image(engine)
    with torch_arguments(engine) as arguments:
        for target in TARGETS:
            build(engine, target, base, arguments)


def build(
    engine: Engine,
    target: str,
    base: str,
    arguments: Mapping[str, str],
    *,
    context: Path = ROOT,
    version: str = VERSION,
) -> None:
    """Builds one target.

    Args:
        target: A target of the Dockerfile.
        base: The Python image to start from.
        arguments: Additional build arguments.
        context: Folder of a checkout.
        version: Version in the tag.
    """
    values = {"PYTHON_IMAGE": base, **arguments}
    engine.run(
        "build",
        f"--file={context / 'deploy/docker/Dockerfile'}",
        f"--target={target}",
        f"--tag={tag(target, version)}",
        *(f"--build-arg={key}={value}" for key, value in values.items()),
        str(context),
        timeout=_BUILD_SECONDS,
    )


@contextmanager
def torch_arguments(engine: Engine) -> Iterator[dict[str, str]]:
    """Yields the build arguments with which pip finds torch during a build.

    pip's find-links may name a folder of wheels. A build cannot read folders of this machine, so this
    function serves the folder over HTTP on the bridge. URLs of an index stay as they are.
    """
    arguments = {
        f"PIP_{name.upper().replace('-', '_')}": value
        for name in ("index-url", "extra-index-url")
        if (value := pip_setting(name)) and urlsplit(value.split()[0]).scheme.startswith("http")
    }
    links = pip_setting("find-links").split()
    folders = [link for link in links if any(Path(link).glob("torch-*.whl"))]
    if not folders:
        yield arguments
        return
    gateway = engine.gateway
    handler = functools.partial(_QuietHandler, directory=folders[0])
    with ThreadingHTTPServer((gateway, _WHEELS_PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            address = f"http://{gateway}:{server.server_address[1]}/"
            yield arguments | {"PIP_FIND_LINKS": address, "PIP_TRUSTED_HOST": gateway}
        finally:
            server.shutdown()


class _QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        """Suppresses the log, which would mix with the output of the tests."""
