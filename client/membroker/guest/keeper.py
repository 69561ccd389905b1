"""`Guest`: a program's memory as the broker sees it, and the thread that suspends and restores the program.

Owns what is declared, which processes are suspended, and why. While the program is awake, all that it uses is declared,
and can be recalled as a whole. To sleep, all its processes are locked, then each is suspended, then the declaration
ends. To wake, the memory is declared, which waits in the broker's queue, then the device's own figure must agree, and
only then each process is restored: a restore that meets a full device makes the process useless forever.

A guest without a door always wants to run: it asks to wake as soon as it sleeps, and takes turns with others. One with
a door wakes for a connection. A guest that an operator has put to sleep stays asleep until a connection or an operator
wakes it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from .. import DEFERRED, Model, Recall
from ..errors import ClosedError, MembrokerError, OutOfMemory, SessionLost
from ..ext import start_thread
from ..types import SleepRequest, SleepStatus
from ..vmm.driver import DriverError
from ..vmm.sizes import format_size
from .settings import Settings
from .suspender import Suspender
from .tree import ProcessTree

_IDLE = "it had no connection"
AWAKE, FALLING, ASLEEP, WAKING = "awake", "falling_asleep", "asleep", "waking"
LOOK_SECONDS = 0.1
"""How often the processes are looked at."""
SESSIONS_SECONDS = 1.0
"""How often the processes are looked for that have a session of a broker: they are never suspended any more."""
LOCK_SECONDS = 10.0
"""How long a process may take until its calls wait."""
TOUCH_SECONDS = 5.0
"""How often a guest that is used says so."""
LESS_SECONDS = 10.0
"""How long a program must use less before less is declared."""
FIRM_SECONDS = 60.0
"""How long a guest that could not be suspended is not recalled."""
CLOSE_SECONDS = 1.0
"""How long `close` waits for its thread, which may wait for a broker that is away."""
DEVICE_SECONDS = 10.0
"""How long the device may take to show what the broker has lent before that is told."""
ASK_AGAIN_SECONDS = 5.0
"""How long a guest waits until it asks again after a refusal."""
WAIT_SECONDS = 86_400.0
"""How long one request waits in the broker's queue when the guest wakes."""


