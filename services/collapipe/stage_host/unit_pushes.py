"""Pushes the units of a stage to the edge server while the stage still updates its other units."""

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

from collapipe.errors import CollapipeError
from collapipe.rpc import Outbox
from collapipe.stage_runtime.resident_units import Upload

Report = Callable[[int], None]
"""Told how many bytes of the present unit have arrived. It raises an error after `UnitPushes.abort`."""


class UnitPushes:
    """Pushes units one after the other, in a thread of its own.

    Args:
        push: Pushes one unit.
    """

    def __init__(self, push: Callable[[Upload, Report], None]) -> None:
        self.waiting_for = ""
        """What the stage waits for, in words."""
        self.seconds = 0.0
        """Time from the first push to the end of the last one."""
        self.arrived_bytes = 0
        """What has arrived of all units."""
        self._earlier_bytes = 0
        self._push = push
        self._units: Outbox[Upload] = Outbox()
        self._outcome: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._aborted: CollapipeError | None = None
        threading.Thread(target=self._run, name="pushes", daemon=True).start()

    def put(self, upload: Upload) -> None:
        """Pushes a unit after those that were put before."""
        self._units.put(upload)

    def wait(self) -> None:
        """Waits until all units have arrived. Raises the error of a push, or that of `abort`."""
        self._units.close()
        failure = self._outcome.get()
        self.waiting_for = ""
        if failure is not None:
            raise failure

    def abort(self, reason: CollapipeError) -> None:
        """Makes `wait` raise `reason`."""
        self._aborted = reason
        self._outcome.put(reason)
        self._units.close()

    def _run(self) -> None:
        started: float | None = None
        try:
            for upload in self._units:
                started = started or time.perf_counter()
                self._report(upload, 0)
                self._push(upload, partial(self._report, upload))
                self._earlier_bytes = self.arrived_bytes
                self.seconds = time.perf_counter() - started
        except Exception as error:
            self._outcome.put(error)
        else:
            self._outcome.put(None)

    def _report(self, upload: Upload, received_bytes: int) -> None:
        if self._aborted is not None:
            raise self._aborted
        total = upload.blob.total_bytes
        self.arrived_bytes = self._earlier_bytes + received_bytes
        self.waiting_for = f"push unit {upload.unit_index} ({received_bytes} of {total} bytes)"
