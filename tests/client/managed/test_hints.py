"""Hints and plans for managed memory, on the real cuda-bindings over the fake GPU.

The fake keeps each page's advice as a GPU does, so the tests read back what was advised. What it cannot show (pages
that move, kernels that read them) is in tests/gpu. tests/docs/migrating_tests.md maps oxicuda-memory's tests to these.
"""

from __future__ import annotations

import textwrap
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

Run = Callable[..., str]

_BINDINGS = {
    12: """
        if not hasattr(bindings, "cuMemAdvise_v2"):
            bindings.cuMemAdvise_v2, bindings.cuMemPrefetchAsync_v2 = bindings.cuMemAdvise, bindings.cuMemPrefetchAsync
            u64 = ctypes.c_ulonglong
            def cuMemAdvise(address, size, advice, device):
                return (bindings.CUresult(fake.cuMemAdvise(u64(address), u64(size), int(advice), int(device))),)
            def cuMemPrefetchAsync(address, size, device, stream):
                return (bindings.CUresult(fake.cuMemPrefetchAsync(u64(address), u64(size), int(device), u64(stream))),)
            bindings.cuMemAdvise, bindings.cuMemPrefetchAsync = cuMemAdvise, cuMemPrefetchAsync
    """,
    13: """
        if hasattr(bindings, "cuMemAdvise_v2"):
            bindings.cuMemAdvise, bindings.cuMemPrefetchAsync = bindings.cuMemAdvise_v2, bindings.cuMemPrefetchAsync_v2
            del bindings.cuMemAdvise_v2, bindings.cuMemPrefetchAsync_v2
    """,
}
"""Makes the installed bindings' functions those of this version: the arguments that changed, and the names."""


_FORMS = {"13": (13, "13000", "_v2"), "12": (12, "13000", "_v2"), "12 on a driver of 12.1": (12, "12010", "")}


@pytest.mark.parametrize(("version", "driver", "suffix"), _FORMS.values(), ids=_FORMS.keys())
def test_every_hint_arrives_by_every_form_of_the_calls(run: Run, version: int, driver: str, suffix: str) -> None:
    """CUDA 12.2 changed a device's number into a location, and 13 gave the new form the old name.

    A binding called with the other's arguments would advise about a device that nobody named, or crash.
    """
    code = f"""
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            at = buffer.address, buffer.size
            hints.set_read_mostly()
            hints.set_preferred_location(1)
            hints.set_accessed_by(0)
            hints.set_accessed_by("host")
            assert attribute("READ_MOSTLY", *at) == 1
            assert attribute("PREFERRED_LOCATION", *at) == 1
            assert attribute("ACCESSED_BY", *at) == [HOST, 0]
            hints.set_preferred_location("host")
            assert attribute("PREFERRED_LOCATION", *at) == HOST
            hints.unset_read_mostly()
            hints.unset_preferred_location()
            hints.unset_accessed_by("host")
            assert attribute("READ_MOSTLY", *at) == 0
            assert attribute("PREFERRED_LOCATION", *at) == NOWHERE
            assert attribute("ACCESSED_BY", *at) == [0, NOWHERE]
            assert attribute("LAST_PREFETCH_LOCATION", *at) == NOWHERE
            hints.prefetch_to(1)
            assert attribute("LAST_PREFETCH_LOCATION", *at) == 1
            hints.prefetch_to("host")
            assert attribute("LAST_PREFETCH_LOCATION", *at) == HOST
        calls = [line.split()[0] for line in asked() if "Advise" in line or "Prefetch" in line]
        assert calls == ["cuMemAdvise{suffix}"] * 8 + ["cuMemPrefetchAsync{suffix}"] * 2, calls
    """
    form = textwrap.dedent(_BINDINGS[version])
    run(form + textwrap.dedent(code), FAKE_CUDA_DEVICES="2", FAKE_CUDA_VERSION=driver)


def test_a_policy_adds_to_what_was_advised_before(run: Run) -> None:
    """Also if a driver of device 0 advises for device 1."""
    code = """
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            for ordinal in (1, 0):
                hints.apply_policy(MigrationPolicy.PreferDevice(ordinal))
                assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == ordinal
            apply_migration_policy(driver, buffer.address, MIB, MigrationPolicy.PreferHost)
            hints.apply_policy(MigrationPolicy.ReadMostly)
            before = asked()
            hints.apply_policy(MigrationPolicy.Default)
            assert asked() == before
            assert attribute("READ_MOSTLY", buffer.address, MIB) == 1
            assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == HOST
    """
    run(code, FAKE_CUDA_DEVICES="2")


