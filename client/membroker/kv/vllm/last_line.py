"""Why an engine did not start, as the last line that the user sees.

vLLM starts an engine in other processes. Their errors are followed by those of the processes that wait for them, and by
tracebacks. Owns the way of one sentence from any process of vLLM to the one that the user has started, which writes it
when it ends. It never raises.

vLLM starts its processes by `multiprocessing`. So a process that was started in another way is the user's, even if it
has inherited the variable of a program with vLLM that started it.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
from contextlib import suppress
from typing import Final

from ...errors import MembrokerError

VARIABLE: Final = "MEMBROKER_VLLM_LAST_LINE"
"""The file of the user's process that takes the sentence: in memory, and open until that ends."""
_NAME: Final = "membroker-last-line"
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
        if multiprocessing.parent_process() is None or not _file():
            memory = os.memfd_create(_NAME)
            os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{memory}"
            atexit.register(_say, memory, os.getpid())
        logging.getLogger("vllm").addHandler(_Reasons())


def tell(error: MembrokerError) -> None:
    """Let this be the last line."""
    with suppress(OSError), open(_file(), "w") as file:
        file.write(f"membroker: {error}\n")


def _file() -> str:
    """Return the file of the user's process, or "" if that has ended: another process can have its pid."""
    path = os.environ.get(VARIABLE, "")
    try:
        return path if os.readlink(path).startswith(f"/memfd:{_NAME}") else ""
    except OSError:
        return ""


def _say(memory: int, pid: int) -> None:
    if os.getpid() == pid:  # and not a fork of it
        with suppress(OSError):
            sys.stderr.write(os.pread(memory, _MOST_BYTES, 0).decode(errors="replace"))
