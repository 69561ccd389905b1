"""The daemon's directory on disk: its lock, its epoch, and the sockets of its endpoints.

Owns paths, modes and owners. A socket is bound in `state/`, which only the daemon's user can enter, given its owner and
mode, and then renamed into its endpoint. So a socket is never reachable with the wrong mode. A server unlinks only the
path that it bound, so an old daemon that stops cannot remove its successor's socket. Must never touch a device.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from membroker.wire.ownership import stranger_in, user_text
from membroker.wire.paths import socket_fault, unwritable

from . import files, logs

MAX_EPOCH = (1 << 24) - 1
"""The last epoch. An id is an epoch and a counter, together 64 bits."""
SO_PASSRIGHTS = getattr(socket, "SO_PASSRIGHTS", 83)
"""The option of a socket, since Linux 6.16, whether it takes descriptors. Its connections inherit it."""
_OF_ALL = "all"
"""The place of a device's name in the directory of `membrokerd --all`."""
_NUMBER_BYTES = 64
"""How much is read of a file that contains one number."""


class DirectoryError(Exception):
    """The daemon cannot use its directory. The message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Owner, group and mode of a socket; -1 keeps the owner or group. `table` is where they are configured."""

    uid: int = -1
    gid: int = -1
    mode: int = 0o660
    table: str = ""


def try_runtime(runtime: Path, device: str, tenants: Collection[str]) -> None:
    """Raise `DirectoryError` if a daemon of this user could not have its directory here. Makes nothing.

    `device` is the directory's name.
    """
    _refuse(runtime, stranger_in(runtime))
    there = next(part for part in (runtime, *runtime.parents) if part.exists())
    if not there.is_dir():
        raise DirectoryError(f"{there} is not a directory: move it away, or choose another with --runtime-directory")
    if why := unwritable(there):
        raise DirectoryError(
            f"cannot use {there}: {why}{_owner(there)}; fix that, or choose another directory with "
            "--runtime-directory DIR"
        )
    for tenant in tenants:
        _check_path(runtime / device / "tenants" / tenant / "handoff.sock")


