"""The descriptor store: what is held can be lent, in any order, until the segment is given up; and nothing is lost."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from tests.support.keepers import content_of, memfd

from membroker.wire.descriptors import close_all
from membrokerd.restart.descriptor_store import DescriptorStore, Done, Kept, Store, sort


@pytest.fixture
def store() -> Store:
    return Store()


def keep(store: DescriptorStore, segment: int, first: int, *descriptors: int) -> None:
    told: list[OSError | None] = []
    store.keep(segment, range(first, first + len(descriptors)), descriptors, told.append)
    assert told == [None], "this store has them at once"


def test_descriptors_are_lent_by_id_and_stay(store: DescriptorStore) -> None:
    """A segment comes in packets, and goes out in packets: in the order of the ids that are asked for."""
    keep(store, 1, 10, 100, 101)
    keep(store, 1, 12, 102)
    assert store.lend(1, range(10, 13)) == [100, 101, 102]
    assert store.lend(1, [12, 10]) == [102, 100]
    assert len(store) == 3


def test_segments_are_apart(store: DescriptorStore) -> None:
    """Who asks one segment for another's extents has a bug, and is not served."""
    keep(store, 1, 10, 100)
    keep(store, 2, 20, 200)
    for segment, extent in ((1, 20), (2, 10), (3, 10)):
        with pytest.raises(KeyError):
            store.lend(segment, [extent])
    assert store.give_up(1) == [100]
    assert store.lend(2, [20]) == [200]


def test_what_is_given_up_is_gone_and_the_callers(store: DescriptorStore) -> None:
    """Every descriptor comes back once; a segment of which nothing was made, or that was given up, has none."""
    keep(store, 1, 10, 100, 101)
    keep(store, 1, 12, 102)
    assert sorted(store.give_up(1)) == [100, 101, 102]
    assert store.give_up(1) == []
    assert store.give_up(7) == []
    assert len(store) == 0
    with pytest.raises(KeyError):
        store.lend(1, [10])


def test_the_end_returns_everything() -> None:
    store = Store()
    keep(store, 1, 10, 100)
    keep(store, 2, 20, 200, 201)
    assert sorted(store.close()) == [100, 200, 201]
    assert len(store) == 0
    assert store.close() == []


# --- with a second process ---


class Slow:
    """A second process that has what it is given when the test lets it."""

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
        """Take half of the first put, and say that it is full."""
        items, done = self.puts.pop(0)
        self.names |= {name for name, _ in items[: len(items) // 2]}
        done(OSError("full"))


@pytest.fixture
def mirror() -> Slow:
    return Slow()


@pytest.fixture
def mirrored(mirror: Slow) -> Iterator[Store]:
    """A store whose own copies are closed at the end; extents have numbers here that nobody opened."""
    store = Store(mirror)
    yield store
    close_all(descriptor for descriptor in store.close() if descriptor < 1000)


def test_nothing_is_lent_before_the_mirror_has_it(mirror: Slow, mirrored: Store) -> None:
    """A reader attaches while a segment's packet is on its way: it has no descriptor that a crash could lose."""
    told: list[OSError | None] = []
    mirrored.keep(0x1F, [10, 11], [1010, 1011], told.append)
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


def test_what_the_mirror_refuses_is_the_callers_again(mirror: Slow, mirrored: Store) -> None:
    """The second packet does not fit: the first stays, and of the second nothing is left, here or there."""
    told: list[OSError | None] = []
    mirrored.keep(1, [10], [1010], told.append)
    mirrored.keep(1, [11, 12], [1011, 1012], told.append)
    mirror.take()
    mirror.fail()
    assert [str(error) for error in told] == ["None", "full"]
    assert mirrored.give_up(1, [11, 12]) == []
    assert mirrored.lend(1, [10]) == [1010]
    assert mirror.names == {"segment.1.a"}


def test_what_is_given_up_is_settled_when_the_mirror_has_done_it(mirror: Slow, mirrored: Store, store: Store) -> None:
    """A segment is paid for until its memory is free. A daemon that ends first leaves that to its successor."""
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


def test_a_mirror_that_begins_anew_is_told_everything(mirror: Slow, mirrored: Store) -> None:
    """What is kept and what is copied; a session's pidfd is a copy, so the connection may close its own."""
    mirrored.keep(1, [10], [1010], lambda error: None)
    mirror.take()
    pidfd, watch = memfd(b"pidfd"), memfd(b"watch")
    mirrored.keep_process(0xAB, pidfd)
    mirrored.keep_driver({"watch": watch})
    close_all([pidfd, watch])
    contents = dict(mirror.contents())
    assert contents.pop("segment.1.a") == 1010
    assert {name: content_of(descriptor) for name, descriptor in contents.items()} == {
        "process.ab": b"pidfd",
        "driver.watch": b"watch",
    }
    mirror.take()
    mirror.take()
    assert len(mirrored) == 1, "only extents are counted"
    mirrored.forget_process(0xAB)
    mirrored.forget_process(0xAB)
    assert mirror.names == {"segment.1.a", "driver.watch"}
    assert dict(mirror.contents()).keys() == mirror.names


def test_a_copy_that_fails_is_only_logged(mirror: Slow, mirrored: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Lending goes on without it; a mirror that begins anew gets it after all."""
    file = memfd(b"pidfd")
    mirrored.keep_process(1, file)
    mirror.fail()
    os.close(file)
    mirrored.keep_process(2, file)
    assert [record.getMessage() for record in caplog.records] == ["a restart would lose descriptors"] * 2
    assert [name for name, _ in mirror.contents()] == ["process.1"]


def test_what_a_driver_needs_is_put_at_once_and_let_go_together(mirror: Slow, mirrored: Store) -> None:
    """Half of a driver's descriptors are of no use: one put has all, so that a death leaves all of them or nothing."""
    file = memfd(b"")
    mirrored.keep_driver({"watches": file, "table": file})
    (put,) = mirror.puts
    assert [name for name, _ in put[0]] == ["driver.watches", "driver.table"]
    mirrored.keep_process(1, file)
    mirrored.forget_driver()
    assert [name for name, _ in mirror.contents()] == ["process.1"]
    close_all([*mirrored.close(), file])


def test_a_daemon_that_ends_at_its_start_complains_of_nothing(mirror: Slow, caplog: pytest.LogCaptureFixture) -> None:
    """Its port is taken. Of what it has lent nothing is lost, and a session that it took over is another matter."""
    store = Store(mirror)
    file = memfd(b"")
    store.keep_driver({"watches": file})
    close_all(store.close())
    assert caplog.records == []
    store = Store(mirror)
    store.keep_process(1, file)
    close_all([*store.close(), file])
    assert [record.getMessage() for record in caplog.records] == ["a restart would lose descriptors"]


def test_what_a_predecessor_left_is_the_stores(mirror: Slow, mirrored: Store) -> None:
    """A restarted daemon lends, drops and closes it as its own, and puts none of it again."""
    mirror.names = {"segment.1.a", "segment.1.b", "process.5", "driver.watch"}
    pidfd, watch = memfd(b""), memfd(b"")
    mirrored.adopt(Kept({1: {10: 1010, 11: 1011}}, {5: pidfd}, {"watch": watch}))
    mirrored.keep_process(5, pidfd)
    mirrored.keep_driver({"watch": watch})
    assert mirror.puts == [], "put again it would be gone from the other process for a moment"
    assert mirrored.lend(1, [10, 11]) == [1010, 1011]
    assert dict(mirror.contents()).keys() == mirror.names
    assert mirrored.give_up(1, [10]) == [1010]
    mirrored.forget_process(5)
    assert mirror.names == {"segment.1.b", "driver.watch"}
    assert sorted(mirrored.close()) == sorted([1011, watch])
    assert mirror.closed
    assert mirror.names == {"segment.1.b", "driver.watch"}, "the end of a daemon is not the end of its segments"
    os.close(watch)


def test_without_a_mirror_nothing_is_copied(store: Store) -> None:
    before = len(os.listdir("/proc/self/fd"))
    store.keep_process(1, 0)
    store.keep_driver({"watch": 0})
    store.forget_process(1)
    assert len(os.listdir("/proc/self/fd")) == before
    assert store.close() == []


def test_names_are_read_strictly() -> None:
    """One name for one thing: what could be a second name of it is nobody's, and is closed. The later of two counts."""
    names = ["segment.1f.a", "segment.1f.b", "process.1f", "driver.watch-2", "process.1f", "segment.1f.a"]
    strange = ["segment.1F.a", "segment.0x1.a", "segment.01.a", "segment.1.", "segment.1", "process.", "process.0"]
    strange += ["process.1 ", "process.1\n", "process.\u0661", "driver.", "driver.a/b", "Driver.a", "", "stored"]
    before = len(os.listdir("/proc/self/fd"))
    kept, unknown = sort((name, memfd(f"{place}".encode())) for place, name in enumerate([*names, *strange]))
    assert unknown == strange
    assert len(os.listdir("/proc/self/fd")) == before + 4
    extents = kept.segments.pop(0x1F)
    assert {extent: content_of(descriptor) for extent, descriptor in extents.items()} == {10: b"5", 11: b"1"}
    assert content_of(kept.processes[0x1F]) == b"4"
    assert content_of(kept.driver["watch-2"]) == b"3"
    assert not kept.segments
    close_all([*extents.values(), *kept.processes.values(), *kept.driver.values()])
