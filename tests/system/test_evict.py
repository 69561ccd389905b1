"""`EvictSession`, as an operator needs it: a real daemon ends real workers, and says which it cannot end."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from google.rpc.status_pb2 import Status
from tests.support import raw
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.faulty_daemon import CONFINED
from tests.support.sizes import MIB
from tests.support.workers import Worker, is_clean, worker, workers

from membroker import errors
from membroker.v1 import admin_pb2

USER = 60_001
"""A user that no machine has."""
HOLD = "model = client.model('chat'); kept = model.allocate('16MiB'); kept.view()[:4] = b'kept'"


@pytest.fixture
def killing() -> Iterator[Daemon]:
    """A daemon that sends SIGKILL 0.3 s after SIGTERM."""
    with running(module="tests.support.faulty_daemon kill_soon") as daemon:
        yield daemon


def evict(daemon: Daemon, name: str) -> Any:
    """Evict a session; return the Session, or the Status of the refusal."""
    return raw.admin_call(daemon.admin, "EvictSession", admin_pb2.EvictSessionRequest(name=name))


def name_of(one: Worker) -> str:
    return str(one.ask("client.session"))


def why_not(daemon: Daemon, name: str) -> str:
    """Evict what cannot be evicted: return the sentence, which the library raises as InvalidRequest."""
    refused = evict(daemon, name)
    assert isinstance(refused, Status), refused
    error = errors.from_status(refused)
    assert (type(error), error.reason) == (errors.InvalidRequest, "SESSION_NOT_EVICTABLE")
    assert evictions(daemon) == 0
    assert "evicts" not in daemon.log()
    return str(error).removeprefix(f"{name} cannot be evicted: ")


def evictions(daemon: Daemon) -> float:
    return daemon.figure("membroker_evictions_total")


# --- What ends ---


def test_a_worker_that_ends_by_sigterm(daemon: Daemon) -> None:
    """All its sessions end with it, those of another tenant too; what it has sealed stays."""
    with worker() as one:
        one.connect(daemon).do(HOLD)
        one.do("segment = model.create_segment('weights', '2MiB'); segment.seal()")
        other = f"membroker.connect({str(daemon.endpoint('blue'))!r})"
        one.do(f"other = {other}; held = other.model('search').allocate('32MiB')")
        session = evict(daemon, name_of(one))
        assert (session.pid, session.tenant, session.models) == (one.pid, "tenants/red", ["tenants/red/models/chat"])
        assert session.books[0].used_bytes == 16 * MIB
        assert one.process.wait(DEADLINE_SECONDS) == -signal.SIGTERM
        until(lambda: not daemon.sessions() and daemon.books().lent_bytes == 2 * MIB)
        daemon.delete_segments()
        until(lambda: is_clean(daemon))
        assert evictions(daemon) == 1
        (said,) = until(lambda: [line for line in daemon.log().splitlines() if "evict" in line])
        assert re.search(rf"WARNING an operator evicts a process: SIGTERM .*pid={one.pid} ", said)


@pytest.mark.parametrize("what", ["lambda *_: client.close()", "SIGSTOP"])
def test_a_worker_that_does_not_end_by_sigterm_is_killed(killing: Daemon, what: str) -> None:
    """It lives on without a session; or it hangs while the daemon is restarted, so that its session is detached."""
    with worker() as one:
        one.connect(killing).do(HOLD)
        name = name_of(one)
        if what == "SIGSTOP":
            one.send(signal.SIGSTOP)
            killing.kill()
            killing.start_again()
        else:
            one.do(f"import signal; signal.signal(signal.SIGTERM, {what})")
        assert evict(killing, name).name == name
        assert one.process.wait(DEADLINE_SECONDS) == -signal.SIGKILL
        until(lambda: is_clean(killing))
        until(lambda: "SIGKILL" in killing.log())
        said = [line for line in killing.log().splitlines() if "evict" in line]
        assert [line.rpartition(": ")[2].split()[0] for line in said] == ["SIGTERM", "SIGKILL"]
        assert evictions(killing) == 1


def test_a_request_that_waits_gets_the_memory(killing: Daemon) -> None:
    """What an eviction is for: red's engine hangs with most of the device, and blue's requests wait for room."""
    with workers(2) as (hung, other):
        hung.connect(killing).do("kept = client.model('chat').allocate('192MiB')")
        name = name_of(hung)
        hung.send(signal.SIGSTOP)
        other.connect(killing, "blue").do("model = client.model('search')")
        other.begin("got = model.allocate('128MiB', timeout=600); answer = got.size")
        until(lambda: killing.books().waiting_requests)
        assert evict(killing, name).name == name
        assert other.result() == 128 * MIB


def test_a_daemon_that_stops_meanwhile_leaves_the_process_alone() -> None:
    """Asked twice, one SIGTERM is sent: a second one would be an order to leave. The next daemon kills nobody."""
    with running(module="tests.support.faulty_daemon kill_late") as patient, worker() as engine:
        engine.connect(patient).do(HOLD)
        engine.do("import signal; got = []; signal.signal(signal.SIGTERM, lambda *_: got.append('SIGTERM'))")
        name = name_of(engine)
        for _ in range(2):
            assert evict(patient, name).name == name
        assert engine.ask("got") == ["SIGTERM"]
        assert evictions(patient) == 1
        assert patient.stop() == 0
        assert engine.ask("bytes(kept.view()[:4]).decode()") == "kept"
        patient.start_again()
        engine.do("model.allocate(PAGE).close()")
        assert engine.ask("got") == ["SIGTERM"]
        assert evictions(patient) == 0
        assert "SIGKILL" not in patient.log()


# --- What is refused ---


@pytest.mark.root
def test_another_users_process_without_cap_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under the systemd unit: root without CAP_KILL signals root's processes alone."""
    monkeypatch.setenv(CONFINED, "without CAP_KILL")
    tenants = {"red": {"owner": USER, "mode": "0600"}, "blue": {}}
    with running({"tenants": tenants}, module="tests.support.faulty_daemon kill_soon") as daemon:
        daemon.directory.chmod(0o755)
        with closing(Worker(user=USER)) as theirs, worker() as roots:
            theirs.connect(daemon).do(HOLD)
            said = why_not(daemon, name_of(theirs))
            assert said.startswith(f"its process has the uid {USER}, and the daemon may not signal that user's")
            assert f"end process {theirs.pid} as root, or give the daemon CAP_KILL" in said
            assert theirs.ask("bytes(kept.view()[:4]).decode()") == "kept"
            roots.connect(daemon, "blue").do(HOLD)
            assert not isinstance(evict(daemon, name_of(roots)), Status)
            assert roots.process.wait(DEADLINE_SECONDS) == -signal.SIGTERM


