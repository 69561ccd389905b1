"""A program of a benchmark in a process of its own: a line of JSON in, a line of JSON out, and all else in a log.

For what a `Crew` cannot run: another tree's membroker, another environment, libraries that print. Imports no membroker.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 60.0
END_SECONDS = 15.0
LOG_LINES = 30


class ChildFailed(Exception):
    """A program did not start, or ended; the message has the end of its log."""


class Child:
    """`python -m MODULE`, which gets a first line that sets it up. Without a log its errors are this process's."""

    def __init__(
        self,
        module: str,
        setup: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path | None = None,
        python: str = sys.executable,
    ) -> None:
        self._log = log
        errors = None if log is None else log.open("w")
        try:
            self.process = subprocess.Popen(
                [python, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
                process_group=0,
            )
        finally:
            if errors is not None:
                errors.close()
        self.tell(setup)

    def tell(self, command: Mapping[str, Any]) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # `hear` says why
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()

    def hear(self, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
        """Return the answer to the last command."""
        assert self.process.stdout is not None
        line = ""
        if select.select([self.process.stdout], [], [], seconds)[0]:
            line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line or '{"failed": "no answer"}')
        if "failed" in found:
            log = [] if self._log is None else self._log.read_text(errors="replace").splitlines()[-LOG_LINES:]
            raise ChildFailed("\n".join([f"{found['failed']}; the end of its log:", *log]))
        return found

    def close(self, seconds: float = END_SECONDS) -> None:
        """Let it end by itself, and kill what has not ended after so many seconds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # also processes of its own, if they are left
        self.process.wait()
        self.process.stdout.close()


def answering() -> Callable[[Mapping[str, Any]], None]:
    """In the child: return what sends an answer. What libraries print goes to the log from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda answer: print(json.dumps(answer), file=answers, flush=True)
