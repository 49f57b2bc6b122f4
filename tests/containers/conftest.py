"""Provides one Docker Engine for all tests of containers, and builds the images of this checkout."""

from collections.abc import Iterator

import pytest

from containers.engine import Engine, NoEngineError
from containers.engine import docker_engine as running_engine
from containers.engine_images import build_images


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
