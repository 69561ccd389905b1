"""State on disk that was damaged, removed or replaced: the next daemon has the right books, or says what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, Daemon, hold_still, running, until
from tests.support.raw import Session
from tests.support.sizes import MIB
from tests.support.template import run as run_python
from tests.support.workers import PAGE, worker

from membroker.v1 import admin_pb2


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running({"settle_seconds": 600.0}) as one:
        yield one


def state(daemon: Daemon) -> Path:
    return daemon.root / "state"


def command(daemon: Daemon) -> list[str]:
    return [sys.executable, "-m", "membrokerd.cli", "--config", str(daemon.directory / "membrokerd.toml")]


def refused(daemon: Daemon) -> str:
    """Start another daemon in the same place, which must refuse with one sentence, and return that."""
    done = run_python(command(daemon)[1:], DEADLINE_SECONDS)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("membrokerd: ") or "membrokerd.toml: " in last, done.stderr
    return last


def records(data: bytes) -> list[int]:
    at, found = 0, []
    while length := int.from_bytes(data[at : at + 4], "little"):
        found.append(at)
        at += 8 + length
    return found


def test_no_id_is_lent_twice_where_the_epoch_was_removed(daemon: Daemon) -> None:
    """A cleaner took `state/epoch` while no daemon ran. Ids that a worker holds are in the journal, and stay its."""
    with Session(daemon.endpoint()) as first:
        held = first.borrow(first.register("m"), PAGE, 4)
        daemon.kill()
        (state(daemon) / "epoch").unlink()
        daemon.start_again()
        with Session(daemon.endpoint("blue")) as other:
            fresh = other.borrow(other.register("m"), PAGE, 4)
            assert not set(held) & set(fresh)
            assert len({session.name for session in daemon.sessions()}) == 2
            assert daemon.books().lent_bytes == 8 * PAGE
            other.release(fresh)
            assert daemon.books().lent_bytes == 4 * PAGE


def test_a_torn_end_is_left_out_and_kept(daemon: Daemon) -> None:
    """The last record, of a loan, is cut short. The rest stands, and who may hold what it says is named."""
    with worker() as one:
        one.connect(daemon).do("model = client.model('m'); held = [model.allocate(PAGE) for _ in range(2)]")
        until(lambda: daemon.books().unaccounted_bytes == 0)
        daemon.kill()
        journal = state(daemon) / "journal"
        data = journal.read_bytes()
        at = [at for at in records(data) if data[at + 8 : at + 13] == b"[[10,"][-1]
        torn = data[: at + 20] + bytes(len(data) - at - 20)
        journal.write_bytes(torn)
        daemon.start_again()
        (aside,) = state(daemon).glob("journal.torn-*")
        assert aside.read_bytes() == torn
        until(lambda: "last record is incomplete" in daemon.log())
        until(lambda: f"which counts as unaccounted until the worker ends pid={one.pid}" in daemon.log())
        until(lambda: daemon.books().lent_bytes == PAGE)


@pytest.mark.deep
def test_what_is_removed_of_the_state_is_written_again(daemon: Daemon) -> None:
    """A cleaner comes by night. No second daemon starts, and the next one has the books."""
    with worker() as one:
        one.connect(daemon).do("buffer = client.model('m').allocate('16MiB')")
        with hold_still(daemon):  # it would write into what is half removed
            shutil.rmtree(state(daemon))
        assert "a membrokerd already owns this device" in refused(daemon)
        until(lambda: "have been rewritten" in daemon.log())
        assert all((state(daemon) / name).exists() for name in ("lock", "epoch", "journal"))
        assert str(daemon.process.pid) in refused(daemon)
        daemon.kill()
        daemon.start_again()
        until(lambda: daemon.books().lent_bytes == 16 * MIB)
        one.do("buffer.close(); client.close()")


@pytest.mark.deep
def test_what_cannot_be_written_again_is_told(daemon: Daemon) -> None:
    """A socket, or all of the device's directory: the log says what to do, once. Who is connected goes on."""
    with Session(daemon.endpoint()) as session:
        model = session.register("m")
        (daemon.endpoint("blue") / "handoff.sock").unlink()
        until(lambda: "a socket was removed or replaced" in daemon.log())
        with hold_still(daemon):  # it would tell of the sockets first
            shutil.rmtree(daemon.root)
        until(lambda: "the daemon's directory was removed or replaced" in daemon.log())
        session.borrow(model, PAGE)
    until(lambda: daemon.log().count("removed or replaced") == 2)