@pytest.mark.root
def test_a_process_outside_of_the_daemons_pid_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Kubernetes without hostPID: the daemon has a pidfd, and the kernel lets it signal nothing by it.

    In one container the keeper of the descriptors ends with the daemon, and the next one cannot name the process.
    """
    monkeypatch.setenv(CONFINED, "in a pid namespace")
    with running(module="tests.support.faulty_daemon kill_soon") as daemon, worker() as one:
        one.connect(daemon).do(HOLD)
        name = name_of(one)
        said = why_not(daemon, name)
        assert said.startswith("its process is in a pid namespace that the daemon cannot signal into")
        assert "delete its pod" in said
        assert one.ask("bytes(kept.view()[:4]).decode()") == "kept"
        one.send(signal.SIGSTOP)
        assert daemon.stop() == 0
        daemon.start_again()
        said = why_not(daemon, name)
        assert said.startswith("the daemon has lost its handle of the process, which is in another pid namespace")
        assert said.endswith("then `membroker forget` the session")


@pytest.mark.root
def test_a_containers_first_process_is_killed(killing: Daemon) -> None:
    """A daemon in the host's pid namespace reaches into a container's; pid 1 there gets no SIGTERM that it ignores."""
    inside = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-m", "tests.support.workers"]
    with closing(Worker(command=inside)) as one:
        one.connect(killing).do(HOLD)
        assert one.ask("os.getpid()") == 1
        (session,) = killing.sessions()
        assert session.pid not in (0, 1, one.pid)
        assert not isinstance(evict(killing, session.name), Status)
        one.process.wait(DEADLINE_SECONDS)
        until(lambda: is_clean(killing))
        until(lambda: "SIGKILL" in killing.log())
