"""A daemon that sends SIGKILL soon after SIGTERM, and that may not signal every process if a test wants so.

`python -m tests.support.killing_daemon` in the place of `membrokerd`. The variable CONFINED takes CAP_KILL away from
it, or puts it into a pid namespace of its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from membrokerd.cli import main
from membrokerd.runtime import eviction

CONFINED = "MEMBROKER_TEST_CONFINED"
_CLONE_NEWPID = 0x20000000
_PR_SET_PDEATHSIG = 1


def _enter_namespace() -> None:
    """Go on as the first process of a new pid namespace; this process passes SIGTERM on, and waits for that one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWPID):
        raise OSError(ctypes.get_errno(), "unshare")
    child = os.fork()
    if not child:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


if __name__ == "__main__":
    confined = os.environ.pop(CONFINED, "")
    if confined == "without CAP_KILL":
        again = [sys.executable, "-m", "tests.support.killing_daemon", *sys.argv[1:]]
        os.execvp("setpriv", ["setpriv", "--bounding-set=-kill", *again])
    if confined == "in a pid namespace":
        _enter_namespace()
    eviction.KILL_SECONDS = 0.3
    sys.exit(main())
