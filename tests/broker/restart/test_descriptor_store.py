"""The descriptor store: descriptors can be lent in any order until the segment is given up, and none is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from tests.support.keepers import content_of, memfd
from tests.support.processes import descriptors

from membroker.wire.descriptors import close_all
from membrokerd.restart.descriptor_store import Done, Store, StoredDescriptors, sort


@pytest.fixture
def store() -> Store:
    return Store()


def keep(store: Store, segment: int, first: int, *descriptors: int) -> None:
    told: list[OSError | None] = []
    store.keep("t", segment, range(first, first + len(descriptors)), descriptors, told.append)
    assert told == [None], "this store keeps them at once"


def test_descriptors_are_lent_by_id_and_stay_until_they_are_given_up(store: Store) -> None:
    """A segment is kept and lent in packets, in the order of the ids that are asked for. Segments are kept apart.

    Each descriptor is returned once. A segment that was never kept, or was given up, has none.
    """
    keep(store, 1, 10, 100, 101)
    keep(store, 1, 12, 102)
    keep(store, 2, 20, 200)
    assert store.lend(1, range(10, 13)) == [100, 101, 102]
    assert store.lend(1, [12, 10]) == [102, 100]
    assert len(store) == 4
    for segment, extent in ((1, 20), (2, 10), (3, 10)):
        with pytest.raises(KeyError):
            store.lend(segment, [extent])
    assert sorted(store.give_up(1)) == [100, 101, 102]
    assert store.give_up(1) == store.give_up(7) == []
    with pytest.raises(KeyError):
        store.lend(1, [10])
    assert store.close() == [200]
    assert len(store) == 0
    assert store.close() == []


# --- with a second process ---


class Slow:
    """A second process that handles a put only when the test says so."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.puts: list[tuple[list[tuple[str, int]], Done]] = []
        self.contents: Callable[[], Iterable[tuple[str, int]]] = tuple
        self.closed = False

    def put(self, items: Sequence[tuple[str, int]], done: Done) -> None:
        self.puts.append((list(items), done))

    def drop(self, names: Sequence[str]) -> None:
        self.names -= set(names)

    def fill_from(self, contents: Callable[[], Iterable[tuple[str, int]]]) -> None:
        self.contents = contents

    def close(self) -> None:
        self.closed = True
        while self.puts:
            self.puts.pop(0)[1](ConnectionError("the broker is stopping"))

    def take(self) -> None:
        """Take the first put."""
        items, done = self.puts.pop(0)
        self.names |= {name for name, _ in items}
        done(None)

    def fail(self) -> None:
        """Take half of the first put, and fail because it is full."""
        items, done = self.puts.pop(0)
        self.names |= {name for name, _ in items[: len(items) // 2]}
        done(OSError("full"))


@pytest.fixture
def mirror() -> Slow:
    return Slow()


@pytest.fixture
def mirrored(mirror: Slow) -> Iterator[Store]:
    """A store whose own copies are closed at the end. The extents' descriptors are numbers that were never opened."""
    store = Store(mirror)
    yield store
    close_all(descriptor for descriptor in store.close() if descriptor < 1000)


def test_nothing_is_lent_before_the_mirror_has_it(mirror: Slow, mirrored: Store) -> None:
    """A reader attaches during a put of the segment: it must not get a descriptor that a crash could lose."""
    told: list[OSError | None] = []
    mirrored.keep("t", 0x1F, [10, 11], [1010, 1011], told.append)
    assert told == []
    assert len(mirrored) == 0
    with pytest.raises(KeyError):
        mirrored.lend(0x1F, [10])
    mirror.take()
    assert told == [None]
    assert mirrored.lend(0x1F, [11, 10]) == [1011, 1010]
    assert mirror.names == {"segment.1f.a", "segment.1f.b"}
    assert mirrored.give_up(0x1F, [10]) == [1010]
    assert mirror.names == {"segment.1f.b"}
    assert mirrored.give_up(0x1F) == [1011]
    assert mirror.names == set()


def test_the_caller_owns_what_the_mirror_refuses(mirror: Slow, mirrored: Store) -> None:
    """The second packet does not fit: the first stays, and nothing of the second is left, here or in the mirror."""
    told: list[OSError | None] = []
    mirrored.keep("t", 1, [10], [1010], told.append)
    mirrored.keep("t", 1, [11, 12], [1011, 1012], told.append)
    mirror.take()
    mirror.fail()
    assert [str(error) for error in told] == ["None", "full"]
    assert mirrored.give_up(1, [11, 12]) == []
    assert mirrored.lend(1, [10]) == [1010]
    assert mirror.names == {"segment.1.a"}


def test_a_tenant_with_many_segments_does_not_delay_others(mirror: Slow, mirrored: Store) -> None:
    """A thousand packets of one tenant wait. One of another tenant goes behind the one that is on its way."""
    told: list[str] = []
    for number in range(1, 1_001):
        mirrored.keep("red", number, [number], [1_000 + number], lambda _: told.append("red"))
    for number in range(2_001, 2_004):
        mirrored.keep("blue", number, [number], [1_000 + number], lambda _: told.append("blue"))
    while told.count("blue") < 3:
        assert len(mirror.puts) == 1, "one is on its way, whatever waits"
        mirror.take()
    assert told[1] == "blue", "the first is behind the one that was on its way"
    while mirror.puts:
        mirror.take()
    assert (told.count("red"), told.count("blue"), len(mirrored)) == (1_000, 3, 1_003)
    for segment in (*range(1, 1_001), *range(2_001, 2_004)):
        mirrored.give_up(segment)


def test_what_waits_for_a_mirror_that_does_not_answer_is_refused_with_the_first(mirror: Slow, mirrored: Store) -> None:
    """Else the thousandth would wait a thousand times as long. The end of the daemon refuses what waits, too."""
    told: list[OSError | None] = []
    for number in (1, 2, 3):
        mirrored.keep("t", number, [number], [1_000 + number], told.append)
    (_, done) = mirror.puts.pop()
    done(TimeoutError("no answer"))
    assert [type(error) for error in told] == [TimeoutError] * 3
    assert mirror.puts == []
    for number in (4, 5):
        mirrored.keep("t", number, [number], [1_000 + number], told.append)
    assert mirrored.close() == []
    assert [type(error) for error in told[3:]] == [ConnectionError] * 2


def test_what_was_given_up_is_settled_when_the_mirror_dropped_it(mirror: Slow, mirrored: Store, store: Store) -> None:
    """A segment is charged until its memory is free. If the daemon ends first, its successor frees it."""
    settled: list[str] = []
    mirrored.give_up(1)
    mirrored.settle(lambda: settled.append("mirrored"))
    assert settled == []
    mirror.take()
    assert settled == ["mirrored"]
    mirrored.settle(lambda: settled.append("never"))
    (_, end) = mirror.puts.pop()
    end(ConnectionError("the broker is stopping"))
    mirrored.settle(lambda: settled.append("in vain"))
    (_, end) = mirror.puts.pop()
    end(TimeoutError("no answer"))
    store.settle(lambda: settled.append("alone"))
    assert settled == ["mirrored", "in vain", "alone"]


def test_a_copy_that_fails_is_only_logged(mirror: Slow, mirrored: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Lending continues without the copy, and a mirror that is filled again gets it."""
    file = memfd(b"pidfd")
    mirrored.keep_process(1, file)
    mirror.fail()
    os.close(file)
    mirrored.keep_process(2, file)
    assert [record.getMessage() for record in caplog.records] == ["a restart would lose descriptors"] * 2
    assert [name for name, _ in mirror.contents()] == ["process.1"]


def test_sessions_that_come_and_go_are_no_queue(mirror: Slow, mirrored: Store) -> None:
    """A tenant begins and ends sessions faster than the mirror follows: one put is under way, whatever it does.

    Else a segment of another tenant would wait behind thousands of puts, each with a descriptor.
    """
    file = memfd(b"")
    before = descriptors()
    for session in range(1, 100):
        mirrored.keep_process(session, file)
        if session > 2:
            mirrored.forget_process(session)
    assert [[name for name, _ in items] for items, _ in mirror.puts] == [["process.1"]]
    assert descriptors() == before + 2
    mirrored.forget_process(1)
    mirror.take()
    assert [[name for name, _ in items] for items, _ in mirror.puts] == [["process.2"]]
    mirror.take()
    assert mirror.names == {"process.2"}
    assert mirror.puts == []
    os.close(file)


def test_of_several_sessions_only_what_does_not_fit_is_lost(
    mirror: Slow, mirrored: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """The mirror is nearly full. The put of four sessions fails as a whole: then each is put by itself."""
    file = memfd(b"")
    for session in range(1, 7):
        mirrored.keep_process(session, file)
    mirror.take()
    assert [name for name, _ in mirror.puts[0][0]] == [f"process.{session}" for session in range(2, 7)]
    mirrored.forget_process(6)
    mirror.fail()
    mirrored.keep_process(7, file)
    for fits in (True, True, False, False):
        assert [len(items) for items, _ in mirror.puts] == [1]
        if fits:
            mirror.take()
        else:
            mirror.fail()
    assert [name for name, _ in mirror.puts[0][0]] == ["process.7"], "what came later is put together again"
    mirror.take()
    assert mirror.names == {f"process.{session}" for session in (1, 2, 3, 7)}
    lost = [record.__dict__["fields"]["names"] for record in caplog.records]
    assert lost == ["process.4", "process.5"]
    os.close(file)


def test_what_is_untold_at_the_end_is_told(mirror: Slow, mirrored: Store) -> None:
    file = memfd(b"")
    for session in (1, 2):
        mirrored.keep_process(session, file)
    told: list[str] = []
    mirror.close = lambda: told.extend(name for items, _ in mirror.puts for name, _ in items)  # type: ignore[method-assign]
    close_all([*mirrored.close(), file])
    assert told == ["process.1", "process.2"]


def test_the_drivers_descriptors_are_put_and_dropped_together(mirror: Slow, mirrored: Store) -> None:
    """Half of a driver's descriptors are useless: one put has all, so that a death leaves all of them or none."""
    file = memfd(b"")
    mirrored.keep_driver({"watches": file, "table": file})
    (put,) = mirror.puts
    assert [name for name, _ in put[0]] == ["driver.watches", "driver.table"]
    mirrored.keep_process(1, file)
    mirrored.forget_driver()
    assert [name for name, _ in mirror.contents()] == ["process.1"]
    close_all([*mirrored.close(), file])


def test_the_store_owns_what_a_predecessor_left(mirror: Slow, mirrored: Store) -> None:
    """A restarted daemon lends, drops and closes them as its own, and puts none of them again."""
    mirror.names = {"segment.1.a", "segment.1.b", "process.5", "driver.watch"}
    pidfd, watch = memfd(b""), memfd(b"")
    mirrored.adopt(StoredDescriptors({1: {10: 1010, 11: 1011}}, {5: pidfd}, {"watch": watch}))
    mirrored.keep_process(5, pidfd)
    mirrored.keep_driver({"watch": watch})
    assert mirror.puts == [], "a put removes the old copy for a moment"
    assert mirrored.lend(1, [10, 11]) == [1010, 1011]
    assert dict(mirror.contents()).keys() == mirror.names
    assert mirrored.give_up(1, [10]) == [1010]
    mirrored.forget_process(5)
    assert mirror.names == {"segment.1.b", "driver.watch"}
    assert sorted(mirrored.close()) == sorted([1011, watch])
    assert mirror.closed
    assert mirror.names == {"segment.1.b", "driver.watch"}, "the end of a daemon is not the end of its segments"
    os.close(watch)


def test_names_are_read_strictly() -> None:
    """Each descriptor has one valid name; other spellings are unknown and closed.

    If a name occurs twice, the later counts.
    """
    names = ["segment.1f.a", "segment.1f.b", "process.1f", "driver.watch-2", "process.1f", "segment.1f.a"]
    strange = ["segment.1F.a", "segment.0x1.a", "segment.01.a", "segment.1.", "segment.1", "process.", "process.0"]
    strange += ["process.1 ", "process.1\n", "process.\u0661", "driver.", "driver.a/b", "Driver.a", "", "stored"]
    before = descriptors()
    kept, unknown = sort((name, memfd(f"{place}".encode())) for place, name in enumerate([*names, *strange]))
    assert unknown == strange
    assert descriptors() == before + 4
    extents = kept.segments.pop(0x1F)
    assert {extent: content_of(descriptor) for extent, descriptor in extents.items()} == {10: b"5", 11: b"1"}
    assert content_of(kept.processes[0x1F]) == b"4"
    assert content_of(kept.driver["watch-2"]) == b"3"
    assert not kept.segments
    close_all([*extents.values(), *kept.processes.values(), *kept.driver.values()])
