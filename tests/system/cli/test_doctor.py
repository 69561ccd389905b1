"""The doctor tries what a broker does, on this machine, and says what to do where that fails."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.raw import Session, allocation
from tests.support.sizes import MIB
from tests.support.workers import worker

from membroker.cli import doctor
from membroker.cli import main as cli
from membroker.v1 import admin_pb2
from membroker.v1 import handoff_pb2 as pb
from membroker.vmm.driver import DriverError, DriverUnavailable
from membroker.wire.sessions import descriptors_for, sessions_for
from membrokerd.daemon import DEFAULT_MAX_SESSIONS


def test_as_many_sessions_as_a_daemon_started_here_has() -> None:
    """Also as root in a container, where the kernel does not count descriptors in flight, and the limit cannot rise."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running() as daemon:
        until(lambda: " limits descriptors=" in daemon.log())
        has = re.search(r" limits descriptors=(\d+) max_sessions=(\d+) ", daemon.log())
        assert has is not None
        said = next(one.found for one in doctor.examine(str(daemon.admin)) if one.name == "descriptors")
    most = re.search(r"may have ([\d,]+), enough for ([\d,]+) session", said)
    assert most is not None
    descriptors, sessions = (int(number.replace(",", "")) for number in most.groups())
    assert (descriptors, min(sessions, DEFAULT_MAX_SESSIONS)) == (int(has[1]), int(has[2]))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_1024_descriptors_are_enough_for_five_sessions() -> None:
    """135 each; 64 are the daemon's own, a quarter is for segments, and the kernel refuses at the limit itself."""
    assert "enough for 5 sessions" in doctor.check_descriptors(1024).found
    assert doctor.check_descriptors(descriptors_for(1)).found.endswith("enough for 1 session")
    assert [sessions_for(descriptors_for(sessions)) for sessions in range(2_000)] == list(range(2_000))


def test_the_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        assert doctor.check_runtime_directory({"XDG_RUNTIME_DIR": directory}, 1000).status == "ok"
        long = doctor.check_runtime_directory({"XDG_RUNTIME_DIR": f"{directory}/".ljust(46, "x")}, 1000)
        assert (long.status, long.advice) == ("warn", "tenants with long names will not fit")
        too_long = doctor.check_runtime_directory({"XDG_RUNTIME_DIR": f"{directory}/".ljust(76, "x")}, 1000)
        assert too_long.status == "fail"
        monkeypatch.setattr(os, "access", lambda *_: False)
        closed = doctor.check_runtime_directory({"XDG_RUNTIME_DIR": directory}, 1000)
        assert closed.status == "fail"
        assert "cannot be written to" in closed.found
    unset = doctor.check_runtime_directory({}, 1000)
    assert unset.status == "fail"
    assert "XDG_RUNTIME_DIR" in unset.advice
    system = {"XDG_RUNTIME_DIR": "/ignored", "MEMBROKER_SYSTEM_DIRECTORY": str(tmp_path)}
    assert str(tmp_path) in doctor.check_runtime_directory(system, 0).found


@pytest.mark.root
def test_another_users_runtime_directory_fails() -> None:
    """After `su` the variable is another user's: the check says whose, and the broker is looked for elsewhere."""
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        os.chown(directory, 60_001, 60_001)
        env = {"XDG_RUNTIME_DIR": directory, "MEMBROKER_SYSTEM_DIRECTORY": "/nowhere"}
        check = doctor.check_runtime_directory(env, 60_002)
        assert (check.status, check.found) == ("fail", f"{directory} belongs to uid 60001")
        assert doctor.check_broker(None, env).found.startswith("no broker was found under")


def test_users_that_are_not_mapped_are_a_warning() -> None:
    """In `unshare -Ur` the broker would take them all for one."""
    code = "from membroker.cli import doctor; print(doctor.check_users().status, doctor.check_users().found)"
    said = subprocess.run(["unshare", "-Ur", sys.executable, "-c", code], capture_output=True, text=True)
    if said.returncode:
        pytest.skip(f"this machine allows no user namespace: {said.stderr}")
    assert said.stdout.startswith("warn this user namespace does not map every user")
    assert doctor.check_users().status == "ok" or "does not map" in doctor.check_users().found


