"""The HTTP server of `/metrics` and the probes: its answers, what it refuses, and how long it waits for a client."""

from __future__ import annotations

import gzip
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from email import message_from_bytes
from email.message import Message

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.sizes import MIB
from tests.support.views import UUID, Source, books, model

from membrokerd.observe import cached_text as kept
from membrokerd.observe import metrics_server
from membrokerd.observe.metrics import Metrics
from membrokerd.observe.metrics_server import MetricsServer


class Trouble:
    """The two probes of a daemon, with the answers that a test sets."""

    def __init__(self) -> None:
        self.healthy = self.ready = (True, "ok")


def hang() -> None:
    """Stand in for an event loop that does not answer in time."""
    raise TimeoutError


@pytest.fixture
def trouble() -> Trouble:
    return Trouble()


@pytest.fixture
def source() -> Source:
    return Source(books(model("acme", "a", 4 * MIB)))


@pytest.fixture
def server(source: Source, trouble: Trouble) -> Iterator[MetricsServer]:
    states = {"/healthz": lambda: trouble.healthy, "/readyz": lambda: trouble.ready}
    made = MetricsServer("127.0.0.1", 0, Metrics(source.view, UUID).render, states)
    made.start()
    yield made
    made.close()


def get(server: MetricsServer, path: str) -> tuple[int, str, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}", timeout=DEADLINE_SECONDS) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def is_cut(client: socket.socket) -> bool:
    """Wait until the server says something or has closed the connection; say whether it has closed it.

    The kernel resets a connection that is closed before the server's thread has read what the client sent.
    """
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    ("accept", "packed"),
    [("gzip", True), ("deflate, gzip;q=1.0", True), ("", False), ("gzip;q=0", False), ("gzip; q=0.0, deflate", False)],
)
def test_a_scrape_is_packed_for_a_client_that_takes_it(server: MetricsServer, accept: str, *, packed: bool) -> None:
    """Prometheus asks for gzip: 1,000 models are 2.5 MB of text, most of it the same labels again and again.

    It reads one format of text, whatever it prefers.
    """
    prefers = "Accept: application/openmetrics-text; version=1.0.0"
    status, headers, body = raw_answer(server, "GET", "/metrics?name[]=x", prefers, f"Accept-Encoding: {accept}")
    assert (status, headers["Content-Encoding"]) == (200, "gzip" if packed else None)
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert int(headers["Content-Length"]) == len(body)
    text = gzip.decompress(body) if packed else body
    assert text.startswith(b"# HELP ")
    assert len(body) < len(text) / 4 or not packed


def test_head_is_get_without_the_body(server: MetricsServer, trouble: Trouble) -> None:
    """Load balancers and uptime checks ask so; they were told 501, as if the broker were not well."""
    status, headers, body = raw_answer(server, "HEAD", "/metrics")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 1000
    assert raw_answer(server, "HEAD", "/healthz")[::2] == (200, b"")
    trouble.healthy = (False, "it hangs")
    assert raw_answer(server, "HEAD", "/healthz")[::2] == (503, b"")
    assert raw_answer(server, "HEAD", "/none")[::2] == (404, b"")


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_every_address_is_of_both_families(address: str) -> None:
    """A cluster may have IPv6 alone: the kubelet probes the pod's own address, and 0.0.0.0 is not one of those."""
    if address == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    made = MetricsServer("*", 0, lambda: b"# HELP x\n", {"/healthz": lambda: (True, "ok")})
    made.start()
    try:
        with socket.create_connection((address, made.server_port), timeout=DEADLINE_SECONDS) as client:
            client.sendall(b"GET /healthz HTTP/1.0\r\nHost: pod.example\r\n\r\n")
            assert b" 200 OK" in client.makefile("rb").readline()
    finally:
        made.close()


def raw_answer(server: MetricsServer, method: str, path: str, *headers: str) -> tuple[int, Message, bytes]:
    """Return status, headers and the body as it was sent, which a library would unpack."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=DEADLINE_SECONDS) as client:
        client.sendall("\r\n".join((f"{method} {path} HTTP/1.1", *headers, "", "")).encode())
        head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
    status, _, rest = head.partition(b"\r\n")
    return int(status.split()[1]), message_from_bytes(rest), body


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (["127.0.0.1:9710", "localhost", "LOCALHOST:8080", "[::1]:9710", "10.1.2.3"], 200),
        (["evil.example:9710", "127.0.0.1.evil.example", "", "[", "localhost.evil.example"], 403),
    ],
    ids=["a program of this machine", "a page from elsewhere"],
)
def test_only_a_program_of_this_machine_is_answered(server: MetricsServer, hosts: list[str], status: int) -> None:
    """Also one behind a forwarded port; HTTP/1.0 needs no Host. A page from elsewhere had its name made to lead to
    127.0.0.1 once an operator's browser had loaded it (DNS rebinding).
    """
    for host in hosts:
        for path in ("/metrics", "/healthz"):
            assert raw_answer(server, "GET", path, f"Host: {host}")[0] == status, host
    assert raw_answer(server, "GET", "/metrics")[0] == 200


def test_health_and_readiness_say_why_not(server: MetricsServer, trouble: Trouble) -> None:
    assert get(server, "/healthz")[::2] == (200, "ok\n")
    trouble.ready = (False, "stopping")
    assert get(server, "/readyz")[::2] == (503, "stopping\n")
    trouble.ready = (True, "ok, but")
    assert get(server, "/readyz")[::2] == (200, "ok, but\n")
    assert get(server, "/healthz")[0] == 200
    assert get(server, "/")[0] == get(server, "/metrics/")[0] == 404


def test_a_view_that_does_not_come_is_a_503(server: MetricsServer, source: Source) -> None:
    """A daemon whose event loop hangs reports it; the scrape fails instead of waiting forever."""
    source.before = hang
    assert get(server, "/metrics")[0] == 503


def test_slow_clients_make_room(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that connect and send single bytes fill the table: the oldest is closed for one that asks."""
    monkeypatch.setattr(metrics_server, "DEADLINE_SECONDS", 3600.0)
    before = threading.active_count()
    slow = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(metrics_server.MAX_CONNECTIONS)]
    for client in slow:
        client.sendall(b"GET /metr")
        client.settimeout(DEADLINE_SECONDS)
    assert get(server, "/healthz")[0] == 200
    assert is_cut(slow[0])
    until(lambda: threading.active_count() <= before + metrics_server.MAX_CONNECTIONS)
    for client in slow:
        client.close()


