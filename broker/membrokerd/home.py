"""The daemon's place on disk: the device's directory, its lock, its epoch, and the sockets of its endpoints.

Owns paths, modes and owners. Sockets are bound in `state/`, which nobody else can enter, given their owner and mode,
and only then renamed into their endpoint: none is ever reachable with the wrong mode, and since a server knows only
the path that it bound, an old daemon's stop can't unlink its successor's socket. Must never touch a device.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from membroker.wire.names import MAX_SOCKET_PATH_BYTES

from . import files

MAX_EPOCH = (1 << 24) - 1
"""The last epoch: an id is an epoch and a counter, in 64 bits together."""
_NUMBER_BYTES = 64
"""The most that is read of a file that holds one number."""


class HomeError(Exception):
    """The daemon cannot live here. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who may open a socket: -1 leaves the owner or the group as it is. `table` is where that was configured."""

    uid: int = -1
    gid: int = -1
    mode: int = 0o660
    table: str = ""


class Home:
    """`<runtime>/<device>`, locked by this process until it exits.

    The lock is on the directory itself, so that it holds whatever is removed from it; systemd-tmpfiles leaves a locked
    directory alone, too. `state/lock` tells people the owner's pid, and is locked for daemons that know only that.
    """

    def __init__(self, runtime: Path, device: str) -> None:
        self.runtime = runtime
        self.root = runtime / device
        self.state = self.root / "state"
        self._held: dict[Path, int] = {}
        """Descriptors of what this daemon has locked."""
        self._sockets: dict[Path, tuple[int, int]] = {}
        """What tells the published sockets from all that could be put in their place."""
        self._take()

    def _take(self) -> None:
        directories = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._own(self.runtime, None)
            self._own(self.root, 0o755)
            self._own(self.state, 0o700)
            self._lock(self.root, os.open(self.root, directories))
            self._write_lock()
        except OSError as error:
            raise HomeError(
                f"cannot use {error.filename or self.root}: {error.strerror}; mend that, or choose another directory "
                "with --runtime-directory DIR"
            ) from error

    def _lock(self, path: Path, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise HomeError(self._already_owned()) from error
        except OSError:
            os.close(descriptor)
            raise
        self._held[path] = descriptor

    def _already_owned(self) -> str:
        try:
            owner = files.read_file(self.state / "lock", _NUMBER_BYTES).decode(errors="replace").strip()
        except OSError:
            owner = ""
        if owner.isdecimal():
            found, stop = f"process {owner}", f"kill {owner}"
        else:
            found, stop = "its state/lock, which has its pid, was removed", f"`fuser {self.root}` finds it"
        return (
            f"a membrokerd already owns this device ({self.root}): {found}; "
            f"stop it first ({stop}), or own another device with --device"
        )

    def _write_lock(self) -> None:
        """Tell people who the owner is."""
        path = self.state / "lock"
        self._lock(path, files.open_file(path, os.O_RDWR | os.O_CREAT))
        os.ftruncate(self._held[path], 0)
        os.pwrite(self._held[path], f"{os.getpid()}\n".encode(), 0)

    def next_epoch(self, known: int = 0) -> int:
        """Return a number that no earlier daemon of this device had. It is on disk before it is used.

        `known` is the last epoch by other witnesses, the journal and the descriptor store: the file may be gone.
        """
        path = self.state / "epoch"
        what_to_do = "remove it: the journal, which knows the last epoch too, is asked then"
        try:
            text = files.read_file(path, _NUMBER_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            text = "0"
        except OSError as error:
            raise HomeError(f"cannot read {path}: {error.strerror}; {what_to_do}") from error
        if not (text.isascii() and text.isdecimal()):
            raise HomeError(f"{path} holds {text!r}, which is not a number from 0 to {MAX_EPOCH}; {what_to_do}")
        last = max(int(text), known)
        if int(text) > MAX_EPOCH:
            raise HomeError(f"{path} holds {text}, and {MAX_EPOCH} is the last epoch; {what_to_do}")
        if last == MAX_EPOCH:
            raise HomeError(
                f"{self.state} has reached {MAX_EPOCH}, the last epoch: end every process that borrowed from this "
                "broker, then remove that directory"
            )
        try:
            self._write_epoch(last + 1)
        except OSError as error:
            raise HomeError(f"cannot write {path}: {error.strerror}; make room there, or mend it") from error
        return last + 1

    def _write_epoch(self, epoch: int) -> None:
        files.replace_file(self.state / "epoch", f"{epoch}\n".encode())

    # --- what becomes of it while the daemon runs ---

    def is_in_place(self) -> bool:
        """Say whether the device's directory is still the one that is locked."""
        return _place(self.root) == _place(self._held[self.root])

    def restore(self, epoch: int) -> list[str]:
        """Write again what is gone of `state/` but the journal, and return the names. Raises `OSError`."""
        restored = []
        if not os.path.lexists(self.state):
            self._own(self.state, 0o700)
        lock = self.state / "lock"
        if lock not in self._held or _place(lock) != _place(self._held[lock]):
            if lock in self._held:
                os.close(self._held.pop(lock))
            self._write_lock()
            restored.append("lock")
        if not os.path.lexists(self.state / "epoch"):
            self._write_epoch(epoch)
            restored.append("epoch")
        return restored

    def lost_sockets(self) -> list[Path]:
        """Return the published sockets that are not there any more."""
        return [path for path, place in self._sockets.items() if _place(path) != place]

    def had_predecessor(self) -> bool:
        """Say whether an earlier daemon of this device lived here since the directory was made."""
        return (self.state / "epoch").exists()

    def tell_index(self, index: int) -> None:
        """Write the device's number where `membroker --device` looks for it; the directory is named after the UUID."""
        fresh = self.state / "index.new"
        try:
            fresh.write_text(f"{index}\n")
            fresh.chmod(0o644)
            fresh.rename(self.root / "index")
        except OSError as error:
            raise HomeError(f"cannot write {self.root / 'index'}: {error.strerror}; make room there") from error

    def endpoint(self, *parts: str, mode: int = 0o755) -> Path:
        """Return the directory of an endpoint (`tenants`, NAME or `admin`), made if need be."""
        directory = self.root.joinpath(*parts)
        longest = directory / "handoff.sock"
        for path in (longest, self.private("grpc")):
            if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
                raise HomeError(
                    f"the path {path} is longer than the {MAX_SOCKET_PATH_BYTES} bytes that a Unix socket may have; "
                    "choose a shorter --runtime-directory"
                )
        try:
            for count in range(1, len(parts)):
                self._own(self.root.joinpath(*parts[:count]), 0o755)
            self._own(directory, mode)
        except OSError as error:
            raise HomeError(f"cannot make {error.filename or directory}: {error.strerror}; mend that") from error
        return directory

    @staticmethod
    def _own(directory: Path, mode: int | None) -> None:
        """Make a directory, or take one that is this user's or root's; raises `HomeError` for any other.

        Who else can rename in it could put sockets of its own in our place, and lead elsewhere what we do by name.
        `mode` None is for the runtime directory: that may be a link of the operator's, and keeps the mode it has.
        """
        made = not os.path.lexists(directory)
        if made:
            directory.mkdir(parents=True)
        status = directory.stat() if mode is None else directory.lstat()
        if not (stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise HomeError(
                f"{directory} is not a directory: move it away, or choose another with --runtime-directory DIR"
            )
        foreign = not stat.S_ISDIR(status.st_mode) or status.st_uid not in (0, os.geteuid())
        if foreign or (mode is None and not made and _is_open(status.st_mode)):
            raise HomeError(
                f"{directory} is not this user's alone, and who can change it could pose as the broker: "
                "remove it, or choose another with --runtime-directory DIR"
            )
        if mode is not None or made:
            directory.chmod(0o755 if mode is None else mode)

    def private(self, kind: str) -> Path:
        """Return a path for a socket that nobody else can reach yet."""
        return self.state / f"{kind}-{secrets.token_hex(4)}"

    def publish(self, private: Path, public: Path, ownership: Ownership) -> None:
        """Give a bound socket its owner and mode, and put it where tenants look, over what a dead daemon left."""
        private.chmod(ownership.mode)
        for key, uid, gid in (("owner", ownership.uid, -1), ("group", -1, ownership.gid)):
            if (uid, gid) != (-1, -1):
                self._give(private, f"{ownership.table}.{key}", uid, gid)
        place = _place(private)
        try:
            private.rename(public)
        except OSError as error:  # a directory; anything else is replaced
            private.unlink()
            raise HomeError(
                f"cannot put a socket at {public}: {error.strerror}; move away what is there, and start again"
            ) from error
        assert place is not None
        self._sockets[public] = place

    @staticmethod
    def _give(private: Path, key: str, uid: int, gid: int) -> None:
        try:
            os.chown(private, uid, gid)
        except OSError as error:
            private.unlink()
            raise HomeError(
                f"{key} = {max(uid, gid)}: this daemon, of user {os.geteuid()}, cannot give a socket away: "
                f"{error.strerror}; start it as root, or leave that key out"
            ) from error

    def listen(self, public: Path, ownership: Ownership) -> socket.socket:
        """Return a listening, non-blocking SEQPACKET socket at `public`."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            private = self.private("handoff")
            listener.bind(os.fspath(private))
            listener.listen(1024)
            self.publish(private, public, ownership)
        except BaseException:
            listener.close()
            raise
        return listener

    def close(self, endpoints: list[Path]) -> None:
        """Take the sockets away. The lock itself is held until the process exits."""
        for endpoint in endpoints:
            for name in ("handoff.sock", "grpc.sock"):
                self._sockets.pop(endpoint / name, None)
                if (endpoint / name).is_socket():
                    (endpoint / name).unlink(missing_ok=True)


def _place(path: Path | int) -> tuple[int, int] | None:
    """Return the identity of a file, by path or descriptor, or None when the file does not exist."""
    try:
        status = os.fstat(path) if isinstance(path, int) else os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _is_open(mode: int) -> bool:
    """Say whether others may rename what is in a directory: it is writable for them, and not sticky."""
    return bool(mode & 0o022) and not mode & stat.S_ISVTX


def clear_private(home: Home) -> None:
    """Remove the sockets that a dead daemon bound and never published."""
    for kind in ("grpc", "handoff"):
        for path in home.state.glob(f"{kind}-*"):
            try:
                path.unlink()
            except OSError as error:
                raise HomeError(f"cannot remove {path}: {error.strerror}; move it away, and start again") from error
