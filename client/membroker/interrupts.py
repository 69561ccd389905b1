"""Ctrl-C: the boundary of a call, work that no interrupt can reach, and the waits.

Python raises KeyboardInterrupt between almost any two instructions of the main thread. The library never changes a
signal handler. Instead, `Operation` cleans up after a call that an interrupt ended, and `uninterrupted` moves longer
work to another thread, where Python raises none.

Inside an operation three rules hold. A step is recorded before it is made, and forgotten after it is undone. Every
undo may run twice. Statements without a call between them are one step: Python looks for signals at the beginning of
a function, after a call of C code, and when a loop repeats, and nowhere else.
"""

from __future__ import annotations

import _thread
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from contextlib import ExitStack
from contextvars import copy_context
from functools import partial
from types import FrameType
from typing import Any, Generic, Protocol, Self, TypeVar

from .cancellation import CancelScope, innermost
from .errors import DescriptorLimit, DeviceFailure
from .vmm.driver import DriverError, DriverLimit

STOPPING_SECONDS = 5.0
"""How long an interrupt waits for work in another thread to stop. After that it is raised, and the work goes on."""
LOOK_SECONDS = 1.0
"""How often a wait looks whether an interrupt has arrived that did not end it."""

_T = TypeVar("_T")
Step = Callable[[], object]


class device_failures:
    """A block that turns a driver's error into `DeviceFailure`, or `DescriptorLimit` if no descriptor was left.

    A class, because a generator costs more.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, DriverError):
            raise _failure(error) from error


def _failure(error: DriverError) -> DeviceFailure | DescriptorLimit:
    out_of_descriptors = isinstance(error, DriverLimit) and error.name == "EMFILE"
    return (DescriptorLimit if out_of_descriptors else DeviceFailure)(str(error))


class Used(Protocol):
    """The memory that an operation works on. It does not end while the operation runs."""

    def begin(self, operation: Operation) -> None:
        """Delay the end until `finish`, or until the operation is garbage. Raises `ClosedError`."""
        ...

    def finish(self, operation: Operation) -> None:
        """End if this was the last operation, and the end was requested meanwhile. May be called again."""
        ...

    def interrupted(self) -> None:
        """Drop the connection that the call used: the session then agrees with the broker on what is held."""
        ...


class Operation:
    """The boundary of one public call on `memory`: `with Operation(memory) as operation`.

    It delays the end of the memory, and turns driver errors into errors of the library. `undo` are the steps that take
    the call back if it fails, and `ends` the steps that run in any case, after those; the last step runs first. Each
    must be safe to run twice: an interrupt can end the first run. The call clears `undo` when it is complete.
    """

    __slots__ = ("__weakref__", "_memory", "ends", "guard", "undo")

    def __init__(self, memory: Used) -> None:
        self._memory = memory
        self.undo: list[Step] = []
        self.ends: list[Step] = []
        self.guard: weakref.ref[Operation] | None = None

    def __enter__(self) -> Self:
        self._memory.begin(self)
        return self

    def forward(self, step: Step) -> None:
        """Run a step that replaces the undo steps: after an interrupt it is run again instead of undone.

        If it fails with an `Exception`, the undo steps are restored.
        """
        before = self.undo[:]
        self.undo[:] = [step]
        try:
            step()
        except Exception:
            self.undo[:] = before
            raise
        self.undo.clear()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is not None:
                settle(self.undo, self.ends)
            else:
                for step in reversed(self.ends):
                    step()
            self._memory.finish(self)
        except Exception as failure:
            self._memory.finish(self)
            if isinstance(failure, DriverError):
                raise _failure(failure) from failure
            raise
        except BaseException:
            self._leave()
            raise
        if isinstance(error, DriverError):
            raise _failure(error) from error
        if error is not None and not isinstance(error, Exception):
            self._leave()

    def _leave(self) -> None:
        """End after an interrupt. It drops the connection last: the session then states what it holds."""
        with ExitStack() as ends:
            ends.callback(self._memory.interrupted)
            ends.callback(self._memory.finish, self)
            settle(self.undo, self.ends)


def settle(undo: list[Step], ends: list[Step]) -> None:
    """Run every step of `undo`, the last one first, then every step of `ends`. Safe to run again.

    Raises the last error, as a `DeviceFailure` if it is the driver's.
    """
    failures: list[Exception] = []
    for steps in (undo, ends):
        for step in reversed(steps):
            try:
                step()
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        undo.clear()  # a second run must not undo again after the ends have released it
    if failures:
        with device_failures():
            raise failures[-1]


def completed(step: Step, interrupted: Step) -> None:
    """Run a step to its end. After an interrupt, run it again, call `interrupted`, and raise the interrupt."""
    try:
        step()
    except Exception:
        raise
    except BaseException:
        try:
            step()
        finally:
            interrupted()
        raise


class _Task(Generic[_T]):
    """Work in another thread, for a waiting thread. Its state is in attributes, which an interrupt cannot lose."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work: Callable[[], _T] | None = partial(copy_context().run, work)  # with the caller's cancel scope
        self._started = self._done = False
        self._result: _T | None = None
        self._error: BaseException | None = None
        self._running = threading.Lock()
        self._running.acquire()
        self.interrupted: bool = False
        self.caller: FrameType | None = None
        """The frame of the waiting thread, as long as it waits."""

    def run(self) -> None:
        self._started = True
        here.task = self
        try:
            let_through()  # on a busy machine a thread may start long after the interrupt
            self._result = self._work()  # type: ignore[misc]
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._error = error
        # This thread ends a little after the call. It must not keep alive what the call used.
        self._work = None
        self._done = True
        self._running.release()

    def result(self, on_interrupt: Step, patience: float) -> _T:
        """Start the work, and return its result or raise its error.

        An interrupt asks the work to stop, and waits a little for that.
        """
        try:
            # `Thread.start` waits for the thread, and an interrupt in that wait becomes a RuntimeError, or is lost.
            _thread.start_new_thread(self.run, ())
            self._wait()
        except RuntimeError:
            if self._started:
                raise
            return self._work()  # type: ignore[misc]  # the interpreter is shutting down and cannot start a thread
        except BaseException:
            self.interrupted = True
            on_interrupt()
            self._wait(patience)
            raise
        # The error keeps the frames of the work, and so this task: a task that kept the error would be a cycle.
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error
        result, self._result = self._result, None
        return result  # type: ignore[return-value]

    def _wait(self, seconds: float = -1) -> None:
        # An interrupt can hide that the lock was acquired; `_done` is set then.
        if seconds < 0:
            # A signal between Python's last look and the wait, or in another thread, does not end the wait.
            while not self._done:
                self._running.acquire(timeout=LOOK_SECONDS)
        elif not self._done:
            self._running.acquire(timeout=seconds)


