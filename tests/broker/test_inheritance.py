"""What a daemon takes over from the one before it, where the configuration is another by now."""

from __future__ import annotations

from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.broker import Broker
from membrokerd.core.denied import Reason
from membrokerd.core.events import Location
from membrokerd.core.story import story
from membrokerd.inheritance import condense, hold_what_is_lent

MODEL = ev.ModelName("t", "m")


def broker(capacities: dict[Location, int]) -> Broker:
    return Broker(policy.Rules(granularity=2, capacities=capacities), epoch=1)


def test_a_location_that_is_no_more_has_a_segment_that_is_charged_nothing() -> None:
    """A create failed, and the daemon died before its keeper had let go; an operator took the location out."""
    before = broker({"device": 64, "host": 64})
    before.step(ev.OpenSession(1, "t", 1, 1, "p", False, ""), 0)
    (session,) = before.ledger.sessions
    before.step(ev.RegisterModel(2, session, 1, MODEL, None, {}, False), 0)
    before.step(ev.CreateSegment(3, session, 2, ev.SegmentName("t", "m", "s"), "host", 4), 0)
    before.step(ev.NotMade(session, 2, 0, Reason.DEVICE_FULL, {}), 0)
    told, charged = condense(story(before.ledger))
    held = hold_what_is_lent({"device": 64}, charged)
    after = Broker(policy.Rules(granularity=2, capacities=held), 2, told)
    after.step(ev.Restarted(frozenset(), {}), 0)
    (segment,) = after.ledger.segments
    after.step(ev.Dropped(segment), 0)
    assert not after.ledger.segments
    assert held == {"device": 64, "host": 0}


def test_a_location_where_nothing_is_on_file_is_not_lent() -> None:
    """The daemon before lent host memory, and all of it is back: the configuration decides."""
    before = broker({"device": 64, "host": 64})
    _, charged = condense(story(before.ledger))
    assert hold_what_is_lent({"device": 64}, charged) == {"device": 64}