def test_a_slow_client_is_cut(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has so long for its request, also if it never falls silent for long."""
    with monkeypatch.context() as patch:
        patch.setattr(metrics_server, "DEADLINE_SECONDS", 0.5)
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=DEADLINE_SECONDS) as client:
            client.sendall(b"GET /metr")
            assert is_cut(client)
    assert get(server, "/metrics")[0] == 200


def test_all_that_ask_at_once_share_one_scrape(
    server: MetricsServer, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many scrapers as are allowed wait for one snapshot of the books. One more is refused; a probe is not.

    Afterwards the text is cached: many constant scrapers cost as much as one.
    """
    monkeypatch.setattr(kept, "KEPT_SECONDS", 60)
    asked, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        asked.set()
        assert go_on.wait(DEADLINE_SECONDS)

    source.before = wait
    clients = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(metrics_server.MAX_SCRAPES)]
    for client in clients:
        client.settimeout(DEADLINE_SECONDS)
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    assert asked.wait(DEADLINE_SECONDS)
    until(lambda: server.scrapes._value == 0)  # type: ignore[attr-defined]
    assert get(server, "/metrics")[::2] == (503, "too many scrapes at a time\n")
    assert get(server, "/healthz")[0] == 200
    go_on.set()
    answers = [b"".join(iter(lambda client=client: client.recv(65536), b"")) for client in clients]  # type: ignore[misc]
    for client in clients:
        client.close()
    assert all(answer.startswith(b"HTTP/1.0 200") for answer in answers)
    assert len({answer.partition(b"\r\n\r\n")[2] for answer in answers}) == 1
    until(lambda: get(server, "/metrics")[0] == 200)
    assert source.views == 1


def test_scrapers_that_read_nothing_leave_the_probes_alone() -> None:
    """A local user requests a long answer a hundred times and reads nothing: no liveness probe may fail."""
    long = b"# a line\n" * 1_000_000  # more than the kernel's buffers take
    made = MetricsServer("127.0.0.1", 0, lambda: long, {"/healthz": lambda: (True, "ok")})
    made.start()
    slow, most = [], 0
    try:
        for _ in range(100):
            slow.append(socket.create_connection(("127.0.0.1", made.server_port)))
            slow[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert get(made, "/healthz")[::2] == (200, "ok\n")
            most = max(most, len(made._connections))
        assert most >= metrics_server.MAX_SCRAPES, "no answer was waiting to be read: the test shows nothing"
    finally:
        for client in slow:
            client.close()
        made.close()


def test_who_leaves_without_a_word_is_no_event(server: MetricsServer, caplog: pytest.LogCaptureFixture) -> None:
    """A load balancer probes the port and resets the connection: that must not fill the log."""
    for said in (b"", b"GET /metr", b"POST /metrics HTTP/1.0\r\n\r\n") * 10:
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=DEADLINE_SECONDS) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(said)
    assert get(server, "/healthz")[0] == 200
    server.close()
    assert not caplog.records


def test_a_hundred_silent_clients_leave_the_probes_alone(server: MetricsServer) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(100)]
    for client in silent:
        client.sendall(b"GET /metr")
        assert get(server, "/healthz")[::2] == (200, "ok\n")
    for client in silent:
        client.close()


def test_a_request_has_a_bound(server: MetricsServer) -> None:
    """A client that sends endless headers is cut off after 8 KiB, and not logged."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=DEADLINE_SECONDS) as client:
        client.sendall(b"GET /healthz HTTP/1.0\r\n" + b"X: y\r\n" * 100)
        with suppress(ConnectionError):
            for _ in range(1_000):
                client.sendall(b"X-" + b"y" * 10_000 + b": z\r\n")
        with suppress(ConnectionError):
            assert client.recv(12) in (b"", b"HTTP/1.0 431", b"HTTP/1.0 200")
    assert get(server, "/healthz")[0] == 200


def test_close_ends_at_once_beside_a_client_that_says_nothing(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connected clients do not delay a stop. Closing twice, or before the start, is allowed."""
    monkeypatch.setattr(metrics_server, "DEADLINE_SECONDS", 3600.0)
    made = MetricsServer("127.0.0.1", 0, Metrics(source.view, UUID).render, {})
    made.start()
    with socket.create_connection(("127.0.0.1", made.server_port), timeout=DEADLINE_SECONDS) as silent:
        silent.sendall(b"GET")
        made.close()
    made.close()
    MetricsServer("127.0.0.1", 0, Metrics(source.view, UUID).render, {}).close()
