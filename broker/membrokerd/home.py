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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MAX_PATH_BYTES = 107
"""The longest path of a Unix socket: `sockaddr_un` has 108 bytes, the last is a zero."""
_EPOCH_MAX = (1 << 24) - 1


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
    """`<runtime>/<device>`, locked by this process until it exits."""

    def __init__(self, runtime: Path, device: str) -> None:
        self.runtime = runtime
        self.root = runtime / device
        self.state = self.root / "state"
        self._lock = self._take()

    def _take(self) -> int:
        try:
            self._own(self.runtime, None)
            self._own(self.root, 0o755)
            self._own(self.state, 0o700)
            lock = os.open(self.state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise HomeError(
                f"cannot use {self.root}: {error.strerror}; choose another with --runtime-directory DIR"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(lock, 64).decode(errors="replace").strip() or "unknown"
            os.close(lock)
            raise HomeError(
                f"a membrokerd already owns this device ({self.root}): process {owner}; "
                f"stop it first (kill {owner}), or own another device with --device"
            ) from error
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
        return lock

    def next_epoch(self) -> int:
        """Return a number that no earlier daemon of this device had. It is on disk before it is used."""
        path = self.state / "epoch"
        try:
            last = int(path.read_text()) if path.exists() else 0
        except ValueError as error:
            raise HomeError(f"{path} holds no number; remove it after a reboot") from error
        if last >= _EPOCH_MAX:
            raise HomeError(f"{path} has reached {_EPOCH_MAX}, the last epoch; remove it after a reboot")
        fresh = self.state / "epoch.new"
        try:
            with fresh.open("w") as file:
                file.write(f"{last + 1}\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.rename(path)
        except OSError as error:
            raise HomeError(f"cannot write {path}: {error.strerror}; make room there, or mend it") from error
        return last + 1

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
            if len(os.fsencode(path)) > MAX_PATH_BYTES:
                raise HomeError(
                    f"the path {path} is longer than the {MAX_PATH_BYTES} bytes that a Unix socket may have; "
                    "choose a shorter --runtime-directory"
                )
        for count in range(1, len(parts)):
            self._own(self.root.joinpath(*parts[:count]), 0o755)
        self._own(directory, mode)
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
        private.rename(public)

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
                with suppress(FileNotFoundError):
                    (endpoint / name).unlink()


def _is_open(mode: int) -> bool:
    """Say whether others may rename what is in a directory: it is writable for them, and not sticky."""
    return bool(mode & 0o022) and not mode & stat.S_ISVTX


def clear_private(home: Home) -> None:
    """Remove the sockets that a dead daemon bound and never published."""
    for kind in ("grpc", "handoff"):
        for path in home.state.glob(f"{kind}-*"):
            path.unlink()
