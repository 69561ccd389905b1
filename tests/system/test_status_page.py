"""The status page at `/` of the metrics port: fetched, parsed, and drawn by a real browser."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.pages import Page
from tests.support.sizes import MIB

import membroker

DOCS = Path(__file__).parents[2] / "docs"


def fetch(daemon: Daemon) -> tuple[str, dict[str, str]]:
    url = daemon.device().metrics_url.removesuffix("/metrics") + "/"
    with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
        return answer.read().decode(), dict(answer.headers)


TENANTS = {"chat": {"guarantee": "4GiB", "limit": "7GiB"}, "search": {"guarantee": "1GiB"}, "batch": {}}


@contextmanager
def tenants_at_work() -> Iterator[Daemon]:
    """Three tenants on 8 GiB: two models of chat, one of search, and batch, which has the rest and wants more."""
    with running({"capacity": "8GiB", "tenants": TENANTS}) as daemon, ExitStack() as stack:
        clients = (stack.enter_context(membroker.connect(daemon.endpoint(name))) for name in TENANTS)
        chat, search, batch = clients
        large, small = chat.model("Qwen/Qwen3-8B", limit="5GiB"), chat.model("Qwen/Qwen3-1.7B")
        for one, size in ((large, "1536MiB"), (small, "640MiB"), (search.model("bge-m3"), "512MiB")):
            stack.enter_context(one.allocate(size))
        night = batch.model("night-run")
        night.on_recall(lambda _: None)
        stack.enter_context(night.allocate("3GiB"))
        with pytest.raises(membroker.OutOfMemory):
            large.allocate("4GiB")
        waiter = threading.Thread(target=_wait_in_vain, args=(night,))
        waiter.start()
        yield daemon
    waiter.join()


def _wait_in_vain(night: membroker.Model) -> None:
    with suppress(membroker.MembrokerError):  # the client is closed, or the others have left before it
        night.allocate("4GiB", timeout=600).close()


def test_the_page_shows_what_metrics_tells() -> None:
    """An operator opens the port in a browser. Each model, each tenant's marks and each sum is that of the scrape."""
    with tenants_at_work() as daemon:
        until(lambda: "1 for 4.0 GiB of device memory" in Page(fetch(daemon)[0]).text)
        text, headers = fetch(daemon)
        shown = Page(text)
        assert "chat/Qwen/Qwen3-8B: 1.5 GiB" in shown.titles["device memory by tenant and model"]
        assert shown.titles["device memory of chat"][-2:] == ["guarantee: 4.0 GiB", "limit: 7.0 GiB"]
        rows = {row[0]: row[1:] for row in shown.rows}
        scraped = {
            (sample.labels["tenant"], sample.labels["model"])
            for family in text_string_to_metric_families(daemon.metrics())
            for sample in family.samples
            if sample.name == "membroker_model_used_bytes"
        }
        assert set(rows) == {"model"} | {f"{tenant}/{name}" for tenant, name in scraped}
        assert rows["chat/Qwen/Qwen3-8B"][-1] == "1", "it was refused once"
        assert "MODEL_LIMIT 1" in shown.text
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'unsafe-inline';")
        assert not {"script", "link", "img", "iframe", "object", "form"} & set(shown.tags)


@pytest.mark.deep
def test_a_browser_draws_it(tmp_path: Path) -> None:
    """Headless Chromium: nothing is refused or missing.

    With MEMBROKER_REWRITE=1 the picture of docs/operating.md is taken again.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed (Debian: apt-get install chromium)")
    picture = tmp_path / "status-page.png"
    with tenants_at_work() as daemon:
        if os.environ.get("MEMBROKER_REWRITE"):
            _let_it_trade(daemon)
            picture = DOCS / "status-page.png"
        until(lambda: "polygon" in fetch(daemon)[0])
        url = daemon.device().metrics_url.removesuffix("/metrics") + "/"
        done = subprocess.run(
            [
                *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
                *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
                *("--enable-logging=stderr", "--hide-scrollbars", f"--user-data-dir={tmp_path / 'profile'}"),
                *("--window-size=1060,1300", f"--screenshot={picture}", url),
            ],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line or "Content Security" in line]
    assert complaints == []
    assert picture.exists()


def _let_it_trade(daemon: Daemon) -> None:
    """Let search grow and shrink for a while, so that the chart has something to show."""
    with membroker.connect(daemon.endpoint("search")) as client:
        model, held = client.model("rerank"), []
        for size in (128, 128, 256, -1, 128, -1, -1, 256, -1, -1, 256, -1) * 5:
            if size > 0:
                held.append(model.allocate(size * MIB))
            elif held:
                held.pop().close()
            if size == 256:
                with pytest.raises(membroker.OutOfMemory):
                    model.allocate("8GiB")
            time.sleep(1)
        while held:
            held.pop().close()
