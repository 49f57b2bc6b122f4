import threading
import time

import pytest

from collapipe.errors import PeerLostError
from collapipe_client import supervisor
from collapipe_client.supervisor import Supervisor

LIMIT_SECONDS = 20.0


class Processes:
    """Processes that end at once whenever they are started."""

    def __init__(self, *names: str, can_start: bool = True) -> None:
        self.starts: list[str] = []
        self.said: list[str] = []
        self._names, self._can_start = list(names), can_start
        self._given_up = threading.Event()

    def restart(self, name: str) -> None:
        self.starts.append(name)
        if not self._can_start:
            raise PeerLostError(name, f"{name} did not serve")

    def say(self, message: str) -> None:
        self.said.append(message)
        if sum("not started again" in each for each in self.said) == len(self._names):
            self._given_up.set()

    def run_until_given_up(self) -> None:
        with Supervisor(lambda: self._names, self.restart, self.say):
            assert self._given_up.wait(LIMIT_SECONDS)
            time.sleep(0.05)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.001)


@pytest.mark.parametrize("can_start", [True, False])
def test_what_ends_again_and_again_is_given_up_and_named(*, can_start: bool) -> None:
    processes = Processes("a", "b", can_start=can_start)
    processes.run_until_given_up()
    assert sorted(processes.starts) == ["a"] * 5 + ["b"] * 5
    assert ("a could not be started again: a did not serve" in processes.said) is not can_start
    assert any(
        said.startswith("a is not started again, because 5 starts") for said in processes.said
    )
