"""/metrics, /healthz, /readyz and the status page over HTTP: the standard library's server, with bounds.

prometheus_client's own server is the same one without bounds: it renders for each request, on a thread for each client.

Owns the listening socket and its few connections, each on a thread of its own. It must never touch the books: it calls
the functions that it was given.
"""

from __future__ import annotations

import gzip
import io
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ..ext import logs

METRICS_PORT = 9710
MAX_CONNECTIONS = 16
"""How many are served at a time. Beyond that, the oldest client that has not sent its request is cut: otherwise
clients that connect and send nothing would shut out the scrapes and the probes."""
MAX_SCRAPES = 8
"""How many of these may be scrapes. A scrape can take long, and a client that does not read its answer keeps it open.
That must not make a liveness probe fail, because a failed probe ends the daemon."""
DEADLINE_SECONDS = 5.0
"""How long a client may take to send its request, and again to read the answer."""
HEAD_BYTES = 8192
"""The most bytes that a request may have."""
REST_SECONDS = 0.004
"""How long accepting pauses after each connection: 250 a second are enough, and each keeps the interpreter from the
event loop's thread for about 0.4 ms."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""For browsers: no script, nothing loaded from anywhere, and no frame around the page."""
PAUSE_SECONDS = 0.1
"""How long accepting pauses when the process has no descriptor left."""
CUT_SECONDS = 5.0
"""How long accepting waits for the threads of clients that were cut: on a busy machine these end later."""

PACKING_LEVEL = 1
"""Of gzip: a scrape of 1,000 models becomes 27 times smaller in 20 ms. Level 6: 37 times, in 57 ms."""
_TAKES_GZIP = re.compile(r"\bgzip\b(?!\s*;\s*q=0(?:\.0*)?\s*(?:,|$))")

State = Callable[[], tuple[bool, str]]
"""Returns whether the daemon is healthy or ready, and a sentence."""


class MetricsServer(ThreadingHTTPServer):
    """Listens from construction (`port` 0: a free one) and serves from `start()` to `close()`.

    The address "*" is every address of the machine, of IPv4 and of IPv6.

    `render` returns the text of a scrape or raises `TimeoutError`, and `page` the status page likewise; `states` are
    asked by path. Raises `OSError` when it cannot listen.
    """

    request_queue_size = 512  # with the default backlog of 5, a burst is retried after 1 s, and probes time out

    def __init__(
        self,
        address: str,
        port: int,
        render: Callable[[], bytes],
        states: Mapping[str, State],
        page: Callable[[], bytes] | None = None,
    ) -> None:
        self.render, self.states, self.page = render, states, page
        self.scrapes = threading.BoundedSemaphore(MAX_SCRAPES)
        self._connections: set[socket.socket] = set()
        self._silent: dict[socket.socket, None] = {}
        """The connections that have not sent their request and were not cut, the oldest first."""
        self._changed = threading.Condition()
        """Tells that a connection has ended."""
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="metrics", daemon=True)
        if address == "*":
            address = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
        self.address_family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((address, port), _Handler)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and cut the clients that are still connected: their threads read an end of file."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        self.server_close()
        with self._changed:
            for connection in self._connections:
                shut(connection)

    def server_bind(self) -> None:
        """Bind without asking a name server for this machine's name, as HTTPServer would."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self.server_address[0] == "::" and socket.has_dualstack_ipv6():
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> Any:
        """Accept a connection; without a descriptor for it, pause first: the serving loop retries at once."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve on a thread, or close at once if the bound is reached."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._connections) < 2 * MAX_CONNECTIONS, CUT_SECONDS)
            full = not self._make_room()
            if not full:
                self._connections.add(request)
                self._silent[request] = None
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)
        time.sleep(REST_SECONDS)

    def _make_room(self) -> bool:
        """Return whether there is room for one more connection, after cutting a silent client if necessary.

        The thread of that client lives a moment longer, so such threads are bounded, too.
        """
        if len(self._connections) < MAX_CONNECTIONS:
            return True
        if not self._silent or len(self._connections) >= 2 * MAX_CONNECTIONS:
            return False
        oldest = next(iter(self._silent))
        del self._silent[oldest]
        shut(oldest)
        return True

    def heard(self, request: socket.socket) -> None:
        """Note that a client has sent its request: from now on it is not cut for others."""
        with self._changed:
            self._silent.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection, then close it."""
        with self._changed:
            self._connections.discard(request)
            self._silent.pop(request, None)
            self._changed.notify_all()
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed request as one event. A client that left or was too slow is not logged."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, ConnectionError | TimeoutError):
            logs.fault(error)


def authority(address: str, port: int) -> str:
    """Return address and port as they are written in a URL."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def shut(connection: socket.socket) -> None:
    """End a connection that another thread uses; that thread reads an end of file, and closes it."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the client has closed it already


class _Head(io.RawIOBase):
    """The bytes of a request: HEAD_BYTES at most, and all of them before the deadline.

    A timeout for each read would never end a client that sends one byte a second.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = HEAD_BYTES
        self._deadline = time.monotonic() + DEADLINE_SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._left:
            return 0
        self._connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        count = self._connection.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        return count


