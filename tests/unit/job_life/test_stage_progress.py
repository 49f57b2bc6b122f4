"""When a pipeline counts as stalled, and when a stage computes for too long."""

from dataclasses import replace

import pytest

from collapipe.job_life.stage_progress import (
    Hangs,
    HostSeen,
    StageProgress,
    Stalled,
    begin,
    end_step,
    enter_step,
    rest,
    see,
    work,
)

WAITS = {
    "a": HostSeen("get the forward frame of micro-batch 0"),
    "b": HostSeen("be told what to do", is_idle=True),
}
COMPUTES = {**WAITS, "b": HostSeen("")}


def look(
    progress: StageProgress,
    now: float,
    hosts: dict[str, HostSeen] = WAITS,
    received_bytes: int = 0,
    *,
    is_working: bool = True,
) -> StageProgress:
    return see(replace(progress, is_working=is_working), hosts, received_bytes, now)


def test_pipeline_is_stalled_after_a_silence_without_any_change() -> None:
    progress = look(begin(5.0, 0.0, 99.0), 100.0)
    for now, trouble in ((100.0, None), (105.0, None), (105.1, Stalled())):
        progress = look(progress, now)
        assert progress.trouble(now) == trouble


@pytest.mark.parametrize(
    ("hosts", "received_bytes", "is_working"),
    [
        (WAITS, 11, True),
        ({**WAITS, "a": HostSeen("get the backward frame of micro-batch 0")}, 10, True),
        (WAITS, 10, False),
        (COMPUTES, 10, True),
    ],
    ids=["bytes arrive", "another wait", "no micro-batch is under way", "a stage computes"],
)
def test_any_change_restarts_the_silence(
    hosts: dict[str, HostSeen], received_bytes: int, is_working: bool
) -> None:
    progress = look(
        look(begin(5.0, 0.0, 100.0), 100.0, received_bytes=10), 104.0, received_bytes=10
    )
    progress = look(progress, 104.9, hosts, received_bytes, is_working=is_working)
    assert progress.trouble(109.9) is None
    assert progress.trouble(110.0) == Stalled()


@pytest.mark.parametrize("hosts", [WAITS, COMPUTES])
def test_pipeline_that_computes_or_has_nothing_to_do_is_never_stalled(
    hosts: dict[str, HostSeen],
) -> None:
    progress = begin(5.0, 0.0, 0.0)
    for number in range(1, 4):
        now = 100.0 * number
        progress = look(progress, now, hosts, is_working=hosts is COMPUTES)
        assert progress.trouble(now) is None


def test_end_of_a_step_restarts_the_silence() -> None:
    progress = end_step(look(begin(5.0, 0.0, 0.0), 0.0), 4.0)
    progress = look(progress, 9.0)
    assert progress.trouble(9.0) is None and progress.trouble(9.1) == Stalled()


def test_stage_may_compute_ten_times_as_long_as_the_longest_step() -> None:
    now = 100.0
    progress = enter_step(begin(5.0, 0.0, now), 0, now)
    for seconds in (8.0, 20.0, 3.0):
        now += seconds
        progress = look(progress, now, COMPUTES)
        assert progress.trouble(now) is None
        progress = end_step(progress, now)
    assert progress.limit_seconds == 200.0
    progress = look(progress, now + 200.0, COMPUTES)
    assert progress.trouble(now + 200.0) is None
    progress = look(progress, now + 200.1, COMPUTES)
    assert progress.trouble(now + 200.1) == Hangs(("b",))


@pytest.mark.parametrize(("predicted_seconds", "limit"), [(0.0, 3600.0), (4.0, 120.0)])
def test_first_step_may_take_an_hour_or_thirty_times_as_long_as_predicted(
    predicted_seconds: float, limit: float
) -> None:
    progress = enter_step(begin(5.0, predicted_seconds, 0.0), 0, 0.0)
    assert progress.limit_seconds == limit
    for now, is_slow, trouble in (
        (limit / 3, False, None),
        (limit / 3 + 0.1, True, None),
        (limit, True, None),
        (limit + 0.1, True, Hangs(("b",))),
    ):
        progress = look(progress, now, COMPUTES)
        assert (progress.is_slow(now), progress.trouble(now)) == (is_slow, trouble)


@pytest.mark.parametrize(
    ("hosts", "received_bytes", "is_working"),
    [(WAITS, 0, True), (COMPUTES, 7, True), (COMPUTES, 0, False)],
    ids=["waiting", "bytes arrive", "no micro-batch is under way"],
)
def test_computing_counts_anew_after_progress(
    hosts: dict[str, HostSeen], received_bytes: int, is_working: bool
) -> None:
    progress = end_step(enter_step(begin(5.0, 0.0, 0.0), 0, 0.0), 0.0)
    assert progress.limit_seconds == 30.0, "quick steps leave at least six silences"
    progress = look(progress, 29.0, hosts, received_bytes, is_working=is_working)
    for now, trouble in ((58.0, None), (59.1, Hangs(("b",)))):
        progress = look(progress, now, COMPUTES, received_bytes)
        assert progress.trouble(now) == trouble


def test_evaluation_before_the_first_step_may_take_any_time() -> None:
    progress = look(begin(5.0, 4.0, 0.0), 1e6, COMPUTES)
    assert progress.trouble(1e6) is None and not progress.is_slow(1e6)
    assert progress.computed_seconds(1e6) == 0.0
    assert look(enter_step(progress, 0, 1e6), 1e6, COMPUTES).trouble(1e6) is None


def test_time_in_which_nobody_waits_for_the_stages_is_no_silence() -> None:
    progress = look(work(begin(5.0, 0.0, 0.0), 0.0), 0.0)
    progress = see(rest(progress), WAITS, 0, 90.0)
    assert progress.trouble(90.0) is None and not progress.computing
    progress = see(work(progress, 100.0), WAITS, 0, 105.0)
    assert progress.trouble(105.0) is None and progress.trouble(105.1) == Stalled()


def test_step_that_overlaps_another_one_does_not_restart_its_time() -> None:
    progress = enter_step(enter_step(begin(5.0, 0.0, 0.0), 0, 10.0), 1, 12.0)
    assert (progress.step_index, progress.step_began_at) == (1, 10.0)
    progress = end_step(progress, 15.0)
    assert (progress.longest_step_seconds, progress.step_began_at) == (5.0, 15.0)
