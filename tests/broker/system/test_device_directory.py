"""The daemon's place: one owner at a time, an epoch that never repeats, sockets that are right before they are seen."""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.processes import descriptors

from membroker.wire.names import MAX_SOCKET_PATH_BYTES
from membrokerd.system.device_directory import DeviceDirectory, DirectoryError, Ownership

_OWN = """
import pathlib, sys
from membrokerd.system.device_directory import DeviceDirectory, DirectoryError
try:
    home = DeviceDirectory(pathlib.Path(sys.argv[1]), "host")
except DirectoryError as error:
    print(f"refused: {error}", flush=True)
else:
    print(f"epoch {home.next_epoch()}", flush=True)
    sys.stdin.read()
"""

_GPU = """
import pathlib, sys
from membrokerd.system.device_directory import DeviceDirectory
gpu = DeviceDirectory(pathlib.Path(sys.argv[1]), "gpu-12345678")
print(gpu.write_index(0), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def unlocked(tmp_path: Path) -> Iterator[None]:
    """A daemon holds its directory until it exits. This process has many: let go of what a test has locked."""
    yield
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            if os.readlink(f"/proc/self/fd/{file}").startswith(f"{tmp_path}/"):
                os.close(int(file))


def owner(runtime: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _OWN, str(runtime)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()


@pytest.mark.parametrize("removed", ["nothing", "lock", "all"])
def test_a_second_daemon_is_told_who_the_first_is(tmp_path: Path, removed: str) -> None:
    """Two operators start one each; the second learns the pid and both ways out. A kill -9 lets go of the lock.

    So it is where a cleaner of the runtime directory has taken the files: it would lend the same memory again.
    """
    with owner(tmp_path) as first:
        assert said(first) == "epoch 1"
        if removed == "lock":
            (tmp_path / "host" / "state" / "lock").unlink()
        elif removed == "all":
            shutil.rmtree(tmp_path / "host" / "state")
        with owner(tmp_path) as second:
            refused = said(second)
        assert refused.startswith("refused: a membrokerd already owns this device"), refused
        known = [str(first.pid), str(tmp_path / "host"), "--device"]
        for word in known if removed == "nothing" else [f"`fuser {tmp_path / 'host'}` finds it"]:
            assert word in refused
        first.kill()
    with owner(tmp_path) as third:
        next_epoch = said(third)
        assert next_epoch.startswith("epoch")
        assert removed != "nothing" or next_epoch == "epoch 2", (
            "it came twice, or was taken by the one that was refused"
        )
        third.communicate()


def test_what_is_gone_of_a_place_is_noticed(tmp_path: Path) -> None:
    """Each published socket, until it is taken away in order, and the directory, also where another is in its place."""
    home = DeviceDirectory(tmp_path, "host")
    public = home.endpoint("tenants", "red") / "handoff.sock"
    with home.listen(public, Ownership()):  # which keeps the number of its file from being another's
        assert home.lost_sockets() == []
        public.unlink()
        assert home.lost_sockets() == [public]
        public.touch()
        assert home.lost_sockets() == [public], "it is another file"
    home.close(public.parent)
    assert home.lost_sockets() == []
    assert home.is_in_place()
    home.root.rename(tmp_path / "moved")
    assert not home.is_in_place()
    home.root.mkdir()
    assert not home.is_in_place()


def test_a_daemon_without_its_directory_leaves_its_successors_sockets(tmp_path: Path) -> None:
    """Somebody removed the directory, a second daemon serves there, and then the first one stops."""
    first = DeviceDirectory(tmp_path, "host")
    public = first.endpoint("tenants", "red") / "handoff.sock"
    with first.listen(public, Ownership()):
        shutil.rmtree(first.root)
        second = DeviceDirectory(tmp_path, "host")
        second.endpoint("tenants", "red")
        with second.listen(public, Ownership()):
            first.close(public.parent)
            assert public.is_socket()
            assert second.lost_sockets() == []
            second.close(public.parent)
            assert not public.exists()


def test_what_is_gone_of_the_state_is_written_again(tmp_path: Path) -> None:
    home = DeviceDirectory(tmp_path, "host")
    assert home.next_epoch() == 1
    assert home.restore(1) == []
    before = descriptors()
    (home.state / "lock").unlink()
    assert home.restore(1) == ["lock"]
    shutil.rmtree(home.state)
    assert home.restore(7) == ["lock", "epoch"]
    assert (home.state / "lock").read_text() == f"{os.getpid()}\n"
    assert (home.state / "epoch").read_text() == "7\n"
    assert stat.S_IMODE(home.state.stat().st_mode) == 0o700
    assert descriptors() == before
    (home.state / "lock").unlink()
    (home.state / "lock").mkdir()
    with pytest.raises(OSError, match="lock"):
        home.restore(7)
    (home.state / "lock").rmdir()
    assert home.restore(7) == ["lock"]


def test_the_epoch_grows_and_is_above_all_that_is_known(tmp_path: Path) -> None:
    """The file was removed, or is older than the journal: no id that a worker holds is lent a second time."""
    home = DeviceDirectory(tmp_path, "host")
    assert not home.had_predecessor()
    assert [home.next_epoch(known) for known in (0, 0, 7, 3)] == [1, 2, 8, 9]
    assert home.had_predecessor()
    assert (home.state / "epoch").read_text() == "9\n"
    assert not (home.state / "epoch.new").exists()
    (home.state / "epoch").unlink()
    assert home.next_epoch(9) == 10


@pytest.mark.parametrize("text", ["", "1.5", "-5", "\u0661", "16777216", "9" * 64, "\0" * 60])
def test_an_epoch_that_is_no_epoch_says_what_to_do(tmp_path: Path, text: str) -> None:
    home = DeviceDirectory(tmp_path, "host")
    (home.state / "epoch").write_text(text)
    with pytest.raises(DirectoryError, match=r"epoch; remove it|16777215; remove it") as caught:
        home.next_epoch()
    assert str(home.state / "epoch") in str(caught.value)
    assert (home.state / "epoch").read_text() == text


@pytest.mark.parametrize("known", [0, 16777215])
def test_after_the_last_epoch_there_is_none(tmp_path: Path, known: int) -> None:
    home = DeviceDirectory(tmp_path, "host")
    (home.state / "epoch").write_text("1" if known else "16777215")
    with pytest.raises(DirectoryError, match="16777215, "):
        home.next_epoch(known)


def test_what_a_crash_left_of_an_epoch_is_replaced(tmp_path: Path) -> None:
    """Even a FIFO or a link is: the new file is made, and nothing is opened that was there. A directory is named."""
    home = DeviceDirectory(tmp_path, "host")
    (home.state / "epoch.new").mkdir()
    with pytest.raises(DirectoryError, match=r"epoch: Is a directory"):
        home.next_epoch()
    assert not home.had_predecessor()
    (home.state / "epoch.new").rmdir()
    os.mkfifo(home.state / "epoch.new")
    assert home.next_epoch() == 1
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (home.state / "epoch.new").symlink_to(victim)
    assert home.next_epoch() == 2
    assert victim.read_text() == "mine"


_MAKES: list[Callable[[Path], None]] = [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)]
_WRONG = [*itertools.product(("state/lock", "state/epoch"), _MAKES)]
_WRONG += [(directory, os.mkfifo) for directory in ("tenants", "tenants/red", "state")]


@pytest.mark.parametrize(("name", "make"), _WRONG)
def test_what_is_no_file_is_named(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    """An operator's mistake, or an attempt to hang the daemon at its start. Nor is a file taken for a directory."""
    path = tmp_path / "host" / name
    path.parent.mkdir(parents=True)
    make(path)

    def begin() -> None:
        home = DeviceDirectory(tmp_path, "host")
        home.next_epoch()
        home.endpoint("tenants", "red")

    with pytest.raises(DirectoryError, match=rf"{name}\b.*(FIFO|directory|symbolic link) "):
        begin()


