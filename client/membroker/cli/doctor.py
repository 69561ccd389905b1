"""`membroker doctor`: check whether this machine can run a broker, by trying what a broker does.

Owns the checks. Each tries the thing itself where it can, instead of guessing from a version, and reports what it found
and what to do about it. It must never leave anything behind.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import importlib.util
import os
import platform
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import AccessDenied, BrokerAbsent, BrokerUnavailable, MembrokerError
from ..ext import OPEN_PER_SESSION, names, ownership, paths, sessions_for, system_calls
from ..ext import endpoint as endpoints
from ..guest.cuda import has_pids_of_machine, why_not
from ..vmm import open_driver
from ..vmm.cuda.gpu import load_bindings
from ..vmm.driver import DriverError, DriverUnavailable, Location
from ..vmm.sizes import MIB, format_size
from . import tables
from .books import open_admin, open_books

FEW_SESSIONS = 16
GUARANTEE_STEP = 64 * MIB
"""Engines take pages of up to this size."""
DEFAULT_MAPPINGS = 65_530
FEW_WATCHES = 8_192
FEW_INSTANCES = 16
LONG_ENDPOINT = "gpu-12345678/tenants/" + "n" * 24 + "/handoff.sock"
"""A tenant's name may be longer, and its path then has room in a shorter directory."""
SHORTEST_ENDPOINT = "gpu-12345678/tenants/default/handoff.sock"
SO_PEERPIDFD = 77
SO_PASSRIGHTS = 83
MPS_CONTROL = Path("/tmp/nvidia-mps/control")
"""Where NVIDIA's MPS listens if no variable says so."""
BROKER_PACKAGES = {
    "prometheus_client": "prometheus-client",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "pydantic": "pydantic",
}

Status = Literal["ok", "warn", "fail"]

_NOT_THERE = "if the daemon should run: `systemctl status membrokerd`, and its log, `journalctl -u membrokerd`"
_SILENT = "`journalctl -u membrokerd` says what it did last"
_MAKE_ROOM = (
    "make room on the disk of its journal (its log has the path, and `df -h` the room): it then lends again by itself, "
    "and takes releases meanwhile"
)
_DEVICE_LOST = (
    "`nvidia-smi` and `dmesg | grep -i xid` say what the GPU has: after a reset or a reboot start the daemon and the "
    "workers again. What they had on the GPU is lost"
)
_NOT_ADMITTED = (
    "the tenant's `owner`, `group`, `mode` and `uids` in the daemon's configuration say which users may enter"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `advice` is empty when `status` is ok."""

    name: str
    status: Status
    found: str
    advice: str = ""


def run_doctor(options: argparse.Namespace) -> int:
    """Print every check; return 1 when one fails, else 0."""
    checks = []
    for check in examine(options.endpoint):
        checks.append(check)
        if not options.json:
            advice = f"\n      {check.advice}" if check.advice else ""
            print(tables.printable(f"{check.status:4}  {check.name}: {check.found}") + advice, flush=True)
    if options.json:
        tables.print_json(checks, sys.stdout)
    return int(any(check.status == "fail" for check in checks))


def examine(endpoint: str | None, env: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Run every check on this machine, as this user, and yield each as it is made.

    If an endpoint is named, or a daemon runs on this machine already, what only a daemon needs cannot fail.
    """
    if sys.platform != "linux":
        yield Check("system", "fail", sys.platform, "membroker needs Linux: memfd, pidfd and SCM_RIGHTS")
        return
    looks: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("python", lambda: check_python(sys.version_info[:3])),
        ("system calls", check_system_calls),
        ("peers", check_peers),
        ("passed files", check_passed_files),
        ("users", check_users),
        ("processes", check_process_identity),
        ("descriptors", lambda: check_descriptors(descriptor_limit())),
        ("mappings", lambda: check_mappings(_sysctl("vm/max_map_count"))),
        (
            "inotify",
            lambda: check_inotify(_sysctl("fs/inotify/max_user_watches"), _sysctl("fs/inotify/max_user_instances")),
        ),
        ("sealed memory", check_memfd),
        ("host driver", check_host_driver),
        ("gpu", check_gpu),
        ("sleep of any program", check_guests),
        ("packages", lambda: _of_daemon(check_packages(), endpoint, env)),
        ("runtime directory", lambda: _of_daemon(check_runtime_directory(env, os.geteuid()), endpoint, env)),
        ("broker", lambda: check_broker(endpoint, env)),
    )
    of_broker: tuple[tuple[str, Callable[[], Check]], ...] = (
        ("configuration", lambda: check_configuration(endpoint, env)),
        ("unaccounted", lambda: check_unaccounted(endpoint, env)),
        ("guarantees", lambda: check_guarantees(endpoint, env)),
    )
    for name, look in looks:
        check = _look(name, look)
        yield check
    is_silent = check.advice == _SILENT  # then each would wait for the answer once more
    for name, look in of_broker:
        yield Check(name, "ok", "not checked: the broker does not answer") if is_silent else _look(name, look)