def test_an_older_kernel_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many fleets run 5.14: the broker falls back, and the doctor says on what."""
    monkeypatch.setattr(doctor, "SO_PEERPIDFD", 9_999)
    check = doctor.check_peers()
    assert check.status == "warn"
    assert "Linux 6.5" in check.advice


def test_no_gpu_is_no_fault_and_an_unusable_one_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(kind: str) -> None:
        raise DriverUnavailable("cuInit", "CUDA_ERROR_NO_DEVICE", 100)

    def broken(kind: str) -> None:
        raise DriverError("cuInit", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", 803, "reboot")

    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    monkeypatch.setattr(doctor, "open_driver", absent)
    assert doctor.check_gpu() == doctor.Check(
        "gpu", "ok", 'no GPU: a daemon lends ordinary memory, or with driver = "cuda" does not start'
    )
    monkeypatch.setattr(doctor, "open_driver", broken)
    assert (doctor.check_gpu().status, doctor.check_gpu().advice) == ("warn", "reboot")
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0")]))
    monkeypatch.setattr(doctor, "open_driver", absent)
    assert doctor.check_gpu().status == "warn", "a GPU is there, and cannot be used"


@pytest.mark.parametrize(
    ("version", "uuid", "status", "says"),
    [
        ("580.159.04", "GPU-1", "ok", "driver 580.159.04 on x86_64 can suspend processes"),
        ("565.57.01", "GPU-1", "warn", "needs --no-sleep here: it needs NVIDIA's driver 570 or later"),
        ("580.159.04", "MIG-1", "warn", "nobody has tried it with a MIG slice"),
    ],
)
def test_whether_any_program_can_be_put_to_sleep(
    version: str, uuid: str, status: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(driver_version=version, uuid=uuid)
    monkeypatch.setattr(doctor, "open_driver", lambda kind: SimpleNamespace(device=device, close=lambda: None))
    monkeypatch.setattr(doctor, "load_bindings", lambda: SimpleNamespace(cuCheckpointProcessLock=None))
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    check = doctor.check_guests()
    assert check.status == status
    assert says in f"{check.found} {check.advice}"


def test_missing_packages_are_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "grpc_health" else object())
    check = doctor.check_packages()
    assert (check.status, check.found) == ("fail", "missing: grpcio-health-checking")
    assert check.advice == "pip install 'membroker[broker]'"  # pip takes the extra from what is installed


def test_what_cannot_be_looked_at_is_a_failure_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sandbox forbids system calls, and a driver's library answers with what no code expects: others are checked."""

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    def broken(*_: object, **__: object) -> None:
        raise OverflowError("Python int too large to convert to C int")

    monkeypatch.setattr(socket, "socketpair", forbidden)
    monkeypatch.setattr(doctor, "open_driver", broken)
    checks = {check.name: check for check in doctor.examine("/nowhere", {})}
    for name, said in (
        ("peers", "Operation not permitted"),
        ("gpu", "OverflowError"),
        ("host driver", "OverflowError"),
    ):
        assert (checks[name].status, said in checks[name].found) == ("fail", True)
    assert len(checks) == 17


def test_another_system_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    (check,) = doctor.examine(None)
    assert check.status == "fail"