def test_what_is_where_a_socket_belongs(tmp_path: Path) -> None:
    """A file or a FIFO is replaced, as a dead daemon's socket is; a directory is named, and nothing is left behind."""
    home = DeviceDirectory(tmp_path, "host")
    public = home.endpoint("tenants", "red") / "handoff.sock"
    os.mkfifo(public)
    home.listen(public, Ownership()).close()
    public.unlink()
    public.mkdir()
    with pytest.raises(DirectoryError, match=r"handoff.sock: Is a directory"):
        home.listen(public, Ownership())
    home.clear_private()
    home.private("grpc").mkdir()
    with pytest.raises(DirectoryError, match=r"/grpc-.*: "):
        home.clear_private()


def test_a_long_path_is_refused_with_the_path(tmp_path: Path) -> None:
    """Linux cuts it off or fails in a way nobody understands; bytes count, not letters."""
    for letter in ("r", "ü"):
        runtime = tmp_path / (letter * (MAX_SOCKET_PATH_BYTES - 25))
        home = DeviceDirectory(runtime, "host")
        with pytest.raises(DirectoryError) as caught:
            home.endpoint("tenants", "red")
        assert str(runtime) in str(caught.value)
        assert str(MAX_SOCKET_PATH_BYTES) in str(caught.value)
        assert "--runtime-directory" in str(caught.value)
        assert not (home.root / "tenants").exists()


