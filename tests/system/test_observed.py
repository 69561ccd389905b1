"""A daemon that is looked at: scraped without a pause, with a log that nobody reads, and probed while it hangs."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support import daemons, faulty_daemon
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.honest_worker import COUNTED, State, check_turns, honest
from tests.support.template import PythonProcess
from tests.support.workers import worker

pytestmark = pytest.mark.deep

MODELS = 500
SCRAPERS = 16


def probe(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def is_alive(daemon: Daemon) -> bool:
    """Return what the liveness probe of the chart says: its command, with this daemon's directory for the pod's."""
    manifest = (Path(__file__).parents[2] / "deploy" / "kubernetes" / "membroker.yaml").read_text()
    pattern = r"(?:startup|liveness)Probe:\n +exec:\n +command:\n +- /bin/sh\n +- -c\n +- (.+)"
    (command,) = set(re.findall(pattern, manifest))
    command = command.replace("/run/membroker/all", str(daemon.root))
    return subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.DEVNULL).returncode == 0


_SCRAPE = """
import threading, urllib.error, urllib.request
def scrape():
    global count
    while not over:
        try:
            with urllib.request.urlopen(url, timeout=600) as answer:
                size = len(answer.read())
        except urllib.error.HTTPError as error:
            with error:
                assert error.code == 503, error
            continue
        assert size > 300_000, size
        count += 1
over, count = False, 0
threads = [threading.Thread(target=scrape) for _ in range(SCRAPERS)]
for thread in threads: thread.start()
"""


def test_scrapers_without_a_pause(state: State) -> None:
    """Any local user can scrape: 16 that never pause, of a daemon with 500 models, cost what one costs."""
    config = {"capacity": "1GiB", "max_models_per_tenant": MODELS, "log": {"level": "info"}}
    with running(config, module=COUNTED) as daemon, honest(daemon) as one, worker() as owner, worker() as scraper:
        owner.connect(daemon).do(f"models = [client.model(f'm{{number}}') for number in range({MODELS})]")
        scraper.do(f"url = {daemon.device().metrics_url!r}")
        scraper.do(_SCRAPE.replace("SCRAPERS", str(SCRAPERS)))
        until(lambda: scraper.ask("count") >= SCRAPERS)
        one.beside(state, f"{SCRAPERS} scrapers of {MODELS} models", lambda: scraper.ask("count") > 5 * SCRAPERS)
        scraper.do("over = True\nfor thread in threads: thread.join()")
        state("scrapes meanwhile", str(scraper.ask("count")))
        check_turns(daemon, state, f"{SCRAPERS} scrapers")


def test_a_flood_of_connections_fails_no_liveness_probe(state: State) -> None:
    """A pod that may scrape keeps the port's backlog full. A probe over that port took 8 s, and the chart allowed 5."""
    with running() as daemon, worker() as flood:
        port = int(daemon.device().metrics_url.removesuffix("/metrics").rpartition(":")[2])
        flood.do("import socket, threading\nover, held = False, []")
        flood.do(f"""
def connect():
    while not over:
        sock = socket.socket()
        sock.settimeout(0.1)
        try:
            sock.connect(('127.0.0.1', {port}))
        except OSError:
            sock.close()
        held.append(sock)
        if len(held) > 2_000:
            held.pop(0).close()
threads = [threading.Thread(target=connect, daemon=True) for _ in range(4)]
for thread in threads: thread.start()
""")
        until(lambda: flood.ask("len(held)") > 1_000)
        assert all(is_alive(daemon) for _ in range(50))
        state("connections during the probes", str(flood.ask("len(held)")))
        flood.do("over = True\nfor thread in threads: thread.join()")


@contextmanager
def unread() -> Iterator[None]:
    """Start daemons with a stderr that is a full pipe, which nobody reads."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    os.write(writer, b"\n" * 4096)
    os.set_blocking(writer, True)

    def start(arguments: list[str], **options: Any) -> PythonProcess:
        return PythonProcess(arguments, **{**options, "stderr": writer, "stdout": writer})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemons, "PythonProcess", start)
        try:
            yield
        finally:
            os.close(writer)
            os.close(reader)


def test_a_stderr_that_nobody_reads_stops_nobody(state: State) -> None:
    """The reader hangs: workers are served, what is dropped is counted, and SIGTERM ends the daemon all the same."""
    with unread(), running(module=COUNTED) as daemon, honest(daemon) as one:

        def drops() -> bool:
            return daemon.figure("membroker_log_lines_dropped_total") > 0

        one.beside(state, "a stderr that nobody reads, at DEBUG", drops)
        check_turns(daemon, state, "a stderr that nobody reads")
        one.do("client.close()")
        assert daemon.stop() == 0


def test_probes_and_scrapes_fail_while_the_loop_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver call, or a bug, hangs the event loop. Its HTTP threads live, and must not say that all is well."""
    hang = tmp_path / "hang"
    monkeypatch.setenv(faulty_daemon.HANG, str(hang))
    with running(module="tests.support.faulty_daemon hang") as daemon, worker() as one:
        one.connect(daemon).do("model = client.model('m')")
        url = daemon.device().metrics_url.removesuffix("/metrics")
        assert probe(f"{url}/healthz") == probe(f"{url}/readyz") == (200, "ok\n")
        assert is_alive(daemon)
        hang.touch()
        one.begin("buffer = model.allocate(PAGE)")
        until(lambda: probe(f"{url}/healthz")[0] == 503)
        until(lambda: not is_alive(daemon))
        for path in ("healthz", "readyz"):
            status, sentence = probe(f"{url}/{path}")
            assert status == 503
            assert re.fullmatch(r"the event loop has not turned for \d+ seconds\n", sentence)
        until(lambda: probe(f"{url}/metrics") == (503, "the event loop does not answer\n"))
        hang.unlink()
        one.result()
        until(lambda: probe(f"{url}/healthz") == (200, "ok\n"))
        until(lambda: probe(f"{url}/readyz") == (200, "ok\n"))
        until(lambda: probe(f"{url}/metrics")[0] == 200)
        until(lambda: is_alive(daemon))
