"""Why an engine did not start, as the last line that the user sees.

vLLM starts an engine in other processes. Their errors are followed by those of the processes that wait for them, and by
tracebacks. Owns the way of one sentence from any process of vLLM to the one that the user has started, which writes it
when it ends. It never raises.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from contextlib import suppress
from typing import Final

from ...errors import MembrokerError

VARIABLE: Final = "MEMBROKER_VLLM_LAST_LINE"
"""The file of the user's process that takes the sentence: in memory, and open until that ends."""
_MOST_BYTES: Final = 4096


class _Reasons(logging.Handler):
    """Takes the library's errors from what vLLM logs about a process that has failed."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, MembrokerError):
            tell(error)


def begin() -> None:
    """Listen to what this process of vLLM logs. The first one is the user's."""
    with suppress(OSError):
        if not os.path.exists(os.environ.get(VARIABLE, "")):
            told = os.memfd_create("membroker-last-line")
            os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{told}"
            atexit.register(_say, told, os.getpid())
        logging.getLogger("vllm").addHandler(_Reasons())


def tell(error: MembrokerError) -> None:
    """Let this be the last line."""
    with suppress(OSError), open(os.environ.get(VARIABLE, ""), "w") as file:
        file.write(f"membroker: {error}\n")


def _say(told: int, pid: int) -> None:
    if os.getpid() == pid:  # and not a fork of it
        with suppress(OSError):
            sys.stderr.write(os.pread(told, _MOST_BYTES, 0).decode(errors="replace"))
