"""Attesting: the kernel identifies the peer, and its facts are used only if that process is still alive."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemons import until
from tests.support.processes import descriptors

from membroker.wire import ownership
from membrokerd.core.denied import Reason
from membrokerd.edge.convert import Refused
from membrokerd.edge.handoff import peer as module
from membrokerd.edge.handoff.peer import attest
from membrokerd.system import process as process_module

NOBODY: frozenset[int] = frozenset()
NO_SUCH_OPTION = 9999
_CONNECT = """
import socket, sys
one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
one.connect(sys.argv[1])
print("connected", flush=True)
sys.stdin.read()
"""

_ATTEST = """
import os, socket, sys
from membrokerd.edge.convert import Refused
from membrokerd.edge.handoff.peer import attest
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
listener.listen()
print("listening", flush=True)
for _ in range(2):
    try:
        print(attest(listener.accept()[0], frozenset()), flush=True)
    except Refused as error:
        print(error.denied.reason, flush=True)
"""


@pytest.fixture(params=["pidfd", "by pid"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """SO_PEERPIDFD, and the fallback for kernels without it."""
    if request.param == "by pid":
        monkeypatch.setattr(module, "_SO_PEERPIDFD", NO_SUCH_OPTION)
    return str(request.param)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.bind(str(tmp_path / "s"))
        one.listen()
        yield one


class Process:
    """A process with one connection to a listener."""

    def __init__(self, listener: socket.socket) -> None:
        command = [sys.executable, "-c", _CONNECT, listener.getsockname()]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout.readline() == b"connected\n"
        self.connection, _ = listener.accept()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.communicate()
        self.connection.close()


def test_a_number_that_stands_for_many_users_is_nobody(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives all users that the broker's namespace does not map one uid: two of them were one tenant."""
    monkeypatch.setattr(ownership, "_PROC", tmp_path)
    for name, text in (("self/uid_map", "0 100000 65536\n"), ("sys/kernel/overflowuid", f"{os.geteuid()}\n")):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(text)
    before = descriptors()
    with Process(listener) as one:
        for uids in (NOBODY, frozenset([os.geteuid()])):
            with pytest.raises(Refused) as caught:
                attest(one.connection, uids)
            assert caught.value.denied.reason == Reason.PEER_UNKNOWN
    assert descriptors() == before


@pytest.mark.root
def test_two_users_that_a_namespace_does_not_map_are_refused() -> None:
    """A broker in `unshare -Ur`, and workers of two users outside of it."""
    with tempfile.TemporaryDirectory(prefix="mb-", dir="/tmp") as directory:  # pytest's is closed to other users
        Path(directory).chmod(0o755)
        path = f"{directory}/s"
        with subprocess.Popen(
            ["unshare", "-Ur", sys.executable, "-c", _ATTEST, path], stdout=subprocess.PIPE, text=True
        ) as broker:
            assert broker.stdout.readline() == "listening\n"
            try:
                for uid in (60_001, 60_002):
                    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
                        os.seteuid(uid)
                        try:
                            one.connect(path)
                        finally:
                            os.seteuid(0)
                        assert broker.stdout.readline() == "PEER_UNKNOWN\n"
            finally:
                broker.kill()


def test_a_living_process_is_known_by_pid_uid_and_identity(listener: socket.socket, way: str) -> None:
    """Two connections of one process have one identity; another process has another."""
    with Process(listener) as one, Process(listener) as other:
        first, again, second = (
            attest(one.connection, NOBODY),
            attest(one.connection, NOBODY),
            attest(other.connection, NOBODY),
        )
        try:
            assert (first.pid, first.uid) == (one.process.pid, os.getuid())
            assert first.identity == again.identity != second.identity
            assert first.pidfd != again.pidfd
            assert not os.get_inheritable(first.pidfd)
            assert first.is_alive()
            one.kill()
            assert not first.is_alive()
            assert second.is_alive()
        finally:
            for peer in (first, again, second):
                os.close(peer.pidfd)


