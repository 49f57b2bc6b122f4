"""Holds the frames that have arrived at a stage until the stage takes them."""

import threading
from collections import deque

from collapipe.tensors import Frame, FrameKind


class Mailbox:
    """Frames from both neighbours, and labels: one queue for each direction and one for labels, in the order of arrival.

    Args:
        capacity: Frames of one queue that may wait. The in-flight windows keep correct neighbours below
            it. The stream of a sender that sends more is blocked. `None` means no limit.
        is_first: Whether frames towards the head and labels come from this host itself, so that they have no limit.
    """

    def __init__(self, capacity: int | None, *, is_first: bool = False) -> None:
        self._capacity = capacity
        self._is_first = is_first
        self._changed = threading.Condition()
        self._towards_head: deque[Frame] = deque()
        self._towards_embedding: deque[Frame] = deque()
        self._labels: deque[Frame] = deque()
        self._failure: BaseException | None = None

    def put(self, frame: Frame) -> None:
        """Takes a frame. Waits while its queue is full. After a failure, drops the frame."""
        if frame.kind is FrameKind.LABELS:
            queue = self._labels
        else:
            queue = self._towards_head if frame.kind.towards_head else self._towards_embedding
        is_from_here = self._is_first and queue is not self._towards_embedding
        capacity = None if is_from_here else self._capacity
        with self._changed:
            while self._failure is None and len(queue) == capacity:
                self._changed.wait()
            if self._failure is None:
                queue.append(frame)
                self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Makes every present and later `take` raise. Only the first failure counts."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def take(self, *, forward: bool, backward: bool, prefers_forward: bool = False) -> Frame:
        """Waits for a frame and removes it.

        There is no deadline. The thread that watches the neighbours must call `fail` when it loses one.

        Args:
            forward: Whether a frame towards the head is wanted.
            backward: Whether a frame towards the embedding is wanted.
            prefers_forward: Which of the two comes first if frames of both directions wait.

        Raises:
            CollapipeError: The failure that `fail` was given.
        """
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                has_forward = forward and self._towards_head
                has_backward = backward and self._towards_embedding
                if has_forward and (prefers_forward or not has_backward):
                    return self._pop(self._towards_head)
                if has_backward:
                    return self._pop(self._towards_embedding)
                self._changed.wait()

    def take_labels(self) -> Frame:
        """Waits for the next labels and removes them. Raises the failure that `fail` was given."""
        with self._changed:
            while not self._labels:
                if self._failure is not None:
                    raise self._failure
                self._changed.wait()
            return self._pop(self._labels)

    def has_frame(self, *, forward: bool, backward: bool) -> bool:
        """Returns whether a frame that is wanted has arrived.

        Raises:
            CollapipeError: The failure that `fail` was given.
        """
        with self._changed:
            if self._failure is not None:
                raise self._failure
            return bool((forward and self._towards_head) or (backward and self._towards_embedding))

    def _pop(self, queue: deque[Frame]) -> Frame:
        self._changed.notify_all()
        return queue.popleft()
