"""An accelerator that runs on the CPU, copies as late as it may, and has a clock of its own.

A copy is done when something waits for it, and its target holds nonsense until then. So a missing wait gives wrong
results. What is computed takes as long as a test says, on a clock that runs ahead of the thread that computes. So a
time that was read without waiting for the device is too short.
"""

import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from collapipe.stage_runtime.accelerator import Event
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK

_WAITED = threading.local()


def exact_clock() -> float:
    """Returns when the device reached the event that this thread waited for last. The host's clock would be later."""
    reached_at: float = _WAITED.reached_at
    return reached_at


class LateEvent:
    def __init__(self, stream: "LateStream", position: int, reached_at: float) -> None:
        self.stream = stream
        self.position = position
        self.reached_at = reached_at

    def synchronize(self) -> None:
        self.stream.run_until(self.position)
        time.sleep(max(0.0, self.reached_at - time.perf_counter()))
        _WAITED.reached_at = self.reached_at

    def query(self) -> bool:
        return self.stream.num_done >= self.position

    def elapsed_time(self, end_event: Event, /) -> float:
        assert isinstance(end_event, LateEvent)
        assert self.query(), "the event has not been reached"
        assert end_event.query(), "the later event has not been reached"
        return (end_event.reached_at - self.reached_at) * 1000


class LateStream:
    def __init__(self) -> None:
        self.num_done = 0
        self.seen = 0
        """The last position of the compute stream that this stream has waited for."""
        self._items: list[Callable[[], object]] = []
        self._lock = threading.RLock()

    def record(self) -> LateEvent:
        with self._lock:
            return LateEvent(self, len(self._items), time.perf_counter())

    def submit(self, item: Callable[[], object]) -> None:
        with self._lock:
            self._items.append(item)

    def wait(self, event: Event) -> None:
        def wait() -> None:
            assert isinstance(event, LateEvent)
            event.stream.run_until(event.position)
            self.seen = max(self.seen, event.position)

        self.submit(wait)

    def run_until(self, position: int) -> None:
        with self._lock:
            while self.num_done < position:
                item, self._items[self.num_done] = self._items[self.num_done], _nothing
                self.num_done += 1
                item()


class ComputeStream(LateStream):
    """What torch is told to compute is done at once. Work of `submit` waits until something waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._busy_until = 0.0
        self.last_of_thread: dict[int, int] = {}
        """The position of the last event that a thread recorded while it computed."""

    def spend(self, seconds: float) -> None:
        """Makes the device compute for some time after what it was given before."""
        with self._lock:
            self._busy_until = max(self._busy_until, time.perf_counter()) + seconds

    def record(self) -> LateEvent:
        with self._lock:
            self.submit(_nothing)  # gives each event a position of its own
            position = len(self._items)
            if COMPUTE_LOCK.locked():
                self.last_of_thread[threading.get_ident()] = position
            return LateEvent(self, position, max(self._busy_until, time.perf_counter()))

    def wait(self, event: Event) -> None:
        assert isinstance(event, LateEvent)
        event.stream.run_until(event.position)


class LateStreams:
    """The streams of such an accelerator."""

    torch_device = torch.device("cpu")

    def __init__(self) -> None:
        self.compute = ComputeStream()
        self.uploads = LateStream()
        self.downloads = LateStream()
        self.keys: list[int] = []
        """Every key that the device was seeded with."""

    def upload(self, source: Tensor) -> Tensor:
        target, held = _nonsense(source), weakref.ref(source)

        def copy() -> None:
            if (
                tensor := held()
            ) is not None:  # pinned memory that was given back has other contents
                target.copy_(tensor)

        self.uploads.submit(copy)
        return target

    def download(self, source: Tensor, target: Tensor) -> None:
        target.copy_(_nonsense(source))
        computed = self.compute.last_of_thread.get(threading.get_ident(), 0)

        def copy() -> None:
            if self.downloads.seen >= computed:  # otherwise the device has not computed the source
                target.copy_(source)

        self.downloads.submit(copy)

    def pinned(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def seed(self, key: int) -> None:
        self.keys.append(key)


def _nothing() -> None: ...


def _nonsense(tensor: Tensor) -> Tensor:
    return torch.full(tensor.shape, float("nan") if tensor.is_floating_point() else 1).to(
        tensor.dtype
    )
