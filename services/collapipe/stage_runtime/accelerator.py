"""A processor with memory of its own, which works behind the threads that give it work.

It has three streams. Each does its work in order, and they wait for each other only at events:

- `compute` runs everything that torch is told to compute, of all stages of the host. `COMPUTE_LOCK` keeps the passes
  of two stages apart when they are given, so they are also apart on this stream.
- `uploads` copies frames to the device. `compute` waits for them.
- `downloads` copies frames and pieces of weights to the host, once `compute` has reached the event after their
  computation. The thread that reads the bytes waits for them, and the thread that computes does not.

Copies go through pinned memory. Times come from events, and are read when a stage has ended a step.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from collapipe.stage_runtime.compute_device import CPU, ComputeDevice, DeviceQueue, Report, Timing
from collapipe.stage_runtime.compute_lock import COMPUTE_LOCK
from collapipe.tensors import Frame

_PINNED_BYTES = 256 << 20
"""Most pinned memory. Other programs cannot use it, and the operating system cannot move it."""


class Event(Protocol):
    """A point in a stream, like `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Waits until the stream has reached it."""

    def query(self) -> bool:
        """Returns whether the stream has reached it."""

    def elapsed_time(self, end_event: "Event", /) -> float:
        """Returns the milliseconds from this event to a later one, both of which have been reached."""


class Stream(Protocol):
    """Work in order, like `torch.cuda.Stream`."""

    def record(self) -> Event:
        """Returns the event behind all work that the stream was given."""

    def wait(self, event: Event) -> None:
        """Holds back the work that the stream is given later until an event is reached."""


class Streams(Protocol):
    """The three streams of a kind of accelerator, and its memory."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def compute(self) -> Stream: ...

    @property
    def uploads(self) -> Stream: ...

    @property
    def downloads(self) -> Stream: ...

    def upload(self, source: Tensor) -> Tensor:
        """Lets `uploads` copy a tensor to memory of the device, and returns that memory. The source must stay until then."""

    def download(self, source: Tensor, target: Tensor) -> None:
        """Lets `downloads` copy a tensor to the host."""

    def pinned(self, tensor: Tensor) -> Tensor:
        """Allocates pinned memory on the host for a tensor of this shape and element type."""

    def seed(self, key: int) -> None:
        """Seeds the random numbers that the device draws."""


class PinnedMemory:
    """Memory of the host that an accelerator copies from and to, up to a limit. It is thread-safe."""

    def __init__(self, allocate: Callable[[Tensor], Tensor], limit_bytes: int) -> None:
        self._allocate = allocate
        self._limit_bytes = limit_bytes
        self._lock = threading.RLock()  # The garbage collector may call `_release` in `like`.
        self.used_bytes = 0

    def like(self, tensor: Tensor) -> Tensor:
        """Returns memory for a tensor: pinned, or ordinary memory, which is slower, where the limit is reached."""
        num_bytes = 1 << max(tensor.nbytes - 1, 0).bit_length()  # as torch rounds pinned memory
        with self._lock:
            if self.used_bytes + num_bytes > self._limit_bytes:
                return torch.empty(tensor.shape, dtype=tensor.dtype)
            self.used_bytes += num_bytes
        memory = self._allocate(tensor)
        weakref.finalize(memory, self._release, num_bytes)
        return memory

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self.used_bytes -= num_bytes


class Accelerator(ComputeDevice):
    """The accelerator of a host."""

    def __init__(self, streams: Streams, pinned_bytes: int = _PINNED_BYTES) -> None:
        self.torch_device = streams.torch_device
        self.streams = streams
        self.pinned = PinnedMemory(streams.pinned, pinned_bytes)

    def queue(self) -> DeviceQueue:
        return _Queue(self)

    def seed(self, key: int) -> None:
        super().seed(key)
        self.streams.seed(key)

    def reader(self) -> Callable[[Tensor], Tensor]:
        computed = self.streams.compute.record()

        def read(tensor: Tensor) -> Tensor:
            if tensor.device.type != self.torch_device.type:
                return tensor
            copies, copied = self.download([tensor], computed)
            copied.synchronize()
            return copies[0]

        return read

    def download(self, tensors: Sequence[Tensor], computed: Event) -> tuple[list[Tensor], Event]:
        """Copies tensors to the host, once `compute` has reached an event. They are there at the returned event."""
        streams = self.streams
        streams.downloads.wait(computed)
        copies = [self.pinned.like(tensor) for tensor in tensors]
        for tensor, copy in zip(tensors, copies, strict=True):
            streams.download(tensor, copy)
        return copies, streams.downloads.record()


class _Timing(Timing):
    def __init__(self, queue: "_Queue") -> None:
        super().__init__()
        self._queue = queue
        self._event = queue.record()

    def stop(self, *reports: Report) -> None:
        self._queue.stopped(self._event, reports)


class _Queue(DeviceQueue):
    def __init__(self, device: Accelerator) -> None:
        self._device = device
        self._actions: list[tuple[Event, Event, Sequence[Report]]] = []
        """Start, end and reports of each action since `settle`."""
        self._computed: Event | None = None
        """The end of the last action."""
        self._uploads: deque[tuple[Event, Mapping[str, Tensor]]] = deque()
        """Pinned memory that `uploads` may still read, and the event behind that."""

    def record(self) -> Event:
        return self._device.streams.compute.record()

    def stopped(self, started: Event, reports: Sequence[Report]) -> None:
        self._computed = self.record()
        self._actions.append((started, self._computed, reports))

    def start(self) -> Timing:
        return _Timing(self)

    def settle(self) -> None:
        end = self.record()
        end.synchronize()
        now = (
            time.perf_counter()
        )  # The device has reached `end` just now, so this relates the two clocks.
        actions, self._actions = self._actions, []
        self._uploads.clear()
        for started, ended, reports in actions:
            ended_at = now - ended.elapsed_time(end) / 1000
            started_at = ended_at - started.elapsed_time(ended) / 1000
            for report in reports:
                report(started_at, ended_at)

    def to_device(self, frame: Frame) -> dict[str, Tensor]:
        if not frame.tensors:
            return {}
        streams = self._device.streams
        while self._uploads and self._uploads[0][0].query():
            self._uploads.popleft()
        pinned = {
            name: self._device.pinned.like(tensor).copy_(tensor)
            for name, tensor in frame.tensors.items()
        }
        tensors = {name: streams.upload(tensor) for name, tensor in pinned.items()}
        uploaded = streams.uploads.record()
        self._uploads.append((uploaded, pinned))
        with COMPUTE_LOCK:  # So the wait is part of no pass of another stage.
            streams.compute.wait(uploaded)
        return tensors

    def to_host(self, frame: Frame) -> Frame:
        if not frame.tensors:
            return frame
        # An event of now would be behind the work that another stage may have given since.
        computed = self._computed or self.record()
        copies, copied = self._device.download(list(frame.tensors.values()), computed)
        return frame.with_tensors(dict(zip(frame.tensors, copies, strict=True)), copied.synchronize)


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def record(self) -> Any:
        # A thread that waits for a blocking event sleeps. Otherwise it would keep a core busy.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self.stream.record_event(event)
        return event

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event)


class CudaStreams:
    """The streams and the memory of a GPU of NVIDIA."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        # Every thread of torch computes on the default stream, so what is loaded needs no events.
        self.compute = _CudaStream(torch.cuda.default_stream())
        self.uploads = _CudaStream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        self.downloads = _CudaStream(torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def upload(self, source: Tensor) -> Tensor:
        # Memory that torch allocates for `uploads` is free of earlier work of `compute`, so the copy need not wait.
        with torch.cuda.stream(self.uploads.stream):
            target = source.to(self.torch_device, non_blocking=True)
        target.record_stream(
            self.compute.stream
        )  # torch reuses the memory only after the work there
        return target

    def download(self, source: Tensor, target: Tensor) -> None:
        with torch.cuda.stream(self.downloads.stream):
            target.copy_(source, non_blocking=True)
        source.record_stream(self.downloads.stream)

    def pinned(self, tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def seed(self, key: int) -> None:
        torch.cuda.manual_seed(key)


def choose_device(name: str) -> ComputeDevice:
    """Returns the processor that the setting `device` names."""
    return CPU if name == "cpu" else Accelerator(CudaStreams())
