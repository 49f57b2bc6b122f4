"""Which devices a job leaves out because they restart again and again."""

from collapipe.job_life.failing_clusters import LONGEST_PAUSE
from collapipe.job_life.restarting_devices import (
    RestartingDevices,
    after_new_round,
    pause_after,
    see,
    take_part,
)

NONE = RestartingDevices()


def restart(restarting: RestartingDevices, number: int, num_rounds: int) -> RestartingDevices:
    """Lets a device take part, and then start again."""
    restarting = take_part(restarting, {"a": str(number), "b": "1"})
    after = {"a": str(number + 1), "b": "1"}
    seen = see(restarting, after, num_rounds)
    assert see(seen, after, num_rounds) == seen, "a restart counts once"
    return seen


def test_pause_begins_with_the_third_restart_and_doubles_up_to_a_limit() -> None:
    pauses = [pause_after(number) for number in (1, 2, 2.9, 3, 4, 5, 7, 8, 1e6)]
    assert pauses == [0, 0, 0, 1, 2, 4, 16, LONGEST_PAUSE, LONGEST_PAUSE]


def test_device_takes_part_again_after_new_rounds_and_is_left_out_for_longer_next_time() -> None:
    restarting = NONE
    for number, left_out in enumerate(({}, {}, {"a": 8})):
        restarting = restart(restarting, number, 7)
        assert restarting.left_out(7) == left_out
    assert restarting.left_out(8) == {}
    restarting = restart(restarting, 3, 8)
    assert restarting.left_out(9) == {"a": 10}
    assert restarting.left_out(10) == {}


def test_ten_new_rounds_make_up_for_one_restart() -> None:
    restarting = NONE
    for number in range(20):
        restarting = restart(restarting, number, number)
        assert not restarting.left_out(number)
        for _ in range(10):
            restarting = after_new_round(restarting, ["a"])


def test_restart_of_a_device_that_took_no_part_does_not_count() -> None:
    restarting = NONE
    for number in range(10):
        restarting = see(restarting, {"a": str(number)}, 0)
    assert restarting == NONE
