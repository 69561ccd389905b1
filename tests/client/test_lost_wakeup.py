"""Ctrl-C that does not wake the main thread: the wait for work in another thread still ends."""

from __future__ import annotations

import subprocess
import sys

from tests.support.daemons import DEADLINE_SECONDS

SCRIPT = """
import os, signal, threading
from membroker.interrupts import uninterrupted
release = threading.Event()
is_blocked, is_working = threading.Event(), threading.Event()
def strike():
    is_blocked.wait()
    is_working.wait()
    os.kill(os.getpid(), signal.SIGINT)  # the kernel gives it to this thread: the main thread blocks it
thread = threading.Thread(target=strike)
thread.start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
is_blocked.set()
try:
    uninterrupted(lambda: (is_working.set(), release.wait()), on_interrupt=release.set)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_that_another_thread_receives_ends_the_wait() -> None:
    """Python only notes it there, and the main thread sleeps on. So does one just before the main thread's sleep."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "interrupted\n", "")
