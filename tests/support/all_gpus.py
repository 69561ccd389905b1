"""`membrokerd --all`: a running parent, its daemons, and what both say."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.daemons import DEADLINE_SECONDS, has_traceback, to_toml, until, whole_lines

CLI = ("-m", "membrokerd.cli")
UUIDS = ["host", "host-1"]


class Parent:
    """A running `membrokerd --all`: over two devices of the host driver, unless the configuration says otherwise."""

    def __init__(self, place: Path, program: Sequence[str] = CLI, count: Sequence[str] = ("2",), **config: Any) -> None:
        self.place = place
        self.log_path = place / "log"
        self.notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notified.bind(str(place / "notify"))
        environment = {**os.environ, "NOTIFY_SOCKET": str(place / "notify")}
        command = [sys.executable, *program, "--config", str(write_config(place, **config)), "--all", *count]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def log(self) -> str:
        return whole_lines(self.log_path)

    def metrics_url(self) -> str:
        found = re.search(rf" ready pid={self.process.pid} metrics=(\S+)", self.log())
        return found.group(1) if found else ""

    def wait_until_ready(self) -> None:
        until(lambda: self.process.poll() is not None or self.metrics_url())
        until(lambda: self.process.poll() is not None or self.get("/readyz")[0] == 200)
        assert self.process.poll() is None, self.log()

    def get(self, path: str) -> tuple[int, str]:
        url = self.metrics_url().replace("/metrics", path)
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def figure(self, name: str, uuid: str) -> float | None:
        for family in text_string_to_metric_families(self.get("/metrics")[1]):
            for sample in family.samples:
                if sample.name == name and sample.labels.get("gpu_uuid") == uuid:
                    return sample.value
        return None

    def pids(self, uuids: Sequence[str] = UUIDS) -> list[int]:
        started = dict(re.findall(r"a daemon was started gpu=(\S+) child=(\d+)", self.log()))
        return [int(started[uuid]) for uuid in uuids]

    def endpoint(self, uuid: str) -> Path:
        return self.place / "run" / uuid / "tenants" / "red"

    def told(self) -> str:
        """Return what systemd was told since the last call."""
        lines = []
        with suppress(BlockingIOError):
            while True:
                lines.append(self.notified.recv(4096, socket.MSG_DONTWAIT).decode())
        return "\n".join(lines)


def write_config(place: Path, **changed: object) -> Path:
    path = place / "membrokerd.toml"
    config = {"driver": "host", "capacity": "64MiB", "metrics": {"port": 0}, "tenants": {"red": {}}, **changed}
    places = {"runtime_directory": str(place / "run"), "state_directory": str(place / "kept")}
    path.write_text(to_toml({**places, **config}))
    return path


@contextmanager
def running_all(place: Path, program: Sequence[str] = CLI, **more: Any) -> Iterator[Parent]:
    """Run a parent; at the end SIGTERM ends it and its daemons."""
    parent = Parent(place, program, **more)
    try:
        yield parent
        if parent.process.poll() is None:
            parent.process.terminate()
            assert parent.process.wait(DEADLINE_SECONDS) == 0, parent.log()
        assert not has_traceback(parent.log()), parent.log()
    finally:
        parent.process.kill()
        parent.process.wait(DEADLINE_SECONDS)
        parent.notified.close()
