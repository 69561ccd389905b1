"""The library for programs with an event loop: asyncio, and loops that are used like it, such as uvloop.

    from membroker import aio

    async with aio.connect() as client:
        model = await client.model("m")
        async with model.allocate("8GiB", timeout=60) as buffer:
            ...

Owns the threads in which the calls run, because mapping memory takes its time on any path, and what becomes of a call
whose task is cancelled: its wait ends, in the broker too, and what was granted meanwhile is released before the task
ends. It must never hold up the loop, and decides nothing about memory: `sync` is the object that does the work.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextvars import copy_context
from functools import partial, wraps
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar

from . import client as library
from .cancellation import CancelScope
from .errors import TooMany
from .model import Model, Recall
from .pool.pool import VirtualMemoryPool
from .session.recalls import DEFERRED
from .threads import start_thread

__all__ = ["AsyncCall", "AsyncClient", "AsyncModel", "AsyncPool", "connect", "run"]

logger: logging.Logger = logging.getLogger("membroker")

MOST_CALLS: Final = 1_000
"""How many calls of coroutines a process may have at the same time: each has a thread."""
IDLE_SECONDS: Final = 10.0
"""How long a thread waits for another call."""

_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")
_U = TypeVar("_U")
_Undo = Callable[[Any], object]


class AsyncCall(Generic[_T]):
    """A call that is made when it is awaited, or by `async with`, which takes it back at the end of the block.

    What the call returned is closed, or freed where it is a pool's range; `model` leaves the model.
    """

    def __init__(self, make: Callable[[], _T], undo: _Undo | None = None) -> None:
        self._make = make
        self._undo = undo
        self._result: Any = None

    def __await__(self) -> Generator[Any, Any, _T]:
        """Make the call."""
        return _made(self._make, self._undo).__await__()

    async def __aenter__(self) -> _T:
        """Make the call."""
        result: _T = await self
        self._result = result
        return result

    async def __aexit__(self, *_: object) -> None:
        """Take back what the call did."""
        result, self._result = self._result, None
        await run(self._undo or _close, result)


def _close(result: Any) -> None:
    getattr(result, "sync", result).close()


def run(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> AsyncCall[_T]:
    """Return any call of the library as one that can be awaited: `await aio.run(buffer.close)`.

    If its task is cancelled, its wait ends, and a result that has `close` is closed. A call that does not wait, as most
    others, is finished first.
    """
    return AsyncCall(partial(call, *args, **kwargs))


async def _made(make: Callable[[], _T], undo: _Undo | None) -> _T:
    """Make a call in a thread. When the task is cancelled, end its wait, take back what it did, and be cancelled."""
    scope = CancelScope()
    outcome = _begun(partial(_in_scope, scope, make))
    cancelled = await _ended(outcome, scope.cancel)
    if cancelled is None:
        return outcome.result()
    if outcome.exception() is None:
        result = outcome.result()
        taking_back = _begun(partial(_take_back, result, undo))
        await _ended(taking_back, lambda: None)
        taking_back.result()
    raise cancelled


def _in_scope(scope: CancelScope, make: Callable[[], _T]) -> _T:
    with scope:
        return make()


async def _ended(outcome: asyncio.Future[Any], on_cancel: Callable[[], object]) -> asyncio.CancelledError | None:
    """Wait until a call in a thread has ended, whatever happens; return how the task was cancelled meanwhile."""
    cancelled = None
    while not outcome.done():
        try:
            await asyncio.wait((outcome,))
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
            on_cancel()
    return cancelled


def _take_back(result: Any, undo: _Undo | None) -> None:
    """Undo what a call did whose task was cancelled."""
    try:
        if undo is not None:
            undo(result)
        elif hasattr(sync := getattr(result, "sync", result), "close"):
            sync.close()
    except Exception:
        logger.exception("a cancelled call could not be undone: %r is still there", result)


def _begun(work: Callable[[], _T]) -> asyncio.Future[_T]:
    """Do `work` in a thread, and return the future of its outcome."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()
    context = copy_context()

    def tell(result: _T | None, error: BaseException | None) -> None:
        if error is None:
            outcome.set_result(result)  # type: ignore[arg-type]
        else:
            outcome.set_exception(error)

    def make() -> None:
        result, error = None, None
        try:
            result = context.run(work)
        except BaseException as raised:  # noqa: BLE001 - raised where the call is awaited
            error = raised
        _threads.over()  # before the program hears of it, and begins its next call
        try:
            loop.call_soon_threadsafe(tell, result, error)
        except RuntimeError:  # the loop is closed, and nobody awaits this
            if error is None:
                _take_back(result, None)

    _threads.do(make)
    return outcome


