"""The runtime directory may have any name that a socket can have: who is told of it can quote it, or it is refused.

A daemon that says that it is ready can be read.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.keepers import end_keeper
from tests.support.template import PythonProcess, run

import membroker
from membroker.admin import Admin
from membroker.cli.demo import processes
from membroker.vmm.driver import Location


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        yield Path(directory)


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
                end_keeper(runtime / "host" / "state" / "fdstore.sock")
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
            admin.set_quota("tenants/uid-0", Location.DEVICE, {"limit_bytes": 1 << 20})
        for words in (["models"], ["status"], ["doctor"]):
            endpoint = str(root / "tenants" / "default")
            assert status_of(["-m", "membroker.cli.main", *words, "--endpoint", endpoint]) == 0, words


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("a,b", "has a comma, which gRPC takes for the end of a path"),
        ("n" * 100, "the path of a socket has at most 107 bytes"),
        ("file/run", "file is not a directory"),
    ],
)
def test_a_path_that_cannot_be_read_is_refused_alike(place: Path, name: str, said: str) -> None:
    """By the check of a configuration, by the start, by the library and by the doctor, in one sentence."""
    (place / "file").touch()
    for more in (["--check-config"], []):
        told = run(command(place / name, *more))
        assert told.returncode == 1, more
        assert said in told.stderr.splitlines()[-1], more
        assert "Traceback" not in told.stderr
    assert not (place / name).exists() or name != "file/run"
    if name != "file/run":
        with pytest.raises(membroker.InvalidRequest, match=said):
            membroker.connect(place / name / "host" / "tenants" / "default")


@pytest.mark.parametrize("key", ["runtime_directory", "state_directory", "keeper_socket"])
def test_a_check_tries_each_place(place: Path, key: str) -> None:
    """Another user could put an endpoint, quotas or a keeper there: the start refuses it, and the check says so."""
    opened = place / "opened"
    opened.mkdir()
    opened.chmod(0o777)
    file = place / "membrokerd.toml"
    places = {"runtime_directory": place / "run", "state_directory": place / "kept", key: opened / "inner" / "place"}
    text = "".join(f'{name} = "{path}"\n' for name, path in places.items())
    file.write_text(f'{text}driver = "host"\ndescriptor_store = "keeper"\n[metrics]\nport = 0\n')
    for more in (["--check-config"], []):
        told = run(["-m", "membrokerd.cli", "--config", str(file), *more])
        assert told.returncode == 1, more
        assert f"{opened} can be changed by other users" in told.stderr.splitlines()[-1], more
        assert not list(opened.iterdir()), "nothing was made there"


def test_a_path_with_a_nul_is_refused(place: Path) -> None:
    """TOML can write one, and no path can have it."""
    file = place / "membrokerd.toml"
    file.write_text(
        'runtime_directory = "/run/\\u0000"\nstate_directory = "/var/\\u0000"\nkeeper_socket = "/k\\u0000"\n'
    )
    told = run(["-m", "membrokerd.cli", "--config", str(file), "--check-config"])
    assert told.returncode == 1
    assert told.stderr.count("a path has no NUL in it") == 3


@pytest.mark.parametrize("name", [b"a,b", b"\xff", b"a\nb", b"n" * 80, b"open"])
def test_where_no_broker_can_be_it_takes_another_directory(place: Path, name: bytes) -> None:
    """TMPDIR has a comma, no text, or another user's hands in it: the demo is about something else."""
    directory = place / os.fsdecode(name)
    directory.mkdir(mode=0o700)
    if name == b"open":
        directory.chmod(0o777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", os.fspath(directory))
        made = processes.make_directory()
    made.rmdir()
    assert (made.parent, list(directory.iterdir())) == (Path("/tmp"), [])


def test_it_begins_in_a_directory_with_quotes(place: Path) -> None:
    directory = place / "a'b\"c\\d#e"
    directory.mkdir()
    broker = processes.DemoBroker(directory)
    config = tomllib.loads((directory / "membrokerd.toml").read_text())
    assert config["runtime_directory"] == str(directory / "run")
    assert broker.starts == 0
