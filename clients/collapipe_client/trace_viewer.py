"""Shows a trace in the browser: serves the file on loopback until Perfetto's page has fetched it."""

import time
import webbrowser
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import quote

from collapipe.errors import AttemptFailedError, InvalidInputError

_SITE = "https://ui.perfetto.dev"
_PORT = 9001
"""The only port of this machine from which Perfetto's page may fetch, by its content security policy."""
_SILENCE_SECONDS = 5.0
_LIMIT_SECONDS = 120.0


def show_in_browser(
    file: Path,
    note: Callable[[str], None],
    open_url: Callable[[str], bool] = webbrowser.open,
    port: int = _PORT,
) -> None:
    """Opens Perfetto's page with a trace, and returns when the page has fetched the file.

    The trace stays on this machine, because the page computes in the browser.

    Args:
        note: Tells the user what happens.
        open_url: Returns whether there is a browser.
        port: 0 takes any free port.

    Raises:
        InvalidInputError: The port is in use.
        AttemptFailedError: No browser fetched the file.
    """
    data = file.read_bytes()
    path = f"/{quote(file.name)}"
    fetched = False

    class Handler(BaseHTTPRequestHandler):
        timeout = (
            _SILENCE_SECONDS  # Browsers open connections in advance, and send nothing on them.
        )

        def do_GET(self) -> None:
            nonlocal fetched
            if self.path != path:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", _SITE)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            fetched = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        server = HTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise InvalidInputError(
            f"port {port} of this machine is in use, and Perfetto's page fetches from no other port: end the process that "
            f"uses it, or open {file} by hand at {_SITE}"
        ) from error
    with server:
        url = f"{_SITE}/#!/?url=http://127.0.0.1:{server.server_port}{path}"
        opened = open_url(url)
        note(f"{'opened' if opened else 'open in a browser on this machine:'} {url}")
        deadline = time.monotonic() + _LIMIT_SECONDS
        while not fetched:
            server.timeout = deadline - time.monotonic()
            if server.timeout <= 0:
                raise AttemptFailedError(
                    f"no browser fetched the trace within {_LIMIT_SECONDS:g} s: open {file} by hand at {_SITE}"
                )
            server.handle_request()
