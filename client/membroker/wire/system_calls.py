"""The system calls that a broker needs besides the usual ones, tried once: a sandbox may refuse any of them.

A seccomp profile, a unit's SystemCallFilter= or a security module answers with an error number of its own choice, which
elsewhere means that a limit is reached or a process is dead. So the daemon tries at its start, and `membroker doctor`
does, too. It must leave nothing behind.
"""

from __future__ import annotations

import array
import errno
import fcntl
import os
import signal
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

SHORT = (errno.EMFILE, errno.ENFILE)
"""No descriptor is left, in this process or on the machine: that is no refusal."""


def describe(call: str, error: OSError) -> str:
    """Return what a call has failed with, for a sentence: its name, the reason and the kernel's word for it."""
    word = errno.errorcode.get(error.errno or 0, "")
    return f"{call}: {error.strerror or error}" + (f" ({word})" if word else "")


def refused(*, host_driver: bool) -> list[str]:
    """Return each call that this system refuses, with its reason; none where a broker can run."""
    found = []
    for call, attempt in (_CALLS | (_CALLS_OF_HOST_DRIVER if host_driver else {})).items():
        try:
            with ExitStack() as stack:
                attempt(stack)
        except OSError as error:
            if error.errno not in SHORT:
                found.append(describe(call, error))
    return found


def _opened(stack: ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def _seal(stack: ExitStack) -> None:
    made = _opened(stack, os.memfd_create("membroker-try", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC))
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def _signal(stack: ExitStack) -> None:
    process = _opened(stack, os.pidfd_open(os.getpid()))
    signal.pidfd_send_signal(process, 0)  # no signal: only whether it may be sent


def _pass(stack: ExitStack) -> None:
    ours, theirs = map(stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    passed = array.array("i", [_opened(stack, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))])
    ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
    _, control, flags, _ = theirs.recvmsg(1, socket.CMSG_SPACE(passed.itemsize), socket.MSG_CMSG_CLOEXEC)
    for _, _, content in control:
        _opened(stack, int(array.array("i", content)[0]))
    if flags & socket.MSG_CTRUNC and not control:
        raise PermissionError(errno.EPERM, "the descriptor did not arrive")


def _lock(stack: ExitStack) -> None:
    with suppress(BlockingIOError):
        fcntl.flock(_opened(stack, os.open("/", os.O_RDONLY | os.O_DIRECTORY)), fcntl.LOCK_SH | fcntl.LOCK_NB)


def _peer(stack: ExitStack) -> None:
    ours, _ = map(stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    ours.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)


_CALLS: dict[str, Callable[[ExitStack], object]] = {
    "socketpair(AF_UNIX, SOCK_SEQPACKET)": lambda stack: list(
        map(stack.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
    ),
    "sendmsg(SCM_RIGHTS)": _pass,
    "getsockopt(SO_PEERCRED)": _peer,
    "pidfd_open": lambda stack: _opened(stack, os.pidfd_open(os.getpid())),
    "pidfd_send_signal": _signal,
    "eventfd2": lambda stack: _opened(stack, os.eventfd(0)),
    "flock": _lock,
}
_CALLS_OF_HOST_DRIVER: dict[str, Callable[[ExitStack], object]] = {
    "memfd_create": lambda stack: _opened(stack, os.memfd_create("membroker-try", os.MFD_CLOEXEC)),
    "fcntl(F_ADD_SEALS)": _seal,
}
