"""The library's calls and the core together: what one says of memory is what the other thinks of it, at any moment."""

from __future__ import annotations

import pytest
from tests.simulation.faults import Fault, Faults
from tests.simulation.joined import Joined

from membroker.session import machine
from membroker.session.inventory import Inventory
from membroker.session.machine import Calls
from membroker.session.outages import Outages

SEEDS = range(5)
STEPS = 3_000
FAULTS = Faults()


def test_a_short_while() -> None:
    joined = Joined(7).play(300)
    assert joined.ended["Allocated"] > 20


@pytest.mark.deep
@pytest.mark.parametrize("seed", SEEDS)
def test_both_sides_agree(seed: int) -> None:
    """Everything that can happen to a call has happened: it is granted, refused, given up, lost, or fails half way."""
    joined = Joined(seed).play(STEPS)
    happened = ("Allocated", "Released", "CAPACITY", "DRIVER_FAILED", "SegmentView", "Detached", "WRITER_DIED")
    assert min(joined.ended[name] for name in happened) > 0
    assert joined.ended["DELIVERY_FAILED"] > 0, "no call was given up"


@FAULTS.instead_of(Calls, "goes_back")
def _nothing_goes_back(was, self, call):  # type: ignore[no-untyped-def]
    return iter(())


@FAULTS.instead_of(Calls, "taken")
def _never_acknowledges_at_once(was, self, packet):  # type: ignore[no-untyped-def]
    was(self, packet)


@FAULTS.instead_of(Calls, "taken")
def _forgets_what_overtook(was, self, packet):  # type: ignore[no-untyped-def]
    """An Ack that does not cover a packet yet forgets its extents, and a later one is not sent for them."""
    ack, key = was(self, packet), (packet.frame.request_id, packet.frame.delivery.part)
    if key in self._arrived:
        self._since_ack += self._arrived[key]
        self._arrived[key] = 0
    return ack


@FAULTS.instead_of(Inventory, "strike_extents")
def _still_states_what_is_released(was, self, extent_ids):  # type: ignore[no-untyped-def]
    return list(extent_ids)


@FAULTS.instead_of(machine, "catch_up")
def _is_silent_after_a_resume(was, stated, now):  # type: ignore[no-untyped-def]
    return iter(())


@FAULTS.instead_of(Outages, "wait")
def _waits_for_ever(was, self, failed, error, since, now):  # type: ignore[no-untyped-def]
    return was(self, failed, error, now, now)


@FAULTS.instead_of(Outages, "resumed")
def _keeps_the_lost_connection(was, self, calls):  # type: ignore[no-untyped-def]
    self.move("resumed")


FAULTS.replacing("forgets_a_hold", Inventory, "attached", lambda *_: None)
FAULTS.replacing("sends_more_than_the_broker_takes", machine, "MOST_PATIENT", 40)


@pytest.mark.deep
@pytest.mark.parametrize("fault", FAULTS.each())
def test_a_machine_with_a_fault_is_found_out(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    for seed in SEEDS:
        try:
            Joined(seed).play(STEPS)
        except (AttributeError, TypeError):  # the machine has no such name any more: the fault must be mended
            raise
        except Exception as error:  # noqa: BLE001 - whatever either side raises is what is looked for
            print(f"seed {seed}: {type(error).__name__}: {error}")
            return
    pytest.fail("nobody noticed")
