from pathlib import Path

import pytest

from .authorities import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority of another deployment."""
    return Authority(tmp_path_factory.mktemp("others"))


@pytest.fixture
def fresh(tmp_path: Path) -> Authority:
    """An authority in which a test may revoke."""
    return Authority(tmp_path)
