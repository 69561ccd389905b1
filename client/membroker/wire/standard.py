"""How a program starts: what it has inherited, and Ctrl-C while it imports.

It must import nothing that is slow.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from importlib import import_module
from types import ModuleType


def import_quietly(name: str) -> ModuleType:
    """Return the module `name`. Ctrl-C during its import ends the process without a word: nothing was begun yet."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return import_module(name)
    finally:
        signal.signal(signal.SIGINT, before)


_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD)
"""Signals that end a daemon, or say that a child has ended. SIGHUP stays as it is: `nohup` is about that one."""
_TIMERS = (
    (signal.ITIMER_REAL, signal.SIGALRM),
    (signal.ITIMER_VIRTUAL, signal.SIGVTALRM),
    (signal.ITIMER_PROF, signal.SIGPROF),
)
_SOFT_LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU)


def forget_inheritance() -> None:
    """Set all that a daemon inherits and relies on: to be called first, before any thread or descriptor.

    A supervisor, a shell or a service manager may have blocked or ignored the signals that stop it, set an alarm, left
    descriptors closed, or a umask or soft limits of its own.
    """
    for timer, number in _TIMERS:  # before signals are unblocked: one of these may be pending
        signal.setitimer(timer, 0)
        signal.signal(number, signal.SIG_IGN)
    for number in _HEARD:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    open_standard_descriptors()
    os.umask(0o022)
    for limit in _SOFT_LIMITS:
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (hard, hard))


def open_standard_descriptors() -> None:
    """Open those of the descriptors 0 to 2 that are closed on /dev/null. To be called before anything is opened.

    Otherwise the next socket or file gets one of these numbers, and a C library's messages on stderr go into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(number, True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - until the process ends
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
