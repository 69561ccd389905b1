"""An honest worker in bad company: what it does while others flood, stop or fall silent, and how long that takes it.

`Honest` is a worker process of its own that borrows and releases in a loop. How long its turns took is in the report,
and no test bounds it. How many steps of others come before one of its own: `tests/broker/system/test_turns.py`;
`unprivileged` starts a daemon for which the kernel's bounds hold,
and `spare_descriptors` leaves a process so many descriptors and no more.
"""

from __future__ import annotations

import os
import re
import resource
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support import daemons
from tests.support.daemons import Daemon, running, until
from tests.support.workers import Refused, Worker, as_user, worker

State = Callable[[str, str], None]
"""The fixture `state`: what, and its figure."""
NOBODY = 20_000 + os.getpid() % 40_000
"""A user that nobody else is, not even another run of these tests: what is in flight is counted for each user."""
CYCLES = 200
"""Turns of the honest worker at least, alone and beside each."""

COUNTED = "tests.support.faulty_daemon count_turns"
"""The module of a daemon whose turns `check_turns` looks at."""
TURN_CALLS = 50_000
"""No turn of the daemon's event loop may make so many Python calls, whatever peers send.

The longest turns seen took 0.4 to 0.5 us for each call, so this many take about 25 ms.
"""

_CYCLES = """
import time
def cycles(count):
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        buffer = model.allocate(PAGE)
        view = buffer.view()
        assert bytes(view[:4]) == bytes(4), 'lent what somebody had written'
        view[:4] = b'mine'
        view.release()
        buffer.close()
        seconds.append(time.perf_counter() - began)
    return seconds
"""


class Honest:
    """A worker that borrows a granule, writes and gives it back, over and over; whatever fails raises `Refused`."""

    def __init__(self, process: Worker, daemon: Daemon, transport: str) -> None:
        self._worker = process.connect(daemon, "blue", transport)
        self._worker.do("model = client.model('honest')")
        self._worker.do(_CYCLES)
        self._transport = transport
        self._alone = self.turns(CYCLES)

    def turns(self, count: int) -> list[float]:
        seconds: list[float] = self._worker.ask(f"cycles({count})")
        return seconds

    def do(self, code: str) -> None:
        """Run anything else; `client` and `model` are there."""
        self._worker.do(code)

    def ask(self, code: str) -> Any:
        return self._worker.ask(code)

    def refused(self, code: str) -> Refused:
        return self._worker.refused(code)

    def beside(self, state: State, what: str, is_over: Callable[[], bool] = lambda: True) -> None:
        """Go on until `is_over`, for CYCLES turns at least, and state how long they took."""
        seconds = self.turns(CYCLES)
        while not is_over():
            seconds += self.turns(100)
        figures = f"{_figures(seconds)} in {len(seconds)} turns, alone {_figures(self._alone)}"
        state(f"an honest worker ({self._transport}) beside {what}", figures)

    def beside_flood(self, state: State, what: str, flood: Worker, code: str) -> Any:
        """Let another worker run `code`, go on beside it until it is done, and return the `answer` that it left."""
        flood.begin(code)
        assert flood.process.stdout is not None
        stdout = flood.process.stdout
        self.beside(state, what, lambda: bool(select.select([stdout], [], [], 0)[0]))
        return flood.result()


def _figures(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p99 = (ordered[int(len(ordered) * share)] * 1e3 for share in (0.5, 0.99))
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"


@contextmanager
def honest(daemon: Daemon, transport: str = "handoff") -> Iterator[Honest]:
    """Yield an honest worker of the tenant blue that is connected and has taken its time alone."""
    with worker() as process:
        yield Honest(process, daemon, transport)


def check_turns(daemon: Daemon, state: State, what: str) -> None:
    """Assert that no turn of the daemon's event loop made too many Python calls so far, and state the longest.

    Its time is stated only: other processes make it longer. CPU time goes on while a virtual machine stands still.
    """
    assert daemon.module.startswith(COUNTED), "the turns of this daemon are not counted"
    scraped = dict(re.findall(r"^membroker_loop_(\w+){[^}]*} (\S+)$", daemon.metrics(), re.MULTILINE))
    longest, slow = float(scraped["longest_turn_seconds"]), int(float(scraped["slow_turns_total"]))
    calls = round(float(scraped["longest_turn_cpu_seconds"]) * 1e6)
    state(f"longest turn, {what}", f"{calls:,} Python calls, {longest * 1e3:.1f} ms; {slow} took more than 50 ms")
    assert 0 < calls < TURN_CALLS, f"a turn of the event loop made {calls:,} Python calls"


def other_user() -> int | None:
    """Return the user for a process without privileges; None is this user, if it is not root."""
    return NOBODY if os.geteuid() == 0 else None


@contextmanager
def unprivileged(config: Mapping[str, Any], descriptors: int, module: str = "membrokerd.cli") -> Iterator[Daemon]:
    """Run a daemon that may have so many descriptors, open and in flight, and cannot help itself to more.

    For root, who runs tests in a container, no bound of the kernel holds: there the daemon is another user.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if descriptors > hard:
        pytest.skip(f"needs a limit of {descriptors} descriptors, and this one is {hard}: raise it (ulimit -Hn)")
    user = other_user()

    def start(arguments: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*as_user(user), sys.executable, *arguments], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemons, "PythonProcess", start)
        with running(config, descriptors, module) as daemon:
            until(lambda: " limits descriptors=" in daemon.log())
            assert f" limits descriptors={descriptors} " in daemon.log(), "the daemon helped itself to more"
            yield daemon


_LOOKS = 200


def spare_descriptors(pid: int, spare: int | None) -> None:
    """Let a process of this user have `spare` descriptors more than it has open; None: as many as it may have.

    What it has open for a moment only, as for a scrape, does not count: the lowest of many looks does.
    """
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    limit = hard if spare is None else min(_lowest_unused(pid, spare) for _ in range(_LOOKS))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))


def _lowest_unused(pid: int, number: int) -> int:
    """Return the descriptor after the `number` lowest that are not in use. The limit is on their value."""
    used = set(map(int, os.listdir(f"/proc/{pid}/fd")))
    unused = (value for value in range(len(used) + number + 1) if value not in used)
    return [next(unused) for _ in range(number + 1)][-1]
