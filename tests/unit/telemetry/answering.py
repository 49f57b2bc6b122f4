"""An HTTP server whose answers a test chooses."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

Form = dict[str, list[str]]
Answer = Callable[[Form], tuple[int, bytes]]
"""Returns status and body of the response to a request with these parameters."""


@contextmanager
def answering(answer: Answer, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serves on a free port, by HTTPS if `tls` is given, and yields "host:port"."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = self.rfile.read(int(self.headers["Content-Length"])).decode()
            status, body = answer(parse_qs(query))
            try:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)
            except OSError:
                self.close_connection = True  # the client has gone

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.socket.close()
