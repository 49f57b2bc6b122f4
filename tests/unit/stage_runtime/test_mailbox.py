import threading
from collections.abc import Callable
from typing import Any

import pytest

from collapipe.errors import CancelledError, PeerLostError
from collapipe.stage_runtime import Mailbox
from collapipe.tensors import Frame, FrameKind


def forward(number: int) -> Frame:
    return Frame(FrameKind.FORWARD, 0, number)


def backward(number: int) -> Frame:
    return Frame(FrameKind.BACKWARD, 0, number)


class Condition(threading.Condition):
    """Counts the calls that have begun to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.begun.release()
        return super().wait(timeout)


class Box(Mailbox):
    """A mailbox that tells when a call waits."""

    def __init__(self, capacity: int | None, *, is_first: bool = False) -> None:
        super().__init__(capacity, is_first=is_first)
        self._changed: Condition = Condition()

    def is_waited_for(self) -> bool:
        return self._changed.begun.acquire(timeout=60)

    def take_forward(self) -> Frame:
        return self.take(forward=True, backward=False)


class Call(threading.Thread):
    """Calls a function in its own thread and keeps the result or the error."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    def ends(self) -> bool:
        self.join(60)
        return not self.is_alive()


def test_labels_wait_for_whoever_takes_them() -> None:
    mailbox = Box(1)
    taking = Call(mailbox.take_labels)
    assert mailbox.is_waited_for()
    labels = [Frame(FrameKind.LABELS, 0, number) for number in range(3)]
    mailbox.put(labels[0])
    assert taking.ends() and taking.result is labels[0]
    mailbox.put(labels[1])
    putting = Call(lambda: mailbox.put(labels[2]))
    assert mailbox.is_waited_for(), "more labels waited than the mailbox may hold"
    assert mailbox.take_labels() is labels[1]
    assert putting.ends() and mailbox.take_labels() is labels[2]
    taking = Call(mailbox.take_labels)
    mailbox.fail(CancelledError("over"))
    assert taking.ends() and isinstance(taking.error, CancelledError)


@pytest.mark.parametrize("prefers_forward", [False, True])
def test_preferred_direction_is_taken_first(prefers_forward: bool) -> None:
    mailbox = Mailbox(None)
    activations, gradients = [forward(1), forward(3)], [backward(0), backward(2)]
    order = activations + gradients if prefers_forward else gradients + activations
    for frame in order[2:] + order[:2]:
        mailbox.put(frame)
    for frame in order:
        taken = mailbox.take(forward=True, backward=True, prefers_forward=prefers_forward)
        assert taken == frame
    mailbox.put(forward(4))
    mailbox.put(backward(4))
    taken = mailbox.take(forward=False, backward=True, prefers_forward=prefers_forward)
    assert taken == backward(4)


def test_evaluation_and_predictions_have_the_directions_of_training() -> None:
    mailbox = Box(None)
    prediction, evaluate = Frame(FrameKind.PREDICTION, 0, 0), Frame(FrameKind.EVALUATE, 0, 1)
    mailbox.put(evaluate)
    mailbox.put(prediction)
    assert mailbox.take(forward=False, backward=True) == prediction
    assert mailbox.take_forward() == evaluate


def test_take_waits_for_a_frame_of_an_allowed_direction() -> None:
    mailbox = Box(None)
    mailbox.put(backward(0))
    taken = Call(mailbox.take_forward)
    assert mailbox.is_waited_for()
    mailbox.put(forward(1))
    assert taken.ends()
    assert taken.result == forward(1)


def test_put_waits_while_the_queue_of_its_direction_is_full() -> None:
    mailbox = Box(2)
    for frame in (forward(0), forward(1), backward(0)):
        mailbox.put(frame)
    third = Call(lambda: mailbox.put(forward(2)))
    assert mailbox.is_waited_for()
    assert mailbox.take_forward() == forward(0)
    assert third.ends()
    assert [mailbox.take_forward() for _ in range(2)] == [forward(1), forward(2)]


def test_first_stage_takes_all_frames_of_its_own_host_but_few_of_the_next_stage() -> None:
    mailbox = Box(2, is_first=True)
    filled = Call(lambda: [mailbox.put(forward(number)) for number in range(100)])
    assert filled.ends()
    mailbox.put(backward(0))
    mailbox.put(backward(1))
    third = Call(lambda: mailbox.put(backward(2)))
    assert mailbox.is_waited_for()
    mailbox.take(forward=False, backward=True)
    assert third.ends()


def test_failure_ends_a_waiting_take_and_a_waiting_put() -> None:
    mailbox = Box(1)
    mailbox.put(forward(0))
    taker = Call(lambda: mailbox.take(forward=False, backward=True))
    putter = Call(lambda: mailbox.put(forward(1)))
    assert mailbox.is_waited_for() and mailbox.is_waited_for()
    mailbox.fail(CancelledError("over"))
    assert taker.ends()
    assert putter.ends()
    assert isinstance(taker.error, CancelledError)
    assert putter.error is None


def test_first_failure_is_raised_and_later_frames_are_dropped() -> None:
    mailbox = Box(None)
    mailbox.put(forward(0))
    first = PeerLostError("device-1", "first")
    mailbox.fail(first)
    mailbox.fail(CancelledError("second"))
    mailbox.put(forward(1))
    assert len(mailbox._towards_head) == 1
    for take in (mailbox.take_forward, mailbox.take_labels):
        with pytest.raises(PeerLostError) as raised:
            take()
        assert raised.value is first