def test_a_socket_has_its_mode_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment can anybody connect who may not: it is bound where nobody else comes in, and renamed at last."""
    home = DeviceDirectory(tmp_path, "host")
    assert stat.S_IMODE(home.state.stat().st_mode) == 0o700
    directory = home.endpoint("tenants", "red")
    public = directory / "handoff.sock"
    seen: list[int] = []
    rename = Path.rename

    def watched(self: Path, target: Path) -> Path:
        assert not public.exists()
        assert self.parent == home.state
        seen.append(stat.S_IMODE(self.stat().st_mode))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    with (
        home.listen(public, Ownership(mode=0o640)) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        assert seen == [0o640]
        client.connect(str(public))
        assert not listener.getblocking()


def test_what_a_dead_daemon_left_is_replaced(tmp_path: Path) -> None:
    """Its published socket is overwritten. Its private ones are removed, and those of a tenant that is no more."""
    home = DeviceDirectory(tmp_path, "host")
    for tenant in ("old", "red"):
        public = home.endpoint("tenants", tenant) / "handoff.sock"
        home.listen(public, Ownership()).close()
    for kind in ("grpc", "handoff"):
        home.private(kind).touch()
    (home.state / "epoch").write_text("4\n")
    home.clear_private()
    home.clear_endpoints({"red": None})
    assert [path.parent.name for path in home.root.glob("tenants/*/*.sock")] == ["red"]
    assert sorted(path.name for path in home.state.iterdir()) == ["epoch", "lock"]
    with home.listen(public, Ownership()), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(public))
    home.close(public.parent)
    home.close(tmp_path / "never made")
    assert not public.exists()


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_the_umask_opens_no_directory(tmp_path: Path, umask: int) -> None:
    """A user that can write to a directory above an endpoint can put another endpoint in its place."""
    before = os.umask(umask)
    try:
        home = DeviceDirectory(tmp_path / "a" / "b", "host")
        home.endpoint("tenants", "red")
    finally:
        os.umask(before)
    paths = [path for path in tmp_path.rglob("*") if path.is_dir()]
    modes = {str(path.relative_to(tmp_path)): stat.S_IMODE(path.stat().st_mode) for path in paths}
    assert modes.pop("a/b/host/state") == 0o700
    modes.pop("a")
    assert set(modes.values()) == {0o755}, modes


def test_a_directory_below_one_that_others_may_change_is_refused(tmp_path: Path) -> None:
    """They could rename ours, and put another in its place; perhaps it is a trap. Its contents are not touched."""
    opened = tmp_path / "opened"
    opened.mkdir()
    opened.chmod(0o777)
    for runtime in (opened, opened / "later"):
        with pytest.raises(DirectoryError, match=rf"{opened} "):
            DeviceDirectory(runtime, "host")
    assert not list(opened.iterdir())
    (opened / "run").mkdir()
    with pytest.raises(DirectoryError, match=rf"{opened} "):
        DeviceDirectory(opened / "run", "host")
    opened.chmod(0o1777)
    DeviceDirectory(opened, "host")


@pytest.mark.parametrize("part", ["host", "host/state"])
def test_a_link_is_never_followed(tmp_path: Path, part: str) -> None:
    """Behind it could be any directory of root's, whose mode and content would be changed."""
    runtime, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir(mode=0o755)
    link = runtime / part
    link.parent.mkdir(parents=True)
    link.symlink_to(victim)
    with pytest.raises(DirectoryError, match="not this user's alone"):
        DeviceDirectory(runtime, "host")
    assert not list(victim.iterdir())
    assert stat.S_IMODE(victim.stat().st_mode) == 0o755


@pytest.mark.root
def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    """Its owner could rename what we put there."""
    theirs = tmp_path / "run"
    theirs.mkdir()
    os.chown(theirs, 60_001, 60_001)
    with pytest.raises(DirectoryError, match="not this user's alone"):
        DeviceDirectory(theirs, "host")


def test_the_host_driver_does_not_take_the_number_of_a_living_gpu(tmp_path: Path) -> None:
    """An operator tries the host driver beside a GPU's daemon: manifests that say `0` still mean the GPU.

    The number is the host driver's once the GPU's daemon is dead, and the GPU's again when that comes back.
    """
    runtime = tmp_path / "run"
    command = [sys.executable, "-c", _GPU, str(runtime)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as gpu:
        assert said(gpu) == "True"
        host = DeviceDirectory(runtime, "host")
        assert not host.write_index(0, yields=True)
        assert (runtime / "0").readlink() == Path("gpu-12345678")
        assert (host.root / "index").read_text() == "0\n"
        gpu.kill()
    assert host.write_index(0, yields=True)
    assert (runtime / "0").readlink() == Path("host")
    assert host.write_index(0, yields=True), "its own number"
    DeviceDirectory(runtime, "gpu-12345678").write_index(0)
    assert (runtime / "0").readlink() == Path("gpu-12345678")


def test_a_directory_at_the_number_of_the_device_is_moved_away(tmp_path: Path) -> None:
    """The machine boots, and a container starts before the daemon: its runtime makes the endpoint that it mounts."""
    mounted = tmp_path / "run" / "0" / "tenants" / "acme"
    mounted.mkdir(parents=True)
    (mounted / "file").write_text("a tenant's")
    home = DeviceDirectory(tmp_path / "run", "gpu-12345678")
    home.write_index(0)
    assert (tmp_path / "run" / "0").resolve() == home.root
    assert [path.read_text() for path in home.state.glob("moved-*/tenants/acme/file")] == ["a tenant's"]
    (home.root / "index").unlink()
    (home.root / "index").mkdir()
    with pytest.raises(DirectoryError, match=rf"{home.root}/index: Is a directory"):
        home.write_index(0)