class Guest:
    """One program. `open_model` registers its model; `say` tells its user; `end` kills it and says why.

    `listens` says whether it listens at its port: before that it is not idle, since it still starts. `watch` gets the
    pids of its processes at each look.

    The memory of `settings` is declared by `borrow`, before the program starts.
    """

    def __init__(
        self,
        open_model: Callable[[], Model],
        suspender: Suspender,
        tree: ProcessTree,
        settings: Settings,
        *,
        say: Callable[[str], object],
        end: Callable[[str], object],
        watch: Callable[[list[int]], object] = lambda pids: None,
        listens: Callable[[], bool] = lambda: True,
    ) -> None:
        self._open_model, self._suspender, self._tree, self._settings = open_model, suspender, tree, settings
        self._say, self._end, self._watch, self._listens = say, end, watch, listens
        self._has_listened = False
        self._changed = threading.Condition()
        self._state = AWAKE
        self._model = open_model()
        self._closed = False
        self._recall: Recall | None = None
        self._asked_to_sleep_until = 0.0
        self._stays_asleep = self._may_rest = False
        self._wakes = False
        self._connections = 0
        self._idle_since = self._declared_at = self._less_since = time.monotonic()
        self._declared = 0
        self.most_used = 0
        """The most that was seen, in bytes."""
        self._firm_until = 0.0
        self._suspended: dict[int, str] = {}
        """The suspended processes, and when they started."""
        self._image = 0
        self._granted: bool | None = None
        """Whether the broker has lent what the guest needs to wake; None: it has not been asked."""
        self._granted_at = self._ask_again_at = 0.0
        self._asleep_since, self._why, self._took = 0.0, "", 0.0
        self._told = ""
        self._sessions_at = 0.0
        self._thread: threading.Thread | None = None

    # --- what the command does ---

    def borrow(self, wait: float) -> None:
        """Declare what the program may use, before it starts. Raises `OutOfMemory`."""
        self._answer_for()
        self._model.declare(self._settings.memory, recallable=self._settings.can_sleep, wait=wait)
        self._declared, self._declared_at = self._settings.memory, time.monotonic()

    def start(self) -> None:
        """Begin to look at the program."""
        self._thread = start_thread(self._run, "membroker-guest")

    def close(self) -> None:
        """Look no more: the program has ended. The caller ends the session, and with it the declaration."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def wake(self) -> None:
        """Wake the program, if it sleeps, as soon as the broker lends the memory."""
        with self._changed:
            self._wakes, self._stays_asleep = True, False
            self._changed.notify_all()

    def connected(self, change: int) -> None:
        """Count connections through the door: each keeps the program from sleeping for want of use, and wakes it."""
        with self._changed:
            self._connections += change
            self._idle_since = time.monotonic()
            if change > 0:
                self._stays_asleep = False
            self._changed.notify_all()

    @property
    def is_awake(self) -> bool:
        """Whether the program can use its memory now."""
        return self._state == AWAKE

    # --- what the broker and operators ask ---

    def _answer_for(self) -> None:
        if self._settings.can_sleep:
            self._model.on_recall(self._recalled)
            self._model.on_sleep(self._asked)

    def _recalled(self, recall: Recall) -> object:
        with self._changed:
            self._recall = recall
            self._changed.notify_all()
        return DEFERRED

    def _asked(self, request: SleepRequest) -> SleepStatus:
        if request.wake:
            self.wake()
        elif request.idle_seconds is not None:  # the broker asks by itself
            with self._changed:
                idle = self._idle()
                self._may_rest = bool(request.idle_seconds) and idle is not None and idle >= request.idle_seconds
                self._changed.notify_all()
        else:
            with self._changed:
                if self._state == AWAKE:
                    self._asked_to_sleep_until = request.deadline
                else:
                    self._stays_asleep, self._wakes = True, False
                self._changed.notify_all()
        return self.status()

    def status(self) -> SleepStatus:
        """Return what an operator sees."""
        with self._changed:
            state, image = self._state, self._image
            if state == AWAKE:
                busy = self._connections and self._asked_to_sleep_until > time.monotonic()
                plural = "s" if self._connections > 1 else ""
                detail = f"it has {self._connections} connection{plural}" if busy else self._told
                idle = self._idle()
                idle_ms = None if idle is None else int(idle * 1000)
                return SleepStatus("busy" if busy else AWAKE, detail=detail, idle_ms=idle_ms)
            since = time.strftime("%H:%M:%S", time.localtime(self._asleep_since))
            detail = f"asleep since {since}, because {self._why}; it took {self._took:.1f} s"
            if state == WAKING:
                detail += f"; it waits for {format_size(self._need())}"
            asleep_ms = max(0, int((time.time() - self._asleep_since) * 1000))
            by_itself = self._why.startswith(_IDLE)
            return SleepStatus(state, weight_bytes=image, detail=detail, asleep_ms=asleep_ms, by_itself=by_itself)

    def _idle(self) -> float | None:
        """Return how long nobody has come through the door; None if somebody is there, or it has none, or starts."""
        if self._connections or not self._settings.has_door:
            return None
        now = time.monotonic()
        if not self._has_listened and self._listens():
            self._has_listened, self._idle_since = True, now
        return now - self._idle_since if self._has_listened else None

    # --- the thread ---

    def _run(self) -> None:
        while not self._closed:
            try:
                self.look()
            except ClosedError:
                return
            except SessionLost:
                self._open_again()
            except (MembrokerError, DriverError) as error:
                self._tell(str(error))
            except Exception as error:  # noqa: BLE001 - a program that sleeps must not sleep on because of a fault here
                self._tell(f"a fault of membroker: {error!r}")
            with self._changed:
                if not self._closed and self._recall is None:
                    self._changed.wait(LOOK_SECONDS)

    def _open_again(self) -> None:
        """Begin a new session: an operator has ended the old one, and what is declared with it."""
        try:
            self._model = self._open_model()
            self._declared, self._granted, self._recall = 0, None, None
            self._answer_for()
        except MembrokerError as error:
            self._tell(str(error))

    def _tell(self, text: str) -> None:
        """Tell the user, once."""
        if text != self._told:
            self._told = text
            self._say(text)

    def look(self) -> None:
        """Look at the program, and do what is to be done next. The thread does this again and again."""
        pids = self._tree.pids()
        self._watch(pids)
        if self._settings.can_sleep and time.monotonic() - self._sessions_at >= SESSIONS_SECONDS:
            self._tree.look_at_sessions()
            self._sessions_at = time.monotonic()
        usage = {pid: size for pid, size in self._suspender.usage(pids).items() if size}
        used = sum(usage.values())
        self.most_used = max(self.most_used, used)
        if self._state == AWAKE:
            why = self._why_sleep()
            if why:
                self._sleep(usage, why)
            else:
                self._follow(usage, used)
        elif usage and self._state in (ASLEEP, WAKING):  # it has begun a process that computes
            self._sleep(usage, self._why)
        elif self._state == WAKING or (self._wants_to_run() and time.monotonic() >= self._ask_again_at):
            self._go_on_waking()
        self._answer_recall()

    def _why_sleep(self) -> str:
        """Return why the program must sleep now, as half a sentence, or ""."""
        settings, now = self._settings, time.monotonic()
        if not settings.can_sleep:
            return ""
        if self._recall is not None:
            return "others need the memory"
        if not self._connections and now < self._asked_to_sleep_until:
            return "an operator has asked for it"
        after, idle = settings.sleep_after, self._idle()
        if idle is not None and (self._may_rest or (after is not None and idle >= after)):
            return f"{_IDLE} for {idle:.1f} s"
        return ""

    def _wants_to_run(self) -> bool:
        if self._wakes or self._connections:
            return True
        return not self._stays_asleep and not self._settings.has_door

    def _answer_recall(self) -> None:
        """Answer a recall for which there is nothing to do any more."""
        if self._recall is not None and self._state == ASLEEP:
            recall, self._recall = self._recall, None
            recall.done()

    def _declare(self, size: int, wait: float = 0.0) -> None:
        is_firm = time.monotonic() < self._firm_until
        self._model.declare(size, recallable=self._settings.can_sleep and not is_firm, wait=wait)
        self._declared, self._declared_at = size, time.monotonic()

    def _follow(self, usage: Mapping[int, int], used: int) -> None:
        """Declare what the program uses."""
        now, target = time.monotonic(), max(self._settings.memory, used)
        if target < self._declared and not self._settings.shrinks:
            target = self._declared
        if target >= self._declared:
            self._less_since = now
        if target > self._declared:
            try:
                self._declare(target)
            except OutOfMemory as error:
                self._exceed(usage, used, error)
        elif target < self._declared and now - self._less_since >= LESS_SECONDS:
            self._declare(target)
        elif self._declared and self._is_touched(now):
            self._declare(self._declared)

    def _is_touched(self, now: float) -> bool:
        """Say whether the declaration is to be made again: the guest is in use, or can be recalled again."""
        is_over = self._declared_at <= self._firm_until <= now
        return is_over or (self._connections > 0 and now - self._declared_at >= TOUCH_SECONDS)

    def _exceed(self, usage: Mapping[int, int], used: int, error: OutOfMemory) -> None:
        """Let a program sleep, or end it, that uses more than the broker lends."""
        why = f"it uses {format_size(used)}, and the broker lends it {format_size(self._declared)}"
        if self._settings.on_excess == "kill":
            self._end(f"{why}: {error}")
        elif self._settings.can_sleep and time.monotonic() >= self._firm_until:
            self._sleep(usage, why)
        else:
            self._tell(f"{why}: {error}")

    # --- asleep ---

    def _sleep(self, usage: Mapping[int, int], why: str) -> None:
        """Suspend the processes that use the device, and declare nothing. If that fails, be firm for a while."""
        was_asleep, begun = self._state != AWAKE, time.monotonic()
        with self._changed:
            self._state = FALLING
        failed = self._why_not(usage) or self._suspend(usage)
        if failed:
            with self._changed:
                self._state = AWAKE
                self._asked_to_sleep_until = 0.0
                self._firm_until = time.monotonic() + FIRM_SECONDS
            self._tell(f"it cannot sleep: {failed}")
            if self._settings.charges_host:
                self._model.declare(0, "host")
            self._declare(max(self._declared, sum(usage.values())))
            if self._recall is not None:
                recall, self._recall = self._recall, None
                recall.done()
            return
        with self._changed:
            self._suspended |= {pid: start for pid in usage if (start := self._tree.start_of(pid))}
            self._image = sum(usage.values()) + (self._image if was_asleep else 0)
            self._asleep_since, self._why, self._took = time.time(), why, time.monotonic() - begun
            if time.monotonic() < self._asked_to_sleep_until:
                self._stays_asleep = True
            self._asked_to_sleep_until, self._wakes, self._may_rest = 0.0, False, False
            if self._granted is None:
                self._state = ASLEEP
            else:
                self._state = WAKING
        if self._granted is None:
            self._declare(0)
        self._told = ""
        self._say(f"it sleeps, because {why}: {format_size(self._image)} after {self._took:.1f} s")

    def _why_not(self, usage: Mapping[int, int]) -> str:
        """Return why the processes must not be suspended, as half a sentence, or ""."""
        self._tree.look_at_sessions()
        reasons = filter(None, map(self._tree.why_not, usage))
        size = sum(usage.values())
        free = _host_bytes_free()
        if free is not None and size > free:
            return f"the machine has {format_size(free)} of memory free, and its image needs {format_size(size)}"
        if reason := next(reasons, ""):
            return reason
        if self._settings.charges_host:
            try:
                self._model.declare(size + self._image, "host")
            except OutOfMemory as error:
                return f"the broker does not lend host memory for its image: {error}"
        return ""

    def _suspend(self, usage: Mapping[int, int]) -> str:
        """Lock all processes, then suspend each. Undo that if one fails, and return why, as half a sentence."""
        locked: list[int] = []
        suspended: list[int] = []
        for steps, call in ((locked, self._lock), (suspended, self._suspender.suspend)):
            for pid in usage:
                try:
                    call(pid)
                    steps.append(pid)
                except DriverError as error:
                    if not self._tree.start_of(pid):
                        continue  # it has ended
                    self._undo(locked, suspended)
                    return f"process {pid}: {error}"
        return ""

    def _lock(self, pid: int) -> None:
        self._suspender.lock(pid, LOCK_SECONDS)

    def _undo(self, locked: list[int], suspended: list[int]) -> None:
        """Let the processes run on: their memory is still declared."""
        for pid in locked:
            try:
                if pid in suspended:
                    self._suspender.restore(pid)
                self._suspender.unlock(pid)
            except DriverError as error:
                if self._tree.start_of(pid):
                    self._end(f"process {pid} cannot be put back on the device, and can only be killed: {error}")

    # --- and awake again ---

    def _need(self) -> int:
        return max(self._image, self._settings.memory)

    def _go_on_waking(self) -> None:
        """Ask the broker; when it has lent the memory and the device shows it, restore."""
        if self._state == ASLEEP:
            with self._changed:
                self._state, self._granted = WAKING, False
            start_thread(self._ask, "membroker-guest-wake")
        elif self._granted and self._recall is not None:  # the device did not show it in time
            self._declare(0)
            with self._changed:
                self._state, self._granted = ASLEEP, None
        elif self._granted and self._is_on_device():
            self._restore()

    def _ask(self) -> None:
        """Wait in the broker's queue, in a thread of its own."""
        granted: bool | None = None
        try:
            self._declare(self._need(), WAIT_SECONDS)
            granted = True
        except ClosedError:
            return
        except MembrokerError as error:
            self._tell(f"it cannot wake yet: {error}")
        with self._changed:
            self._granted, self._granted_at = granted, time.monotonic()
            if not granted:
                self._state, self._ask_again_at = ASLEEP, time.monotonic() + ASK_AGAIN_SECONDS
            self._changed.notify_all()

    def _is_on_device(self) -> bool:
        free = self._suspender.free_bytes()
        if free is None or free >= self._image:
            return True
        if time.monotonic() - self._granted_at >= DEVICE_SECONDS:
            self._tell(
                f"the broker has lent {format_size(self._image)}, but the device has {format_size(free)} free: a "
                "process uses memory that is not in the books (`membroker processes`). It stays asleep until then"
            )
        return False

    def _restore(self) -> None:
        begun = time.monotonic()
        alive = [pid for pid, start in self._suspended.items() if self._tree.start_of(pid) == start]
        for call in (self._suspender.restore, self._suspender.unlock):
            for pid in alive:
                try:
                    call(pid)
                except DriverError as error:
                    if self._tree.start_of(pid) == self._suspended[pid]:
                        self._end(f"process {pid} cannot be put back on the device, and can only be killed: {error}")
                        self._closed = True
                        return
        with self._changed:
            self._state, self._granted = AWAKE, None
            self._suspended, self._image, self._wakes = {}, 0, False
            self._idle_since = time.monotonic()
            self._told = ""
        if self._settings.charges_host:
            self._model.declare(0, "host")
        self._say(f"it is awake again after {time.monotonic() - begun:.1f} s")


def _host_bytes_free() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