def _split(url: str) -> SplitResult:
    """Return the parts of a URL; all are empty if the text is not a URL, as `http://[`."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version, sys_version = "membrokerd", ""

    def setup(self) -> None:
        """Read within the bounds."""
        super().setup()
        self.rfile = io.BufferedReader(_Head(self.connection))

    def do_GET(self) -> None:
        """Answer a path. The deadline is now that of the answer, which sendall() keeps."""
        self.server.heard(self.connection)
        self.connection.settimeout(DEADLINE_SECONDS)
        path = _split(self.path).path
        if not self._is_for_us():
            self._answer(403, b"this port is for programs of this machine: ask for 127.0.0.1 or localhost\n")
        elif path == "/metrics":
            self._rendered(self.server.render, "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/" and self.server.page is not None:
            self._rendered(self.server.page, "text/html; charset=utf-8")
        elif state := self.server.states.get(path):
            well, sentence = state()
            self._answer(200 if well else 503, f"{sentence}\n".encode())
        else:
            self._answer(404, b"try /, /metrics, /healthz or /readyz\n")

    def do_HEAD(self) -> None:
        """Answer as GET, without the body: it costs the same."""
        self.do_GET()

    def _is_for_us(self) -> bool:
        """Say whether the Host is one that only a program of this machine uses, if the server is on loopback.

        A page from elsewhere in an operator's browser could read all that is served: its name may be made to lead to
        127.0.0.1 once it has been loaded (DNS rebinding).
        """
        if not ip_address(self.server.server_name).is_loopback:
            return True
        host = _split(f"//{self.headers.get('Host', 'localhost')}").hostname or ""
        try:
            return host == "localhost" or bool(ip_address(host))
        except ValueError:
            return False

    def _rendered(self, render: Callable[[], bytes], content_type: str) -> None:
        if not self.server.scrapes.acquire(blocking=False):
            self._answer(503, b"too many scrapes at a time\n")
            return
        with ExitStack() as scrape:
            scrape.callback(self.server.scrapes.release)
            try:
                text = render()
            except TimeoutError:
                self._answer(503, b"the event loop does not answer\n")
            else:
                packs = bool(_TAKES_GZIP.search(self.headers.get("Accept-Encoding", "")))
                # A thread that compresses does not keep the interpreter from the event loop.
                self._answer(200, gzip.compress(text, PACKING_LEVEL) if packs else text, content_type, packs)

    def _answer(
        self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8", is_packed: bool = False
    ) -> None:
        self.send_response(status)
        self.send_header("Vary", "Accept-Encoding")
        if is_packed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: scrapes and probes come every few seconds."""