def _of_daemon(check: Check, endpoint: str | None, env: Mapping[str, str]) -> Check:
    """Return the check of something that only a daemon needs: it passes if no daemon has to be started here."""
    why = (
        "an endpoint is named"
        if endpoint or env.get(names.ENDPOINT_VARIABLE)
        else "one runs here"
        if endpoints.living_devices(env)
        else ""
    )
    if check.status == "ok" or not why:
        return check
    return Check(check.name, "ok", f"{check.found}; only a daemon needs it, and {why}")


def _look(name: str, look: Callable[[], Check]) -> Check:
    """Return the check; one that cannot be made fails, whatever the reason, and the others are still made."""
    try:
        return look()
    except OSError as error:
        return Check(name, "fail", f"could not be checked: {error}", "run the doctor outside this sandbox")
    except Exception as error:  # noqa: BLE001 - an answer that nobody has foreseen is this check's alone
        return Check(name, "fail", f"could not be checked: {type(error).__name__}: {error}", "report this as a bug")


# --- This process and this kernel ---


def check_python(version: tuple[int, int, int]) -> Check:
    """Python 3.11 is the first with a TOML reader."""
    found = ".".join(map(str, version))
    if version >= (3, 11, 0):
        return Check("python", "ok", found)
    return Check("python", "fail", found, "install Python 3.11 or later")


def check_system_calls() -> Check:
    """Try each call once that a broker needs: a sandbox answers as if something else were wrong."""
    if calls := system_calls.refused(host_driver=True):
        advice = "allow them: the seccomp profile of the container, SystemCallFilter= of the unit, a security module"
        return Check("system calls", "fail", f"this system refuses {'; '.join(calls)}", advice)
    return Check("system calls", "ok", "no sandbox refuses what a broker needs")


def check_peers() -> Check:
    """SO_PEERPIDFD (Linux 6.5) names the process at the other end, without pid reuse and across pid namespaces."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD))
        except OSError as error:
            why = "" if error.errno == errno.ENOPROTOOPT else f" ({system_calls.describe('getsockopt', error)})"
            return Check(
                "peers",
                "warn",
                f"kernel {platform.release()} has no SO_PEERPIDFD{why}",
                "Linux 6.5 has it; before it the broker knows peers by pid and start time, in its own pid namespace",
            )
    return Check("peers", "ok", f"kernel {platform.release()} has SO_PEERPIDFD")


def check_passed_files() -> Check:
    """With SO_PASSRIGHTS (Linux 6.16) nobody can pass the broker a file whose close hangs."""
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)
        except OSError:
            return Check(
                "passed files",
                "warn",
                f"kernel {platform.release()} has no SO_PASSRIGHTS",
                "Linux 6.16 has it; before it, a program that may connect and mounts a FUSE file system can keep the "
                "broker from ending, and its endpoint from accepting",
            )
    return Check("passed files", "ok", f"kernel {platform.release()} has SO_PASSRIGHTS")


def check_users() -> Check:
    """Check that each user has a number here: those that a user namespace does not map have one for all of them."""
    if trouble := ownership.namespace_trouble():
        return Check("users", "warn", trouble, "start the daemon outside of it, or map all users that have workers")
    return Check("users", "ok", "each number is one user")


def check_process_identity() -> Check:
    """Since Linux 6.9 each process's pidfd has an inode of its own; before, all pidfds share one."""
    process, other = os.pidfd_open(os.getpid()), os.eventfd(0)
    try:
        own = os.fstat(process).st_dev != os.fstat(other).st_dev
    finally:
        os.close(process)
        os.close(other)
    if own:
        return Check("processes", "ok", "a pidfd's inode names its process")
    advice = "Linux 6.9 has them; before it the broker tells processes apart by pid and start time"
    return Check("processes", "warn", f"kernel {platform.release()}: pidfds have no inode of their own", advice)


