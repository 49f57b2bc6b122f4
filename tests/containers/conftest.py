"""Provides one Docker Engine for all tests of containers, and builds the images of this checkout."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from containers.engine import Engine, NoEngineError
from containers.engine import docker_engine as running_engine
from containers.engine_images import build_images


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Divides the tests among two workers: emulated processors need neither the engine nor a quiet machine."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            group = "arm64" if item.path.name == "test_arm64.py" else "engine"
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Engine]:
    """Provides the running engine, or a private one that leaves nothing behind after the session."""
    try:
        context = running_engine()
        engine = context.__enter__()
    except NoEngineError as error:
        pytest.skip(str(error))
    try:
        yield engine
    finally:
        context.__exit__(None, None, None)


@pytest.fixture(scope="session")
def images(docker_engine: Engine) -> Engine:
    """Provides the engine after building every image of this checkout."""
    build_images(docker_engine)
    return docker_engine
