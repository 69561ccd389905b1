"""Which calls of a session may be at the broker, and who is next."""

from __future__ import annotations

import random

from membroker.session.places import MOST_PATIENT, Places
from membroker.wire.names import MAX_CALLS_PER_SESSION

LINE = "tenants/t/models/m", 0


def test_the_oldest_is_next() -> None:
    """Forty threads borrow at the same time; each place that becomes free goes to the call that came first."""
    places = Places()
    has = [places.enter(call, LINE) for call in range(40)]
    assert has == [True] * MOST_PATIENT + [False] * (40 - MOST_PATIENT)
    admitted = [next_call for call in range(28) for next_call in places.leave(call)]
    assert admitted == list(range(MOST_PATIENT, 40))


def test_a_call_that_does_not_wait_finds_a_place() -> None:
    """All places for calls that wait are taken for minutes; a call that would be answered at once is not held up."""
    places = Places()
    for call in range(40):
        places.enter(call, LINE)
    kept = MAX_CALLS_PER_SESSION - MOST_PATIENT
    assert [places.enter(100 + number, None) for number in range(kept + 1)] == [True] * kept + [False]
    assert places.leave(100) == [100 + kept]


def test_a_call_whose_time_is_over_asks_once_more() -> None:
    """It goes to the broker before those that may still wait, because it cannot wait there."""
    places = Places()
    for call in range(20):
        places.enter(call, LINE)
    assert places.hurry(15) == [15]
    assert places.has(15)
    assert not places.has(14)


def test_a_call_in_front_gives_up() -> None:
    """Nobody waits for one that has gone."""
    places = Places()
    for call in range(MOST_PATIENT + 2):
        places.enter(call, LINE)
    assert places.leave(MOST_PATIENT) == []
    assert places.leave(0) == [MOST_PATIENT + 1]


def test_another_model_is_not_held_up() -> None:
    """All places of those that wait are taken for one model. One call for each of a few others goes all the same."""
    places = Places()
    for call in range(40):
        places.enter(call, LINE)
    others = MAX_CALLS_PER_SESSION - 1 - MOST_PATIENT
    assert [places.enter(100 + number, f"model {number}") for number in range(others + 1)] == [True] * others + [False]
    assert not places.enter(200, "model 0"), "it has its call at the broker"
    assert places.enter(300, None), "one place is left for calls that do not wait"
    assert places.leave(300) == []
    assert places.leave(100) == [103], "the oldest whose line has no call there"
    assert places.leave(101) == [200]


def test_any_order() -> None:
    """Never more than the broker accepts; every call gets its place; and in each line the oldest is first."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    places, calls, admitted = Places(), range(300), list[int]()
    coming, under_way, lines = list(calls), list[int](), {call: chance.choice("aaaab" + "0") for call in calls}
    while coming or under_way:
        if coming and (not under_way or chance.random() < 0.6):
            call = coming.pop(0)
            got = [call] if places.enter(call, None if lines[call] == "0" else lines[call]) else []
        else:
            got = places.leave(under_way.pop(chance.randrange(len(under_way))))
        admitted += got
        under_way += got
        assert len(under_way) <= MAX_CALLS_PER_SESSION
    assert sorted(admitted) == list(calls)
    for line in "ab0":
        of_line = [call for call in admitted if lines[call] == line]
        assert of_line == sorted(of_line)
