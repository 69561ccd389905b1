"""The metrics of several daemons as one text, each family once with the series of all, and their status pages as one.

Owns how they are joined. It must never change a figure.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from html import escape

from .cached_text import CachedText
from .catalog import DAEMON_RESTARTS, DAEMON_UP
from .html_document import document
from .metrics_server import shut

FETCH_SECONDS = 3.0
"""How long one daemon may take to answer. It answers a scrape with an error after 2 s itself."""
MAX_TEXT_BYTES = 64 << 20
_HEAD = b"# HELP "


def merge(texts: Mapping[str, bytes]) -> bytes:
    """Return one text for those of several daemons, by UUID. A series without labels gets its daemon's `gpu_uuid`."""
    families: dict[bytes, list[bytes]] = {}
    for uuid, text in texts.items():
        label = b'{gpu_uuid="%s"} ' % uuid.encode()
        family: list[bytes] = []
        for line in text.splitlines(keepends=True):
            if line.startswith(_HEAD):
                name = line.removeprefix(_HEAD).partition(b" ")[0]
                is_new = name not in families
                family = families.setdefault(name, [])
            if not line.startswith(b"#"):
                family.append(line if b"{" in line else line.replace(b" ", label, 1))
            elif is_new:
                family.append(line)
    return b"".join(b"".join(lines) for lines in families.values())


def join_pages(pages: Mapping[str, bytes]) -> bytes:
    """Return one status page for those of several daemons, by UUID: an empty one if a daemon does not answer."""
    bodies = []
    for uuid, page in pages.items():
        body = page.decode(errors="replace").partition("<body>")[2].rpartition("</body>")[0]
        bodies.append(body or f"<h1>membroker: {escape(uuid)}</h1><p>This daemon does not answer: see its log.</p>")
    return document("membroker", "<hr>".join(bodies)).encode()


def own_text(up: Mapping[str, bool], restarts: Mapping[str, int]) -> bytes:
    """Return what the parent itself knows about each daemon."""
    lines: list[str] = []
    for spec, figures in ((DAEMON_UP, up), (DAEMON_RESTARTS, restarts)):
        lines += [f"# HELP {spec.name} {spec.help}\n", f"# TYPE {spec.name} {spec.kind}\n"]
        lines += [f'{spec.name}{{gpu_uuid="{uuid}"}} {int(figure)}\n' for uuid, figure in figures.items()]
    return "".join(lines).encode()


class Merged:
    """Fetches and joins the metrics, and the status pages, of all daemons.

    `ports` returns each daemon's port on the loopback address by UUID, None while the daemon is not ready. `restarts`
    returns how often each was started again. A daemon that does not answer is left out, and is not up.
    """

    def __init__(
        self, ports: Callable[[], Mapping[str, int | None]], restarts: Callable[[], Mapping[str, int]]
    ) -> None:
        self._ports, self._restarts = ports, restarts
        self.render = CachedText(self._join_texts).get
        """Return the text of a scrape; may be called on any thread."""
        self.page = CachedText(lambda: join_pages(self._fetch_from_all("/"))).get
        """Return the status pages of all daemons as one; may be called on any thread."""

    def _join_texts(self) -> bytes:
        answers = self._fetch_from_all("/metrics")
        texts = {uuid: text for uuid, text in answers.items() if text.startswith(_HEAD)}
        return own_text({uuid: uuid in texts for uuid in answers}, self._restarts()) + merge(texts)

    def _fetch_from_all(self, path: str) -> dict[str, bytes]:
        ports = self._ports()
        with ThreadPoolExecutor(max(1, len(ports))) as threads:
            answers = {uuid: threads.submit(_fetch, port, path) for uuid, port in ports.items() if port}
            return {uuid: answers[uuid].result() if uuid in answers else b"" for uuid in ports}


def _fetch(port: int, path: str) -> bytes:
    """Return what a daemon serves at `path`: all of it and in time, or else nothing.

    One cut line would make Prometheus refuse what all the others answer.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=FETCH_SECONDS)
    with ExitStack() as stack:
        stack.callback(connection.close)
        try:
            connection.connect()
            end = threading.Timer(FETCH_SECONDS, shut, (connection.sock,))  # the timeout is for each read alone
            end.start()
            stack.callback(end.cancel)
            connection.request("GET", path)
            answer = connection.getresponse()
            if answer.status == 200 and answer.length is not None and answer.length <= MAX_TEXT_BYTES:
                return answer.read()
        except (OSError, http.client.HTTPException):
            return b""
    return b""