def descriptor_limit() -> int:
    """Return how many descriptors a daemon of this user could have: as root it raises the hard limit, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if os.geteuid():
        return hard
    highest = max(hard, _sysctl("fs/nr_open"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, highest))
    except (OSError, ValueError):  # root in a container often has no CAP_SYS_RESOURCE
        return hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return highest


def check_descriptors(limit: int) -> Check:
    """Each session may have 128 descriptors open in the broker, or in flight, and a few more."""
    sessions = sessions_for(limit)
    found = f"a daemon started from here may have {limit:,}, enough for {sessions:,} session{'s' * (sessions != 1)}"
    advice = f"raise it: LimitNOFILE= in the unit, `ulimit -n` in a shell; {OPEN_PER_SESSION} for each session"
    status: Status = "fail" if not sessions else "warn" if sessions < FEW_SESSIONS else "ok"
    return Check("descriptors", status, found, "" if status == "ok" else advice)


def check_mappings(limit: int) -> Check:
    """On the host driver each extent that a worker maps is one of its process's mappings."""
    found = f"a process may map {limit:,} extents of the host driver"
    if limit >= DEFAULT_MAPPINGS:
        return Check("mappings", "ok", found)
    return Check("mappings", "warn", found, f"sysctl vm.max_map_count={DEFAULT_MAPPINGS}, or use larger pages")


def check_inotify(watches: int, instances: int) -> Check:
    """The host driver watches each of its extents to see it end: a watch for each, an instance for each daemon."""
    found = f"the host driver may have {watches:,} extents, and this user {instances:,} daemons with it"
    if watches >= FEW_WATCHES and instances >= FEW_INSTANCES:
        return Check("inotify", "ok", found)
    advice = "sysctl fs.inotify.max_user_watches=65536 fs.inotify.max_user_instances=128 (a GPU needs none)"
    return Check("inotify", "warn", found, advice)


def check_memfd() -> Check:
    """The host driver's extents are sealed memory files."""
    descriptor = os.memfd_create("membroker-doctor", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, 4096)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.ftruncate(descriptor, 8192)
    except PermissionError:
        return Check("sealed memory", "ok", "memory files keep the size they are sealed at")
    finally:
        os.close(descriptor)
    return Check(
        "sealed memory", "fail", "a sealed memory file could be grown", "use a kernel that honours F_SEAL_GROW"
    )


def check_host_driver() -> Check:
    """Make an extent and release it, as the daemon would."""
    try:
        driver = open_driver("host", total_bytes=64 * MIB)
        try:
            handle = driver.create(driver.device.granularity)
            held = driver.memory(Location.DEVICE)
            driver.release(handle)
            freed = driver.memory(Location.DEVICE)
        finally:
            driver.close()
    except DriverError as error:
        return Check("host driver", "fail", str(error), error.hint or "see the call's manual page for this error")
    if held is None or freed is None or held.used - freed.used != 2 * MIB:
        return Check("host driver", "fail", f"an extent of 2 MiB shows as {held} and {freed}", "report this as a bug")
    return Check("host driver", "ok", "an extent was made, seen and freed")


# --- The GPU, the packages, the runtime directory, the broker ---


def check_gpu() -> Check:
    """Check the GPU, if there is one: a machine without a GPU can run the host driver."""
    try:
        driver = open_driver("cuda")
    except DriverUnavailable as error:
        if not any(Path("/dev").glob("nvidia[0-9]*")):
            return Check("gpu", "ok", 'no GPU: a daemon lends ordinary memory, or with driver = "cuda" does not start')
        return _unusable_gpu(error)
    except DriverError as error:
        return _unusable_gpu(error)
    device = driver.device
    try:
        memory = driver.memory(Location.DEVICE)
    except DriverError as error:
        return _unusable_gpu(error)
    finally:
        driver.close()
    if memory is None:
        advice = 'it shares the machine\'s memory, as GB10 and Jetson do, which no broker can lend: driver = "host"'
        return Check("gpu", "warn", f"{device.name} does not tell how much of its memory is in use", advice)
    return Check(
        "gpu", "ok", f"{device.name} {device.uuid}, {format_size(memory.free)} of {format_size(memory.total)} free"
    )


