"""`Guest` over a device that obeys what was measured of CUDA's driver, and a broker that lends what it has free."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.daemons import until
from tests.support.fake_suspender import FakeProcess, FakeSuspender
from tests.support.sizes import MIB

import membroker
from membroker.errors import BrokerUnavailable, MembrokerError, OutOfMemory
from membroker.guest import host_memory, keeper
from membroker.guest.keeper import Guest
from membroker.guest.settings import Settings
from membroker.guest.tree import ProcessTree
from membroker.types import SleepRequest, SleepStatus

NEVER = 1e18


class FakeModel:
    """Lends up to `free` bytes, and notes what is declared, and whether that can be recalled."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.declared, self.recallable = 0, False
        self.said: list[tuple[int, bool]] = []
        self.fails: MembrokerError | None = None
        """What the next declaration raises."""
        self.watch: Callable[[int], object] = lambda size: None
        """Is told what is declared on the device."""
        self.ask: Callable[[Any], object] | None = None
        self.answer: Callable[[SleepRequest], Any] | None = None

    def say_sleep(self, status: SleepStatus) -> None:
        """Hear it."""

    def on_recall(self, callback: Callable[[Any], object]) -> None:
        self.ask = callback

    def on_sleep(self, callback: Callable[[SleepRequest], Any]) -> None:
        self.answer = callback

    def declare(
        self, size: int, location: str = "device", *, recallable: bool = False, timeout: float | None = None
    ) -> None:
        if location == "host":
            if size:
                raise OutOfMemory("there is no room")
            return
        if self.fails is not None:
            fails, self.fails = self.fails, None
            raise fails
        self.watch(size)
        if size - self.declared > self.free:
            raise OutOfMemory("there is no room")
        self.free -= size - self.declared
        self.declared, self.recallable = size, recallable
        self.said.append((size, recallable))


class FakeTree:
    def __init__(self, suspender: FakeSuspender) -> None:
        self.suspender, self.reasons, self.looks = suspender, dict[int, str](), 0
        self.starts: dict[int, str] = {}
        """Of pids that are not those of the processes that had them first."""

    def pids(self) -> list[int]:
        return sorted(self.suspender.processes)

    def start_of(self, pid: int) -> str:
        return self.starts.get(pid, f"start of {pid}") if pid in self.suspender.processes else ""

    def reuse(self, pid: int, size: int) -> None:
        """A process ends, and another one gets its pid."""
        self.suspender.processes[pid] = FakeProcess(size)
        self.starts[pid] = "later"

    def look_at_sessions(self) -> None:
        self.looks += 1

    def why_not(self, pid: int) -> str:
        return self.reasons.get(pid, "")


