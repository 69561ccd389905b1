"""Which endpoint to enter, how to connect to it, and what is wrong when that fails.

Owns the search for an endpoint's directory, and the error message for each way in which it can be unusable. It must
never send or read anything, and never repair anything itself: the message names the command that does.
"""

from __future__ import annotations

import errno
import grp
import itertools
import math
import os
import pwd
import re
import socket
import stat
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..errors import AccessDenied, BrokerAbsent, BrokerUnavailable, DescriptorLimit, InvalidRequest, MembrokerError
from ..wire.names import ENDPOINT_VARIABLE, SYSTEM_DIRECTORY, SYSTEM_VARIABLE
from ..wire.ownership import group_text, stranger_in, user_text
from ..wire.paths import socket_fault
from ..wire.system_calls import SHORT, describe

_VISIBLE = "CUDA_VISIBLE_DEVICES"
SHOWN = 8
"""How many tenants or devices a message lists."""

_START = "start one with `membrokerd` (under systemd: `systemctl start membrokerd`)"
_IF_IT_RUNS = "If `pgrep -a membrokerd` shows one{}, its directory was removed, and its log says what to do"
_DEVICE = re.compile(r"[0-9]{1,4}|(?=[0-9]*[A-Za-z-])[A-Za-z0-9-]{4,64}")