class _Here(threading.local):
    task: _Task[Any] | None = None


here: _Here = _Here()
"""`here.task` is the work of `uninterrupted` that this thread does."""


def uninterrupted(work: Callable[[], _T], on_interrupt: Step = lambda: None, patience: float = STOPPING_SECONDS) -> _T:
    """Return the result of `work`. No interrupt is raised in it, because the main thread runs it in another thread.

    An interrupt calls `on_interrupt`, which may end a wait of the work, and makes `let_through` raise in the work. It
    is raised here when the work has ended, or after `patience` seconds.
    """
    if threading.get_ident() != threading.main_thread().ident:
        return work()
    task = _Task(work)
    task.caller = sys._getframe(1)
    try:
        return task.result(on_interrupt, patience)
    finally:
        task.caller = None  # an error keeps the task, and a frame keeps the program's variables


def let_through() -> None:
    """Raise KeyboardInterrupt in the work of `uninterrupted` if an interrupt is waiting. Call it between two steps."""
    if here.task is not None and here.task.interrupted:
        raise KeyboardInterrupt


class Condition:
    """A `lock`, held in a `with` block of the caller: in the block, `wait` releases it until it is told of a change.

    `waiting` has the locks on which threads wait. A thread may wait with a key, and is then told alone.
    """

    __slots__ = ("lock", "waiting")

    def __init__(self, lock: threading.RLock | None = None) -> None:
        # An RLock has an owner, so a `with` block that an interrupt ended never releases another thread's lock.
        self.lock = lock or threading.RLock()
        self.waiting: dict[object, threading.Lock] = {}

    def wait(self, seconds: float | None = None, key: object = None) -> None:
        """Wait for a change, at most `seconds` and `LOOK_SECONDS`, so call it in a loop. The caller holds the lock.

        Ctrl-C ends the wait. One that comes while the thread falls asleep does not wake it, and ends the wait later.
        """
        waiter = threading.Lock()
        waiter.acquire()
        key = waiter if key is None else key
        self.waiting[key] = waiter
        try:
            self.lock.release()
            waiter.acquire(timeout=LOOK_SECONDS if seconds is None else min(seconds, LOOK_SECONDS))
        finally:
            interrupt: BaseException | None = None
            while True:
                try:
                    if not self.lock._is_owned():  # type: ignore[attr-defined]  # as threading.Condition asks
                        self.lock.acquire()
                    self.waiting.pop(key, None)
                    break
                except BaseException as error:  # noqa: BLE001 - an interrupt: raised below, with the lock held
                    interrupt = error
            if interrupt is not None:
                raise interrupt

    def tell_all(self) -> None:
        """Wake every waiting thread. The caller holds the lock."""
        while self.waiting:
            self.waiting.popitem()[1].release()

    def wake(self) -> None:
        """Wake every waiting thread, because one of them has been cancelled. Any thread; the caller has no lock."""
        with self.lock:
            self.tell_all()

    def tell(self, key: object) -> None:
        """Wake the thread that waits with this key, if there is one. The caller holds the lock."""
        if (waiter := self.waiting.pop(key, None)) is not None:
            waiter.release()

    def tell_next(self) -> None:
        """Wake the thread that has waited longest with a key, and all that wait without. The caller holds the lock."""
        keys = [key for key, waiter in self.waiting.items() if key is not waiter]
        for key in [key for key, waiter in self.waiting.items() if key is waiter] + keys[:1]:
            self.tell(key)


class KeyedLocks:
    """A lock for each of many numbers. Unusable in a forked child: another thread of the parent may have held it."""

    def __init__(self) -> None:
        self._owners: dict[int, object] = {}
        self._changed = Condition()

    def take(self, things: Collection[int], owner: Operation) -> None:
        """Wait until all of `things` are free, then lock them until `owner` ends.

        Ctrl-C ends the wait, and so does a cancel scope: the call that has them may wait for memory.
        """
        key, scope = object(), innermost.get() or CancelScope()
        owner.ends.append(lambda: self._give_up(things, key))
        with scope.waking(self._changed.wake), self._changed.lock:
            while not self._owners.keys().isdisjoint(things):
                scope.check()
                self._changed.wait()
            self._owners.update(dict.fromkeys(things, key))

    def _give_up(self, things: Collection[int], key: object) -> None:
        with self._changed.lock:
            for thing in things:
                if self._owners.get(thing) is key:
                    del self._owners[thing]
            self._changed.tell_all()