def test_hints_know_their_range(run: Run) -> None:
    """An address of somebody else's is taken as it is. Memory that is not managed is refused with the driver's word."""
    run("""
        hints = ManagedMemoryHints.for_buffer(driver, 0xDEAD, "512B")
        assert (hints.address, hints.size) == (0xDEAD, 512)
        assert asked() == []
        for hint in (hints.set_read_mostly, lambda: hints.prefetch_to(0)):
            with pytest.raises(DeviceFailure, match=r"cuMem.* failed: CUDA_ERROR_INVALID_VALUE"):
                hint()
    """)


def test_a_part_is_advised_and_prefetched(run: Run) -> None:
    """A framework's managed allocation of which one tensor is to stay on the host.

    `"device"` is the driver's own. A thread that has never called CUDA has no context: the driver's is lent to it.
    """
    run("""
        with UnifiedBuffer(driver, 4 * MIB) as buffer:
            part = ManagedMemoryHints.for_buffer(driver, buffer.address + MIB, MIB)
            part.set_preferred_location("host")
            assert attribute("PREFERRED_LOCATION", buffer.address + MIB, MIB) == HOST
            assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == NOWHERE
            hints = ManagedMemoryHints.from_unified(buffer)
            hints.prefetch_range("1MiB", 2 * MIB, 0)
            assert attribute("LAST_PREFETCH_LOCATION", buffer.address + MIB, 2 * MIB) == 0
            assert attribute("LAST_PREFETCH_LOCATION", buffer.address, MIB) == NOWHERE
            hints.set_preferred_location("device")
            thread = threading.Thread(target=hints.prefetch_to, args=(Location.DEVICE,))
            thread.start(); thread.join()
            for name in ("PREFERRED_LOCATION", "LAST_PREFETCH_LOCATION"):
                assert attribute(name, buffer.address, 4 * MIB) == 0
    """)


def test_a_part_outside_is_refused(run: Run) -> None:
    """Also where the sum of both would be a small number again in 64 bits."""
    run("""
        with UnifiedBuffer(driver, 4096) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            high = (1 << 63) - 1
            for offset, size in ((4000, 200), (4096, 1), (0, 4097), (high, high), (high, 2), (1, high)):
                with pytest.raises(InvalidRequest, match=" 4096 "):
                    hints.prefetch_range(offset, size, 0)
            for offset, size in ((-1, 1), (1 << 64, 1), (0, 0)):
                with pytest.raises(InvalidRequest):
                    hints.prefetch_range(offset, size, 0)
            assert asked() == ["cuMemAllocManaged 4096"]
    """)


def test_a_device_that_is_not_there_or_without_concurrent_access_takes_no_hints(run: Run) -> None:
    """Said with how many there are, or with the attribute's name: CUDA would say `INVALID_DEVICE` of both."""
    code = """
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            before = asked()
            for hint in (hints.set_preferred_location, hints.unset_accessed_by, hints.prefetch_to):
                with pytest.raises(ManagedMemoryUnavailable, match="device 1 .*CONCURRENT_MANAGED_ACCESS"):
                    hint(1)
                with pytest.raises(InvalidRequest, match="sees 2,"):
                    hint(2)
            assert asked() == before
            hints.set_preferred_location(0)
            assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == 0
    """
    run(code, FAKE_CUDA_DEVICES="2", FAKE_CUDA_LACKS="89@1")


def test_streams_as_ints_and_as_frameworks_have_them(run: Run) -> None:
    """A stream of torch has `cuda_stream`, one of CuPy `ptr`. Anything else is refused before CUDA is called."""
    run("""
        class Torch:
            cuda_stream = int(driver.in_context("cuStreamCreate", 0))
        class CuPy:
            ptr = Torch.cuda_stream
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            for stream in (0, Torch.cuda_stream, CuPy()):
                hints.prefetch_range(0, MIB, 0, stream)
            PrefetchPlan().add(buffer.address, MIB, 0).execute(driver, Torch())
            streams = [line.split()[-1] for line in asked() if "Prefetch" in line]
            assert streams == ["default"] + ["stream"] * 3, streams
            for stream in (None, -1, 1 << 64, True, "0", object()):
                with pytest.raises(InvalidRequest, match="stream"):
                    hints.prefetch_to(0, stream)
    """)


# Plans


