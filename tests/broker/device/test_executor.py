"""The driver's calls: what is made is handed over whole, or nothing of it is left; nothing ends the thread.

Few extents are made where they are asked for, more of them on the thread; whichever it is, there is one order. What few
are depends on how long they take: here they are four, unless a test is about that.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import mmap
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.processes import descriptors
from tests.support.sizes import MIB, PAGE

from membroker.vmm import DriverError, DriverLimit, DriverOutOfMemory, Location, MemoryInfo
from membroker.vmm.host.driver import HostDriver
from membroker.wire.frames import close_all
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.effects import Make
from membrokerd.device import executor as executor_module
from membrokerd.device.executor import OWN, RESULTS_AHEAD, Executor, Figures

TOTAL = 64 * MIB
_T = TypeVar("_T")


class Failing(HostDriver):
    """A device whose call of a name raises at its k-th time from now."""

    def __init__(self) -> None:
        super().__init__(TOTAL, TOTAL)
        self._counted: Counter[str] = Counter()
        self._failures: dict[tuple[str, int], Exception] = {}
        self.lent: list[tuple[int, str]] = []
        """How many extents each call made, and on which thread."""
        self.before_lend: Callable[[], None] = lambda: None

    def fail(self, call: str, at: int, failure: Exception) -> None:
        self._failures[call, self._counted[call] + at] = failure

    def _count(self, call: str) -> None:
        self._counted[call] += 1
        if failure := self._failures.pop((call, self._counted[call]), None):
            raise failure

    def lend(self, size: int, count: int, location: Location = Location.DEVICE, *, sealable: bool = False) -> list[int]:
        self.before_lend()
        self.lent.append((count, threading.current_thread().name))
        return super().lend(size, count, location, sealable=sealable)

    def _create(self, made: list[int], size: int, location: Location, *, sealable: bool) -> None:
        self._count("create")
        super()._create(made, size, location, sealable=sealable)

    def seal(self, descriptor: int) -> None:
        self._count("seal")
        super().seal(descriptor)

    def memory(self, location: Location) -> MemoryInfo:
        self._count("memory")
        return super().memory(location)


FEW = 4


@pytest.fixture(autouse=True)
def few_are_quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "by_the_clock" not in request.fixturenames:
        monkeypatch.setattr(executor_module, "INLINE_SECONDS", FEW)
        second = property(lambda _: 1.0, lambda _, measured: None)
        monkeypatch.setattr(Executor, "_extent_seconds", second, raising=False)


@pytest.fixture
def driver() -> Iterator[Failing]:
    one = Failing()
    one.release(one.create(PAGE))  # the driver's inotify descriptor is made before anything is counted
    assert one.memory(Location.DEVICE).used == 0
    yield one
    one.close()


def packet(count: int, size: int = PAGE, location: Any = "device", segment: int = 0, tenant: str = "red") -> Make:
    return Make(tenant, 1, 7, 0, 1, range(100, 100 + count), size, location, segment)


def play(driver: HostDriver, story: Callable[[Executor], Awaitable[_T]], reserve: int = 0) -> _T:
    """Run a story beside a started executor, and return what it returns."""

    async def main() -> _T:
        executor = Executor(driver, reserve)
        executor.start(asyncio.get_running_loop())
        try:
            return await asyncio.wait_for(story(executor), DEADLINE_SECONDS)
        finally:
            executor.stop()

    return asyncio.run(main())


def run(driver: HostDriver, *work: Callable[[Executor, Callable[[Any], None]], None], reserve: int = 0) -> list[Any]:
    """Run each piece of work on a started executor and return what it was told, in the order of the answers."""

    async def story(executor: Executor) -> list[Any]:
        answers: asyncio.Queue[Any] = asyncio.Queue()
        for piece in work:
            piece(executor, answers.put_nowait)
        return [await answers.get() for _ in work]

    return play(driver, story, reserve)


def makes(make: Make) -> Callable[[Executor, Callable[[Any], None]], None]:
    return lambda executor, done: executor.make(make, done)


def looks(executor: Executor, done: Callable[[Figures], None]) -> None:
    executor.look(done)


def seals(descriptors: list[int]) -> Callable[[Executor, Callable[[Any], None]], None]:
    return lambda executor, done: executor.seal("red", descriptors, done)


def test_a_packet_is_made_in_order_and_nothing_is_kept(driver: Failing) -> None:
    """Descriptors come back, one for each id; once they are closed the device shows every byte free again."""
    before = descriptors()
    (made,) = run(driver, makes(packet(5)))
    assert len(set(made)) == 5
    assert all(os.fstat(one).st_size == PAGE for one in made)
    assert not any(os.get_inheritable(one) for one in made)
    assert driver.memory(Location.DEVICE).used == 5 * PAGE
    close_all(made)
    assert driver.memory(Location.DEVICE).used == 0
    assert descriptors() == before


def test_the_gate_lets_through_what_fits_and_refuses_before_anything_is_created(driver: Failing) -> None:
    """The books allow it and another program fills the GPU: DEVICE_FULL with the numbers, and not one create."""
    driver.stranger_bytes = TOTAL - 4 * PAGE
    (made,) = run(driver, makes(packet(2)), reserve=2 * PAGE)
    close_all(made)
    driver.fail("create", 1, AssertionError("the gate stands before every create"))
    (failure,) = run(driver, makes(packet(3)), reserve=2 * PAGE)
    assert failure.reason is Reason.DEVICE_FULL
    numbers = ("requested_bytes", "device_free_bytes", "available_bytes", "reserve_bytes")
    assert [failure.numbers[number] for number in numbers] == [3 * PAGE, 4 * PAGE, 2 * PAGE, 2 * PAGE]


@pytest.fixture
def ample(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test moves; and as much as half of the device is ample."""
    now = [100.0]
    monkeypatch.setattr(executor_module, "GATE_AMPLE", TOTAL // 2)
    monkeypatch.setattr(executor_module.time, "monotonic", lambda: now[0])
    return now


def readings(driver: Failing, *makes_and_waits: Make | float, now: list[float]) -> list[int]:
    """Make each packet, or let so many seconds pass; return how often the device had been read after each packet."""
    read, memory = [0], driver.memory

    def reading(location: Location) -> MemoryInfo:
        read[0] += 1
        return memory(location)

    driver.memory = reading  # type: ignore[method-assign]
    seen: list[int] = []

    def work(executor: Executor, done: Callable[[Any], None]) -> None:
        for one in makes_and_waits:
            if isinstance(one, float):
                now[0] += one
            else:
                executor.make(one, close_all)
                seen.append(read[0])
        done(None)

    run(driver, work)
    return seen


def test_the_gate_believes_a_fresh_figure_while_there_is_plenty(driver: Failing, ample: list[float]) -> None:
    """What was made since is taken off it: with little left the device is read for each packet."""
    room = TOTAL // 2 // PAGE
    packets = [packet(4)] * (room // 4 + 1)
    seen = readings(driver, *packets, packet(1), packet(1), now=ample)
    assert seen == [1] * (room // 4) + [2, 2, 2]  # read again, and then it shows that all of it is free


def test_the_gate_believes_no_old_figure_and_none_where_little_is_left(driver: Failing, ample: list[float]) -> None:
    wait = executor_module.GATE_SECONDS
    assert readings(driver, packet(1), wait / 2, packet(1), wait, packet(1), packet(1), now=ample) == [1, 1, 2, 2]
    driver.stranger_bytes = TOTAL // 2
    assert readings(driver, packet(1), packet(1), packet(1), now=ample) == [1, 2, 3]


def test_a_stranger_who_was_not_seen_is_told_with_todays_numbers(driver: Failing, ample: list[float]) -> None:
    """Another program took everything after the gate's reading: the driver fails, and the refusal is as the gate's."""

    def stranger() -> None:
        driver.stranger_bytes = TOTAL - 2 * PAGE
        driver.before_lend = lambda: None

    driver.before_lend = stranger
    driver.fail("create", 1, DriverOutOfMemory("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", 2))
    (failure,) = run(driver, makes(packet(3)))
    assert failure.reason is Reason.DEVICE_FULL
    assert failure.numbers["device_free_bytes"] == failure.numbers["available_bytes"] == 2 * PAGE
    assert "driver_says" not in failure.numbers
    assert ample, "no time has passed"


FAILURES = [
    (Reason.DEVICE_FULL, DriverOutOfMemory("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", 2)),
    (Reason.DESCRIPTORS_EXHAUSTED, DriverLimit("inotify_add_watch", "ENOSPC", errno.ENOSPC)),
    (Reason.DRIVER_FAILED, DriverError("cuMemCreate", "CUDA_ERROR_UNKNOWN", 999)),
    (Reason.DESCRIPTORS_EXHAUSTED, OSError(errno.EMFILE, "Too many open files")),
    (Reason.DRIVER_FAILED, OSError(errno.EIO, "I/O error")),
    (Reason.INTERNAL, ValueError("a bug of the driver's own")),
]


@pytest.mark.parametrize(("why", "failure"), FAILURES, ids=[str(failure) for _, failure in FAILURES])
@pytest.mark.parametrize(("count", "at"), [(1, 1), (FEW, 1), (FEW, FEW), (5, 1), (5, 3), (5, 5)])
def test_a_failure_at_the_kth_call_leaves_nothing(
    driver: Failing, count: int, at: int, why: Reason, failure: Exception
) -> None:
    """Whatever fails, and wherever: nothing is open, nothing is used, and the next packet is made.

    Neither the thread is ended by it, nor the event loop, where few extents are made.
    """
    before = descriptors()
    driver.fail("create", at, failure)
    refused, made = run(driver, makes(packet(count)), makes(packet(1)))
    assert isinstance(refused, Denied)
    assert refused.reason is why
    assert refused.numbers["requested_bytes"] == count * PAGE
    close_all(made)
    assert len(made) == 1
    assert descriptors() == before
    assert driver.memory(Location.DEVICE).used == 0


@pytest.mark.parametrize("failure", [DriverError("nvmlDeviceGetMemoryInfo", "NVML_ERROR_GPU_IS_LOST", 15), KeyError(1)])
def test_a_device_that_cannot_be_asked_does_not_end_the_thread(driver: Failing, failure: Exception) -> None:
    """NVML fails during an audit, and at the gate, which creates nothing then. The figures are absent, and the thread,
    which everybody needs, works on.
    """
    driver.fail("memory", 1, failure)
    absent, made, figures = run(driver, looks, makes(packet(1)), looks)
    assert set(absent.values()) == {None}
    close_all(made)
    assert figures["device"].used == PAGE
    driver.fail("memory", 1, failure)
    (refused,) = run(driver, makes(packet(1)))
    assert refused.reason is (Reason.DRIVER_FAILED if isinstance(failure, DriverError) else Reason.INTERNAL)
    assert driver.memory(Location.DEVICE).used == 0


LOST = DriverError("nvmlDeviceGetMemoryInfo", "NVML_ERROR_GPU_IS_LOST", 15)
DEAD = DriverError("cuMemCreate", "CUDA_ERROR_UNKNOWN", 999)


def states(driver: Failing, *work: Any) -> list[bool]:
    """Do the work, one piece after the other, and return after each whether the device was lost."""
    told: list[bool] = []

    def begin(executor: Executor, done: Callable[[Any], None], left: Sequence[Any] = work) -> None:
        def heard(outcome: Any) -> None:
            told.append(bool(executor.lost))
            if isinstance(outcome, list):
                close_all(outcome)
            begin(executor, done, left[1:])

        if left:
            left[0](executor, heard)
        else:
            done(None)

    run(driver, begin)
    return told


def test_a_lost_device_is_told_once_and_its_return_once(driver: Failing, caplog: pytest.LogCaptureFixture) -> None:
    """A GPU falls off the bus, for two audits. Afterwards nothing is left of what it had to prove."""
    caplog.set_level("INFO")
    for at in (3, 4):  # a look at both locations comes before
        driver.fail("memory", at, LOST)
    before = descriptors()
    assert states(driver, *[looks] * 4) == [False, True, True, False]
    told = [record.getMessage() for record in caplog.records]
    assert [text.partition(":")[0] for text in told] == [
        "the device does not answer",
        "the device answers again, and memory is lent again",
    ]
    assert (driver.memory(Location.DEVICE).used, descriptors()) == (0, before)


def test_a_device_that_shows_its_memory_and_makes_nothing_is_lost(driver: Failing) -> None:
    """After a reset NVML answers, and the CUDA of this process does not: only an extent proves the device."""
    for at in (1, 2, 3):
        driver.fail("create", at, DEAD)
    assert states(driver, looks, makes(packet(1)), looks, looks, looks) == [False, False, True, True, False]


def test_a_create_that_fails_alone_loses_no_device(driver: Failing) -> None:
    """One tenant's odd request, a full device, a process without descriptors: the device has answered."""
    driver.fail("create", 1, DEAD)
    assert not any(states(driver, makes(packet(1)), looks, makes(packet(1))))
    for failure in (DriverOutOfMemory("cuMemCreate", "CUDA_ERROR_OUT_OF_MEMORY", 2), OSError(errno.EMFILE, "")):
        driver.fail("create", 1, DEAD)
        driver.fail("create", 2, failure)
        assert not any(states(driver, makes(packet(1)), looks))


# --- where it happens, and in which order ---

ON_LOOP, ON_THREAD = "MainThread", "membrokerd-driver"


@pytest.fixture
def by_the_clock(driver: Failing, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], None]]:
    """Tell how many seconds each call of the driver takes from now on, by the executor's clock."""
    now, takes = [0.0], [0.0]
    monkeypatch.setattr(executor_module.time, "perf_counter", lambda: now[0])

    def pass_time() -> None:
        now[0] += takes[0]

    def take(seconds: float) -> None:
        takes[0] = seconds

    driver.before_lend = pass_time
    return take


def test_what_takes_long_is_made_on_the_thread(driver: Failing, by_the_clock: Callable[[float], None]) -> None:
    """How long is judged by what was made before: beside others that map all the time one is too many."""
    slow = 20 * executor_module.INLINE_SECONDS

    async def story(executor: Executor) -> None:
        for seconds in (slow, slow, *[0.0] * 17):
            by_the_clock(seconds)
            told = asyncio.get_running_loop().create_future()
            executor.make(packet(1), told.set_result)
            close_all(await told)

    play(driver, story)
    wheres = [where for _, where in driver.lent]
    assert wheres[:3] == [ON_LOOP, ON_THREAD, ON_THREAD], "nobody knew before the first"
    assert wheres[-1] == ON_LOOP, "it never learned that it was quick again"


def hold(driver: Failing) -> tuple[threading.Event, threading.Event]:
    """Hold the next call of the driver. Return the events that it has begun, and that it may go on."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_SECONDS)

    driver.before_lend = wait
    return begun, go_on


def told_of(driver: Failing, ask: Callable[[Executor, Callable[[str], Callable[[Any], None]]], int]) -> list[str]:
    """Return what is told, in its order, of all that `ask` asks for while the thread is at a large packet of red's.

    `ask` says how much that is. Nothing that is made stays open.
    """
    begun, go_on = hold(driver)

    def work(executor: Executor, done: Callable[[Any], None]) -> None:
        told: list[str] = []

        def tell(what: str) -> Callable[[Any], None]:
            def heard(outcome: Any) -> None:
                told.append(f"{what}: {outcome.reason}" if isinstance(outcome, Denied) else what)
                if isinstance(outcome, list):
                    close_all(outcome)
                if len(told) == asked + 1:
                    done(told)

            return heard

        executor.make(packet(5), tell("large"))
        assert begun.wait(DEADLINE_SECONDS)
        asked = ask(executor, tell)
        go_on.set()

    (told,) = run(driver, work)
    assert told[0] == "large"
    return list(told[1:])


def test_a_tenant_with_many_busy_sessions_does_not_keep_the_others_waiting(driver: Failing) -> None:
    """Twenty sessions of red ask for a page each, and then one of blue: it comes before all of them.

    The packet that the thread is at is red's, so red has used more of its time. The jobs of each keep their order.
    """

    def ask(executor: Executor, tell: Callable[[str], Callable[[Any], None]]) -> int:
        for number in range(20):
            executor.make(packet(1), tell(f"red {number}"))
        for tenant in ("blue", "green", "blue"):
            executor.make(packet(1, tenant=tenant), tell(tenant))
        return 23

    told = told_of(driver, ask)
    assert told[:2] == ["blue", "green"]
    assert [one for one in told if one.startswith("red")] == [f"red {number}" for number in range(20)]


def test_what_the_daemon_lets_go_of_is_gone_before_any_tenant_has_its_packet(driver: Failing) -> None:
    """The stock has filled the GPU. It is dropped for blue's request, and audits are due: the request finds room."""
    (stock,) = run(driver, makes(packet(26, tenant=OWN)))

    def ask(executor: Executor, tell: Callable[[str], Callable[[Any], None]]) -> int:
        executor.make(packet(1, tenant="blue"), tell("small"))
        executor.look(tell("audit"))
        executor.look(tell("death"))
        executor.close(OWN, stock, tell("dropped"))
        executor.make(packet(20, tenant="blue"), tell("large"))
        return 5

    assert told_of(driver, ask) == ["audit", "death", "dropped", "small", "large"]


def test_a_turn_of_the_event_loop_hears_of_few_results(driver: Failing) -> None:
    """The loop is busy, and the thread makes 20 packets. To send all in one turn would hold up everybody."""

    async def story(executor: Executor) -> list[int]:
        loop = asyncio.get_running_loop()
        heard: list[int] = [0]
        over = asyncio.Event()

        def told(made: list[int]) -> None:
            close_all(made)
            heard[-1] += 1
            if sum(heard) == 20:
                over.set()

        def next_turn() -> None:
            heard.append(0)
            if not over.is_set():
                loop.call_soon(next_turn)

        executor.close(OWN, [])
        for _ in range(20):
            executor.make(packet(1), told)
        while len(driver.lent) < 20 and executor._ahead.acquire(blocking=False):
            executor._ahead.release()  # the thread goes on
        next_turn()
        await over.wait()
        return heard

    assert max(play(driver, story)) <= RESULTS_AHEAD


def test_a_stop_waits_for_nobody_to_hear_of_results(driver: Failing) -> None:
    """The daemon stops amid 20 packets, and its event loop waits for the thread: the thread ends all the same."""

    async def main() -> None:
        executor = Executor(driver, 0)
        executor.start(asyncio.get_running_loop())
        executor.close(OWN, [])
        for _ in range(20):
            executor.make(packet(1), close_all)
        executor.stop()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert len(driver.lent) == 20


def test_a_result_that_nobody_has_heard_of_is_still_before(driver: Failing) -> None:
    """The thread is idle again, and its outcome lies in the event loop's queue: nothing may be told before it."""
    done_first: list[str] = []

    async def story(executor: Executor) -> None:
        finished = threading.Event()
        driver.before_lend = lambda: None
        told: asyncio.Queue[str] = asyncio.Queue()

        def tell(what: str) -> Callable[[Any], None]:
            def heard(made: list[int]) -> None:
                close_all(made)
                done_first.append(what)
                told.put_nowait(what)

            return heard

        executor.make(packet(9), tell("large"))
        executor.close("red", [], lambda _: None)
        executor._asked.put(("red", finished.set))  # behind all that was asked
        assert finished.wait(DEADLINE_SECONDS)
        executor.make(packet(1), tell("small"))
        assert done_first == []
        assert [await told.get() for _ in range(2)] == ["large", "small"]
        executor.make(packet(2), tell("idle"))
        assert done_first == ["large", "small", "idle"]

    play(driver, story)
    assert [where for _, where in driver.lent] == [ON_THREAD, ON_THREAD, ON_LOOP]


def test_outcomes_keep_their_order_whatever_is_mixed(driver: Failing) -> None:
    """A figure shows the packets that are told before it and none of those behind, wherever each was made.

    The core counts on it: it knows which of its debits a figure can show.
    """
    counts = (1, 8, 2, 1, 6, 4, 1)
    pieces = [piece for count in counts for piece in (makes(packet(count)), looks)]
    made: list[int] = []
    packets: list[int] = []
    for told in run(driver, *pieces):
        if isinstance(told, list):
            packets.append(len(told))
            made += told
        else:
            assert told["device"].used == len(made) * PAGE
    assert packets == list(counts)
    close_all(made)


def test_an_outcome_may_ask_for_more(driver: Failing) -> None:
    """The core's answer to one packet is the next: made at once in the middle of the telling, and told in order."""
    told: list[int] = []
    kept: list[int] = []

    def chain(executor: Executor, done: Callable[[Any], None]) -> None:
        def made(count: int, descriptors: Sequence[int]) -> None:
            told.append(count)
            kept.extend(descriptors)
            if count < 6:
                executor.make(packet(count + 1), lambda more: made(count + 1, more))
            else:
                done(None)

        executor.make(packet(1), lambda first: made(1, first))

    run(driver, chain)
    close_all(kept)
    assert told == [1, 2, 3, 4, 5, 6]
    assert [where for _, where in driver.lent] == [ON_LOOP] * 4 + [ON_THREAD] * 2


def test_only_a_segments_extents_can_be_sealed(driver: Failing) -> None:
    """A private extent is sealed at its birth against every later seal: nobody can end its owner's writing."""
    private, shared = run(driver, makes(packet(1)), makes(packet(1, segment=9)))
    assert fcntl.fcntl(private[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    assert not fcntl.fcntl(shared[0], fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    close_all(private + shared)


def test_a_seal_is_of_every_extent_and_closes_nothing(driver: Failing) -> None:
    """One fails in the middle, and the next does the rest: a process that maps it from now on cannot write."""
    (made,) = run(driver, makes(packet(3, segment=9)))
    driver.fail("seal", 2, ValueError("a bug of the driver's own"))
    failed, *done = run(driver, seals(made), seals(made), seals(made), seals([]))
    assert failed.reason is Reason.INTERNAL
    assert done == [None, None, None]
    for descriptor in made:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, PAGE)
        mmap.mmap(descriptor, PAGE, prot=mmap.PROT_READ).close()
    close_all(made)
    assert driver.memory(Location.DEVICE).used == 0


def test_what_is_closed_is_gone_before_the_next_look(driver: Failing) -> None:
    """The core counts on it: a figure that it gets after `Dropped` shows what went with it, one before does not."""
    before = descriptors()
    (made,) = run(driver, makes(packet(3, segment=9)))

    def closes_and_looks(executor: Executor, done: Callable[[Any], None]) -> None:
        executor.close("red", made, lambda _: executor.look(done))

    seen, after = run(driver, looks, closes_and_looks)
    assert (seen["device"].used, after["device"].used) == (3 * PAGE, 0)
    assert descriptors() == before


def test_the_anchor_is_one_granule_until_the_end(driver: Failing) -> None:
    before = descriptors()
    executor = Executor(driver, 0)
    assert executor.drop_anchor() == PAGE
    assert driver.memory(Location.DEVICE).used == PAGE
    executor.stop()  # it was never started
    assert driver.memory(Location.DEVICE).used == 0
    assert descriptors() == before


def test_an_anchor_that_fails_leaves_nothing(driver: Failing) -> None:
    before = descriptors()
    driver.fail("create", 1, DriverError("cuMemExportToShareableHandle", "CUDA_ERROR_NOT_SUPPORTED", 801))
    with pytest.raises(DriverError):
        Executor(driver, 0).drop_anchor()
    assert driver.memory(Location.DEVICE).used == 0
    assert descriptors() == before