def test_a_running_broker_is_found(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    endpoint = str(daemon.endpoint("red"))
    check = doctor.check_broker(endpoint, {})
    assert check.status == "ok"
    assert "lends 256.0 MiB (device)" in check.found
    assert cli.main(["doctor", "--json", "--endpoint", endpoint]) == 0
    (found,) = [each for each in json.loads(capsys.readouterr().out) if each["name"] == "broker"]
    assert found == {"name": "broker", "status": "ok", "found": check.found, "advice": ""}


def test_who_is_late_is_told_before_what_that_breaks() -> None:
    """Blue has borrowed all that is guaranteed to red, and does not answer a recall: red's guarantee cannot be kept."""
    config = {"recall_seconds": 0.3, "tenants": {"red": {"guarantee": "128MiB"}, "blue": {}}}
    with running(config) as daemon, Session(daemon.endpoint("red")) as red, Session(daemon.endpoint("blue")) as blue:
        blue.borrow(blue.register("batch", answers_recalls=True), 64 * MIB, 4)
        red.send(pb.Frame(request_id=1_000, allocate=allocation(red.register("chat"), 64 * MIB)))
        until(lambda: any(model.books[0].late_bytes for model in daemon.models()))
        assert daemon.books().guarantee_shortfall_bytes
        check = doctor.check_guarantees(str(daemon.admin), {})
        assert (check.status, check.found) == ("warn", "blue/batch owes 64.0 MiB that the broker has recalled")
        assert "`membroker explain blue/batch --admin` names the session, and how to end it" in check.advice


def test_memory_that_no_session_explains_is_a_warning() -> None:
    """An engine keeps what it said it released. That fits into the headroom at first, as a context does on a GPU."""
    config = {"headroom": "32MiB", "gate_reserve": "8MiB"}
    lie = "client._session.reconnecting.release(list(pool._holding.extents.values())[{}])"
    with running(config) as daemon, worker() as liar:
        endpoint = str(daemon.endpoint("red"))
        liar.connect(daemon)
        liar.do("pool = client.model('m').pool(page_size='2MiB'); pool.allocate(0, '32MiB')")
        assert "0 B of device memory are in use and not in the books" in doctor.check_unaccounted(endpoint, {}).found
        liar.do(lie.format(":12"))
        until(lambda: daemon.books().unaccounted_bytes == 24 * MIB)
        check = doctor.check_unaccounted(endpoint, {})
        assert (check.status, check.found) == ("ok", "24.0 MiB of device memory are in use and not in the books")
        liar.do(lie.format("12:13"))
        until(lambda: daemon.books().unaccounted_bytes == 26 * MIB)
        check = doctor.check_unaccounted(endpoint, {})
        assert (check.status, check.found) == (
            "warn",
            "26.0 MiB of device memory are in use and not in the books, more than the 24.0 MiB that the headroom has "
            "for it",
        )
        assert check.advice.startswith("`membroker processes` shows which processes use more than they are charged")
        liar.kill()
    assert doctor.check_unaccounted(endpoint, {}).found == "not checked: that needs a broker"


def test_a_drained_broker_is_a_warning(daemon: Daemon) -> None:
    """Somebody drained it yesterday, and every request is refused."""
    with daemon.admin_stub() as stub:
        stub.Drain(admin_pb2.DrainRequest())
        check = doctor.check_broker(str(daemon.endpoint("red")), {})
        stub.Undrain(admin_pb2.UndrainRequest())
    assert (check.status, check.advice) == ("warn", "`membroker undrain` lends again")
    assert check.found.endswith(" on host lends nothing: it is drained")
    assert doctor.check_broker(str(daemon.endpoint("red")), {}).status == "ok"


def test_no_broker_a_broker_and_a_dead_one(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator was paged, and this is the first command: it says what the other commands say.

    A worker's environment has only the library. That is no fault beside a daemon, which has its own packages and may be
    another user's; but the next daemon may have to start from here.
    """
    monkeypatch.setattr(doctor, "missing_packages", lambda: ["pydantic"])
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        env = os.environ | {"XDG_RUNTIME_DIR": directory}

        def checked() -> tuple[doctor.Check, doctor.Check]:
            checks = {check.name: check for check in doctor.examine(None, env)}
            return checks["broker"], checks["packages"]

        broker, packages = checked()
        assert (broker.status, broker.found.partition(" under ")[0]) == ("warn", "no broker was found")
        assert broker.advice.startswith("start one with `membrokerd`")
        assert (packages.status, packages.found) == ("fail", "missing: pydantic")
        Path(directory, "membroker").symlink_to(daemon.root.parent)
        broker, packages = checked()
        assert (broker.status, packages.status) == ("ok", "ok")
        assert packages.found == "missing: pydantic; only a daemon needs it, and one runs here"
        daemon.kill()
        broker, packages = checked()
    assert (broker.status, packages.status) == ("warn", "fail")
    assert "the broker is dead and left its socket behind" in broker.found
    assert "journalctl -u membrokerd" in broker.advice


def test_an_endpoint_that_was_named_and_cannot_be_entered_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--endpoint", str(tmp_path / "tenants" / "acme")]) == 1
    out = capsys.readouterr().out
    assert "fail  broker: " in out
    assert all(line.startswith(("ok  ", "warn", "fail", "      ")) for line in out.splitlines())
