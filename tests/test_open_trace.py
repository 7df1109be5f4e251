"""The trace server: one file, for one page, once."""

from __future__ import annotations

import _thread
import http.client
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tracesim.errors import TraceError
from tracesim.open_trace import PERFETTO, PortError, open_trace

Reply = tuple[int, dict[str, str], bytes]
CONTENT = bytes(range(256)) * 5000


class Browser:
    """Plays the browser: makes requests from a thread of its own, as told by a script."""

    def __init__(self, script: Callable[[Browser], None]) -> None:
        self.script = script
        self.replies: list[Reply] = []
        self.page = ""

    def __call__(self, page: str) -> None:
        self.page = page
        self.trace = urlsplit(page.partition("url=")[2])
        self.thread = threading.Thread(target=self.script, args=[self], daemon=True)
        self.thread.start()

    def request(self, method: str = "GET", path: str | None = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection(str(self.trace.hostname), self.trace.port, timeout=10)
        connection.request(method, path or self.trace.path, headers=headers)
        response = connection.getresponse()
        reply = (response.status, dict(response.getheaders()), response.read())
        connection.close()
        self.replies.append(reply)
        return reply


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "rank 0 #1.pftrace"
    path.write_bytes(CONTENT)
    return path


def test_the_page_is_opened_and_gets_the_file_once(trace: Path) -> None:
    browser = Browser(lambda b: b.request(Origin=PERFETTO) and None)
    announced: list[str] = []
    assert open_trace(trace, port=0, open_browser=browser, announce=announced.append)
    browser.thread.join(10)
    [(status, headers, body)] = browser.replies
    assert (status, body) == (200, CONTENT)
    assert headers["Access-Control-Allow-Origin"] == "https://ui.perfetto.dev"
    assert headers["Content-Length"] == str(len(CONTENT))
    port = browser.trace.port
    assert browser.page == f"https://ui.perfetto.dev/#!/?url=http://127.0.0.1:{port}/rank_0__1.pftrace"
    assert announced == [browser.page]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port or 0), timeout=5)


def refused_then_fetched(browser: Browser) -> None:
    browser.request(Origin="https://example.org")
    browser.request(Host="example.org")
    browser.request(path="/etc/passwd")
    browser.request(path="/../secret")
    browser.request("POST")
    browser.request("OPTIONS", Origin="https://example.org")
    browser.request("OPTIONS", Origin=PERFETTO)
    browser.request(path=browser.trace.path + "?again", Origin=PERFETTO)


def test_other_pages_hosts_paths_and_methods_get_nothing(trace: Path) -> None:
    (trace.parent / "secret").write_bytes(b"secret")
    browser = Browser(refused_then_fetched)
    assert open_trace(trace, port=0, open_browser=browser)
    browser.thread.join(10)
    assert [status for status, _, _ in browser.replies] == [403, 403, 404, 404, 501, 403, 204, 200]
    assert all("Access-Control-Allow-Origin" not in headers for _, headers, _ in browser.replies[:6])
    preflight = browser.replies[6][1]
    assert preflight["Access-Control-Allow-Private-Network"] == "true"
    assert preflight["Access-Control-Allow-Origin"] == PERFETTO


def silent_connection_first(browser: Browser) -> None:
    with socket.create_connection((browser.trace.hostname or "", browser.trace.port or 0), timeout=10):
        browser.request()


def test_a_connection_opened_ahead_of_need_does_not_block(trace: Path) -> None:
    browser = Browser(silent_connection_first)
    assert open_trace(trace, port=0, open_browser=browser)
    browser.thread.join(10)
    assert browser.replies[0][2] == CONTENT


def test_ctrl_c_ends_the_server(trace: Path) -> None:
    """Python's own handler, also where the tests run in the background of a shell, which leaves SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert not open_trace(trace, port=0, open_browser=Browser(lambda _: _thread.interrupt_main()))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_busy_port_is_named_before_a_browser_opens(trace: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortError, match=rf"port {port} on 127\.0\.0\.1 is in use, .*stop that program"):
            open_trace(trace, port=port, open_browser=lambda _: pytest.fail("no page without a server"))


@pytest.mark.parametrize(("name", "reason"), [("missing.json", "no such file"), (".", "is a directory")])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, reason: str) -> None:
    with pytest.raises(TraceError, match=rf"cannot open .*: {reason}.*; give the path of a trace file"):
        open_trace(tmp_path / name, port=0, open_browser=lambda _: pytest.fail("nothing to show"))