class Clock:
    """The keeper's time, which stands still until a test lets some seconds pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passed, began = 0.0, int(time.monotonic())  # whole seconds: sums are exact
        own = SimpleNamespace(**{**vars(time), "monotonic": lambda: began + self.passed})
        monkeypatch.setattr(keeper, "time", own)


class Bench:
    def __init__(self, *sizes: int, free: int = 100 * MIB, **settings: Any) -> None:
        self.suspender = FakeSuspender(100 * MIB)
        for number, size in enumerate(sizes):
            self.suspender.processes[number + 10] = FakeProcess(size * MIB)
        self.model, self.tree = FakeModel(free), FakeTree(self.suspender)
        self.said: list[str] = []
        self.ended: list[str] = []
        given = Settings(**{"memory": 40 * MIB, "is_auto": False, "has_door": True, **settings})
        model, tree = cast("membroker.Model", self.model), cast("ProcessTree", self.tree)
        self.guest = Guest(lambda: model, self.suspender, tree, given, say=self.said.append, end=self.ended.append)
        self.guest.borrow(0)

    def recall(self) -> SimpleNamespace:
        """The broker asks for everything, and the guest looks."""
        recall = self.ask()
        self.guest.look()
        return recall

    def ask(self) -> SimpleNamespace:
        """The broker asks for everything. The recall counts its answers."""
        recall = SimpleNamespace(answers=0)
        recall.done = lambda: setattr(recall, "answers", recall.answers + 1)
        assert self.model.ask is not None
        assert self.model.ask(recall) is membroker.DEFERRED
        return recall

    def operator(self, *, wake: bool = False) -> SleepStatus:
        """An operator asks it to sleep, or to wake."""
        return self.answers(SleepRequest(wake=wake, keep_weights=False, deadline=NEVER))

    def answers(self, request: SleepRequest) -> SleepStatus:
        assert self.model.answer is not None
        status: SleepStatus = self.model.answer(request)
        return status

    def until_lent(self) -> None:
        """The broker lends what it needs, and the thread that has asked has told the guest."""
        while self.model.declared == 0:
            self.guest.look()
        until(lambda: "membroker-guest-wake" not in {thread.name for thread in threading.enumerate()})

    def until_awake(self) -> None:
        while not self.guest.is_awake and not self.ended:
            self.guest.look()

    def states(self) -> list[str]:
        return [one.state for one in self.suspender.processes.values()]

    def wakes(self) -> None:
        self.guest.wake()
        self.until_awake()


def test_a_recall_locks_all_processes_before_it_suspends_one_and_declares_nothing() -> None:
    bench = Bench(10, 20)
    recall = bench.recall()
    assert bench.suspender.calls == [("lock", 10), ("lock", 11), ("suspend", 10), ("suspend", 11)]
    assert (bench.model.declared, recall.answers) == (0, 1)
    assert bench.guest.status().state == "asleep"
    assert bench.guest.status().weight_bytes == 30 * MIB
    bench.suspender.calls.clear()
    bench.wakes()
    assert bench.suspender.calls == [("restore", 10), ("restore", 11), ("unlock", 10), ("unlock", 11)]
    assert bench.model.said[-1] == (40 * MIB, True)


def test_nothing_is_restored_before_the_device_shows_the_room() -> None:
    """Another process uses the memory that the broker has lent: a restore would make the program useless for ever."""
    bench = Bench(30)
    bench.recall()
    bench.suspender.used = 80 * MIB
    bench.guest.wake()
    bench.until_lent()
    for _ in range(50):
        bench.guest.look()
    assert bench.states() == ["suspended"]
    recall = bench.recall()
    assert (bench.model.declared, recall.answers) == (0, 1)
    bench.suspender.used = 0
    bench.wakes()
    assert bench.states() == ["running"]
    assert not bench.ended


def test_a_restore_that_fails_is_told_with_the_process_and_ends_the_program() -> None:
    bench = Bench(30)
    bench.recall()
    bench.suspender.processes[10].fails = "restore"
    bench.wakes()
    (why,) = bench.ended
    assert "process 10 cannot be put back on the device, and can only be killed" in why


@pytest.mark.parametrize("call", ["lock", "suspend"])
def test_one_that_cannot_be_suspended_runs_on_and_is_firm(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    bench = Bench(10, 20)
    bench.suspender.processes[11].fails = call
    recall = bench.recall()
    assert recall.answers == 1
    bench.until_awake()
    assert bench.states() == ["running", "running"]
    assert bench.model.said[-1] == (40 * MIB, False)
    assert recall.answers == 1, "it keeps everything"
    assert any(text.startswith("it cannot sleep: process 11") for text in bench.said)
    clock.passed += keeper.FIRM_SECONDS
    bench.guest.look()
    assert bench.model.said[-1] == (40 * MIB, True), "after a while it can be recalled again"


@pytest.mark.parametrize("why", ["of another user", "has used a broker", "does not fit in the machine's memory"])
def test_what_must_not_be_suspended_is_not_touched(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(10, 20)
    if why.startswith("does"):
        monkeypatch.setattr(host_memory, "free_bytes", lambda: 29 * MIB)
    else:
        bench.tree.reasons[11] = f"process 11 {why}"
    recall = bench.recall()
    assert bench.suspender.calls == []
    assert (bench.model.recallable, recall.answers) == (False, 1)
    assert bench.said


def test_one_that_dies_of_its_checkpoint_takes_no_other_with_it() -> None:
    """It had imported memory of a broker that nobody knew of."""
    bench = Bench(10, 20)
    bench.suspender.processes[10].has_imported = True
    bench.recall()
    assert bench.states() == ["suspended"]
    bench.wakes()
    assert bench.states() == ["running"]
    assert not bench.ended


def test_one_that_begins_to_compute_while_the_program_sleeps_is_suspended_too() -> None:
    bench = Bench(10)
    bench.recall()
    bench.suspender.processes[12] = FakeProcess(5 * MIB)
    bench.guest.look()
    assert bench.states() == ["suspended", "suspended"]
    assert bench.guest.status().weight_bytes == 15 * MIB
    bench.wakes()
    assert bench.states() == ["running", "running"]


@pytest.mark.parametrize("is_auto", [False, True])
def test_the_declaration_follows_what_it_uses(is_auto: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less is declared only of a guest whose memory is auto, when it has used less for a while."""
    bench = Bench(10, memory=0 if is_auto else 40 * MIB, is_auto=is_auto)
    bench.suspender.processes[10].size = 60 * MIB
    bench.guest.look()
    assert bench.model.said[-1] == (60 * MIB, True)
    bench.suspender.processes[10].size = 10 * MIB
    bench.guest.look()
    assert bench.model.declared == 60 * MIB
    monkeypatch.setattr(keeper, "LESS_SECONDS", 0.0)
    bench.guest.look()
    assert bench.model.declared == (10 * MIB if is_auto else 60 * MIB)


