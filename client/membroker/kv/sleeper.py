"""`Sleeper`: an idle engine releases its KV cache and its weights when it is asked to, and has them again on demand.

Owns the engine's state between awake and asleep, and one thread that does the work. The engine's scheduler thread calls
`wake`, which never waits. Between the moment at which the cache is empty and the end of the wake, the engine has no
free block, so it can schedule nothing: a request that comes meanwhile waits inside the engine.

An operator asks by command. With `idle_sleep_seconds` in its configuration, the broker asks by itself, about once a
second. It knows whether others want memory, and this knows when the last request came and what a sleep costs: see
`WORTH`. Between two questions the engine does nothing for that.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Final, NoReturn

from .. import VirtualMemoryPool
from ..errors import ClosedError, InvalidRequest, MembrokerError, OutOfMemory, SessionLost
from ..ext import Closing, start_thread
from ..types import SleepRequest, SleepStatus
from ..vmm.sizes import format_size
from .cache import CLOSE_SECONDS, ElasticCache
from .rank import awake
from .ranks import Ranks, RankWeights

logger: logging.Logger = logging.getLogger("membroker")

LOOK_SECONDS: Final = 0.05
"""How often an engine is looked at that is to sleep when its requests have ended."""
EMPTY_SECONDS: Final = 0.002
BORROW_SECONDS: Final = 1.0
"""How long one request for memory waits in the broker's queue when the engine wakes. Then it asks again."""
GIVE_WAY_SECONDS: Final = 10.0
"""An engine that has got no more of its weights for so long releases those that it has, for at most as long.

Two engines that wake at the same time may wait for what the other one has got already. It is longer than most recalls.
"""
WORTH: Final = 10.0
"""An engine sleeps by itself only when it has been idle for this many times as long as its last wake took.

So a lone request waits for at most a tenth of the time in which nobody used the engine. The wake is measured from the
request to the last byte, the wait for memory that others had included. And it must have weights, or pages of its cache,
to give.
"""
BEGIN_SECONDS: Final = 1.0
"""An engine that could not begin to sleep for so long after the broker asked waits to be asked again."""
AWAKE, BUSY, FALLING, ASLEEP, WAKING = "awake", "busy", "falling_asleep", "asleep", "waking"


