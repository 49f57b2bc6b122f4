"""How a control unit names what its stages wait for, and the trouble that ends an attempt."""

from dataclasses import replace

import pytest

from collapipe.control_unit.stage_words import error_that_ends, hosts_do, what_stages_wait_for
from collapipe.errors import AttemptFailedError, PeerLostError
from collapipe.job_life.stage_progress import (
    Hangs,
    HostSeen,
    StagePhase,
    StageProgress,
    Stalled,
    begin,
    enter,
    enter_step,
    see,
    work,
)

FRAME, IDLE = HostSeen("get a frame"), HostSeen("be told what to do", is_idle=True)
COMPUTES = HostSeen("")


def in_step(**hosts: HostSeen) -> StageProgress:
    return see(work(enter_step(begin(5.0, 1.0, 0.0), 3, 0.0), 0.0), hosts, 0, 0.0)


@pytest.mark.parametrize(
    ("hosts", "words"),
    [("a", "a waits"), ("ab", "a and b wait"), ("abc", "a, b and c wait")],
)
def test_hosts_are_named_with_the_right_verb(hosts: str, words: str) -> None:
    assert hosts_do(list(hosts), "wait") == words


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (in_step(a=FRAME, b=COMPUTES), ""),
        (in_step(a=FRAME, b=IDLE, c=FRAME), "step 3: a and c wait to get a frame"),
        (in_step(a=IDLE, b=IDLE), "step 3"),
        (
            see(begin(5.0, 0.0, 0.0), {"a": FRAME}, 0, 0.0),
            "configuring stages: a waits to get a frame",
        ),
        (enter(in_step(a=IDLE), StagePhase.FINISHING), "finishing the round"),
    ],
)
def test_wait_is_named_unless_a_stage_computes(progress: StageProgress, words: str) -> None:
    assert what_stages_wait_for(progress, 1.0) == words


def test_every_phase_has_words() -> None:
    progress = in_step(a=IDLE)
    words = {what_stages_wait_for(replace(progress, phase=phase), 1.0) for phase in StagePhase}
    assert len(words) == len(StagePhase) and all(words)


def test_slow_host_is_named_with_its_limit() -> None:
    words = what_stages_wait_for(in_step(a=FRAME, b=COMPUTES), 11.0)
    assert words.startswith("step 3: b computes slowly") and "11 s" in words and "30 s" in words


def test_error_names_the_host_that_hangs_or_all_that_wait() -> None:
    hangs = error_that_ends(Hangs(("a", "b")), in_step(a=COMPUTES, b=COMPUTES))
    assert isinstance(hangs, PeerLostError) and hangs.host_id == "b"
    stalled = error_that_ends(Stalled(), in_step(a=FRAME, b=IDLE))
    assert isinstance(stalled, AttemptFailedError)
    assert "step 3: a waits to get a frame; b waits to be told" in str(stalled)
