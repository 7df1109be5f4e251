"""Hands one trace file to ui.perfetto.dev in the user's browser, without the file leaving the machine.

The page fetches it from ``http://127.0.0.1:9001``, the one local address its content policy allows. The server is open
for that one file, that one page and one download, and ends with it.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
import webbrowser
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from .errors import TraceError

PERFETTO = "https://ui.perfetto.dev"
ADDRESS = "127.0.0.1"
PORT = 9001
"""The port that ui.perfetto.dev may fetch from."""


class PortError(ValueError):
    """The port of the trace server cannot be used."""


def open_trace(
    path: str | os.PathLike[str],
    *,
    port: int = PORT,
    open_browser: Callable[[str], object] = webbrowser.open_new_tab,
    announce: Callable[[str], object] | None = None,
) -> bool:
    """Serve a trace until ui.perfetto.dev has fetched it once.

    Args:
        path: the file; any format that Perfetto reads.
        port: 0 takes a free one (the public page cannot use it then).
        open_browser: called with the address of the page once the server listens.
        announce: called with the same address before, to print it where no browser can be opened.

    Returns:
        True if the file was fetched, False if the user stopped the server before (Ctrl-C).

    Raises:
        TraceError: if the file cannot be read.
        PortError: if another program listens on the port.
    """
    trace = Path(path)
    try:
        with open(trace, "rb"):
            pass
    except OSError as error:
        raise TraceError(
            f"cannot open {trace}: {(error.strerror or str(error)).lower()}; give the path of a trace file"
        ) from error
    with _listen(trace, port) as server:
        page = f"{PERFETTO}/#!/?url=http://{ADDRESS}:{server.server_port}{server.resource}"
        try:
            if announce is not None:
                announce(page)
            open_browser(page)
            server.serve_forever(poll_interval=0.05)
        except KeyboardInterrupt:
            return False
        return server.fetched.is_set()


def _listen(trace: Path, port: int) -> _TraceServer:
    try:
        return _TraceServer(trace, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortError(
                f"port {port} on {ADDRESS} is in use, perhaps by another `tracesim open` or `trace_processor --httpd`; "
                f"stop that program and try again (ui.perfetto.dev fetches from port {PORT} only), or open "
                f"{PERFETTO} and drop {trace} on it"
            ) from error
        raise PortError(f"cannot listen on {ADDRESS}:{port}: {error.strerror or error}") from error


class _TraceServer(ThreadingHTTPServer):
    """Threads, because browsers open connections ahead of need and would block a server with one."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"

    def __init__(self, trace: Path, port: int) -> None:
        super().__init__((ADDRESS, port), _Handler)
        self.trace = trace
        # Only characters that mean the same in a path, a URL and the fragment of a URL.
        self.resource = "/" + re.sub(r"[^A-Za-z0-9._-]", "_", trace.name)
        self.fetched = threading.Event()

    def is_own_host(self, host: str | None) -> bool:
        """Whether a request names this machine: a page that points its own host name here gets nothing."""
        return host in (f"{ADDRESS}:{self.server_port}", f"localhost:{self.server_port}")


class _Handler(BaseHTTPRequestHandler):
    server: _TraceServer
    timeout = 30
    """Seconds a silent connection is kept."""

    def do_GET(self) -> None:
        """The trace, to Perfetto's page or a program of the user; ends the server once it is through."""
        if self._refused():
            return
        try:
            with open(self.server.trace, "rb") as file:
                self.send_response(HTTPStatus.OK)
                self.send_header("Content-Type", "application/octet-stream")
                self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
                self._end_headers()
                shutil.copyfileobj(file, self.wfile, 1 << 20)
                self.wfile.flush()
        except OSError:
            # The browser went away in the middle: the next request gets the file.
            self.close_connection = True
            return
        self.server.fetched.set()
        self.server.shutdown()

    def do_OPTIONS(self) -> None:
        """The browser's question whether a public page may ask this machine."""
        if self._refused():
            return
        self.send_response(HTTPStatus.NO_CONTENT)
        self.send_header("Access-Control-Allow-Methods", "GET")
        self.send_header("Access-Control-Allow-Private-Network", "true")
        self._end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - name given by the base class
        """Nothing: requests are no news to the user."""

    def _refused(self) -> bool:
        origin = self.headers.get("Origin")
        if not self.server.is_own_host(self.headers.get("Host")) or origin not in (None, PERFETTO):
            self._reply(HTTPStatus.FORBIDDEN)
        elif self.path.partition("?")[0] != self.server.resource:
            self._reply(HTTPStatus.NOT_FOUND)
        else:
            return False
        return True

    def _reply(self, status: HTTPStatus) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _end_headers(self) -> None:
        self.send_header("Access-Control-Allow-Origin", PERFETTO)
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()