def check_guests() -> Check:
    """NVIDIA's driver can suspend processes here: `membroker run --guest`."""
    name = "sleep of any program"
    try:
        with closing(open_driver("cuda")) as gpu:
            version, uuid = gpu.device.driver_version, gpu.device.uuid
    except DriverError:
        return Check(name, "ok", "no usable GPU: `membroker run --guest` needs one, but for a trial (docs/guests.md)")
    found = f"driver {version} on {platform.machine()}"
    if reason := why_not(load_bindings(), version, platform.machine()):
        return Check(name, "warn", found, f"`membroker run --guest` needs --no-sleep here: {reason}")
    has_mps = "CUDA_MPS_PIPE_DIRECTORY" in os.environ or MPS_CONTROL.exists()
    untried = ["a MIG slice"] * uuid.startswith("MIG-") + ["MPS"] * has_mps
    if untried:
        advice = f"nobody has tried it with {' or '.join(untried)}: try it with a program that you can lose"
        return Check(name, "warn", found, advice)
    where = "" if has_pids_of_machine() else "; in a container only if it has the host's pids (--pid=host)"
    return Check(name, "ok", f"{found} can suspend processes of this user{where}: `membroker run --guest`")


def _unusable_gpu(error: DriverError) -> Check:
    return Check("gpu", "warn", f"the GPU is not usable: {error}", error.hint or "see `nvidia-smi`")


def check_packages() -> Check:
    """The daemon needs more packages than the library."""
    if not (missing := missing_packages()):
        return Check("packages", "ok", "all packages that membrokerd imports are installed")
    return Check("packages", "fail", f"missing: {', '.join(missing)}", "pip install 'membroker[broker]'")


def missing_packages() -> list[str]:
    """Return the packages of the extra `broker` that are not installed."""
    return [package for module, package in BROKER_PACKAGES.items() if importlib.util.find_spec(module) is None]


def check_runtime_directory(env: Mapping[str, str], uid: int) -> Check:
    """The daemon makes its sockets there, and a socket's path has at most 107 bytes."""
    own = env.get("XDG_RUNTIME_DIR", "")
    if uid and not own:
        advice = (
            "`export XDG_RUNTIME_DIR=~/run`, or another directory of your own, also where programs start; "
            "or start membrokerd with --runtime-directory DIR"
        )
        return Check("runtime directory", "fail", "XDG_RUNTIME_DIR is not set", advice)
    directory = Path(own, "membroker") if uid else endpoints.system_directory(env)
    if fault := paths.socket_fault(directory / SHORTEST_ENDPOINT):
        return Check("runtime directory", "fail", fault, "choose another with --runtime-directory")
    if stranger := ownership.stranger_in(directory):
        advice = "set the variable to a directory of your own (after `su` it is another user's), or use another with "
        return Check("runtime directory", "fail", stranger, f"{advice}--runtime-directory")
    existing = next(part for part in (directory, *directory.parents) if part.exists())
    if why := paths.unwritable(existing):
        advice = f"make {directory} as root and give it to this user, or choose another with --runtime-directory"
        return Check("runtime directory", "fail", f"{existing} cannot be written to: {why}", advice)
    if paths.socket_fault(directory / LONG_ENDPOINT):
        return Check("runtime directory", "warn", f"{directory} is long", "tenants with long names will not fit")
    return Check("runtime directory", "ok", str(directory))


def check_broker(endpoint: str | None, env: Mapping[str, str]) -> Check:
    """Check whether a broker runs and lets this user in. It fails only for a broker that was named."""
    is_named = bool(endpoint or env.get(names.ENDPOINT_VARIABLE))
    if not is_named and (absent := _no_device(env)):
        found, _, advice = absent.partition(": ")
        return Check("broker", "warn", found, advice)
    try:
        with open_books(endpoint, False, env) as books:
            device = books.device()
    except (BrokerUnavailable, AccessDenied) as error:
        if error.reason == "JOURNAL_FULL":  # no session begins, so a tenant cannot even read the books
            return Check("broker", "fail", str(error), _MAKE_ROOM)
        is_silent = not isinstance(error, AccessDenied | BrokerAbsent)
        advice = _SILENT if is_silent else _NOT_THERE if isinstance(error, BrokerAbsent) else _NOT_ADMITTED
        return Check("broker", "fail" if is_named else "warn", str(error), advice)
    except MembrokerError as error:
        return Check("broker", "warn", str(error), "name one with --device N, or --endpoint DIR")
    daemon = f"membrokerd {device.version} on {device.uuid}"
    if device.journal_full:
        return Check("broker", "fail", f"{daemon} lends nothing: its journal cannot be written", _MAKE_ROOM)
    if device.device_lost:
        return Check("broker", "fail", f"{daemon} lends nothing: its device does not answer", _DEVICE_LOST)
    if device.draining:
        return Check("broker", "warn", f"{daemon} lends nothing: it is drained", "`membroker undrain` lends again")
    capacity = ", ".join(f"{format_size(books.capacity_bytes)} ({where})" for where, books in device.locations.items())
    if device.driver_fallback:
        advice = 'the line `gpu` says why; with driver = "cuda" such a daemon does not start'
        return Check("broker", "warn", f"{daemon} found no usable GPU, and lends host memory: {capacity}", advice)
    return Check("broker", "ok", f"{daemon} lends {capacity}")


