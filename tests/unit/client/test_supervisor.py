import threading

import pytest

from collapipe.errors import PeerLostError
from collapipe_client import supervisor
from collapipe_client.supervisor import Supervisor


@pytest.mark.parametrize("can_start", [True, False])
def test_what_ends_again_and_again_is_given_up_and_named(
    monkeypatch: pytest.MonkeyPatch, *, can_start: bool
) -> None:
    monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.0001)
    starts: list[str] = []
    said: list[str] = []
    looked_again = threading.Event()
    looks = iter(range(3))  # after both are given up

    def lost() -> list[str]:
        """Both processes end at once whenever they are started."""
        num_given_up = sum("not started again" in each for each in said)
        if num_given_up == 2 and next(looks, None) is None:
            looked_again.set()
        return ["a", "b"]

    def restart(name: str) -> None:
        starts.append(name)
        if not can_start:
            raise PeerLostError(name, f"{name} did not serve")

    with Supervisor(lost, restart, said.append):
        assert looked_again.wait(60)
    assert sorted(starts) == ["a"] * 5 + ["b"] * 5
    assert any("a did not serve" in each for each in said) is not can_start
    given_up = [each for each in said if "not started again" in each]
    assert sorted(each[0] for each in given_up) == ["a", "b"] and "5 starts" in given_up[0]