def test_a_plan_is_queued_in_order(run: Run) -> None:
    """A plan runs for each step. One that names a device that is not there changes nothing."""
    code = """
        with UnifiedBuffer(driver, 4 * MIB) as buffer:
            plan = PrefetchPlan()
            for index, location in enumerate([0, 1, "host", "device"]):
                plan.add(buffer.address + index * MIB, MIB, location)
            plan.execute(driver)
            plan.execute(driver)
            queued = [line.split()[1:4] for line in asked() if "Prefetch" in line]
            expected = [["+0", "0"], ["+1048576", "1"], ["+2097152", "-1"], ["+3145728", "0"]]
            assert [[place, device] for place, _, device in queued] == expected * 2, queued
            before = asked()
            with pytest.raises(PrefetchFailed, match="entry 4 .*device 7.* 0 ") as caught:
                plan.add(buffer.address, MIB, 7).execute(driver)
            assert type(caught.value.__cause__) is InvalidRequest
            assert (caught.value.queued, asked()) == ((), before)
    """
    run(code, FAKE_CUDA_DEVICES="2")


def test_a_plan_that_fails_names_the_entry_and_what_is_queued(run: Run) -> None:
    """The third of four buffers was freed by then: the caller learns which, and which two move all the same."""
    run("""
        with UnifiedBuffer(driver, 4 * MIB) as buffer:
            plan = PrefetchPlan().add(buffer.address, MIB, 0).add(buffer.address + MIB, MIB, "host")
            plan.add(0x1000, 4096, 0).add(buffer.address, MIB, 0)
            with pytest.raises(PrefetchFailed) as caught:
                plan.execute(driver)
            failed = caught.value
            assert (failed.index, failed.entry) == (2, PrefetchEntry(0x1000, 4096, 0))
            assert failed.queued == plan.entries[:2]
            assert "entry 2 (4096 bytes at 0x1000 to device 0) failed, with 2 queued before it" in str(failed)
            assert "CUDA_ERROR_INVALID_VALUE" in str(failed)
            assert failed.__cause__.name == "CUDA_ERROR_INVALID_VALUE"
            assert len([line for line in asked() if "Prefetch" in line]) == 2
    """)


# Without a GPU: policies, plans, and the refusals of the host driver


def test_the_advice_of_a_policy() -> None:
    assert (MigrationPolicy.Default.to_advice_pairs(), MigrationPolicy.Default.is_default()) == ([], True)
    assert MigrationPolicy.ReadMostly.to_advice_pairs() == [(MemAdvice.SET_READ_MOSTLY, None)]
    assert MigrationPolicy.PreferHost.to_advice_pairs() == [(MemAdvice.SET_PREFERRED_LOCATION, Location.HOST)]
    third = MigrationPolicy.PreferDevice(3)
    assert (third.to_advice_pairs(), third.is_default()) == ([(MemAdvice.SET_PREFERRED_LOCATION, 3)], False)
    for ordinal in (-1, True, "host", Location.HOST, 1 << 31):
        with pytest.raises(InvalidRequest):
            MigrationPolicy.PreferDevice(ordinal)  # type: ignore[arg-type]


def test_a_plan_keeps_what_was_added_in_order() -> None:
    assert PrefetchPlan().add((1 << 64) - 1, 1, 0), "the last byte of all addresses"
    plan = PrefetchPlan()
    assert (bool(plan), len(plan), plan.entries) == (False, 0, ())
    assert plan.add(0x1000, 4096, 0).add(0x2000, 8192, 1).add(0x4000, "1MiB", "host") is plan
    assert (bool(plan), len(plan)) == (True, 3)
    assert plan.entries == (
        PrefetchEntry(0x1000, 4096, 0),
        PrefetchEntry(0x2000, 8192, 1),
        PrefetchEntry(0x4000, MIB, Location.HOST),
    )


@pytest.mark.parametrize(
    ("address", "size"), [(0x1000, 0), (0, 4096), (1 << 64, 1), ((1 << 64) - 1, 2), (0x1000, 1 << 63), ("0x1000", 4096)]
)
def test_what_is_no_range_is_refused(host: Driver, address: int, size: int) -> None:
    """Without bytes, of no memory, over the end of all addresses, or of no numbers: before any driver sees it."""
    for call in (
        lambda: PrefetchPlan().add(address, size, 0),
        lambda: ManagedMemoryHints.for_buffer(host, address, size),
        lambda: apply_migration_policy(host, address, size, MigrationPolicy.Default),
    ):
        with pytest.raises(InvalidRequest):
            call()


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
    apply_migration_policy(host, 0x1000, 4096, MigrationPolicy.Default)  # it advises nothing
