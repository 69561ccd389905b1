"""The daemon ends and another goes on: what workers, segments and operators have of it then."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import MIB
from tests.support.workers import ANCHOR_BYTES, PAGE, state_of, worker, workers

from membrokerd.system.device_directory import DeviceDirectory, DirectoryError

PATIENT = {"settle_seconds": 600.0}
"""Longer than any test: what is credited was shown free by the device."""


@pytest.fixture
def patient() -> Iterator[Daemon]:
    with running(PATIENT) as daemon:
        yield daemon


def restart(daemon: Daemon, *, kill: bool = True) -> None:
    if kill:
        daemon.kill()
    else:
        assert daemon.stop() == 0
    daemon.start_again()


def check_free(daemon: Daemon) -> None:
    until(lambda: daemon.books().lent_bytes + daemon.books().releasing_bytes == 0)
    until(lambda: daemon.books().device_used_bytes == ANCHOR_BYTES)


def test_who_died_while_no_daemon_ran_is_found_dead(patient: Daemon) -> None:
    """A node loses its daemon and an engine at once. The next one finds the engine dead, as the GPU does."""
    with workers(2) as (dies, lives):
        for one in (dies, lives):
            one.connect(patient).do("buffer = client.model('m').allocate('16MiB')")
        until(lambda: patient.books().unaccounted_bytes == 0 and patient.books().lent_bytes == 32 * MIB)
        patient.kill()
        dies.kill()
        patient.start_again()
        until(lambda: patient.books().lent_bytes == 16 * MIB and patient.books().releasing_bytes == 0)
        lives.do("buffer.close(); client.close()")
    check_free(patient)


def test_a_segment_is_written_on_and_outlives_all(daemon: Daemon) -> None:
    """A loader is half through a file when the daemon dies; nobody holds the weights when it dies once more."""
    with workers(2) as (writer, reader):
        writer.connect(daemon)
        writer.do("segment = client.model('m').create_segment('weights', 8 * MIB); segment.write(0, b'first')")
        reader.connect(daemon)
        reader.begin("attached = client.attach('m/weights', timeout=600)")
        restart(daemon)
        writer.do("segment.write(5, b'second'); segment.seal()")
        reader.result()
        assert reader.ask("attached.read(0, 11).decode()") == "firstsecond"
        assert [one.finish() for one in (writer, reader)] == [0, 0]
    restart(daemon)
    with worker() as one:
        one.connect(daemon)
        assert one.ask("client.attach('m/weights').read(0, 11).decode()") == "firstsecond"
        one.do("client.delete_segment('m/weights'); client.close()")
    check_free(daemon)


def test_what_keeper_and_daemon_have_both_lost_is_told(patient: Daemon) -> None:
    """Both die at once. A process that has mapped the segment reads on; no other can have it, and its name is free."""
    with worker() as one:
        one.connect(patient).do("model = client.model('m'); segment = model.create_segment('weights', 8 * MIB)")
        one.do("segment.write(0, b'weights'); segment.seal()")
        keeper = patient.keeper()
        patient.kill()
        kill(keeper)
        patient.start_again()
        until(lambda: "some descriptors of a segment are missing" in patient.log())
        assert one.ask("segment.read(0, 7).decode()") == "weights"
        until(lambda: patient.books().lent_bytes == 8 * MIB)
        assert one.refused("client.attach('m/weights')").error == "SegmentNotFound"
        one.do("segment.close()")
        until(lambda: patient.books().lent_bytes + patient.books().releasing_bytes == 0)
        one.do("model.create_segment('weights', 2 * MIB).close(); client.close()")
    check_free(patient)


def test_a_segment_is_charged_until_the_keeper_has_let_go(daemon: Daemon) -> None:
    """The keeper is slow to close its copy of a deleted segment: its memory is not free yet, and the books say so."""
    with worker() as one:
        one.connect(daemon)
        one.do("segment = client.model('m').create_segment('weights', 8 * MIB)")
        one.do("segment.write(0, b'weights'); segment.seal(); segment.delete()")
        keeper = daemon.keeper()
        os.kill(keeper, signal.SIGSTOP)
        until(lambda: state_of(keeper) == "T")  # until then it may still close its copy
        try:
            one.do("segment.close()")
            assert one.ask("[one.state for one in client.segments()]") == ["ending"]
            assert daemon.books().lent_bytes == 8 * MIB
        finally:
            os.kill(keeper, signal.SIGCONT)
        until(lambda: daemon.books().lent_bytes == 0)
        until(lambda: daemon.books().unaccounted_bytes == 0)
        one.do("client.close()")
    check_free(daemon)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not os.path.exists(f"/proc/{pid}"))


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A disk of 16 MiB of its own."""
    place = Path(tempfile.mkdtemp(prefix="mb-"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(place)], check=False)
    if mounted.returncode:
        place.rmdir()
        pytest.skip("this user cannot mount a disk of its own")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        place.rmdir()