def test_one_that_uses_more_than_there_is_sleeps_or_is_ended_or_is_told_of() -> None:
    bench = Bench(60, free=50 * MIB)
    bench.guest.look()
    assert (bench.states(), bench.model.declared) == (["suspended"], 0)
    bench = Bench(60, free=50 * MIB, on_excess="kill")
    bench.guest.look()
    assert bench.states() == ["running"]
    assert bench.ended[0].startswith("it uses 60.0 MiB, and the broker lends it 40.0 MiB")
    bench = Bench(60, free=50 * MIB, can_sleep=False)
    bench.guest.look()
    assert (bench.states(), bench.ended) == (["running"], [])
    assert bench.said[0].startswith("it uses 60.0 MiB, and the broker lends it 40.0 MiB")


def test_a_guest_without_a_door_runs_again_unless_an_operator_has_put_it_to_sleep() -> None:
    bench = Bench(10, has_door=False)
    bench.recall()
    bench.until_awake()
    bench.operator()
    bench.guest.look()
    assert bench.guest.status().state == "asleep", "it does not ask to wake"
    bench.operator(wake=True)
    bench.until_awake()


def test_without_host_memory_for_its_image_the_program_stays_awake() -> None:
    bench = Bench(10, 20, charges_host=True)
    recall = bench.recall()
    assert (bench.states(), recall.answers) == (["running", "running"], 1)
    assert any("does not lend host memory for its image" in text for text in bench.said)


def test_the_broker_lets_an_idle_one_sleep_and_no_other() -> None:
    """`idle_sleep_seconds`: 0 only asks how far it is."""
    bench = Bench(10)

    def ask(idle: float) -> str:
        bench.answers(SleepRequest(False, False, 0.0, idle))
        bench.guest.look()
        return str(bench.guest.status().state)

    bench.guest.connected(1)
    assert ask(1e-9) == "awake"
    bench.guest.connected(-1)
    assert [ask(0), ask(1e6), ask(1e-9)] == ["awake", "awake", "asleep"]
    assert bench.guest.status().by_itself


def test_who_has_begun_a_session_since_the_last_look_is_not_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is looked for at each look, too: one that has ended its session by then would not be seen."""
    bench = Bench(10)
    bench.guest.look()
    assert bench.tree.looks == 1
    monkeypatch.setattr(bench.tree, "look_at_sessions", lambda: bench.tree.reasons.update({10: "it would die of it"}))
    bench.recall()
    assert bench.states() == ["running"]


def test_who_begins_to_use_a_broker_before_it_is_locked_is_not_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is locked it can import nothing any more, so what is not seen then is not there."""
    bench = Bench(10, 20)
    Between(bench, monkeypatch, "lock", 11, lambda: bench.tree.reasons.update({11: "it would die of it"}))
    assert bench.recall().answers == 1
    assert bench.states() == ["running", "running"]
    assert bench.suspender.calls == [("lock", 10), ("lock", 11), ("unlock", 10), ("unlock", 11)]
    assert bench.said == ["it cannot sleep: it would die of it"]


# --- what a stranger would try ---


class Between:
    """Does something once, before a call of the device for a process."""

    def __init__(self, bench: Bench, monkeypatch: pytest.MonkeyPatch, call: str, pid: int, do: Callable[[], object]):
        self.was, self.pid, self.do = getattr(bench.suspender, call), pid, do
        monkeypatch.setattr(bench.suspender, call, self)

    def __call__(self, pid: int, *arguments: Any) -> None:
        if pid == self.pid:
            do, self.do = self.do, lambda: None
            do()
        self.was(pid, *arguments)


@pytest.mark.parametrize("call", ["lock", "suspend"])
def test_one_that_cannot_be_suspended_beside_a_sleeping_program_leaves_nothing_asleep(call: str) -> None:
    """The program is not taken for awake, which would leave those that sleep for ever."""
    bench = Bench(10)
    bench.recall()
    bench.suspender.processes[12] = FakeProcess(50 * MIB, fails=call)
    bench.guest.look()
    bench.until_awake()
    assert bench.states() == ["running", "running"]
    assert bench.model.declared == 60 * MIB
    assert not bench.ended