class DeviceDirectory:
    """`<runtime>/<device>`, locked by this process until it exits.

    The lock is on the directory itself, so it holds even if files in the directory are removed, and systemd-tmpfiles
    does not clean a locked directory. `state/lock` contains the daemon's pid for people. It is locked too, for older
    daemons that lock only that file.
    """

    def __init__(self, runtime: Path, device: str) -> None:
        self.runtime = runtime
        self.root = runtime / device
        self.state = self.root / "state"
        self._held: dict[Path, int] = {}
        """Descriptors of the files and directories that this daemon has locked."""
        self._sockets: dict[Path, tuple[int, int]] = {}
        """The identities of the published sockets, to notice when one is replaced."""
        self._acquire()

    @classmethod
    def of_all(cls, runtime: Path) -> DeviceDirectory:
        """Return the directory of the parent of all daemons."""
        return cls(runtime, _OF_ALL)

    def _acquire(self) -> None:
        directories = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        try_runtime(self.runtime, self.root.name, ())
        try:
            self._ensure_directory(self.runtime, None)
            self._ensure_directory(self.root, 0o755)
            self._ensure_directory(self.state, 0o700)
            self._lock(self.root, os.open(self.root, directories))
            self._write_lock()
        except OSError as error:
            place = Path(error.filename or self.root)
            raise DirectoryError(
                f"cannot use {place}: {error.strerror}{_owner(place)}; fix that, or choose another directory with "
                "--runtime-directory DIR"
            ) from error

    def _lock(self, path: Path, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DirectoryError(self._already_owned()) from error
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
            found, stop = "its file state/lock, which has its pid, was removed", f"`fuser {self.root}` finds it"
        owns, other = "already owns this device", ", or choose another device with --device"
        if self.root.name == _OF_ALL:
            owns, other = "--all already runs here", ""
        return f"a membrokerd {owns} ({self.root}): {found}; stop it first ({stop}){other}"

    def _write_lock(self) -> None:
        """Write the daemon's pid for people."""
        path = self.state / "lock"
        self._lock(path, files.open_file(path, os.O_RDWR | os.O_CREAT))
        files.overwrite(self._held[path], f"{os.getpid()}\n".encode())

    def next_epoch(self, known: int = 0) -> int:
        """Return a number that no earlier daemon of this device had, after writing it to disk.

        `known` is the last epoch in the journal and the descriptor store, since the file may have been removed.
        """
        path = self.state / "epoch"
        what_to_do = "remove it: the daemon then takes the last epoch from the journal"
        try:
            text = files.read_file(path, _NUMBER_BYTES).decode(errors="replace").strip()
        except FileNotFoundError:
            text = "0"
        except OSError as error:
            raise DirectoryError(f"cannot read {path}: {error.strerror}; {what_to_do}") from error
        if not (text.isascii() and text.isdecimal()):
            raise DirectoryError(f"{path} contains {text!r}, which is not a number from 0 to {MAX_EPOCH}; {what_to_do}")
        last = max(int(text), known)
        if int(text) > MAX_EPOCH:
            raise DirectoryError(f"{path} contains {text}, but the last epoch is {MAX_EPOCH}; {what_to_do}")
        if last == MAX_EPOCH:
            raise DirectoryError(
                f"{self.state} has reached {MAX_EPOCH}, the last epoch: end every process that borrowed from this "
                "broker, then remove that directory"
            )
        try:
            self._write_epoch(last + 1)
        except OSError as error:
            raise DirectoryError(f"cannot write {path}: {error.strerror}; free some disk space, or fix that") from error
        return last + 1

    def _write_epoch(self, epoch: int) -> None:
        path, text = self.state / "epoch", f"{epoch}\n".encode()
        try:
            files.replace_file(path, text)
        except OSError as error:
            if error.errno not in files.NO_ROOM or not path.exists():
                raise
            descriptor = files.open_file(path, os.O_WRONLY)
            try:
                files.overwrite(descriptor, text)
            finally:
                os.close(descriptor)

    # --- files that are removed while the daemon runs ---

    def is_in_place(self) -> bool:
        """Return whether the device's directory is still the one that is locked."""
        return _identity(self.root) == _identity(self._held[self.root])

    def restore(self, epoch: int) -> list[str]:
        """Rewrite the files that are missing in `state/`, except the journal. Return their names; raises `OSError`."""
        restored = []
        if not os.path.lexists(self.state):
            self._ensure_directory(self.state, 0o700)
        lock = self.state / "lock"
        if lock not in self._held or _identity(lock) != _identity(self._held[lock]):
            if lock in self._held:
                os.close(self._held.pop(lock))
            self._write_lock()
            restored.append("lock")
        if not os.path.lexists(self.state / "epoch"):
            self._write_epoch(epoch)
            restored.append("epoch")
        return restored

    def lost_sockets(self) -> list[Path]:
        """Return the published sockets that were removed or replaced."""
        return [path for path, identity in self._sockets.items() if _identity(path) != identity]

    def had_predecessor(self) -> bool:
        """Return whether an earlier daemon has used this directory."""
        return (self.state / "epoch").exists()

    def write_index(self, index: int, *, yields: bool = False) -> bool:
        """Write the device's number for `membroker --device`, since the directory is named after the UUID.

        `<runtime>/<number>` leads there too, so that a manifest can name an endpoint without knowing the UUID. A
        directory of that name is moved into `state/`: a container that starts before the daemon, after a boot, makes
        one with the endpoint that it mounts, and the daemon could never start.

        With `yields`, a link to another device whose daemon runs stays as it is, and False is returned: the host
        driver's devices have the numbers of GPUs.
        """
        fresh, place = self.state / "index.new", self.runtime / str(index)
        try:
            if not _has_text(self.root / "index", f"{index}\n"):  # a full disk may have no room for it
                fresh.write_text(f"{index}\n")
                fresh.chmod(0o644)
                fresh.rename(self.root / "index")
            if yields and self._leads_to_living(place):
                return False
            alias = self.state / "alias.new"
            alias.unlink(missing_ok=True)
            alias.symlink_to(self.root.name)
            if place.is_dir() and not place.is_symlink():
                place.rename(self.state / f"moved-{secrets.token_hex(4)}")
            alias.rename(place)
        except OSError as error:
            what = error.filename2 or error.filename or place
            raise DirectoryError(f"cannot write {what}: {error.strerror}; free some disk space, or fix that") from error
        return True

    def _leads_to_living(self, place: Path) -> bool:
        """Return whether this is a link to the directory of another device, which a daemon has locked."""
        if not place.is_symlink() or not place.is_dir() or place.samefile(self.root):
            return False
        descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def endpoint(self, *parts: str, mode: int = 0o755) -> Path:
        """Return the directory of an endpoint (`tenants`, NAME or `admin`), and create it if it is missing."""
        directory = self.root.joinpath(*parts)
        _check_path(directory / "handoff.sock")
        try:
            for count in range(1, len(parts)):
                self._ensure_directory(self.root.joinpath(*parts[:count]), 0o755)
            self._ensure_directory(directory, mode)
        except OSError as error:
            raise DirectoryError(f"cannot create {error.filename or directory}: {error.strerror}; fix that") from error
        return directory

    def check(self, tenant: str) -> None:
        """Raise `DirectoryError` if the path of a tenant's sockets would be too long. Makes nothing."""
        _check_path(self.root / "tenants" / tenant / "handoff.sock")

    @staticmethod
    def _ensure_directory(directory: Path, mode: int | None) -> None:
        """Create a directory, or accept one that belongs to this user or root; raises `DirectoryError` for any other.

        Another user that can rename files in it could replace our sockets, or redirect what we do by path. `mode` is
        None for the runtime directory, which may be an operator's symbolic link and keeps its mode; the directories
        above it are looked at, too.
        """
        made = files.make_directory(directory)
        status = directory.stat() if mode is None else directory.lstat()
        if not (stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise DirectoryError(
                f"{directory} is not a directory: move it away, or choose another with --runtime-directory DIR"
            )
        if mode is None:
            _refuse(directory, stranger_in(directory))
        elif not stat.S_ISDIR(status.st_mode):
            _refuse(directory, "it is a symbolic link")
        elif status.st_uid not in (0, os.geteuid()):
            _refuse(directory, f"it belongs to {user_text(status.st_uid)}")
        if mode is not None or made:
            directory.chmod(0o755 if mode is None else mode)

    def clear_endpoints(self, tenants: Collection[str]) -> None:
        """Remove the sockets that a dead daemon left at the endpoints of tenants that are not among these."""
        for directory in self.root.glob("tenants/*"):
            if directory.name not in tenants:
                try:
                    self._clear(directory)
                except OSError as error:
                    raise DirectoryError(f"cannot remove {error.filename}: {error.strerror}; fix that") from error

    def private(self, kind: str) -> Path:
        """Return a new path for a socket that only the daemon's user can reach.

        Raises `DirectoryError` if it is too long for a socket.
        """
        path = self.state / f"{kind}-{secrets.token_hex(4)}"
        _check_path(path)
        return path

    def clear_private(self, kinds: Iterable[str] = ("grpc", "handoff")) -> None:
        """Remove the sockets of these kinds that a dead daemon has left in `state/`."""
        for kind in kinds:
            for path in self.state.glob(f"{kind}-*"):
                try:
                    path.unlink()
                except OSError as error:
                    raise DirectoryError(
                        f"cannot remove {path}: {error.strerror}; move it away, and start again"
                    ) from error

    def publish(self, private: Path, public: Path, ownership: Ownership) -> None:
        """Give a bound socket its owner and mode, and move it to its public path, replacing a dead daemon's socket."""
        private.chmod(ownership.mode)
        for key, uid, gid in (("owner", ownership.uid, -1), ("group", -1, ownership.gid)):
            if (uid, gid) != (-1, -1):
                self._change_owner(private, f"{ownership.table}.{key}", uid, gid)
        identity = _identity(private)
        try:
            private.rename(public)
        except OSError as error:  # there is a directory; anything else is replaced
            private.unlink()
            raise DirectoryError(
                f"cannot put a socket at {public}: {error.strerror}; move away what is there, and start again"
            ) from error
        assert identity is not None
        self._sockets[public] = identity

    @staticmethod
    def _change_owner(private: Path, key: str, uid: int, gid: int) -> None:
        try:
            os.chown(private, uid, gid)
        except OSError as error:
            private.unlink()
            raise DirectoryError(
                f"{key} = {max(uid, gid)}: this daemon runs as user {os.geteuid()} and cannot change a socket's owner: "
                f"{error.strerror}; start it as root, or omit that key"
            ) from error

    def listen(
        self, public: Path, ownership: Ownership, kind: socket.SocketKind = socket.SOCK_SEQPACKET
    ) -> socket.socket:
        """Return a listening, non-blocking socket at `public`.

        Nobody can pass it or its connections a descriptor: to close that may take as long as who passed it likes.
        """
        listener = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            with suppress(OSError):  # before Linux 6.16: see `edge/closing.py`
                listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
            private = self.private("handoff")
            listener.bind(os.fspath(private))
            listener.listen(1024)
            self.publish(private, public, ownership)
        except BaseException:
            listener.close()
            raise
        return listener

    def close(self, endpoint: Path) -> None:
        """Remove the sockets of an endpoint, if they can be removed. The lock is held until the process exits."""
        try:
            self._clear(endpoint)
        except OSError as error:
            logs.warn("a socket cannot be removed", path=error.filename, error=error.strerror)

    def discard(self, private: Path) -> None:
        """Remove a socket that only the daemon's user can reach, if it can be removed: else the next daemon does it."""
        with suppress(OSError):
            private.unlink()

    def _clear(self, endpoint: Path) -> None:
        """Remove the sockets of an endpoint; if the device's directory was replaced, they belong to another daemon."""
        for path in (endpoint / "handoff.sock", endpoint / "grpc.sock"):
            self._sockets.pop(path, None)
            if path.is_socket() and self.is_in_place():
                path.unlink(missing_ok=True)

    def remove(self, endpoint: Path) -> None:
        """Remove the empty directory of an endpoint that is closed for good, if it can be removed."""
        if self.is_in_place():
            with suppress(OSError):  # a program may have put a file there
                endpoint.rmdir()


def _refuse(directory: Path, why: str) -> None:
    """Raise `DirectoryError` if there is a reason why a directory is not this user's alone."""
    if why:
        raise DirectoryError(
            f"{directory} is not this user's alone: {why}. Another user that can change it could pose as the broker: "
            "mend or remove it, or choose another with --runtime-directory DIR"
        )


def _has_text(path: Path, text: str) -> bool:
    try:
        return files.read_file(path, _NUMBER_BYTES) == text.encode()
    except OSError:
        return False


def _check_path(path: Path) -> None:
    """Raise `DirectoryError` if a socket cannot be at this path."""
    if fault := socket_fault(path):
        raise DirectoryError(f"{fault}; choose another --runtime-directory")


def _owner(place: Path) -> str:
    """Say whose a file or directory is, if it is another user's."""
    try:
        owner = os.lstat(place).st_uid
    except OSError:
        return ""
    user = os.geteuid()
    return "" if owner == user else f" (it belongs to uid {owner}, and this daemon runs as uid {user})"


def _identity(path: Path | int) -> tuple[int, int] | None:
    """Return the device and inode of a file, by path or descriptor, or None if the file does not exist."""
    try:
        status = os.fstat(path) if isinstance(path, int) else os.lstat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