def find_endpoint(endpoint: str | os.PathLike[str] | None = None, env: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the endpoint to enter, absolute.

    It is the argument, else MEMBROKER_ENDPOINT, else the only device under `$XDG_RUNTIME_DIR/membroker`, else the only
    one under `/run/membroker`. Devices with a live broker come first. In a device's directory it is `tenants/default`.
    Raises `BrokerUnavailable` if there is no device. Raises `InvalidRequest` if the argument is not a path, and if
    there are several devices, with their directories.
    """
    if endpoint is not None and not isinstance(endpoint, str | os.PathLike):
        raise InvalidRequest(f"an endpoint is the path of a directory, not {endpoint!r}")
    chosen = os.fspath(endpoint) if endpoint is not None else env.get(ENDPOINT_VARIABLE, "")
    directory = Path(chosen).absolute() if chosen else default_device(env)
    return directory / "tenants" / "default" if is_device(directory) else directory


def is_device(directory: Path) -> bool:
    """Say whether this is a device's directory, with the endpoints of its tenants in it."""
    try:
        return (directory / "tenants").is_dir()
    except OSError:
        return False  # the error comes when it is entered


def default_device(env: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the only device, or of the one that CUDA_VISIBLE_DEVICES and LOCAL_RANK leave.

    Directories that dead brokers left count only if no broker is alive: then the error is about that broker.
    """
    devices, why = living_devices(env), ""
    if not devices:
        found = (_devices_in(runtime) for runtime, passed_over in _looked_at(env) if not passed_over)
        devices, why = next(filter(None, found), []), f"no broker is alive: {_START}. "
    if len(devices) > 1 and not why and (mine := _device_of_process(env)):
        return find_device(mine, env)
    if len(devices) > 1:
        listed = _some([str(tenant) for device in devices for tenant in _endpoints_of(device / "tenants")])
        raise InvalidRequest(
            f"{why}{devices[0].parent} has {len(devices)} devices: name one with connect(device=…), "
            f"connect(endpoint=…), {ENDPOINT_VARIABLE}=… or a command's --device N, of {listed}"
        )
    if devices:
        return devices[0]
    raise _none_found(
        "no broker was found",
        env,
        f"{_START}, or name its endpoint's directory with {ENDPOINT_VARIABLE}=…. {_IF_IT_RUNS.format('')}",
    )


def living_devices(env: Mapping[str, str] = os.environ) -> list[Path]:
    """Return the devices with a live broker, of the first runtime directory that has one; else an empty list."""
    found = (
        list(filter(_may_live, _devices_in(runtime))) for runtime, passed_over in _looked_at(env) if not passed_over
    )
    return next(filter(None, found), [])


def find_device(name: str, env: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the device with this number, UUID or name, as in `1`, `GPU-12345678-…`, `gpu-12345678`.

    If several have this number, it is the one whose broker is alive. Raises `BrokerAbsent` if there is no such device,
    and `InvalidRequest` if there are still several, or if the name is not valid.
    """
    if not _DEVICE.fullmatch(name):
        raise InvalidRequest(
            f"{name!r} is not a device: give its number, or its UUID as `nvidia-smi -L` or `membroker status` shows it"
        )
    looked = [runtime for runtime, passed_over in _looked_at(env) if not passed_over]
    devices = [device for runtime in looked for device in _devices_in(runtime)]
    named = [device for device in devices if _is_called(device, name)]
    found = list(filter(_may_live, named)) or named
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(map(str, found))
        raise InvalidRequest(f"{len(found)} devices are called {name}: name one with --endpoint, of {listed}")
    there = ", ".join(f"{device.name} ({_index_of(device)})" for device in devices)
    raise _none_found(
        f"no broker of device {name} was found",
        env,
        f"start one with `membrokerd --device {name}`. {_IF_IT_RUNS.format(' of this device')}",
        f", only of {there}" if there else "",
    )


def endpoint_of_device(device: object, env: Mapping[str, str] = os.environ) -> Path:
    """Return the endpoint of a device as this process names it, in the tenant of MEMBROKER_ENDPOINT or `default`.

    A number counts in CUDA_VISIBLE_DEVICES, as in `cuda:1`, which also names it, as does a `torch.device`. Anything
    else is as for `find_device`, which says what it raises.
    """
    name = str(device)
    number = name.removeprefix("cuda:") if name != "cuda" else env.get("LOCAL_RANK") or "0"
    if isinstance(device, bool) or not name:
        raise InvalidRequest(f"a device is a number, a UUID or a torch.device, not {device!r}")
    visible = _visible_devices(env)
    if number.isdecimal() and visible is not None:
        if int(number) >= len(visible):
            shown = f"CUDA_VISIBLE_DEVICES={env[_VISIBLE]} shows this process {len(visible)}"
            raise InvalidRequest(f"there is no device {number}: {shown}")
        number = visible[int(number)]
    tenant = Path(env[ENDPOINT_VARIABLE]).name if env.get(ENDPOINT_VARIABLE) else "default"
    return find_device(number, env) / "tenants" / tenant


def _visible_devices(env: Mapping[str, str]) -> list[str] | None:
    """Return the devices in CUDA_VISIBLE_DEVICES, as CUDA reads it: none after an invalid one. None: all are."""
    if (text := env.get(_VISIBLE)) is None:
        return None
    names = [name.strip() for name in text.split(",")]
    return list(itertools.takewhile(_DEVICE.fullmatch, names))


def _device_of_process(env: Mapping[str, str]) -> str | None:
    """Return the device that torchrun, or CUDA_VISIBLE_DEVICES alone, gives this process; None if neither says so."""
    rank, visible = env.get("LOCAL_RANK", ""), _visible_devices(env)
    if rank.isdecimal():
        if visible is None:
            return rank
        return visible[int(rank)] if int(rank) < len(visible) else None
    return visible[0] if visible is not None and len(visible) == 1 else None


def _is_called(device: Path, name: str) -> bool:
    if name.isdecimal():
        return _index_of(device) == str(int(name))
    lower = name.lower()
    if device.name == lower:
        return True
    digits = lower.removeprefix("gpu-").removeprefix("mig-").replace("-", "")
    return len(digits) == 32 and device.name == f"gpu-{digits[:8]}"


def _index_of(device: Path) -> str:
    """Return a device's number as its daemon wrote it, or `?`."""
    try:
        descriptor = os.open(device / "index", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            text = os.read(descriptor, 16).decode(errors="replace").strip()
        finally:
            os.close(descriptor)
    except OSError:
        return "?"
    return text if text.isdecimal() else "?"


def system_directory(env: Mapping[str, str] = os.environ) -> Path:
    """Return the runtime directory of root's daemons: MEMBROKER_SYSTEM_DIRECTORY, else `/run/membroker`."""
    return Path(env.get(SYSTEM_VARIABLE) or SYSTEM_DIRECTORY)


def _looked_at(env: Mapping[str, str]) -> list[tuple[Path, MembrokerError | None]]:
    """Return the directories in which brokers keep their endpoints, the user's own first, and why one is passed over.

    A variable is a hint: after `su` or `sudo -E` it is another user's, who could pose as a broker in there. So it
    counts only where nobody but this user and root could have put the directory. A user who is not root may be told of
    a system directory elsewhere.
    """
    own, system = env.get("XDG_RUNTIME_DIR", ""), env.get(SYSTEM_VARIABLE, "")
    found = [(Path(own, "membroker"), stranger_in(Path(own, "membroker")))] * bool(own)
    strange = stranger_in(Path(system).parent, alone=True) if system and os.geteuid() == 0 else ""
    return [
        (runtime, BrokerAbsent(why) if why else _closed(runtime))
        for runtime, why in [*found, (system_directory(env), strange)]
    ]


def _closed(runtime: Path) -> MembrokerError | None:
    """Return why a directory that is there cannot be looked into by this user, and whose it is; None if it can."""
    try:
        _devices_in(runtime)
    except MembrokerError as error:
        return error
    return None


def _none_found(what: str, env: Mapping[str, str], advice: str, besides: str = "") -> MembrokerError:
    """Return the error when no directory has the broker: it names those that were passed over, and why."""
    looked = _looked_at(env)
    reasons = "".join(f" ({runtime} was passed over: {why})" for runtime, why in looked if why)
    if os.geteuid() and not env.get("XDG_RUNTIME_DIR"):
        reasons += " (XDG_RUNTIME_DIR is not set here: a broker of this user is below it, so export it as in its shell)"
    kind = AccessDenied if any(isinstance(why, AccessDenied) for _, why in looked) else BrokerAbsent
    return kind(f"{what} under {' or '.join(str(runtime) for runtime, _ in looked)}{besides}: {advice}{reasons}")


def _devices_in(runtime: Path) -> list[Path]:
    try:
        return sorted(entry for entry in runtime.iterdir() if _is_device(entry))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise diagnose(Path(error.filename or runtime), error) from error


def _is_device(entry: Path) -> bool:
    """Say whether this is a device's directory, and not the link from its number to it."""
    return (entry / "tenants").is_dir() and not entry.is_symlink()


def _may_live(device: Path) -> bool:
    """Say whether a broker of this device may be alive; a directory that we may not read counts."""
    try:
        return any(_may_be_bound(tenant / "handoff.sock") for tenant in (device / "tenants").iterdir())
    except OSError:
        return True


def _may_be_bound(path: Path) -> bool:
    # By a socket of another kind: the kernel says whether a process listens, and that process does not notice.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ECONNREFUSED)
        return True


DESCRIPTORS_SHORT = "this process has no file descriptor left: raise its limit, `ulimit -n` (RLIMIT_NOFILE)"

DESCRIPTORS_CUT = (
    f"{DESCRIPTORS_SHORT}. If it has enough, a security module (SELinux, AppArmor) refuses these to it: the audit log "
    "says so"
)
"""What MSG_CTRUNC means: the kernel did not install all descriptors of a packet, and does not say why."""


def call_failed(call: str, error: OSError) -> MembrokerError:
    """Return the exception for a system call of this process that failed: with its name, and its own reason."""
    if error.errno in SHORT:
        return DescriptorLimit(DESCRIPTORS_SHORT)
    kind = AccessDenied if error.errno in (errno.EPERM, errno.EACCES) else BrokerUnavailable
    return kind(
        f"{describe(call, error)}: this process may not make that call here. If it runs in a sandbox (seccomp, "
        "SystemCallFilter=, RestrictAddressFamilies=), allow it there: `membroker doctor` tries each that is needed"
    )


def open_socket(path: Path, timeout: float) -> socket.socket:
    """Connect to the handoff socket at `path` and return it, blocking for at most `timeout` seconds a call.

    Raises `BrokerUnavailable`, `AccessDenied`, `DescriptorLimit` or `InvalidRequest`, with the cause and the command
    that repairs it.
    """
    check_path(path)
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    except OSError as error:
        raise call_failed("socket(AF_UNIX, SOCK_SEQPACKET)", error) from error
    try:
        set_timeout(connection, timeout)
        connection.connect(os.fspath(path))
    except OSError as error:
        connection.close()
        raise diagnose(path, error) from error
    except BaseException:
        connection.close()
        raise
    return connection


def set_timeout(connection: socket.socket, timeout: float) -> None:
    """Let the kernel end each blocking call after `timeout` seconds, rounded up to 1 us (EAGAIN); 0 means never.

    Python's own timeout makes the socket non-blocking, and such a connect fails at once when the queue is full.
    """
    value = struct.pack("ll", *divmod(math.ceil(timeout * 1e6), 1_000_000))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, value)


def check_path(path: Path) -> None:
    """Raise `InvalidRequest` for a path that is too long for a socket's address, or that gRPC cannot take."""
    if fault := socket_fault(path):
        raise InvalidRequest(
            f"{fault}: choose another runtime directory, or name the endpoint through a symbolic link with a short path"
        )


def diagnose(path: Path, error: OSError) -> MembrokerError:
    """Return the exception for a socket at `path` that could not be connected to, by what the file system shows."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return AccessDenied(_denied(path))
    if error.errno == errno.ENOENT:
        return BrokerAbsent(_absent(path))
    if error.errno == errno.ENOTDIR:
        return BrokerUnavailable(f"{_first(path, _is_no_directory)} is not a directory: {_name_endpoint(path)}")
    if error.errno == errno.ECONNREFUSED:
        return _refused(path)
    if error.errno == errno.EPROTOTYPE:
        return BrokerUnavailable(f"{path} is a socket of another kind, not a broker's: {_name_endpoint(path)}")
    if error.errno in (errno.EAGAIN, errno.ETIMEDOUT):
        return BrokerUnavailable(silent(path))
    return BrokerUnavailable(f"cannot connect to {path}: {error.strerror} ({errno.errorcode.get(error.errno or 0)})")


def silent(path: Path) -> str:
    """Return the message for a broker that does not answer in the time allowed."""
    return f"{not_answering(path)}, or give connect() a longer timeout"


def not_answering(path: Path) -> str:
    """Return the message for a broker that runs and does not answer."""
    return (
        f"the broker at {path} does not answer: it is stopped or overloaded. Look at it with "
        "`ps -C membrokerd -o pid,stat,args`, continue a stopped one (stat T) with `kill -CONT PID`"
    )


def _refused(path: Path) -> BrokerUnavailable:
    with suppress(FileNotFoundError):  # a broker that stops removes its socket
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return BrokerUnavailable(f"{path} is not a socket: {_name_endpoint(path)}")
    return BrokerAbsent(
        f"nobody listens at {path}: the broker is dead and left its socket behind; {_START}, which replaces it"
    )


def _absent(path: Path) -> str:
    missing = _first(path, lambda part: not part.exists()) or path
    if path.name == "handoff.sock" and missing == path and _is_admin(path.parent):
        return (
            f"{path.parent} is the operator's endpoint, where nothing is borrowed: name a tenant's, as in "
            f"{path.parent.with_name('tenants')}/NAME"
        )
    if path.parent.parent.name == "tenants" and missing in (path, path.parent):
        tenant, tenants = path.parent, path.parent.parent
        live = _open_in(tenants)
        if there := live or (_names_in(tenants) if missing == tenant else []):
            nearest = tenant.with_name(_nearest(tenant.name, there))
            others = (
                f"has {_some(there)}: name one's endpoint, as in --endpoint {nearest} or {ENDPOINT_VARIABLE}={nearest}"
            )
            if missing == tenant:
                dead = "" if live else f"no broker is alive at {tenants.parent}: {_START}. "
                return f"{dead}{tenants.parent} has no tenant {tenant.name!r}, but {others}"
            return (
                f"{tenant} has no {path.name}: it was removed, or this tenant is not configured any more. If "
                "`membroker tenants` lists it, `systemctl restart membrokerd`: workers keep their memory. If not, "
                f"{tenants.parent} {others}"
            )
    if missing == path:
        devices = _device_names_in(path.parent)
        tenants_here = _open_in(path.parent) or _names_in(path.parent) if path.parent.name == "tenants" else []
        for what, inside in (("devices", devices), ("tenants", tenants_here)):
            if inside:
                return (
                    f"{path.parent} is not an endpoint but the directory of these {what}: {_some(inside)}. Name one of "
                    f"them, as in {path.with_name(inside[0])}"
                )
    if missing.is_symlink():
        return f"{missing} is a symbolic link to nothing: {_name_endpoint(path)}"
    if missing == path:
        return (
            f"{path.parent} has no {path.name}: no broker has this endpoint open. Is membrokerd running? "
            f"If not, {_START}"
        )
    return (
        f"{missing} does not exist. Is membrokerd running, with this tenant? If not, {_START}; or "
        f"{_name_endpoint(path)}"
    )


def _is_admin(directory: Path) -> bool:
    return directory.name == "admin" and is_device(directory.parent)


def _nearest(name: str, known: list[str]) -> str:
    """Return the name that is most like `name`, else the first."""
    import difflib  # only to explain a mistake

    return (difflib.get_close_matches(name, known, n=1) or known)[0]


def _names_in(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir())
    except OSError:
        return []


def _open_in(tenants: Path) -> list[str]:
    """Return the tenants at whose sockets a broker may listen. A tenant that was removed leaves its directory."""
    return [name for name in _names_in(tenants) if _may_be_bound(tenants / name / "handoff.sock")]


def _endpoints_of(tenants: Path) -> list[Path]:
    """Return the open endpoints of a device; of a dead broker `default`, as nobody can say which will be open."""
    return [tenants / name for name in _open_in(tenants) or ["default"]]


def _device_names_in(directory: Path) -> list[str]:
    found = [directory / name for name in _names_in(directory)]
    return [entry.name for entry in found if is_device(entry) and not entry.is_symlink()]


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)


def _denied(path: Path) -> str:
    real = Path(os.path.realpath(path))  # a device is also called by a link, its number, and anyone can enter that
    closed = _first(real.parent, lambda part: not os.access(part, os.X_OK, effective_ids=True)) or real
    found = os.stat(closed) if closed.parent == closed or os.access(closed.parent, os.X_OK) else None
    if found is None:
        return f"permission denied: {closed}, for user {user_text(os.geteuid())}"
    owner, group = user_text(found.st_uid), group_text(found.st_gid)
    mine = ", ".join(group_text(gid) for gid in sorted({os.getegid(), *os.getgroups()}))
    return (
        f"permission denied: {closed} belongs to {owner}, group {group}, mode {stat.S_IMODE(found.st_mode):04o}, and "
        f"this process runs as {user_text(os.geteuid())}, groups {mine}. {_admission(path, found)}"
    )


def _admission(path: Path, found: os.stat_result) -> str:
    if path.name == "grpc.sock" and _is_admin(path.parent):
        owner = f"{user_text(found.st_uid)}, or as root" if found.st_uid else "root"
        return f"Only the operator enters there: run the command as {owner}"
    admits_group = found.st_mode & (stat.S_IXGRP if stat.S_ISDIR(found.st_mode) else stat.S_IWGRP)
    if admits_group and found.st_gid != 0:  # a member of the group root could do far more than this
        with suppress(KeyError):  # one of the two has no name, as in a container
            names = f"{grp.getgrgid(found.st_gid).gr_name} {pwd.getpwuid(os.geteuid()).pw_name}"
            return f"Join the group with `usermod -aG {names}` and log in again"
    return (
        f"Enter through your own tenant's endpoint ({ENDPOINT_VARIABLE}=…), or let the operator admit you: the "
        "tenant's `owner`, `group`, `mode` and `uids` in the daemon's configuration"
    )


def _first(path: Path, wrong: Callable[[Path], bool]) -> Path | None:
    """Return the first part of `path`, from the root down, of which `wrong` is true."""
    return next((part for part in (*reversed(path.parents), path) if wrong(part)), None)


def _is_no_directory(part: Path) -> bool:
    return part.exists() and not part.is_dir()


def _name_endpoint(path: Path) -> str:
    return (
        f"name the endpoint's directory, which has {path.name} in it, with connect(endpoint=…), "
        f"{ENDPOINT_VARIABLE}=… or a command's --endpoint"
    )
