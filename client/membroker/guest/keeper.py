"""`Guest`: a program's memory as the broker sees it, and the thread that suspends and restores the program.

Owns what is declared, which processes are suspended, and why. While the program is awake, all that it uses is declared,
and can be recalled as a whole. To sleep, all its processes are locked, then each is suspended, then the declaration
ends. To wake, the memory is declared, which waits in the broker's queue, then the device's own figure must agree, and
only then each process is restored: a restore that meets a full device makes the process useless forever.

A guest without a door always wants to run: it asks to wake as soon as it sleeps, and takes turns with others. One with
a door wakes for a connection. A guest that an operator has put to sleep stays asleep until a connection or an operator
wakes it.

A process is a pid and its start: before each call it is made sure that the pid still means the same process.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NamedTuple

from .. import DEFERRED, Model, Recall
from ..errors import ClosedError, MembrokerError, OutOfMemory, SessionLost
from ..ext import start_thread
from ..types import SleepRequest, SleepStatus
from ..vmm.driver import DriverError
from ..vmm.sizes import format_size
from .host_memory import claimed
from .settings import Settings
from .suspender import Suspender
from .tree import ProcessTree

SleepCause = Literal["", "recall", "idle", "operator", "excess"]
_Phase = Literal["awake", "asleep", "asks", "lent"]
LOOK_SECONDS = 0.1
"""How often the processes are looked at."""
SESSIONS_SECONDS = 1.0
"""How often the processes are looked for that have a session of a broker: they are never suspended any more."""
LOCK_SECONDS = 10.0
"""How long a process may take until its calls wait."""
TOUCH_SECONDS = 5.0
"""How often a guest that is used says so."""
SAY_SECONDS = 5.0
"""How often the broker is told how the guest is, if nothing changes: a new daemon does not know it."""
TELL_SECONDS = 60.0
"""How often the user is told the same with other numbers."""
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
MOST_ROUNDS = 10
"""How often processes are looked for that have begun to use the device while the others were suspended."""


_WITHOUT_DIGITS = dict.fromkeys(map(ord, "0123456789."))


class UsingProcess(NamedTuple):
    """A process that uses the device. One that got its pid later has another `start`."""

    pid: int
    start: str
    size: int


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
        self._is_due = False
        """Whether something has happened that is not to wait for the next look."""
        self._model = open_model()
        self._is_lost = False
        """Whether the broker does not know the session any more."""
        self._closed = False
        self._recall: Recall | None = None
        self._asked_to_sleep_until = 0.0
        self._stays_asleep = self._may_rest = False
        self._wakes = False
        self._connections = 0
        self._idle_since = self._declared_at = self._less_since = time.monotonic()
        self._declared, self._is_firm = 0, False
        self.most_used: int = 0
        """The most that was seen, in bytes."""
        self._firm_until, self._must_run = 0.0, ""
        """Until when it is not put to sleep, and why it never is again."""
        self._phase: _Phase = "awake"
        """Asleep, it first asks the broker for what it needs to wake. It wakes when that is lent, and on the device."""
        self._is_falling = False
        """Whether processes are being suspended: all of them, or those that have begun while the others sleep."""
        self._suspended: dict[int, UsingProcess] = {}
        self._beside = 0
        """What processes use that could not be suspended beside the others."""
        self._lent_at = self._ask_again_at = 0.0
        self._asleep_since = 0.0
        self._sleep_took: float | None = None
        self._wake_took: float | None = None
        self._cause: SleepCause = ""
        self._why = ""
        self._last_text = self._last_kind = ""
        self._last_told_at = 0.0
        self._said: SleepStatus | None = None
        self._said_at = self._sessions_at = 0.0
        self._thread: threading.Thread | None = None

    # --- what the command does ---

    def borrow(self, wait: float) -> None:
        """Declare what the program may use, before it starts. Raises `OutOfMemory`."""
        self._answer_for()
        self._declare(self._settings.memory, wait)

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
        """Wake the program, if it sleeps, as soon as the broker lends the memory, and let no operator's wish stand."""
        with self._changed:
            self._wakes, self._stays_asleep, self._asked_to_sleep_until = True, False, 0.0
            self._happened()

    def keep_awake(self, why: str) -> None:
        """Never let it sleep from now on, because of this, and wake it."""
        with self._changed:
            self._must_run, self._firm_until = why, math.inf
        self.wake()
        self._tell(f"it does not sleep any more: {why}")

    def connected(self, change: int) -> None:
        """Count connections through the door: each keeps the program from sleeping for want of use, and wakes it."""
        with self._changed:
            self._connections += change
            self._idle_since = time.monotonic()
            if change > 0:
                self._stays_asleep = False
            self._happened()

    @property
    def is_awake(self) -> bool:
        """Whether the program can use its memory now."""
        return self._phase == "awake" and not self._is_falling

    def _happened(self) -> None:
        self._is_due = True
        self._changed.notify_all()

    # --- what the broker and operators ask ---

    def _answer_for(self) -> None:
        if self._settings.can_sleep:
            self._model.on_recall(self._recalled)
            self._model.on_sleep(self._asked)

    def _recalled(self, recall: Recall) -> object:
        with self._changed:
            self._recall = recall
            self._happened()
        return DEFERRED

    def _asked(self, request: SleepRequest) -> SleepStatus:
        if request.wake:
            self.wake()
        elif request.idle_seconds is not None:  # the broker asks by itself
            with self._changed:
                idle = self._idle()
                self._may_rest = bool(request.idle_seconds) and idle is not None and idle >= request.idle_seconds
                self._happened()
        else:
            with self._changed:
                self._wakes = False
                if self.is_awake:
                    self._asked_to_sleep_until = request.deadline
                else:
                    self._stays_asleep = True
                self._happened()
        return self.status()

    @property
    def _state(self) -> str:
        # An operator who is told that it sleeps can lend its memory to others: none of it is declared any more.
        if self._is_falling or (self._phase == "asleep" and self._declared > self._beside):
            return "falling_asleep"
        return "waking" if self._phase in ("asks", "lent") else self._phase

    def status(self) -> SleepStatus:
        """Return what an operator sees."""
        with self._changed:
            return replace(
                self._progress(),
                cause=self._cause,
                sleep_took_ms=_ms(self._sleep_took),
                wake_took_ms=_ms(self._wake_took),
            )

    def _progress(self) -> SleepStatus:
        state = self._state
        if state == "awake":
            busy = self._connections and self._asked_to_sleep_until > time.monotonic()
            plural = "s" if self._connections > 1 else ""
            detail = f"it has {self._connections} connection{plural}" if busy else self._last_text
            idle = self._idle()
            idle_ms = None if idle is None else int(idle * 1000)
            return SleepStatus("busy" if busy else state, detail=detail, idle_ms=idle_ms)
        if self._phase == "awake":  # it falls asleep
            return SleepStatus(state, needed_bytes=self._need())
        since = time.strftime("%H:%M:%S", time.localtime(self._asleep_since))
        detail = f"asleep since {since}, because {self._why}; it took {self._sleep_took or 0:.1f} s"
        if state == "waking":
            detail += f"; it waits for {format_size(self._need())}"
        return SleepStatus(
            state,
            weight_bytes=self._image(),
            detail=detail,
            asleep_ms=max(0, int((time.time() - self._asleep_since) * 1000)),
            by_itself=self._cause == "idle",
            needed_bytes=self._need(),
        )

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
            with self._changed:
                self._is_due = False
            try:
                if self._is_lost:
                    self._open_again()
                self.look()
            except ClosedError:
                return
            except SessionLost:
                self._is_lost = True
            except (MembrokerError, DriverError) as error:
                self._tell(str(error))
            except Exception as error:  # noqa: BLE001 - a program that sleeps must not sleep on because of a fault here
                self._tell(f"a fault of membroker: {error!r}")
            self._say_status()
            with self._changed:
                if not self._closed and not self._is_due:
                    self._changed.wait(LOOK_SECONDS)

    def _say_status(self) -> None:
        """Tell the broker how it is, for operators, if anything has changed or it was not told for a while."""
        status, now = self.status(), time.monotonic()
        said = replace(status, idle_ms=None, asleep_ms=None, detail="")
        if said != self._said or now - self._said_at >= SAY_SECONDS:
            with suppress(MembrokerError):
                self._model.say_sleep(status)
            self._said, self._said_at = said, now

    def _open_again(self) -> None:
        """Begin a new session: an operator has ended the old one, and what is declared with it."""
        self._model = self._open_model()
        self._declared, self._recall, self._is_lost = 0, None, False
        if self._phase != "awake":
            self._phase = "asleep"
        self._answer_for()
        if self._settings.charges_host and self._suspended:
            self._model.declare(self._image(), "host")

    def _tell(self, text: str) -> None:
        """Tell the user, once. With other numbers it is told again after a while."""
        kind, now = text.translate(_WITHOUT_DIGITS), time.monotonic()
        if kind != self._last_kind or (text != self._last_text and now - self._last_told_at >= TELL_SECONDS):
            self._last_kind, self._last_told_at = kind, now
            self._say(text)
        self._last_text = text

    def look(self) -> None:
        """Look at the program, and do what is to be done next. The thread does this again and again."""
        if self._settings.can_sleep and time.monotonic() - self._sessions_at >= SESSIONS_SECONDS:
            self._sessions_at = time.monotonic()
            self._tree.look_at_sessions()
        using = self._using()
        used = sum(process.size for process in using)
        self.most_used = max(self.most_used, used)
        if self._phase == "awake":
            cause, why = self._why_sleep()
            if cause:
                self._sleep(using, cause, why)
            else:
                self._follow(using, used)
        elif using and time.monotonic() >= self._firm_until:  # it has begun a process that computes
            self._sleep(using, self._cause, self._why)
        else:
            self._beside = sum(process.size for process in using)
        if self._phase != "awake":
            self._look_asleep()

    def _look_asleep(self) -> None:
        gives_up = self._phase == "lent" and (self._recall is not None or self._declared < self._need())
        if gives_up:  # the device did not show it in time, or more is needed by now
            self._phase = "asleep"
        if self._phase == "asleep" and self._declared != self._beside:
            try:
                self._declare(self._beside)
            except OutOfMemory as error:
                self._tell(f"it uses {format_size(self._beside)} while it sleeps: {error}")
        self._answer_recall()
        if self._phase == "lent":
            if self._is_on_device():
                self._restore()
        elif self._phase == "asleep" and not gives_up and self._wants_to_run():
            self._ask_to_wake()

    def _using(self) -> list[UsingProcess]:
        """Return the processes that use the device now, but suspended ones. Forget those of these that have ended.

        The device may list a suspended process for a moment longer.
        """
        pids = self._tree.pids()
        self._watch(pids)
        starts = {pid: self._tree.start_of(pid) for pid in pids}  # before the usage: so it is never another one's
        self._suspended = {pid: process for pid, process in self._suspended.items() if self._is_there(process)}
        usage = self._suspender.usage(pids)
        found = [UsingProcess(pid, start, usage[pid]) for pid, start in starts.items() if start and usage.get(pid)]
        return [process for process in found if process.pid not in self._suspended]

    def _is_there(self, process: UsingProcess) -> bool:
        return self._tree.start_of(process.pid) == process.start

    def _image(self) -> int:
        return sum(process.size for process in self._suspended.values())

    def _why_sleep(self) -> tuple[SleepCause, str]:
        """Return why the program must sleep now, in a word and as half a sentence, or ""."""
        settings, now = self._settings, time.monotonic()
        if not settings.can_sleep:
            return "", ""
        if self._recall is not None:
            return "recall", "others need the memory"
        if not self._connections and now < self._asked_to_sleep_until:
            return "operator", "an operator has asked for it"
        after, idle = settings.sleep_after, self._idle()
        is_long = idle is not None and (self._may_rest or (after is not None and idle >= after))
        if is_long and now >= self._firm_until:
            return "idle", f"it had no connection for {idle:.1f} s"
        return "", ""

    def _wants_to_run(self) -> bool:
        if self._wakes or self._connections or self._beside:
            return True
        return not self._stays_asleep and not self._settings.has_door

    def _answer_recall(self) -> None:
        """Answer a recall for which there is nothing to do any more."""
        if self._recall is not None and self._phase == "asleep":
            recall, self._recall = self._recall, None
            recall.done()

    def _declare(self, size: int, wait: float = 0.0) -> None:
        is_firm = not self._settings.can_sleep or time.monotonic() < self._firm_until
        self._model.declare(size, recallable=not is_firm, timeout=wait)
        self._declared, self._is_firm, self._declared_at = size, is_firm, time.monotonic()

    def _follow(self, using: list[UsingProcess], used: int) -> None:
        """Declare what the program uses."""
        now, target = time.monotonic(), max(self._settings.memory, used)
        if target < self._declared and not self._settings.is_auto:
            target = self._declared
        if target >= self._declared:
            self._less_since = now
        if target > self._declared:
            try:
                self._declare(target)
            except OutOfMemory as error:
                self._exceed(using, used, error)
        elif target < self._declared and now - self._less_since >= LESS_SECONDS:
            self._declare(target)
        elif self._declared and self._is_touched(now):
            self._declare(self._declared)

    def _is_touched(self, now: float) -> bool:
        """Say whether the declaration is to be made again: the guest is in use, or can be recalled again, or not."""
        is_changed = self._settings.can_sleep and self._is_firm != (now < self._firm_until)
        return is_changed or (self._connections > 0 and now - self._declared_at >= TOUCH_SECONDS)

    def _exceed(self, using: list[UsingProcess], used: int, error: OutOfMemory) -> None:
        """Let a program sleep, or end it, that uses more than the broker lends."""
        why = f"it uses {format_size(used)}, and the broker lends it {format_size(self._declared)}"
        if self._settings.on_excess == "kill":
            self._end(f"{why}: {error}")
        elif self._settings.can_sleep and time.monotonic() >= self._firm_until:
            self._sleep(using, "excess", why)
        else:
            self._tell(f"{why}: {error}")

    # --- asleep ---

    def _sleep(self, using: list[UsingProcess], cause: SleepCause, why: str) -> None:
        """Suspend the processes that use the device, and declare nothing. If that fails, be firm for a while."""
        begun = time.monotonic()
        with self._changed:
            if self._phase == "awake" and cause == "operator" and begun >= self._asked_to_sleep_until:
                return  # it has been woken since
            self._is_falling = True
            if self._phase == "awake":
                self._wakes, self._cause = False, cause
        self._say_status()
        before = self._suspended
        try:
            failed = self._suspend_all(using)
        except BaseException as error:
            self._is_falling = False
            if self._suspended != before:
                self._fail(using, f"{error!r}")
            raise
        if failed:
            self._fail(using, failed)
            return
        with self._changed:
            self._asleep_since, self._cause, self._why = time.time(), cause, why
            self._sleep_took = time.monotonic() - begun
            if time.monotonic() < self._asked_to_sleep_until:
                self._stays_asleep = not self._connections
            self._asked_to_sleep_until, self._may_rest, self._beside = 0.0, False, 0
            self._is_falling = False
            if self._phase == "awake":
                self._phase = "asleep"
        self._last_text = self._last_kind = ""
        self._say(f"it sleeps, because {why}: {format_size(self._image())} after {self._sleep_took:.1f} s")

    def _suspend_all(self, using: list[UsingProcess]) -> str:
        """Suspend these, and what begins to use the device meanwhile. Return why that fails, as half a sentence."""
        for _ in range(MOST_ROUNDS):
            failed = self._why_not(using)
            if not failed:
                with claimed(sum(process.size for process in using)) as lacking:
                    failed = lacking or self._suspend(using)
            if failed:
                return failed
            using = self._using()
            if not using:
                return ""
        return "it begins more and more processes that use the device"

    def _fail(self, using: list[UsingProcess], failed: str) -> None:
        """Let what runs run on, and be firm. What is suspended already is put back when the device shows the room."""
        was_awake = self._phase == "awake"
        with self._changed:
            self._is_falling = False
            self._asked_to_sleep_until = 0.0
            if not self._must_run:
                self._firm_until = time.monotonic() + FIRM_SECONDS
            if was_awake and self._suspended:  # their memory is still declared
                self._phase, self._lent_at = "lent", time.monotonic()
                self._asleep_since, self._cause, self._why = time.time(), "", f"it could not sleep: {failed}"
            recall, self._recall = self._recall, None
        self._tell(f"it cannot sleep: {failed}")
        try:
            if self._settings.charges_host and not self._suspended:
                self._model.declare(0, "host")
            if was_awake:
                self._declare(max(self._declared, sum(process.size for process in using)))
        finally:
            if recall is not None:
                recall.done()

    def _why_not(self, using: list[UsingProcess]) -> str:
        """Return why the processes must not be suspended, as half a sentence, or ""."""
        if self._must_run:
            return self._must_run
        self._tree.look_at_sessions()
        reasons = filter(None, [self._tree.why_not(process.pid) for process in using])
        if reason := next(reasons, ""):
            return reason
        if self._settings.charges_host:
            try:
                self._model.declare(sum(process.size for process in using) + self._image(), "host")
            except OutOfMemory as error:
                return f"the broker does not lend host memory for its image: {error}"
        return ""

    def _suspend(self, using: list[UsingProcess]) -> str:
        """Lock all processes, then suspend each. If one fails, unlock those that run; return why."""
        locked: list[UsingProcess] = []
        failed = ""
        for process in using:
            if not failed:
                error = self._failure(process, lambda pid: self._suspender.lock(pid, LOCK_SECONDS))
                # What it can still do by now, it has done: a locked process imports nothing.
                failed = f"process {process.pid}: {error}" if error else self._tree.why_not(process.pid)
                locked += [] if error else [process]
        for process in locked:
            if not failed:
                error = self._failure(process, self._suspender.suspend)
                failed = f"process {process.pid}: {error}" if error else ""
                if not error and self._is_there(process):
                    self._suspended = {**self._suspended, process.pid: process}
        for process in locked if failed else ():
            if process.pid not in self._suspended and (error := self._failure(process, self._suspender.unlock)):
                self._end(f"process {process.pid} cannot go on, and can only be killed: {error}")
        return failed

    def _failure(self, process: UsingProcess, call: Callable[[int], object]) -> DriverError | None:
        """Make a call for a process that is still there. Return why it has failed, unless the process has ended."""
        if self._is_there(process):
            try:
                call(process.pid)
            except DriverError as error:
                if self._is_there(process):
                    return error
        return None

    # --- and awake again ---

    def _need(self) -> int:
        return max(self._image() + self._beside, self._settings.memory)

    def _ask_to_wake(self) -> None:
        if time.monotonic() >= self._ask_again_at:
            with self._changed:  # so the thread cannot have its answer before
                start_thread(self._ask, "membroker-guest-wake", self._model)
                self._phase = "asks"

    def _ask(self, model: Model) -> None:
        """Wait in the broker's queue, in a thread of its own."""
        phase: _Phase = "asleep"
        try:
            self._declare(self._need(), WAIT_SECONDS)
            phase = "lent"
        except ClosedError:
            return
        except MembrokerError as error:
            self._is_lost = self._is_lost or (isinstance(error, SessionLost) and model is self._model)
            self._tell(f"it cannot wake yet: {error}")
        finally:
            with self._changed:
                if model is self._model:  # else it is asked for again
                    self._phase, self._lent_at = phase, time.monotonic()
                    if phase == "asleep":
                        self._ask_again_at = time.monotonic() + ASK_AGAIN_SECONDS
                self._happened()

    def _is_on_device(self) -> bool:
        free, image = self._suspender.free_bytes(), self._image()
        if free is None or free >= image:
            return True
        if time.monotonic() - self._lent_at >= DEVICE_SECONDS:
            self._tell(
                f"the broker has lent {format_size(image)}, but the device has {format_size(free)} free: a process "
                "uses memory that is not in the books (`membroker processes`). It stays asleep until then"
            )
        return False

    def _restore(self) -> None:
        begun = time.monotonic()
        for call in (self._put_back, self._suspender.unlock):
            for process in self._suspended.values():
                if error := self._failure(process, call):
                    self._end(
                        f"process {process.pid} cannot be put back on the device, and can only be killed: {error}"
                    )
                    self._closed = True
                    return
        with self._changed:
            self._phase = "awake"
            self._suspended, self._beside, self._wakes = {}, 0, False
            self._wake_took = time.monotonic() - begun
            self._idle_since = time.monotonic()
            self._last_text = self._last_kind = ""
        if self._settings.charges_host:
            self._model.declare(0, "host")
        self._say(f"it is awake again after {self._wake_took:.1f} s")

    def _put_back(self, pid: int) -> None:
        if self._suspender.state(pid) != "locked":  # else it was put back before, and something else failed then
            self._suspender.restore(pid)


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * 1000)
