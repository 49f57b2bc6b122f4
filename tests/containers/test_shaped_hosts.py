"""Tests that links of the compose testbed are shaped for as long as their hosts run, whatever restarts these."""

from collections.abc import Callable, Iterator

import pytest
from prometheus_server import eventually

from containers.compose import ComposeTestbed
from containers.engine import CommandError, Engine
from containers.test_compose import kill_command

pytestmark = pytest.mark.timeout(600)

HOSTS = ("device-1-2", "device-1-3")
LAYERS = ("compose.yaml", "compose.netem.yaml")


@pytest.fixture(scope="module")
def testbed(images: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeTestbed]:
    """Provides two hosts without a scheduler, which they call again and again."""
    cores = {"RASPBERRY_PI_4_CPUS": "1"}
    testbed = ComposeTestbed(images, tmp_path_factory.mktemp("shaped"), LAYERS, cores)
    try:
        testbed.compose("up", "--detach", "--no-build", "--no-deps", *HOSTS)
        yield testbed
    finally:
        testbed.down()


def is_shaped(testbed: ComposeTestbed, host: str) -> bool:
    """Returns whether the kernel limits the link from a host to the other one."""
    try:
        return "htb" in testbed.exec(host, "tc", "class", "show", "dev", "eth0")
    except CommandError:  # The container does not run, or is just restarted.
        return False


def started_at(testbed: ComposeTestbed, host: str) -> str:
    template = "{{.State.StartedAt}} {{.State.Running}}"
    return testbed.engine.run("inspect", "--format", template, testbed.container(host))


def stop_and_start(testbed: ComposeTestbed, host: str) -> None:
    for verb in ("stop", "start"):
        testbed.engine.run(verb, testbed.container(host))


def restart(testbed: ComposeTestbed, host: str) -> None:
    testbed.engine.run("restart", testbed.container(host))


def crash(testbed: ComposeTestbed, host: str) -> None:
    container, before = testbed.container(host), started_at(testbed, host)
    testbed.engine.run("exec", container, *kill_command(testbed, container))
    eventually(lambda: started_at(testbed, host) not in (before, before.replace("true", "false")))


def restart_engine(testbed: ComposeTestbed, host: str) -> None:
    if testbed.engine.restart is None:
        pytest.skip("the running engine may have other containers")
    testbed.engine.restart()


@pytest.mark.parametrize("disturb", [stop_and_start, restart, crash, restart_engine])
def test_links_are_shaped_again_with_their_host(
    testbed: ComposeTestbed, disturb: Callable[[ComposeTestbed, str], None]
) -> None:
    eventually(lambda: all(is_shaped(testbed, host) for host in HOSTS))
    disturb(testbed, HOSTS[0])
    eventually(lambda: all(is_shaped(testbed, host) for host in HOSTS))
