"""The runtime directory may have any name that a socket can have: who is told of it can quote it, or it is refused.

A daemon that says that it is ready can be read.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.template import PythonProcess, run

import membroker
from membroker.admin import Admin


def command(runtime: Path, *more: str) -> list[str]:
    options = ["--driver", "host", "--metrics-port", "0", "--runtime-directory", os.fspath(runtime)]
    return ["-m", "membrokerd.cli", *options, *more]


@contextmanager
def ready(place: Path, runtime: Path) -> Iterator[Path]:
    """Yield the device's directory of a daemon that has said that it is ready."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notified:
        notified.bind(str(place / "notify"))
        environment = {**os.environ, "NOTIFY_SOCKET": str(place / "notify")}
        with PythonProcess(command(runtime), env=environment, stderr=subprocess.PIPE) as daemon:
            try:
                assert select.select([notified], [], [], DEADLINE_SECONDS)[0]
                yield runtime / "host"
            finally:
                daemon.terminate()
                _, said = daemon.communicate(timeout=DEADLINE_SECONDS)
    assert daemon.returncode == 0, said


def status_of(arguments: list[str]) -> int:
    """Run a program to its end. What it says has a path that is no text: a failing test shows it."""
    with PythonProcess(arguments, stdout=subprocess.DEVNULL) as process:
        return process.wait(DEADLINE_SECONDS)


def test_a_daemon_that_is_ready_can_be_read(place: Path) -> None:
    """By the library, by the operator's calls, and by each command; and --check-config has said so before."""
    runtime = place / os.fsdecode(b":;&=@#?%41%2F \"'\\\n\xff\xfe{index}")
    assert status_of(command(runtime, "--check-config")) == 0
    with ready(place, runtime) as root:
        with (
            membroker.connect(root / "tenants" / "default") as client,
            client.model("m").allocate("2MiB"),
        ):
            assert [model.books["device"].used_bytes for model in client.models()] == [2 << 20]
        with Admin(root / "admin" / "grpc.sock") as admin:
            assert admin.device().uuid == "host"
        for words in (["models"], ["status"], ["doctor"]):
            endpoint = str(root / "tenants" / "default")
            assert status_of(["-m", "membroker.cli.main", *words, "--endpoint", endpoint]) == 0, words


def test_a_path_that_cannot_be_read_is_refused_alike(place: Path) -> None:
    """By the check of a configuration, by the start, and by the library."""
    for name, said in (("a,b", "has a comma"), ("n" * 100, "the path of a socket has at most 107 bytes")):
        for more in (["--check-config"], []):
            told = run(command(place / name, *more))
            assert told.returncode == 1, more
            assert said in told.stderr.splitlines()[-1], more
        with pytest.raises(membroker.InvalidRequest, match=said):
            membroker.connect(place / name / "host" / "tenants" / "default")