def fill(path: Path) -> None:
    with suppress(OSError), path.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))


@pytest.mark.parametrize("kill", [True, False], ids=["killed", "stopped"])
def test_a_start_on_a_full_disk_goes_on_with_the_books(small_disk: Path, kill: bool) -> None:
    """What is lent is known, and what is released meanwhile is recorded in the reserve of the file that was there."""
    with running({"runtime_directory": str(small_disk / "run")}) as daemon, worker() as one:
        one.connect(daemon).do("model = client.model('m'); held = [model.allocate(PAGE) for _ in range(8)]")
        fill(small_disk / "filler")
        epochs = []
        for left in (7, 6):
            restart(daemon, kill=kill)
            epochs.append((daemon.root / "state" / "epoch").read_text())
            one.do("held.pop().close()")
            until(lambda left=left: daemon.books().lent_bytes == left * PAGE)
        assert sorted(set(epochs), key=int) == epochs, "an epoch was used twice"
        assert not any(path.name.endswith(".new") for path in (daemon.root / "state").iterdir())
        (small_disk / "filler").unlink()
        until(lambda: not daemon.device().journal_full)
        restart(daemon, kill=kill)
        one.do("held.append(model.allocate(PAGE))")
        assert daemon.books().lent_bytes == 7 * PAGE
        one.do("[buffer.close() for buffer in held]; client.close()")
        check_free(daemon)
        assert "the journal" not in daemon.log()


def test_a_disk_that_becomes_read_only_stops_no_stop(small_disk: Path) -> None:
    """As ext4 does after an error of the disk. The sockets stay, and the next daemon replaces them."""
    with running({"runtime_directory": str(small_disk / "run")}) as daemon:
        subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
        try:
            subprocess.run(["mount", "-o", "remount,ro,bind", str(small_disk)], check=True)
            assert daemon.stop() == 0
            assert "Traceback" not in daemon.log()
            assert daemon.log().endswith("INFO stopped\n")
            with pytest.raises(DirectoryError, match="its file system is read-only"):
                DeviceDirectory(small_disk / "run", "host")
        finally:
            subprocess.run(["umount", "--lazy", str(small_disk)], check=True)
        assert (daemon.endpoint() / "handoff.sock").is_socket()
        daemon.start_again()
        check_free(daemon)


def test_a_tenant_that_is_removed_while_the_daemon_is_down(patient: Daemon) -> None:
    """Its worker keeps what it has. The log says why that stays charged, and the worker that the tenant is gone."""
    with worker() as one:
        one.connect(patient, outage=1.0).do("model = client.model('m'); kept = model.allocate('2MiB')")
        patient.kill()
        before, patient.config = patient.log(), {**patient.config, "tenants": {"blue": {}}}
        patient.start_again()
        until(lambda: "tenant=red sessions=1" in patient.log().removeprefix(before))
        assert "a tenant that is not configured any more has sessions" in patient.log()
        assert patient.books().lent_bytes == PAGE
        # It looks for its daemon once in a second: a call that ends before that has heard nothing yet.
        until(lambda: "this tenant is not configured any more" in str(one.refused("model.allocate('2MiB')")))
    check_free(patient)


def test_less_capacity_than_is_lent() -> None:
    """Lent memory stays lent, and no more is lent until it is released. The device shrinks with the capacity."""
    with running() as daemon, worker() as one:
        one.connect(daemon).do("model = client.model('m'); buffer = model.allocate('32MiB')")
        daemon.kill()
        daemon.config["capacity"] = "16MiB"
        daemon.start_again()
        until(lambda: daemon.sessions()[0].state == daemon.sessions()[0].OPEN)
        assert (daemon.books().capacity_bytes, daemon.books().lent_bytes) == (32 * MIB, 32 * MIB)
        assert daemon.books().unaccounted_bytes == 0
        assert one.refused("model.allocate(PAGE)").reason == "CAPACITY"
        one.do("buffer.close(); client.close()")
        restart(daemon)
        assert daemon.books().capacity_bytes == 16 * MIB


def test_a_worker_that_starts_first_waits_for_the_daemon(daemon: Daemon) -> None:
    """After a reboot nobody orders who starts: the engine says what it waits for, and goes on when it is there."""
    assert daemon.stop() == 0
    with worker() as one:
        one.begin(f"client = membroker.connect({str(daemon.endpoint())!r}, timeout=600)")
        daemon.start_again()
        one.result()
        one.do("client.model('m').allocate(PAGE).close()")