def _no_device(env: Mapping[str, str]) -> str:
    """Return the error's message if no broker runs or ran on this machine, else an empty text."""
    try:
        endpoints.default_device(env)
    except BrokerAbsent as error:
        return str(error)
    except MembrokerError:  # several, or a directory that this user cannot read
        pass
    return ""


def check_unaccounted(endpoint: str | None, env: Mapping[str, str]) -> Check:
    """What is in use beyond the books must fit into the headroom, or the device has less room than the books say."""
    try:
        with open_books(endpoint, False, env) as books:
            locations = books.device().locations
    except MembrokerError:
        return Check("unaccounted", "ok", "not checked: that needs a broker")
    lines = []
    for where, memory in locations.items():
        if memory.unaccounted_bytes is None:
            continue
        room = memory.headroom_bytes - memory.gate_reserve_bytes
        found = f"{format_size(memory.unaccounted_bytes)} of {where} memory are in use and not in the books"
        if memory.unaccounted_bytes > room:
            advice = (
                "`membroker processes` shows which processes use more than they are charged (in a container, run "
                "`nvidia-smi` on the host): end them, let them declare what they allocate, or raise `headroom`"
            )
            found += f", more than the {format_size(room)} that the headroom has for it"
            return Check("unaccounted", "warn", found, advice)
        lines.append(found)
    return Check("unaccounted", "ok", "; ".join(lines) or "not checked: the device does not tell what is in use")


def check_configuration(endpoint: str | None, env: Mapping[str, str]) -> Check:
    """Check that the daemon would start again with its file. Only an operator can ask."""
    try:
        with open_admin(endpoint, env) as admin:
            device = admin.device()
    except MembrokerError:
        return Check("configuration", "ok", "not checked: that needs a broker's admin endpoint")
    if device.reload_problems:
        found = f"the last reload was refused, and the next start would fail: {'; '.join(device.reload_problems)}"
        return Check("configuration", "warn", found, "mend the file, then reload: `membrokerd --config FILE --reload`")
    if device.pending_keys:
        advice = "restart the daemon for keys; for a tenant, its log says what to do before another reload"
        return Check("configuration", "warn", f"not in force: {', '.join(device.pending_keys)}", advice)
    return Check("configuration", "ok", "the file is in force as it was read last")


def check_guarantees(endpoint: str | None, env: Mapping[str, str]) -> Check:
    """Check that the guarantees of a running broker can be kept and used. Only an operator can ask for them."""
    try:
        with open_admin(endpoint, env) as admin:
            locations = admin.device().locations
            quotas = [quota for quota in admin.quotas(configured=True) if quota.guarantee_bytes]
            late = {model.name: sum(books.late_bytes for books in model.books.values()) for model in admin.models()}
    except MembrokerError:
        return Check("guarantees", "ok", "not checked: that needs a broker's admin endpoint")
    for name, size in late.items():  # first, as it is often why guarantees cannot be kept
        if size:
            model = tables.short_name(name)
            found = f"{model} owes {format_size(size)} that the broker has recalled"
            advice = (
                f"its worker is stopped, hangs, or keeps all that it is asked for: `membroker explain {model} --admin` "
                "names the session, and how to end it"
            )
            return Check("guarantees", "warn", found, advice)
    for where, books in locations.items():
        if books.guarantee_shortfall_bytes:
            missing = format_size(books.guarantee_shortfall_bytes)
            advice = (
                "others have it and cannot be asked for it, or do not answer (`membroker models --admin`), or all "
                "guarantees are more than the capacity (`membroker quota list --all`)"
            )
            found = f"{missing} of the {where} guarantees are neither free nor recallable now"
            return Check("guarantees", "warn", found, advice)
    for quota in quotas:
        size = quota.guarantee_bytes or 0
        if size % GUARANTEE_STEP:
            found = f"{tables.short_name(quota.name)} is guaranteed {format_size(size)}"
            step = format_size(GUARANTEE_STEP)
            advice = f"make it a multiple of {step}: a pool with pages of that size cannot use the rest"
            return Check("guarantees", "warn", found, advice)
    return Check("guarantees", "ok", f"{len(quotas)} set, all of them can be kept" if quotas else "no guarantee is set")


def _sysctl(name: str) -> int:
    return int(Path("/proc/sys", name).read_text())
