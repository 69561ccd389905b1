"""The metrics of several daemons as one text, each family once with the series of all, and their status pages as one.

Owns how they are joined. It must never change a figure.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from html import escape

from membroker.vmm import format_size

from .cached_text import CachedText
from .catalog import DAEMON_RESTARTS, DAEMON_UP
from .html_document import document, host_name
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


def join_pages(pages: Mapping[str, bytes], texts: Mapping[str, bytes], host: str) -> bytes:
    """Return one status page for those of several daemons, by UUID: empty ones if a daemon does not answer.

    A table of all comes first; the figures are those of their scrapes.
    """
    rows, bodies = [], []
    for uuid, page in pages.items():
        body = page.decode(errors="replace").partition("<body>")[2].rpartition("</body>")[0]
        name = escape(uuid)
        missing = (
            f'<h1 class="bad">{escape(host)}: {name}</h1><p class="bad">This daemon does not answer: see its log.</p>'
        )
        bodies.append(f'<div id="{name}">{body or missing}</div>')
        cells = _cells(texts.get(uuid, b"")) if body else None
        shown = "".join(f"<td>{cell}</td>" for cell in cells or ("does not answer", *[""] * (len(_HEADS) - 1)))
        rows.append(f'<tr{" class=bad" * (not cells)}><td class="name"><a href="#{name}">{name}</a></td>{shown}</tr>')
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    table = f'<table><thead><tr><th class="name">GPU</th>{heads}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    top = f'<h1>{escape(host)}: {len(pages)} GPU{"s" * (len(pages) != 1)}</h1><div class="wide">{table}</div><hr>'
    return document(f"{host}: membroker", top + "<hr>".join(bodies)).encode()


_HEADS = ("lent", "capacity", "reserved", "waiting", "refused", "sessions", "version")


def _cells(text: bytes) -> tuple[str, ...]:
    """Return what the table says of a daemon, out of its scrape."""

    def total(name: str, label: str = "") -> int:
        pattern = rf"^membroker_{name}{{[^}}]*{label}[^}}]*}} (\S+)$"
        return int(sum(map(float, re.findall(pattern.encode(), text, re.MULTILINE))))

    at_device = 'location="device"'
    sizes = [
        total(name, at_device)
        for name in ("device_lent_bytes", "device_capacity_bytes", "device_reserved_bytes", "model_waiting_bytes")
    ]
    version = re.search(rb'^membroker_build_info{[^}]*version="([^"]*)"', text, re.MULTILINE)
    counts = (total("device_denials_total"), total("sessions"))
    return (*map(format_size, sizes), *map(str, counts), escape(version[1].decode(errors="replace")) if version else "")


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
        self.page = CachedText(self._join_pages).get
        """Return the status pages of all daemons as one; may be called on any thread."""

    def _join_pages(self) -> bytes:
        return join_pages(self._fetch_from_all("/"), self._fetch_from_all("/metrics"), host_name())

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
