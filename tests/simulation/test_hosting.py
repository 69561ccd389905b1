"""Guests among everything else: deaths, lost connections, daemons that die, quotas that move, segments, the stock.

`tests/simulation/test_guests.py` has what is promised to guests among themselves. Here the referee follows each guest
beside all others: what can be recalled of it, when, and that its model and tenant keep what they are guaranteed.
"""

from __future__ import annotations

import pytest
from tests.simulation.faults import Fault, around, instead_of, notice, replacing
from tests.simulation.hosting import hosts_guests
from tests.simulation.world import World

from membrokerd.core import admission, recallable, recalls, waiting

SEEDS = [seed for seed in range(21_000, 21_020) if hosts_guests(seed)]
STEPS = 4_000


@pytest.mark.parametrize("seed", SEEDS[:3])
def test_guests_among_everything_else(seed: int) -> None:
    world = World(seed).play_steps(STEPS)
    assert world.referee.recalls.ends["guests asked"] > 0


@instead_of(recallable.Recallable, "bytes_of")
def _asked_without_a_connection(was, self, borrower):  # type: ignore[no-untyped-def]
    if borrower in self.guests and not self.answers(*borrower[:2]):
        return self.extents_of(borrower)
    return was(self, borrower)


@instead_of(recallable.Recallable, "can_go")
def _asked_in_its_slice(was, self, borrower, wanted_by=None):  # type: ignore[no-untyped-def]
    slices = {one: guest.slice_until for one, guest in self.guests.items()}
    for guest in self.guests.values():
        guest.slice_until = None
    try:
        return was(self, borrower, wanted_by)
    finally:
        for one, until in slices.items():
            self.guests[one].slice_until = until


@instead_of(recalls.Recalls, "resumed")
def _forgotten_by_a_resume(was, self, session, answering, guests, gone, now):  # type: ignore[no-untyped-def]
    return was(self, session, answering, (), gone, now)


FAULTS = (
    _asked_without_a_connection,
    _asked_in_its_slice,
    _forgotten_by_a_resume,
    around("below_a_guarantee", admission.Admission, "hold_without", lambda was, *_: True),
    replacing("no_longer_for_more", recalls, "GUEST_NS_PER_GIB", 0),
    around("granted_without_a_word", waiting.Waiting, "declared", lambda was, self, request: request.move("answered")),
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__.strip("_"))
def test_a_core_with_a_fault_in_its_guests_is_found_out(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    notice(fault, SEEDS, monkeypatch)