class _Threads:
    """The threads of this process for calls of coroutines. One that is idle takes the next call."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin without a thread, as a forked child does."""
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle = 0
        self._calls = 0

    def do(self, work: Callable[[], None]) -> None:
        """Do `work` at once; it says itself when its call is `over`. Raises `TooMany` and `ThreadLimit`."""
        with self._lock:
            if self._calls >= MOST_CALLS:
                raise TooMany(f"{MOST_CALLS} calls of coroutines are under way in this process, which is the maximum")
            self._calls += 1
            if self._idle:
                self._idle -= 1
                self._work.put(work)
                return
        try:
            start_thread(self._run, "membroker-aio", work)
        except BaseException:
            self.over()
            raise

    def over(self) -> None:
        """A call is over."""
        with self._lock:
            self._calls -= 1

    def _run(self, work: Callable[[], None]) -> None:
        while True:
            work()
            del work  # it refers to a result
            with self._lock:
                self._idle += 1
            try:
                work = self._work.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                with self._lock:
                    # If no thread counts as idle, somebody has put work for this one.
                    if self._idle:
                        self._idle -= 1
                        return
                work = self._work.get()


_threads = _Threads()
os.register_at_fork(after_in_child=_threads.forget)


class _Wrapper(Generic[_S]):
    """An object of the library whose calls can be awaited. `sync` is the object itself."""

    def __init__(self, sync: _S) -> None:
        self.sync: Final = sync

    def __repr__(self) -> str:
        return f"<aio of {self.sync!r}>"


def _call(
    method: Callable[Concatenate[_S, _P], _T], undo: Callable[[_S, _T], object] | None = None
) -> Callable[Concatenate[_Wrapper[_S], _P], AsyncCall[_T]]:
    """Return a method as one that can be awaited; `undo` takes back what it did, if closing its result does not."""

    @wraps(method)
    def make(self: _Wrapper[_S], /, *args: _P.args, **kwargs: _P.kwargs) -> AsyncCall[_T]:
        return AsyncCall(
            partial(method, self.sync, *args, **kwargs), None if undo is None else partial(undo, self.sync)
        )

    return make


def _call_for(
    method: Callable[Concatenate[_S, _P], _T], wrapper: Callable[[_T], _U], undo: _Undo | None = None
) -> Callable[Concatenate[_Wrapper[_S], _P], AsyncCall[_U]]:
    """Return a method as one that can be awaited, and whose result is wrapped."""

    @wraps(method)
    def make(self: _Wrapper[_S], /, *args: _P.args, **kwargs: _P.kwargs) -> AsyncCall[_U]:
        return AsyncCall(lambda: wrapper(method(self.sync, *args, **kwargs)), undo)

    return make


