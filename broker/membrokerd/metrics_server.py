"""/metrics, /healthz and /readyz over HTTP, on threads of its own: a slow client costs a thread for some seconds.

Owns the listening socket and its few connections. It must never touch the books: it asks the registry and two
callables.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

MAX_CONNECTIONS = 16
"""Served at a time. Beyond it the oldest that has not asked yet makes room, else whoever holds some open and says
nothing would shut out the scrapes and the probes."""
DEADLINE_SECONDS = 10.0
"""The whole life of a connection. A client that drips bytes would outlive any timeout of a single read."""
PAUSE_SECONDS = 0.1
"""How long accepting rests when the process has no descriptor left."""
_TEXT = "text/plain; charset=utf-8"

State = Callable[[], str]
"""Returns "" when all is well, else a word or sentence that says why not."""


class MetricsServer:
    """Listens from construction (`port` 0: a free one) and serves from `start()` to `close()`.

    Raises `OSError` when it cannot listen.
    """

    def __init__(self, address: str, port: int, registry: CollectorRegistry, healthy: State, ready: State) -> None:
        self._server = _Server(address, port, registry, {"/healthz": healthy, "/readyz": ready})
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics", daemon=True
        )

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.server_port

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stop, and cut whoever is still connected."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
        self._server.cut(float("inf"))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # of 5, who comes beside a few others is heard a second later, too late for a probe

    def __init__(self, address: str, port: int, registry: CollectorRegistry, states: dict[str, State]) -> None:
        self.registry, self.states = registry, states
        self._connections: dict[socket.socket, float] = {}
        self._silent: dict[socket.socket, None] = {}
        """Those of them that have not asked yet, and are not cut; the oldest first."""
        self._lock = threading.Lock()
        self.address_family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        """Bind without asking a name server who we are, as HTTPServer would."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> Any:
        """Accept; where there is no descriptor for it, rest first: the loop would try again at once, for ever."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve on a thread, or close at once when as many as allowed are being served."""
        with self._lock:
            full = not self._make_room()
            if not full:
                self._connections[request] = time.monotonic()
                self._silent[request] = None
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def _make_room(self) -> bool:
        """Cut one that says nothing, where there is need. Its thread lasts a moment longer: these are bounded, too."""
        if len(self._connections) < MAX_CONNECTIONS:
            return True
        if not self._silent or len(self._connections) >= 2 * MAX_CONNECTIONS:
            return False
        oldest = next(iter(self._silent))
        del self._silent[oldest]
        _shut(oldest)
        return True

    def heard(self, request: socket.socket) -> None:
        """A connection has asked: it is answered, whoever else comes."""
        with self._lock:
            self._silent.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Forget the connection, then close it."""
        with self._lock:
            self._connections.pop(request, None)
            self._silent.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut what is past its deadline; the serving loop calls this ten times a second."""
        self.cut(time.monotonic() - DEADLINE_SECONDS)

    def cut(self, began_before: float) -> None:
        """Wake the threads of these connections with an end of file. They close them."""
        with self._lock:
            for connection, began in self._connections.items():
                if began < began_before:
                    _shut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a failed answer as one event: the default prints to stderr. A client that went away is none."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            logging.getLogger("membrokerd").warning("an HTTP request failed", exc_info=True)


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the client was faster


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 5
    server_version, sys_version = "membrokerd", ""

    def do_GET(self) -> None:
        """Answer a path."""
        self.server.heard(self.connection)
        path = urlsplit(self.path).path
        if path == "/metrics":
            self._metrics()
        elif state := self.server.states.get(path):
            trouble = state()
            self._answer(503 if trouble else 200, f"{trouble or 'ok'}\n".encode())
        else:
            self._answer(404, b"here are /metrics, /healthz and /readyz\n")

    def _metrics(self) -> None:
        encoder, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = encoder(self.server.registry)
        except TimeoutError:
            self._answer(503, b"the broker does not answer\n")
        else:
            self._answer(200, body, content_type)

    def _answer(self, status: int, body: bytes, content_type: str = _TEXT) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except (ConnectionError, TimeoutError):
            self.close_connection = True  # the client went away, or did not read: nobody is left to tell

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: a scrape every few seconds is no event."""
