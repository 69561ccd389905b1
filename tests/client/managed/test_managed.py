"""Managed memory without a GPU: policies, plans, and the refusals of the host driver."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.support.sizes import MIB

from membroker.errors import InvalidRequest
from membroker.managed.hints import (
    ManagedMemoryHints,
    ManagedMemoryUnavailable,
    MemAdvice,
    MigrationPolicy,
    PrefetchEntry,
    PrefetchPlan,
    UnifiedBuffer,
    apply_migration_policy,
)
from membroker.vmm import Driver, Location

# Policies


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("Default", []),
        ("ReadMostly", [(MemAdvice.SET_READ_MOSTLY, None)]),
        ("PreferDevice(0)", [(MemAdvice.SET_PREFERRED_LOCATION, 0)]),
        ("PreferDevice(3)", [(MemAdvice.SET_PREFERRED_LOCATION, 3)]),
        ("PreferHost", [(MemAdvice.SET_PREFERRED_LOCATION, Location.HOST)]),
    ],
)
def test_the_advice_of_a_policy(text: str, pairs: list[object]) -> None:
    """The seed dropped the ordinal. A log line with the policy can be pasted into a program."""
    policy = eval(f"MigrationPolicy.{text}")
    assert policy.to_advice_pairs() == pairs
    assert (str(policy), repr(policy)) == (f"MigrationPolicy.{text}",) * 2
    assert policy.is_default() == (text == "Default")


def test_policies_are_values() -> None:
    """A scheduler keeps regions by policy, so equal ones must be one key, and none can be changed in place."""
    assert MigrationPolicy.PreferDevice(1) == MigrationPolicy.PreferDevice(1)
    assert len({MigrationPolicy.PreferDevice(1), MigrationPolicy.PreferDevice(1), MigrationPolicy.PreferDevice(2)}) == 2
    MigrationPolicy.PreferHost.to_advice_pairs().clear()
    assert MigrationPolicy.PreferHost.to_advice_pairs()


@pytest.mark.parametrize("ordinal", [-1, True, "1", "host", Location.HOST, None, 1.0, 1 << 31])
def test_a_device_is_preferred_by_an_ordinal_only(ordinal: object) -> None:
    """-1 is CUDA's own word for the host: here it would be a typing error that silently means something else."""
    with pytest.raises(InvalidRequest, match="ordinal"):
        MigrationPolicy.PreferDevice(ordinal)  # type: ignore[arg-type]


def test_the_advice_has_cudas_numbers() -> None:
    assert [(advice.name, advice.value) for advice in MemAdvice] == [
        ("SET_READ_MOSTLY", 1),
        ("UNSET_READ_MOSTLY", 2),
        ("SET_PREFERRED_LOCATION", 3),
        ("UNSET_PREFERRED_LOCATION", 4),
        ("SET_ACCESSED_BY", 5),
        ("UNSET_ACCESSED_BY", 6),
    ]


# Plans


def test_a_plan_keeps_what_was_added_in_order() -> None:
    plan = PrefetchPlan()
    assert (bool(plan), len(plan), plan.entries) == (False, 0, ())
    assert plan.add(0x1000, 4096, 0).add(0x2000, 8192, 1).add(0x4000, "1MiB", "host") is plan
    assert (bool(plan), len(plan)) == (True, 3)
    assert plan.entries == (
        PrefetchEntry(0x1000, 4096, 0),
        PrefetchEntry(0x2000, 8192, 1),
        PrefetchEntry(0x4000, MIB, Location.HOST),
    )


_NO_RANGES = [
    (0x1000, 0),
    (0x1000, -1),
    (0, 4096),
    (-4096, 4096),
    (1 << 64, 1),
    ((1 << 64) - 1, 2),
    ((1 << 64) - (1 << 62), (1 << 62) + 1),
    (0x1000, 1 << 63),
    (True, 4096),
    ("0x1000", 4096),
    (0x1000, None),
]
"""Ranges without bytes, of no memory, over the end of all addresses, or of no numbers."""


@pytest.mark.parametrize(("address", "size"), _NO_RANGES)
def test_what_is_no_range_is_refused(host: Driver, address: int, size: int) -> None:
    """It is refused where it is written down, before any driver sees it; the seed found out at the call, or never."""
    plan = PrefetchPlan()
    with pytest.raises(InvalidRequest):
        plan.add(address, size, 0)
    assert not plan
    with pytest.raises(InvalidRequest):
        ManagedMemoryHints.for_buffer(host, address, size)
    for policy in (MigrationPolicy.Default, MigrationPolicy.PreferHost):
        with pytest.raises(InvalidRequest):
            apply_migration_policy(host, address, size, policy)


def test_the_last_byte_of_all_addresses_is_a_range() -> None:
    """The bound is the last address itself: one byte more is refused above."""
    assert PrefetchPlan().add((1 << 64) - 1, 1, 0)


@pytest.mark.parametrize("location", [-1, 1 << 31, True, "gpu", "", None, 0.0])
def test_what_is_no_location_is_refused(location: object) -> None:
    plan = PrefetchPlan()
    with pytest.raises(InvalidRequest):
        plan.add(0x1000, 4096, location)  # type: ignore[arg-type]
    assert not plan


# The host driver


def test_the_host_driver_says_that_managed_memory_needs_a_gpu(host: Driver) -> None:
    """The same program on a laptop: one sentence, typed, at whichever door it comes in."""
    doors: list[Callable[[], object]] = [
        lambda: UnifiedBuffer(host, "1MiB"),
        lambda: ManagedMemoryHints.for_buffer(host, 0x1000, 4096),
        lambda: apply_migration_policy(host, 0x1000, 4096, MigrationPolicy.PreferHost),
        lambda: PrefetchPlan().add(0x1000, 4096, "host").execute(host),
    ]
    for door in doors:
        with pytest.raises(ManagedMemoryUnavailable):
            door()


def test_applying_the_default_policy_asks_no_driver(host: Driver) -> None:
    """It advises nothing, so it does nothing, also where nothing could be advised."""
    apply_migration_policy(host, 0x1000, 4096, MigrationPolicy.Default)
