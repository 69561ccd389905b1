"""What `membroker doctor` says of a machine, without a broker."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.daemons import until
from tests.support.processes import descriptors

from membroker.cli import doctor
from membroker.vmm.driver import DriverError, DriverUnavailable
from membroker.wire.sessions import descriptors_for, sessions_for


def test_this_machine_passes_and_nothing_is_left_behind() -> None:
    """The suite runs real daemons here, so the doctor has to agree that they can run."""
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        before = descriptors()
        checks = {check.name: check for check in doctor.examine(None, os.environ | {"XDG_RUNTIME_DIR": directory})}
        until(lambda: descriptors() <= before)
        assert os.listdir(directory) == []
    assert {name for name, check in checks.items() if check.status == "fail"} == set()
    assert len(checks) == 19
    assert all(check.found and (check.status == "ok") == (not check.advice) for check in checks.values())


def test_a_limit_that_is_too_low_has_advice() -> None:
    for check, status in [
        (doctor.check_python((3, 11, 0)), "ok"),
        (doctor.check_python((3, 10, 14)), "fail"),
        (doctor.check_descriptors(1024), "warn"),
        (doctor.check_descriptors(129), "fail"),
        (doctor.check_mappings(1000), "warn"),
        (doctor.check_inotify(65_536, 1), "warn"),
    ]:
        assert check.status == status
        assert bool(check.advice) == (status != "ok")
    assert "enough for 5 sessions" in doctor.check_descriptors(1024).found
    assert [sessions_for(descriptors_for(sessions)) for sessions in range(2_000)] == list(range(2_000))


def test_the_runtime_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        assert doctor.check_runtime_directory({"XDG_RUNTIME_DIR": directory}, 1000).status == "ok"
        long = doctor.check_runtime_directory({"XDG_RUNTIME_DIR": f"{directory}/".ljust(46, "x")}, 1000)
        assert (long.status, long.advice) == ("warn", "tenants with long names will not fit")
        too_long = doctor.check_runtime_directory({"XDG_RUNTIME_DIR": f"{directory}/".ljust(76, "x")}, 1000)
        assert too_long.status == "fail"
        monkeypatch.setattr(os, "access", lambda *_, **__: False)
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
    ("version", "status", "says"),
    [
        ("580.159.04", "ok", "driver 580.159.04 on x86_64 can suspend processes of this user: "),
        ("565.57.01", "warn", "needs --no-sleep here: it needs NVIDIA's driver 570 or later"),
    ],
)
def test_whether_any_program_can_be_put_to_sleep(
    version: str, status: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(doctor, "MPS_CONTROL", tmp_path / "control")
    device = SimpleNamespace(driver_version=version, uuid="GPU-1")
    monkeypatch.setattr(doctor, "open_driver", lambda kind: SimpleNamespace(device=device, close=lambda: None))
    monkeypatch.setattr(doctor, "load_bindings", lambda: SimpleNamespace(cuCheckpointProcessLock=None))
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    check = doctor.check_guests()
    assert check.status == status
    assert says in f"{check.found} {check.advice}"


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
    assert len(checks) == 19
