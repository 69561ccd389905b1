"""A fork of the test's own process, for what a child may and may not do with what it inherits."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from contextlib import ExitStack

from tests.support.daemons import DEADLINE_SECONDS


def in_a_child(body: Callable[[], None]) -> None:
    """Run `body` in a fork, without what runs at the end of a process; it must raise nothing, and not wait forever."""
    child = os.fork()
    if not child:
        with ExitStack() as failed:
            failed.callback(os._exit, 1)
            failed.callback(traceback.print_exc)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(DEADLINE_SECONDS))
            body()
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
