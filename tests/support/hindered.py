"""A program that begins as badly as its parent can have it: `python -m tests.support.hindered [MODULE] …`.

Signals are blocked and ignored, an alarm is pending, descriptor 0 is closed, files are made for everybody, and soft
limits are low. Then it becomes `python -m MODULE …`, which inherits all that; without a module, the daemon.
"""

from __future__ import annotations

import os
import resource
import signal
import sys

ALARM_SECONDS = 0.01
FILE_BYTES = 1 << 20
DESCRIPTORS = 256

if __name__ == "__main__":
    ignored = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGCHLD, signal.SIGHUP)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    signal.setitimer(signal.ITIMER_REAL, ALARM_SECONDS)
    os.umask(0)
    for limit, soft in ((resource.RLIMIT_FSIZE, FILE_BYTES), (resource.RLIMIT_NOFILE, DESCRIPTORS)):
        resource.setrlimit(limit, (soft, resource.getrlimit(limit)[1]))
    os.close(0)
    words = sys.argv[1:] if sys.argv[1].startswith("membrokerd.") else ["membrokerd.cli", *sys.argv[1:]]
    os.execv(sys.executable, [sys.executable, "-m", *words])