_ENGINE = """
import os, sys
import membroker
endpoint, left, then = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
client = membroker.connect(endpoint)
buffer = client.model("m").allocate("8MiB")
if left:
    os.execv(sys.executable, [sys.executable, __file__, endpoint, str(left - 1), *then])
if then:
    os.execvp(then[0], then)
print("done", flush=True)
sys.stdin.read()
"""


@contextmanager
def engine(daemon: Daemon, times: int, *then: str) -> Iterator[subprocess.Popen[str]]:
    """Run a worker that borrows, and calls exec() with what it has, so many times; at last it becomes `then`."""
    path = daemon.directory / "engine.py"
    path.write_text(_ENGINE)
    command = [sys.executable, str(path), str(daemon.endpoint()), str(times), *then]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_worker_that_starts_itself_anew_leaves_no_charge(daemon: Daemon) -> None:
    """It calls exec() again and again, and at last becomes a program that does not come back to the broker."""
    with engine(daemon, 2) as process:
        assert process.stdout.readline() == "done\n"
        until(lambda: daemon.books().lent_bytes == 8 * MIB and daemon.books().releasing_bytes == 0)
        assert len(daemon.sessions()) == 1
        until(lambda: daemon.log().count("a process started another program by exec()") == 2)
    with engine(daemon, 0, "cat") as process:
        until(lambda: daemon.log().count("a process started another program by exec()") == 3)
        until(lambda: daemon.books().lent_bytes + daemon.books().releasing_bytes == 0)
        assert process.poll() is None


def test_who_is_refused_learns_which_sessions_to_forget(daemon: Daemon) -> None:
    """All sessions of a process have lost their connections. The refusal names them, and an operator ends one."""
    sessions = [Session(daemon.endpoint()) for _ in range(16)]
    for session in sessions:
        session.sock.close()
        session.notices.close()
    until(lambda: daemon.device().detached_sessions == 16)
    with raw.Connection(daemon.endpoint()) as refused:
        refused.send(raw.hello(client="raw"))
        said = refused.last_words()
    assert raw.reason(said) == "TOO_MANY_SESSIONS"
    assert "`membroker forget SESSION` ends those that are detached" in said.message
    name = sessions[0].welcome.session
    assert f" {name}" in said.message
    raw.admin_call(daemon.admin, "ForgetSession", admin_pb2.ForgetSessionRequest(name=name))
    with raw.Connection(daemon.endpoint()) as again:
        again.send(raw.hello(client="raw"))
        assert again.receive().frame.HasField("welcome")


def test_a_daemon_that_is_started_without_standard_descriptors(daemon: Daemon, tmp_path: Path) -> None:
    """A supervisor closed them. They are /dev/null, in the keeper too: no file gets what a library prints."""
    closed = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh"]
    assert daemon.stop() == 0
    until(lambda: not daemon.keeper())
    with subprocess.Popen([*closed, *command(daemon)]) as process:
        try:
            until((daemon.admin / "grpc.sock").exists)
            for number in range(3):
                assert os.readlink(f"/proc/{process.pid}/fd/{number}") == "/dev/null"
            assert os.readlink(f"/proc/{daemon.keeper()}/fd/0") == "/dev/null"
            with Session(daemon.endpoint()) as session:
                session.borrow(session.register("m"), PAGE)
        finally:
            process.terminate()
            assert process.wait(DEADLINE_SECONDS) == 0
    status = [sys.executable, "-c", "import sys; from membroker.cli import run; sys.exit(run())", "status"]
    done = subprocess.run([*closed, *status, "--endpoint", str(tmp_path)], timeout=DEADLINE_SECONDS)
    assert done.returncode == 1
