"""An HTTP server whose answers a test chooses."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

Form = dict[str, list[str]]
Answer = Callable[[Form], tuple[int, bytes]]
"""Returns status and body of the response to a request with these parameters."""


@contextmanager
def answering(answer: Answer, body_seconds: float = 0.0) -> Iterator[str]:
    """Serves on a free port and yields "host:port". A body comes so long after its headers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(urlsplit(self.path).query)

        def do_POST(self) -> None:
            self._answer(self.rfile.read(int(self.headers["Content-Length"])).decode())

        def _answer(self, query: str) -> None:
            status, body = answer(parse_qs(query))
            try:
                self.send_response(status)
                self.end_headers()
                time.sleep(body_seconds)
                self.wfile.write(body)
            except OSError:
                self.close_connection = True  # the client has gone

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.socket.close()
