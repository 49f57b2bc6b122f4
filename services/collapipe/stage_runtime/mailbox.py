"""What has arrived at a stage and was not yet worked on."""

import threading
from collections import deque

from collapipe.tensors import Frame


class Mailbox:
    """Frames from both neighbours, each in its order of arrival.

    Args:
        capacity: Frames of one direction that may wait. The windows of the stages keep honest neighbours below
            theirs; a neighbour that sends more has to wait, and through its stream its sender. `None`: no limit, for
            frames that are made on this host.
    """

    def __init__(self, capacity: int | None) -> None:
        self._capacity = capacity
        self._changed = threading.Condition()
        self._towards_head: deque[Frame] = deque()
        self._towards_embedding: deque[Frame] = deque()
        self._failure: BaseException | None = None

    def put(self, frame: Frame) -> None:
        """Takes a frame from a neighbour; waits while there is no room, and drops it after a failure."""
        queue = self._towards_head if frame.kind.towards_head else self._towards_embedding
        with self._changed:
            while self._failure is None and len(queue) == self._capacity:
                self._changed.wait()
            if self._failure is None:
                queue.append(frame)
                self._changed.notify_all()

    def fail(self, failure: BaseException) -> None:
        """Makes every present and later `take` raise; the first failure is kept."""
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def take(self, *, forward: bool, backward: bool) -> Frame:
        """Waits for a frame of a wanted direction; one that goes backward comes first.

        The wait has no deadline of its own: whoever watches the neighbours calls `fail`.

        Raises:
            CollapipeError: What `fail` was given.
        """
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if backward and self._towards_embedding:
                    return self._pop(self._towards_embedding)
                if forward and self._towards_head:
                    return self._pop(self._towards_head)
                self._changed.wait()

    def _pop(self, queue: deque[Frame]) -> Frame:
        self._changed.notify_all()
        return queue.popleft()
