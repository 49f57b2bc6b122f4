"""A slow link between two network namespaces of this machine: it limits, delays and loses IP packets.

Tests use it where the kernel has no netem. The packets are those of the kernel's own TCP. Needs root.
"""

import fcntl
import os
import select
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 1500
_QUEUE_BYTES = 32 << 10
"""Size of the queue of each TCP connection before the link. Packets that do not fit are dropped."""
_PORTS = slice(12, 24)
"""Where an IPv4 packet has its addresses and ports."""


@dataclass(frozen=True)
class LinkQuality:
    """What each direction of the link does to packets.

    Args:
        lost_one_in: Of so many packets, the last one is lost; 0 loses none. If lots were drawn, a packet would be lost again and again at
            times, and its sender would be silent for longer than a job allows.
    """

    rate_bps: float
    delay_seconds: float = 0.0
    lost_one_in: int = 0


class Side:
    """One end of the link: a network namespace with the interface eth0."""

    def __init__(self, namespace: str, address: str) -> None:
        self.namespace = namespace
        self.address = address
        self.num_lost = 0
        """Packets that the link has lost, or dropped because its queue was full."""
        self._file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        request = struct.pack("16sH22x", namespace.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(self._file, _TUNSETIFF, request)
        run(f"ip netns add {namespace}")
        run(f"ip link set {namespace} netns {namespace} name eth0")
        for command in ("link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"):
            run(f"ip -n {namespace} {command}")

    @property
    def command(self) -> list[str]:
        """The beginning of a command line that runs on this side."""
        return ["ip", "netns", "exec", self.namespace]

    def carry(self, other: "Side", wire: "SlowWire") -> None:
        """Carries packets from this side to the other one, until the wire is closed. Connections send in turns, as with the fair queues of
        many routers."""
        num_packets = 0
        waiting: dict[bytes, deque[bytes]] = {}
        """Packets before the link, by connection; the one whose turn it is comes first."""
        under_way: deque[tuple[float, bytes]] = deque()
        free_at = 0.0
        while not wire.closed:
            quality, now = wire.quality, time.monotonic()
            while waiting and free_at <= now:
                ports, queue = next(iter(waiting.items()))
                packet = queue.popleft()
                del waiting[ports]
                if queue:
                    waiting[ports] = queue
                free_at += 8 * len(packet) / quality.rate_bps
                under_way.append((free_at + quality.delay_seconds, packet))
            while under_way and under_way[0][0] <= now:
                with suppress(OSError):  # The receiver's interface may be full, as on a real link.
                    os.write(other._file, under_way.popleft()[1])
            due = [now + 0.1]
            due += [free_at] if waiting else []
            due += [under_way[0][0]] if under_way else []
            if not select.select([self._file], [], [], max(min(due) - now, 0.0))[0]:
                continue
            packet, num_packets = os.read(self._file, 2 * _MTU), num_packets + 1
            queue = waiting.get(packet[_PORTS], deque())
            is_full = sum(map(len, queue)) + len(packet) > _QUEUE_BYTES
            if is_full or (quality.lost_one_in and num_packets % quality.lost_one_in == 0):
                self.num_lost += 1
                continue
            if not waiting:
                free_at = max(free_at, time.monotonic())
            queue.append(packet)
            waiting[packet[_PORTS]] = queue

    def close(self) -> None:
        os.close(self._file)
        run(f"ip netns del {self.namespace}")


class SlowWire:
    """The link between two sides. `quality` may change at any time."""

    def __init__(self, quality: LinkQuality) -> None:
        self.quality = quality
        self.closed = False
        pid = os.getpid()
        self.sides = Side(f"near-{pid}", "10.99.0.1"), Side(f"far-{pid}", "10.99.0.2")
        pairs = (self.sides, self.sides[::-1])
        self._threads = [threading.Thread(target=a.carry, args=(b, self)) for a, b in pairs]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self.closed = True
        for thread in self._threads:
            thread.join()
        for side in self.sides:
            side.close()


@contextmanager
def slow_wire(quality: LinkQuality) -> Iterator[SlowWire]:
    """Makes two network namespaces and the link between them. Skips the test where that is not possible."""
    if os.geteuid() or not shutil.which("ip") or not os.path.exists("/dev/net/tun"):
        pytest.skip("a slow link needs root, iproute2 and /dev/net/tun")
    wire = SlowWire(quality)
    try:
        yield wire
    finally:
        wire.close()


def run(command: str) -> str:
    """Runs a command and returns its output."""
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout
