"""The descriptor store: what is held can be lent, in any order, until the segment is given up; and nothing is lost."""

from __future__ import annotations

import pytest

from membrokerd.store import DescriptorStore, Store


@pytest.fixture
def store() -> DescriptorStore:
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