class Sleeper(Closing):
    """Lets an operator put the engine of `cache` to sleep and wake it (`membroker sleep`, `membroker wake`).

    With `idle_sleep_seconds` in the broker's configuration it sleeps by itself.
    It is a context manager. `weights` is a pool with the engine's weights, or `Ranks.weights`. When the engine falls
    asleep, the weights are copied to pinned host memory and their device memory is released; their addresses do not
    change. Without `weights` they stay on the device, and `kept` is half a sentence that tells the operator why. With
    `keep_pinned` the host memory stays pinned after the first sleep, so the next sleep is faster
    (`VirtualMemoryPool.restore`). `also` is called when the cache is empty, to release other memory of the engine, such
    as PyTorch's own cache.

    The engine sleeps only while its cache rests (`ElasticCache.rest`). The engine must call `wake` when a request
    comes, after `ElasticCache.wake` or `grow`, and must compute inside `awake` blocks. Raises `InvalidRequest` if the
    pool of `cache` has no model, and what `Model.on_sleep` raises.
    """

    def __init__(
        self,
        cache: ElasticCache,
        weights: VirtualMemoryPool | RankWeights | None = None,
        *,
        kept: str = "they are the engine's own memory",
        keep_pinned: bool = False,
        also: Callable[[], object] | None = None,
    ) -> None:
        self._cache, self._weights, self._keep_pinned = cache, weights, keep_pinned
        self._why_kept, self._also = kept, also
        self._state = AWAKE
        self._request: SleepRequest | None = None
        self._wake_wanted = False
        self._is_committed = False
        """Whether what a step needs may be gone: only the end of the wake undoes that."""
        self._has_kept = False
        """Whether it sleeps with weights that it could have released."""
        self._users = 0
        """How many blocks of `awake` run."""
        self._closed = False
        self._ended = ""
        """Why the thread has ended before `close`, in half a sentence."""
        self._before = self._moved = 0
        """The bytes of the cache when the engine began to fall asleep, and of weights that are on the host."""
        self._detail = ""
        self._by_itself = False
        """Whether the broker asked for this sleep by itself."""
        self._used_at = time.monotonic()
        """When the engine was last seen with a request."""
        self._asleep_since = self._wanted_since = 0.0
        self._wake_seconds = 0.0
        """How long its last wake took."""
        self._left = 0
        """The bytes of the cache that its last sleep could not release."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        model = cache.model
        if model is None:
            raise InvalidRequest("this cache has no pool of a model: no operator can ask it to sleep")
        self._model = model
        if isinstance(model, Ranks):
            model.on_use(self.keep_awake)
        model.on_sleep(self.answer)

    # What the engine calls

    def wake(self) -> None:
        """Begin to wake the engine if it sleeps. It returns at once, and any thread may call it."""
        self._used_at = time.monotonic()
        if self._state == AWAKE:
            return
        with self._changed:
            self._want_wake()

    def _want_wake(self) -> None:
        """Wake soon, or at once if nothing but the cache was touched yet. The caller holds the lock."""
        if self._state == FALLING and not self._is_committed:
            self._state = AWAKE
            self._cache.resume()
        if self._wake_wanted and self._state != AWAKE:
            return  # its thread has been told
        self._wake_wanted = self._state != AWAKE
        self._wanted_since = time.monotonic()
        self._changed.notify_all()

    def awake(self) -> AbstractContextManager[None]:
        """Wake the engine, wait until its weights are back, and keep it awake during the block.

        It is for code that uses weights or blocks. Raises `ClosedError`.
        """
        return awake(self.keep_awake)

    def keep_awake(self, more: int) -> bool:
        """Add `more` to the number of users that keep the engine awake, and return whether it is awake now.

        A negative number removes users. If the engine sleeps and has users, it begins to wake. The call returns at
        once. `awake` does the same for a user in this process, and waits. Raises `ClosedError`.
        """
        with self._changed:
            self._used_at = time.monotonic()
            self._users += more
            if self._users and self._state != AWAKE:
                if self._closed and more >= 0:
                    self._fail()
                self._want_wake()
            return self._state == AWAKE

    @property
    def state(self) -> str:
        """`awake`, `falling_asleep`, `asleep` or `waking`."""
        return self._state

    # What the operator asks

    def answer(self, request: SleepRequest) -> SleepStatus:
        """Take a request, and return how far the engine is. It is the callback for `Model.on_sleep`."""
        with self._changed:
            if self._ended:
                return SleepStatus("unsupported", detail=self._ended)
            if request.idle_seconds is not None:
                return self._answer_broker(request.idle_seconds)
            if request.wake:
                self._request = None
                self._want_wake()
            elif self._state == AWAKE or (self._state == ASLEEP and self._has_kept and not request.keep_weights):
                self._request = request  # awake, or asleep with weights that are to go, too
            self._start()
            if self._state == AWAKE and not request.wake:
                return SleepStatus(BUSY, detail="its engine has requests")
            return self._status(FALLING if self._state == ASLEEP and self._request is not None else self._state)

    def _start(self) -> None:
        """Let the thread look at what has changed. The caller holds the lock."""
        if self._thread is None and not self._closed:
            self._thread = start_thread(self._run, "membroker-sleep")
        self._changed.notify_all()

    def _answer_broker(self, idle_seconds: float) -> SleepStatus:
        """Fall asleep if there was no request for so long, and it pays. The caller holds the lock."""
        if self._state != AWAKE:
            return self._status(self._state)
        now = time.monotonic()
        if self._users or not self._cache.is_resting:
            self._used_at = now
            return SleepStatus(AWAKE)
        idle = now - self._used_at
        pays = idle >= WORTH * self._wake_seconds and (  # an awake engine has its weights
            self._weights is not None or self._cache.stats().charged_bytes > self._left
        )
        if not pays:
            return SleepStatus(AWAKE)
        if 0 < idle_seconds <= idle and self._request is None:
            self._request = SleepRequest(
                wake=False, keep_weights=False, deadline=now + BEGIN_SECONDS, idle_seconds=idle_seconds
            )
            self._start()
        return SleepStatus(AWAKE, idle_ms=int(idle * 1000))

    def _status(self, state: str) -> SleepStatus:
        if state == AWAKE:
            return SleepStatus(state)
        released = max(0, self._before - self._cache.stats().charged_bytes)
        since = self._asleep_since
        asleep = int((time.monotonic() - since) * 1000) if state == ASLEEP and since else None
        return SleepStatus(state, released, self._moved, self._detail, asleep_ms=asleep, by_itself=self._by_itself)

    # The thread that does it

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._closed or self._has_work()):
                    self._changed.wait(None if self._request is None else LOOK_SECONDS)
                if self._closed:
                    return
                wakes = self._wake_wanted and self._state != AWAKE
            try:
                if wakes:
                    self._wake_up()
                else:
                    self._fall_asleep()
            except (ClosedError, SessionLost) as error:
                self._cache.end_growing()  # an engine that cannot wake is not to wait for blocks
                with self._changed:
                    if not self._closed:
                        self._ended = f"its engine can no longer sleep or wake: {error}"
                        logger.error("%s: %s", self._model.resource_name, self._ended)  # noqa: TRY400
                    self._closed = True
                    self._changed.notify_all()
                return
            except Exception:
                logger.exception("the engine failed to fall asleep or wake up: wake it by `membroker wake`")
                with self._changed:
                    self._state, self._detail = ASLEEP, "the engine failed, and its log says why"
                time.sleep(BORROW_SECONDS)

    def _has_work(self) -> bool:
        """Return whether the thread has something to do now. The caller holds the lock."""
        request = self._request
        if request is not None and time.monotonic() >= request.deadline:
            request = self._request = None
        if self._state == ASLEEP:
            return self._wake_wanted or request is not None
        return request is not None and not self._users and self._cache.is_resting

    def _fall_asleep(self) -> None:
        with self._changed:
            request, self._request = self._request, None
            if request is None:
                return
            if self._state == AWAKE and not self._begin(request):
                return
            self._state = FALLING
        if self._commit():
            self._cache.release_first()
            if self._also is not None:
                self._also()
            self._release_weights(request)
            with self._changed:
                self._asleep_since = self._asleep_since or time.monotonic()
                self._state = ASLEEP

    def _commit(self) -> bool:
        """Wait until the cache is empty, and return True; False if the engine is wanted before."""
        while True:
            with self._changed:
                if self._state != FALLING or self._closed:
                    return False
                if self._cache.is_empty:
                    self._is_committed = True
                    return True
            time.sleep(EMPTY_SECONDS)

    def _begin(self, request: SleepRequest) -> bool:
        """Decide to sleep, unless a request has come. The caller holds the lock.

        The state is set before the engine is looked at, and an engine that gets a request ends its rest before it looks
        at the state. So one of the two sees the other.
        """
        self._state, self._wake_wanted, self._is_committed = FALLING, False, False
        if self._users or not self._cache.is_resting:
            self._state, self._request = AWAKE, request
            return False
        self._detail = ""
        self._by_itself = request.idle_seconds is not None
        self._before, self._moved = self._cache.stats().charged_bytes, 0
        self._cache.suspend()
        return True

    def _release_weights(self, request: SleepRequest) -> None:
        self._has_kept = self._weights is not None and request.keep_weights
        why = "as asked" if self._has_kept else self._why_kept
        if self._weights is not None and not request.keep_weights:
            why = ""
            try:
                self._weights.offload(progress=self._stop_if_wanted)
            except _Wanted:
                return
            except MembrokerError as error:
                why = str(error)
            self._moved = self._weights.stats().offloaded_bytes
        left = self._left = self._cache.stats().charged_bytes
        floor = [f"KV cache of {format_size(left)} kept: its floor"] if left else []
        self._detail = "; ".join([f"weights kept: {why}"] * bool(why) + floor)

    def _stop_if_wanted(self, done: int, total: int) -> None:
        self._moved = done
        if self._wake_wanted or self._closed:
            raise _Wanted

    def _wake_up(self) -> None:
        with self._changed:
            self._state, self._detail = WAKING, ""
        begun = came = time.monotonic()
        has_said = False
        while True:
            if self._closed:
                self._fail()
            asked = time.monotonic()
            try:
                if self._weights is not None:
                    self._weights.restore(timeout=BORROW_SECONDS, keep_pinned=self._keep_pinned)
                self._cache.resume(timeout=BORROW_SECONDS)
                break
            except (ClosedError, SessionLost):
                raise
            except MembrokerError as error:
                what = "waits for memory" if isinstance(error, OutOfMemory) else "cannot wake yet"
                self._detail = f"{what}: {error}"
                if not has_said:
                    logger.warning("%s %s", self._model.resource_name, self._detail)
                has_said = True
                time.sleep(max(0.0, min(BORROW_SECONDS, asked + BORROW_SECONDS - time.monotonic())))
                came = self._give_way(came)
        with self._changed:
            self._state, self._detail, self._request = AWAKE, "", None
            self._wake_wanted = self._is_committed = self._by_itself = False
            self._used_at, self._asleep_since = time.monotonic(), 0.0
            self._wake_seconds = self._used_at - self._wanted_since
            self._changed.notify_all()
        logger.info("%s woke in %.2f s", self._model.resource_name, time.monotonic() - begun)

    def _give_way(self, came: float) -> float:
        """Release the weights again if none have come since `came`, which is long ago; return when some came last."""
        if self._weights is None:
            return came
        left = self._weights.stats().offloaded_bytes
        if left == self._moved and time.monotonic() < came + GIVE_WAY_SECONDS:
            return came
        if left == self._moved:
            with suppress(MembrokerError):  # the host has no room for them, or the broker is away
                self._weights.offload(progress=lambda done, total: None)
            self._moved = self._weights.stats().offloaded_bytes
            with self._changed:
                self._changed.wait_for(lambda: self._closed, random.uniform(0.0, GIVE_WAY_SECONDS))
        else:
            self._moved = left
        return time.monotonic()

    def _fail(self) -> NoReturn:
        raise ClosedError("this engine was closed while it slept")

    # The end

    def close(self) -> None:
        """Stop answering operators, and end the thread. Idempotent. An engine that sleeps stays asleep."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._model.sleep_callback == self.answer:  # and no callback that was set later
            with suppress(MembrokerError):  # the client is closed
                self._model.on_sleep(None)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def __repr__(self) -> str:
        return f"<membroker.kv.Sleeper of {self._cache!r}, {self._state}>"


class _Wanted(Exception):
    """A request has come while the weights were on their way to the host."""
