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

    def waits(self) -> bool:
        self.join(0.1)
        return self.is_alive()

    def ends(self) -> bool:
        self.join(10)
        return not self.is_alive()


def take_forward(mailbox: Mailbox) -> Frame:
    return mailbox.take(forward=True, backward=False)


def test_frames_of_one_direction_keep_their_order() -> None:
    mailbox = Mailbox(None)
    for number in range(3):
        mailbox.put(forward(number))
    assert [take_forward(mailbox).micro_batch for _ in range(3)] == [0, 1, 2]


def test_labels_wait_for_whoever_takes_them() -> None:
    mailbox = Mailbox(1)
    taking = Call(mailbox.take_labels)
    assert taking.waits()
    labels = [Frame(FrameKind.LABELS, 0, number) for number in range(3)]
    mailbox.put(labels[0])
    assert taking.ends() and taking.result is labels[0]
    mailbox.put(labels[1])
    putting = Call(lambda: mailbox.put(labels[2]))
    assert putting.waits(), "more labels waited than the mailbox may hold"
    assert mailbox.take_labels() is labels[1]
    assert putting.ends() and mailbox.take_labels() is labels[2]
    taking = Call(mailbox.take_labels)
    mailbox.fail(CancelledError("over"))
    assert taking.ends() and isinstance(taking.error, CancelledError)


def test_gradient_is_taken_before_an_older_activation() -> None:
    mailbox = Mailbox(None)
    mailbox.put(forward(0))
    mailbox.put(backward(1))
    assert mailbox.take(forward=True, backward=True) == backward(1)
    assert mailbox.take(forward=True, backward=True) == forward(0)


def test_older_activation_is_taken_first_where_a_forward_pass_is_preferred() -> None:
    mailbox = Mailbox(None)
    mailbox.put(backward(0))
    mailbox.put(forward(1))
    both = {"forward": True, "backward": True}
    assert mailbox.take(**both, prefers_forward=True) == forward(1)
    assert mailbox.take(**both, prefers_forward=True) == backward(0)
    mailbox.put(forward(2))
    mailbox.put(backward(1))
    assert mailbox.take(forward=False, backward=True, prefers_forward=True) == backward(1)


def test_evaluation_and_predictions_have_the_directions_of_training() -> None:
    mailbox = Mailbox(None)
    prediction, evaluate = Frame(FrameKind.PREDICTION, 0, 0), Frame(FrameKind.EVALUATE, 0, 1)
    mailbox.put(evaluate)
    mailbox.put(prediction)
    assert mailbox.take(forward=False, backward=True) == prediction
    assert take_forward(mailbox) == evaluate


def test_take_waits_for_a_frame_of_an_allowed_direction() -> None:
    mailbox = Mailbox(None)
    taken = Call(lambda: take_forward(mailbox))
    mailbox.put(backward(0))
    assert taken.waits()
    mailbox.put(forward(1))
    assert taken.ends()
    assert taken.result == forward(1)


def test_put_waits_while_the_queue_of_its_direction_is_full() -> None:
    mailbox = Mailbox(2)
    mailbox.put(forward(0))
    mailbox.put(forward(1))
    third = Call(lambda: mailbox.put(forward(2)))
    mailbox.put(backward(0))  # the queue of the other direction has room
    assert third.waits()
    assert take_forward(mailbox) == forward(0)
    assert third.ends()
    assert [take_forward(mailbox).micro_batch for _ in range(2)] == [1, 2]


def test_mailbox_without_capacity_takes_everything() -> None:
    mailbox = Mailbox(None)
    filled = Call(lambda: [mailbox.put(forward(number)) for number in range(1000)])
    assert filled.ends()


def test_first_stage_takes_all_frames_of_its_own_host_but_few_of_the_next_stage() -> None:
    mailbox = Mailbox(2, is_first=True)
    filled = Call(lambda: [mailbox.put(forward(number)) for number in range(1000)])
    assert filled.ends()
    mailbox.put(backward(0))
    mailbox.put(backward(1))
    third = Call(lambda: mailbox.put(backward(2)))
    assert third.waits()
    mailbox.take(forward=False, backward=True)
    assert third.ends()


def test_failure_ends_a_waiting_take_and_a_waiting_put() -> None:
    mailbox = Mailbox(1)
    taker = Call(lambda: mailbox.take(forward=False, backward=True))
    mailbox.put(forward(0))
    putter = Call(lambda: mailbox.put(forward(1)))
    assert taker.waits()
    assert putter.waits()
    mailbox.fail(CancelledError("over"))
    assert taker.ends()
    assert putter.ends()
    assert isinstance(taker.error, CancelledError)
    assert putter.error is None


def test_take_raises_the_first_failure_even_if_frames_have_arrived() -> None:
    mailbox = Mailbox(None)
    mailbox.put(forward(0))
    mailbox.fail(PeerLostError("device-1", "first"))
    mailbox.fail(CancelledError("second"))
    for _ in range(2):
        with pytest.raises(PeerLostError, match="first"):
            take_forward(mailbox)


def test_frames_after_a_failure_are_dropped() -> None:
    mailbox = Mailbox(None)
    mailbox.fail(CancelledError("over"))
    for number in range(3):
        mailbox.put(forward(number))
    assert not mailbox._towards_head
