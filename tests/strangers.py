"""Connections of strangers, which have no certificate and send nothing."""

import selectors
import socket
import threading
from contextlib import suppress

_CLOSING_SECONDS = 120.0


class Strangers:
    """Keeps connections to a server open without a byte, until it is closed. Those that the server closes come again."""

    def __init__(self, address: str, number: int) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._selector = selectors.DefaultSelector()
        self._open: set[socket.socket] = set()
        self._number = number
        self._is_over = threading.Event()
        self.have_tried_all = threading.Event()
        self._thread = threading.Thread(target=self._connect, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join(_CLOSING_SECONDS)
        for connection in self._open:
            connection.close()

    def _connect(self) -> None:
        while not self._is_over.is_set():
            for _ in range(self._number - len(self._open)):
                with suppress(OSError):  # The server takes no more for the moment.
                    connection = socket.create_connection(self._address, 1.0)
                    self._open.add(connection)
                    self._selector.register(connection, selectors.EVENT_READ)
                if self._is_over.is_set():
                    return
            self.have_tried_all.set()
            for key, _ in self._selector.select(0.1):
                connection = key.fileobj  # type: ignore[assignment]
                with suppress(OSError):
                    if connection.recv(4096):
                        continue
                self._selector.unregister(connection)
                self._open.discard(connection)
                connection.close()