class AsyncPool(_Wrapper[VirtualMemoryPool]):
    """A pool whose calls can be awaited: each is the method of `VirtualMemoryPool` with its name."""

    allocate = _call(VirtualMemoryPool.allocate, VirtualMemoryPool.free)
    allocate_anywhere = _call(VirtualMemoryPool.allocate_anywhere, VirtualMemoryPool.free)
    grow = _call(VirtualMemoryPool.grow, VirtualMemoryPool.free)
    shrink = _call(VirtualMemoryPool.shrink)
    free = _call(VirtualMemoryPool.free)
    trim = _call(VirtualMemoryPool.trim)
    offload = _call(VirtualMemoryPool.offload)
    restore = _call(VirtualMemoryPool.restore)
    restore_from = _call(VirtualMemoryPool.restore_from)
    close = _call(VirtualMemoryPool.close)


class AsyncModel(_Wrapper[Model]):
    """A model whose calls can be awaited: each is the method of `Model` with its name.

    `allocate`, `growable_buffer` and `create_segment` return the library's own objects. Their calls that may wait are
    made by `run`: `await aio.run(buffer.grow, "1GiB", timeout=5)`.
    """

    pool = _call_for(Model.pool, AsyncPool)
    allocate = _call(Model.allocate)
    growable_buffer = _call(Model.growable_buffer)
    sparse_array = _call(Model.sparse_array)
    create_segment = _call(Model.create_segment)
    declare = _call(Model.declare)
    stats = _call(Model.stats)
    available = _call(Model.available)
    unregister = _call(Model.unregister)
    leave = _call(Model.leave)

    def on_recall(self, callback: Callable[[Recall], Awaitable[object]] | None) -> AsyncCall[None]:
        """Call a coroutine function in this loop with each `Recall`; the recall is answered when it has returned.

        Otherwise as `Model.on_recall`. The coroutine must not borrow, because the broker waits for the answer. If the
        broker raises the recall meanwhile, the function is called again, and the answer is sent when the last of these
        calls has returned. An exception is logged.
        """
        if callback is None:
            return run(self.sync.on_recall, None)
        answering = _CoroutineAnswers(asyncio.get_running_loop(), callback)
        return run(self.sync.on_recall, answering.heard)


class _CoroutineAnswers:
    """What answers the recalls of one model by a coroutine function."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[Recall], Awaitable[object]]) -> None:
        self._loop = loop
        self._callback = callback
        self._lock = threading.Lock()
        self._under_way: Counter[Recall] = Counter()

    def heard(self, recall: Recall) -> object:
        """Let the loop answer a recall. In the library's thread for callbacks."""
        with self._lock:
            self._under_way[recall] += 1
        answer = self._answer(recall)
        try:
            asyncio.run_coroutine_threadsafe(answer, self._loop)
        except RuntimeError:  # the loop is closed
            answer.close()
            return None
        return DEFERRED

    async def _answer(self, recall: Recall) -> None:
        try:
            await self._callback(recall)
        except Exception:
            logger.exception("a coroutine for recalls has failed at %r: what it did not release is kept", recall)
        finally:
            with self._lock:
                self._under_way[recall] -= 1
                is_last = not self._under_way[recall]
                if is_last:
                    del self._under_way[recall]
            if is_last:
                await run(recall.done)


class AsyncClient(_Wrapper[library.Client]):
    """A client whose calls can be awaited: each is the method of `Client` with its name."""

    model = _call_for(library.Client.model, AsyncModel, lambda model: model.sync.leave())
    attach = _call(library.Client.attach)
    delete_segment = _call(library.Client.delete_segment)
    segments = _call(library.Client.segments)
    device = _call(library.Client.device)
    model_status = _call(library.Client.model_status)
    models = _call(library.Client.models)
    sessions = _call(library.Client.sessions)
    decisions = _call(library.Client.decisions)
    close = _call(library.Client.close)


def _connecting(function: Callable[_P, library.Client]) -> Callable[_P, AsyncCall[AsyncClient]]:
    @wraps(function)
    def make(*args: _P.args, **kwargs: _P.kwargs) -> AsyncCall[AsyncClient]:
        return AsyncCall(lambda: AsyncClient(function(*args, **kwargs)))

    return make


connect = _connecting(library.connect)
