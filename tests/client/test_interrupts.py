"""What an interrupt may not do: lose a step, leave a lock, or wait for what another thread holds.

Finalizers and signal handlers that release memory in the middle of a call interrupt it, too.
"""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until

import membroker
from membroker import interrupts
from membroker.interrupts import KeyedLocks, Operation, let_through, uninterrupted


def test_no_file_of_the_library_touches_a_signal() -> None:
    """The handlers of a process are its program's: only the command line's own entry may set one."""
    library = Path(membroker.__file__).parent
    found = [path for path in library.rglob("*.py") if "signal.signal(" in path.read_text()]
    of_the_commands = {library / "wire/standard.py"}  # how the two commands import: quietly
    commands = {library / "cli", library / "guest"}  # the second is `membroker run --guest`
    assert [path for path in found if commands.isdisjoint(path.parents) and path not in of_the_commands] == []


class TestUninterrupted:
    def test_an_interrupt_stops_the_work_between_two_steps(self) -> None:
        steps: list[int] = []

        def work() -> None:
            steps.append(1)
            os.kill(os.getpid(), signal.SIGINT)
            task = interrupts.here.task
            until(lambda: task.interrupted)
            steps.append(2)
            let_through()
            steps.append(3)

        with pytest.raises(KeyboardInterrupt):
            uninterrupted(work, patience=DEADLINE_SECONDS)
        assert steps == [1, 2]

    def test_a_thread_that_ends_late_keeps_nothing_alive(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A forgotten pool ended only when the thread of its last call did, which a busy machine delays."""
        go_on, ended = threading.Event(), threading.Event()

        def late(run: Callable[[], None], arguments: tuple[()]) -> int:
            def held() -> None:
                run()
                go_on.wait()
                ended.set()

            return _thread.start_new_thread(held, arguments)

        monkeypatch.setattr(interrupts, "_thread", SimpleNamespace(start_new_thread=late))
        used, work = Used(), weakref.WeakSet[object]()

        def step(used: Used = used) -> Used:
            return used

        work.add(step)
        alive = weakref.ref(used)
        assert uninterrupted(step) is used
        del step, used
        assert (alive(), len(work)) == (None, 0)
        go_on.set()
        assert ended.wait(DEADLINE_SECONDS)

    def test_an_interrupt_does_not_wait_for_ever(self) -> None:
        """A broker that answers nothing: the person gets the prompt back."""
        go_on = threading.Event()

        def work() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            assert go_on.wait(DEADLINE_SECONDS)

        with pytest.raises(KeyboardInterrupt):
            uninterrupted(work, patience=0.0)
        go_on.set()

    def test_work_whose_thread_starts_after_the_interrupt_is_not_begun(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a busy machine a thread may start late: nothing would end a wait that it begins then."""
        late: list[Callable[[], None]] = []

        def start_new_thread(run: Callable[[], None], _: tuple[()]) -> None:
            late.append(run)
            raise KeyboardInterrupt

        monkeypatch.setattr(interrupts, "_thread", SimpleNamespace(start_new_thread=start_new_thread))
        steps: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            uninterrupted(lambda: steps.append(1), patience=0.0)
        thread = threading.Thread(target=late[0])
        thread.start()
        thread.join()
        assert steps == []


class Used:
    """What operations work on, and notes what they say."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begin(self, operation: Operation) -> None:
        self.told.append("begin")

    def finish(self, operation: Operation) -> None:
        self.told.append("finish")

    def interrupted(self) -> None:
        self.told.append("interrupted")


class TestOperation:
    @pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()])
    def test_a_failure_is_undone_last_step_first(self, error: BaseException) -> None:
        """The connection is dropped after an interrupt only, and last of all: the session states the truth."""
        used = Used()
        with pytest.raises(type(error)), Operation(used) as operation:  # noqa: PT012 - the block is what is tested
            operation.ends.append(lambda: used.told.append("end"))
            operation.undo += [lambda: used.told.append("first"), lambda: used.told.append("second")]
            raise error
        assert used.told[:5] == ["begin", "second", "first", "end", "finish"]
        assert ("interrupted" in used.told) == isinstance(error, KeyboardInterrupt)

    def test_an_interrupt_of_the_end_runs_it_again(self) -> None:
        used, interrupts_left = Used(), [1]

        def end() -> None:
            used.told.append("end")
            if interrupts_left:
                interrupts_left.pop()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), Operation(used) as operation:
            operation.ends.append(end)
        assert used.told == ["begin", "end", "end", "finish", "interrupted"]

    def test_a_step_forward_is_completed(self) -> None:
        """What cannot be taken back is finished, although Ctrl-C came in the middle of it."""
        used, interrupts_left = Used(), [1]

        def step() -> None:
            used.told.append("step")
            if interrupts_left:
                interrupts_left.pop()
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), Operation(used) as operation:  # noqa: PT012 - as above
            operation.undo.append(lambda: used.told.append("undo"))
            operation.forward(step)
        assert used.told[:3] == ["begin", "step", "step"]
        assert "undo" not in used.told


class TestTurns:
    @pytest.mark.parametrize("to", ["the process", "another thread"])
    def test_an_interrupt_ends_the_wait_and_nothing_else(self, to: str) -> None:
        """Ctrl-C while a thread waits for its turn at a call that hangs: it gets out, and has taken nothing.

        The kernel may give the signal to any thread, and then it does not wake the one that waits.
        """
        turns, taken, done = KeyedLocks(), threading.Event(), threading.Event()

        def hang() -> None:
            with Operation(Used()) as operation:
                turns.take({1}, operation)
                taken.set()
                until(lambda: bool(turns._changed.waiting))
                if to == "the process":
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
                done.wait(DEADLINE_SECONDS)

        hanging = threading.Thread(target=hang)
        hanging.start()
        assert taken.wait(DEADLINE_SECONDS)
        with pytest.raises(KeyboardInterrupt), Operation(Used()) as operation:
            turns.take({1, 2}, operation)
        assert hanging.is_alive(), "it waited for the call that hangs"
        with Operation(Used()) as operation:
            turns.take({2}, operation)
            done.set()
        hanging.join()
        with Operation(Used()) as operation:
            turns.take({1, 2}, operation)


def run(script: str) -> list[str]:
    """Run a program of its own, which must end well, and return the lines that it prints."""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


LOST_WAKEUP = """
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
    assert run(LOST_WAKEUP) == ["interrupted"]


COLLECTED = """
import gc, time
from membroker.memory.buffer import Buffer
from membroker.memory.local_source import LocalSource
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm import libc
from tests.support.daemons import until

gc.disable()  # a collection comes where it is called, and not inside a call of the library before
source, other = LocalSource("host"), LocalSource("host")
pool = VirtualMemoryPool(source, "64MiB", "2MiB")
mmap = libc._mmap


class Block:
    def __init__(self):
        self.address, self.buffer = pool.allocate_anywhere("2MiB"), Buffer(source, "2MiB")
        self.me = self

    def __del__(self):
        pool.free(self.address)
        self.buffer.close()
        other.close()
        print("deleted")


def collect_and_map(*arguments):
    libc._mmap = mmap
    gc.collect()
    return mmap(*arguments)


Block()
gc.collect()
print(pool.physical_usage_bytes, other._ended)
until(lambda: source.physical_usage_bytes == 0)  # the buffer is garbage, too: a thread may be at its end already

other = LocalSource("host")
Block()
libc._mmap = collect_and_map
last = pool.allocate_anywhere("2MiB")  # holds the lock of the addresses while it maps
until(lambda: other._ended and source.physical_usage_bytes == 2 << 20)
print(source.physical_usage_bytes, other._ended)
"""


def test_the_collector_interrupts_a_call_that_holds_a_lock() -> None:
    """Blocks of a cache that refer to each other free their pages when they are collected, at any point of a program.

    In the program's own code that happens at once. In a call of the library, another thread does it.
    """
    assert run(COLLECTED) == ["deleted", "0 True", "deleted", "2097152 True"]


HANDLER = """
import os, signal, time
from membroker.memory.local_source import LocalSource
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm import libc
from tests.support.daemons import until

source = LocalSource("host")
pool, idle = VirtualMemoryPool(source, "64MiB", "2MiB"), VirtualMemoryPool(source, "64MiB", "2MiB")
idle.allocate(0, 1)
mmap = libc._mmap


def be_told(*arguments):
    libc._mmap = mmap
    os.kill(os.getpid(), signal.SIGTERM)
    return mmap(*arguments)


signal.signal(signal.SIGTERM, lambda *_: source.close())
libc._mmap = be_told
try:
    pool.allocate_anywhere("2MiB")  # holds the lock of the addresses while it maps
except Exception as error:
    print(error)
until(lambda: source._ended)
print(source.physical_usage_bytes, source._ended)
"""


def test_a_signal_handler_interrupts_a_call_that_holds_a_lock() -> None:
    """A program closes all it has on SIGTERM, in the handler: the lock is its own thread's, which waits there."""
    assert run(HANDLER)[-1] == "0 True"
