"""A relay on loopback that stands for a slow link."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_BUFFER_BYTES = 4096


class Relay:
    """Forwards TCP connections to a server.

    Args:
        server: "host:port" of the server.
        bits_per_second: Rate of each direction; 0 means no limit.
        delay_seconds: Delay of each direction.
    """

    def __init__(self, server: str, bits_per_second: float = 0, delay_seconds: float = 0) -> None:
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._bits_per_second = bits_per_second
        self._delay_seconds = delay_seconds
        self._listening = socket.socket()
        # Large buffers would take in a whole transfer at once.
        self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._listening.bind(("127.0.0.1", 0))
        self._listening.listen()
        self._open: list[socket.socket] = []
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.num_connections = 0
        self.forwarded_bytes = 0
        """Bytes of both directions."""
        self.cut_after_bytes: int | None = None
        """The first connection breaks before more bytes are forwarded."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()
        for each in self._open:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listening.accept()
            except OSError:  # closed
                return
            self.num_connections += 1
            server = socket.socket()
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
            server.connect(self._server)
            self._open += [caller, server]
            for source, target in ((caller, server), (server, caller)):
                threading.Thread(target=self._forward, args=(source, target), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        waiting: list[tuple[float, bytes]] = []
        changed = threading.Condition()

        def deliver() -> None:
            while True:
                with changed:
                    while not waiting:
                        changed.wait()
                    due, data = waiting.pop(0)
                time.sleep(max(due - time.monotonic(), 0))
                if not data:
                    return
                try:
                    target.sendall(data)
                except OSError:
                    return

        threading.Thread(target=deliver, daemon=True).start()
        try:
            while data := source.recv(_BUFFER_BYTES):
                if self._bits_per_second:
                    time.sleep(8 * len(data) / self._bits_per_second)
                limit = self.cut_after_bytes
                if limit is not None and self.forwarded_bytes + len(data) > limit:
                    self.cut_after_bytes = None
                    break
                self.forwarded_bytes += len(data)
                with changed:
                    waiting.append((time.monotonic() + self._delay_seconds, data))
                    changed.notify()
        except OSError:
            pass
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with changed:
            waiting.append((0.0, b""))
            changed.notify()


@contextmanager
def relay(server: str, bits_per_second: float = 0, delay_seconds: float = 0) -> Iterator[Relay]:
    made = Relay(server, bits_per_second, delay_seconds)
    try:
        yield made
    finally:
        made.close()