def test_what_is_half_suspended_is_put_back_only_when_the_device_shows_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process has taken the room meanwhile."""
    bench = Bench(30, 20)
    bench.suspender.processes[11].fails = "suspend"
    Between(bench, monkeypatch, "suspend", 11, lambda: setattr(bench.suspender, "used", 80 * MIB))
    recall = bench.recall()
    for _ in range(20):
        bench.guest.look()
    assert (bench.states(), bench.ended) == (["suspended", "running"], [])
    assert recall.answers == 1
    assert bench.model.said[-1] == (50 * MIB, False)
    bench.suspender.used = 0
    bench.until_awake()
    assert bench.states() == ["running", "running"]


def test_what_begins_to_compute_after_the_memory_is_lent_is_asked_for_too() -> None:
    """The device has room for it, but the broker may lend that to somebody else at any moment."""
    bench = Bench(30, memory=0)
    bench.recall()
    bench.suspender.used = 80 * MIB
    bench.guest.wake()
    bench.until_lent()
    bench.suspender.processes[11] = FakeProcess(20 * MIB)
    bench.guest.look()
    assert bench.states() == ["suspended", "suspended"]
    lent: list[int] = []
    bench.model.watch = lambda size: lent.append(size) if "suspended" in bench.states() else None
    bench.suspender.used = 0
    bench.until_awake()
    assert lent[-1:] == [50 * MIB]


@pytest.mark.parametrize(
    "wish", [lambda guest: guest.wake(), lambda guest: guest.connected(1)], ids=["wake", "connection"]
)
def test_a_wish_to_wake_while_it_falls_asleep_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, wish: Callable[[Guest], None]
) -> None:
    bench = Bench(10)
    Between(bench, monkeypatch, "suspend", 10, lambda: wish(bench.guest))
    bench.operator()
    bench.guest.look()
    assert bench.states() == ["suspended"]
    bench.until_awake()


@pytest.mark.parametrize("call", ["lock", "suspend"])
def test_a_process_that_got_the_pid_of_an_ended_one_is_not_suspended(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(10, 20)
    Between(bench, monkeypatch, call, 10, lambda: bench.tree.reuse(11, 0))
    bench.recall()
    assert bench.states() == ["suspended", "running"]
    assert (call, 11) not in bench.suspender.calls
    bench.wakes()
    assert bench.states() == ["running", "running"]
    assert not bench.ended


def test_what_ended_asleep_is_neither_asked_for_nor_restored() -> None:
    bench = Bench(10, 70)
    bench.guest.look()
    bench.recall()
    assert bench.guest.status().weight_bytes == 80 * MIB
    del bench.suspender.processes[11]
    bench.wakes()
    assert bench.model.said[-1] == (40 * MIB, True)
    assert (bench.states(), bench.ended) == (["running"], [])


def test_one_that_begins_to_compute_while_the_others_are_suspended_sleeps_before_the_memory_is_lent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(10)
    Between(bench, monkeypatch, "suspend", 10, lambda: bench.suspender.processes.update({11: FakeProcess(20 * MIB)}))
    seen: list[list[str]] = []
    bench.model.watch = lambda size: seen.append(bench.states())
    bench.recall()
    assert seen == [["suspended", "suspended"]]


def test_a_suspended_process_that_the_device_lists_a_moment_longer_is_not_taken_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench(10, 20)
    monkeypatch.setattr(bench.suspender, "usage", lambda pids: dict.fromkeys(pids, 1 * MIB))
    recall = bench.recall()
    bench.guest.look()
    assert (bench.states(), recall.answers) == (["suspended", "suspended"], 1)
    assert bench.model.declared == 0
    assert bench.said[-1].startswith("it sleeps")


def test_one_that_begins_ever_more_processes_is_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(10)

    def begin(pid: int, seconds: float) -> None:
        was(pid, seconds)
        bench.suspender.processes[pid + 1] = FakeProcess(1 * MIB)

    was = bench.suspender.lock
    monkeypatch.setattr(bench.suspender, "lock", begin)
    assert bench.recall().answers == 1
    assert any("more and more processes" in text for text in bench.said)
    bench.until_awake()
    assert set(bench.states()) == {"running"}


def test_a_broker_that_is_away_as_it_falls_asleep_hears_later_that_the_memory_is_free() -> None:
    bench = Bench(10)
    recall = bench.ask()
    bench.model.fails = BrokerUnavailable("the broker is away")
    with pytest.raises(BrokerUnavailable):
        bench.guest.look()
    assert (bench.states(), recall.answers) == (["suspended"], 0)
    assert bench.guest.status().state == "falling_asleep"
    bench.guest.look()
    assert (bench.model.declared, recall.answers) == (0, 1)
    assert bench.guest.status().state == "asleep"