@pytest.mark.parametrize("zombie", [False, True])
def test_a_dead_process_is_refused_and_nothing_stays_open(listener: socket.socket, way: str, *, zombie: bool) -> None:
    """It connected and died before the broker accepted it: a process that has its pid by then is another one.

    The pid of one that nobody has waited for still exists, so only its pidfd shows the death.
    """
    with Process(listener) as one:
        before = descriptors()
        one.process.kill()
        os.waitid(os.P_PID, one.process.pid, os.WEXITED | (os.WNOWAIT if zombie else 0))
        with pytest.raises(Refused) as caught:
            attest(one.connection, NOBODY)
        assert caught.value.denied.reason is Reason.PEER_UNKNOWN
        assert descriptors() == before


def test_a_uid_that_is_not_admitted_is_refused_first(way: str) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        before = descriptors()
        with pytest.raises(Refused) as caught:
            attest(ours, frozenset({os.getuid() + 1}))
        assert caught.value.denied.reason is Reason.ENDPOINT_FORBIDDEN
        assert caught.value.denied.numbers == {"uid": os.getuid()}
        assert descriptors() == before
        os.close(attest(ours, frozenset({os.getuid(), 7})).pidfd)


def test_a_pid_of_another_namespace_needs_a_newer_kernel() -> None:
    """The kernel reports pid 0 for the peer, which pidfd_open cannot open."""
    with pytest.raises(Refused) as caught:
        module._identify_by_pid(0)
    assert caught.value.denied.reason is Reason.PEER_UNKNOWN
    assert "namespace" in str(caught.value.denied.numbers["what"])


def test_a_pid_that_was_taken_over_in_between_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start time before and after the pidfd was opened differs: they are two processes."""
    times = iter([100, 200])
    monkeypatch.setattr(module, "start_time", lambda pid: next(times))
    before = descriptors()
    with pytest.raises(Refused):
        module._identify_by_pid(os.getpid())
    assert descriptors() == before


@pytest.mark.parametrize("name", [b"a) S 1 (2 3", b"\xff\xfe", b"\n\\ )"])
def test_a_process_may_call_itself_anything(name: bytes) -> None:
    """The last parenthesis of /proc/PID/stat counts, and a name need not be UTF-8."""
    code = f"import ctypes;ctypes.CDLL(None).prctl(15,{name!r});print('named',flush=True);input()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        own, its = process_module.start_time(os.getpid()), process_module.start_time(process.pid)
        assert own is not None
        assert its is not None
        assert its >= own
        image = process_module.image_of(process.pid)
        assert image is not None
        assert all(map(str.isdecimal, image))
        process.communicate(b"\n")
    assert process_module.start_time(process.pid) is None
    assert process_module.image_of(process.pid) is None


def test_processes_that_cannot_be_told_apart_do_not_count_as_one(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On kernels 6.5 to 6.8 every process of another pid namespace has pid 0, and its pidfd has no inode of its own."""
    monkeypatch.setattr(process_module, "_inodes_identify", lambda: False)
    with Process(listener) as one:
        identities = set()
        for _ in range(3):
            pidfd, identity = module._identify(one.connection, 0)
            os.close(pidfd)
            identities.add(identity)
        assert len(identities) == 3
        pidfd, identity = module._identify(one.connection, one.process.pid)
        os.close(pidfd)
        assert identity.startswith(f"pid:{one.process.pid}:")


def test_an_exec_changes_the_image_and_nothing_else_does() -> None:
    """The same while a program runs, different after each exec(), and unknown for a process that is gone or hidden."""
    image = "from membrokerd.system.process import image_of; import os; seen = image_of(os.getpid()); "
    code = f"{image}print(seen == image_of(os.getpid()), seen, flush=True); input(); os.execvp('cat', ['cat'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        own = process.stdout.readline().decode().strip()
        before = process_module.image_of(process.pid)
        assert own == f"True {before}"
        process.stdin.write(b"go\n")
        process.stdin.flush()
        until(lambda: process_module.image_of(process.pid) not in (before, None))
        process.kill()
    assert process_module.image_of(process.pid) is None
    assert process_module.image_of(0) is None
    assert process_module.image_of(-1) is None
