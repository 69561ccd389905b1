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


def test_prefer_device_honours_its_ordinal(run: Run) -> None:
    """A driver of device 0 advises for device 1: the seed preferred the device it was called with."""
    code = """
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            for ordinal in (1, 0):
                hints.apply_policy(MigrationPolicy.PreferDevice(ordinal))
                assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == ordinal
            apply_migration_policy(driver, buffer.address, MIB, MigrationPolicy.PreferDevice(1))
            assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == 1
    """
    run(code, FAKE_CUDA_DEVICES="2")


def test_prefer_host_means_the_host(run: Run) -> None:
    """A policy adds to what was advised before, and the default takes nothing back."""
    run("""
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            hints.apply_policy(MigrationPolicy.ReadMostly)
            hints.apply_policy(MigrationPolicy.PreferHost)
            before = asked()
            hints.apply_policy(MigrationPolicy.Default)
            assert asked() == before
            assert attribute("READ_MOSTLY", buffer.address, MIB) == 1
            assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == HOST
    """)


def test_hints_know_their_range(run: Run) -> None:
    """An address of somebody else's is taken as it is, and nothing is asked about it before the first hint.

    Memory that is not managed is refused with the driver's word. An empty plan asks nothing.
    """
    run("""
        hints = ManagedMemoryHints.for_buffer(driver, 0x1000, 4096)
        assert (hints.address, hints.size) == (0x1000, 4096)
        other = ManagedMemoryHints.for_buffer(driver, 0xDEAD, "512B")
        assert (other.address, other.size) == (0xDEAD, 512)
        PrefetchPlan().execute(driver)
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
            assert attribute("PREFERRED_LOCATION", buffer.address + 2 * MIB, 2 * MIB) == NOWHERE
            hints = ManagedMemoryHints.from_unified(buffer)
            hints.prefetch_range("1MiB", 2 * MIB, 0)
            hints.prefetch_range(4 * MIB - 1, 1, "host")
            assert attribute("LAST_PREFETCH_LOCATION", buffer.address + MIB, 2 * MIB) == 0
            assert attribute("LAST_PREFETCH_LOCATION", buffer.address, MIB) == NOWHERE
            assert attribute("LAST_PREFETCH_LOCATION", buffer.address + 4 * MIB - 1, 1) == HOST
            hints.set_preferred_location("device")
            thread = threading.Thread(target=hints.prefetch_to, args=(Location.DEVICE,))
            thread.start(); thread.join()
            for name in ("PREFERRED_LOCATION", "LAST_PREFETCH_LOCATION"):
                assert attribute(name, buffer.address, 4 * MIB) == 0
    """)


def test_no_bytes_are_not_prefetched(run: Run) -> None:
    run("""
        with UnifiedBuffer(driver, MIB) as buffer:
            with pytest.raises(InvalidRequest):
                ManagedMemoryHints.from_unified(buffer).prefetch_range(0, 0, 0)
            assert asked() == [f"cuMemAllocManaged {MIB}"]
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
            for offset in (-1, 1 << 64, None, 0.5):
                with pytest.raises(InvalidRequest):
                    hints.prefetch_range(offset, 1, 0)
            assert asked() == ["cuMemAllocManaged 4096"]
    """)


def test_a_device_that_is_not_there_is_refused(run: Run) -> None:
    """The configuration of a machine with more cards: said with how many there are, and nothing is asked of CUDA."""
    run("""
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            before = asked()
            for hint in (
                lambda: hints.set_preferred_location(1),
                lambda: hints.set_accessed_by(1),
                lambda: hints.unset_accessed_by(2**31 - 1),
                lambda: hints.prefetch_to(1),
                lambda: hints.apply_policy(MigrationPolicy.PreferDevice(1)),
            ):
                with pytest.raises(InvalidRequest, match="sees 1,"):
                    hint()
            assert asked() == before
    """)


@pytest.mark.parametrize("which", [0, 1])
def test_a_device_without_concurrent_access_takes_no_hints(run: Run, which: int) -> None:
    """CUDA would say `INVALID_DEVICE` of a device that is there: the sentence has the attribute's name.

    Of two cards one is too old: hints for the other go on.
    """
    code = f"""
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            named = [
                lambda: hints.set_preferred_location({which}),
                lambda: hints.set_accessed_by({which}),
                lambda: hints.apply_policy(MigrationPolicy.PreferDevice({which})),
            ]
            own = [hints.set_read_mostly, hints.unset_preferred_location, lambda: hints.prefetch_to("host")]
            for hint in named if {which} else named + own:
                with pytest.raises(ManagedMemoryUnavailable, match="device {which} .*CONCURRENT_MANAGED_ACCESS"):
                    hint()
            buffer.view()[:5] = b"bytes"
            if {which}:
                hints.set_preferred_location(0)
                assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == 0
    """
    run(code, FAKE_CUDA_DEVICES="2", FAKE_CUDA_LACKS=f"89@{which}")


def test_streams_as_ints_and_as_frameworks_have_them(run: Run) -> None:
    """torch's stream has `cuda_stream`, CuPy's `ptr`; the default stream is 0."""
    run("""
        class Torch:
            cuda_stream = int(driver.in_context("cuStreamCreate", 0))
        class CuPy:
            ptr = Torch.cuda_stream
        class TorchDefault:
            cuda_stream = 0
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            for stream in (0, Torch.cuda_stream, Torch(), CuPy(), TorchDefault()):
                hints.prefetch_range(0, MIB, 0, stream)
            PrefetchPlan().add(buffer.address, MIB, 0).execute(driver, Torch())
            hints.prefetch_to("host", CuPy())
            streams = [line.split()[-1] for line in asked() if "Prefetch" in line]
            assert streams == ["default"] + ["stream"] * 3 + ["default"] + ["stream"] * 2, streams
    """)


def test_what_is_no_stream_is_refused(run: Run) -> None:
    """CUDA follows a handle without looking: what can be seen to be none never gets there."""
    run("""
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            plan = PrefetchPlan().add(buffer.address, MIB, 0)
            for stream in (None, -1, 1 << 64, True, "0", object()):
                with pytest.raises(InvalidRequest, match="stream"):
                    hints.prefetch_to(0, stream)
                with pytest.raises(InvalidRequest):
                    plan.execute(driver, stream)
            with pytest.raises(DeviceFailure, match="CUDA_ERROR_INVALID_HANDLE"):
                hints.prefetch_to(0, 0xDEAD)
            assert not [line for line in asked() if "Prefetch" in line]
    """)


def test_without_a_context_the_error_says_how_to_get_one(run: Run) -> None:
    """A broker's driver has none, and must never get one by the back door."""
    run("""
        broker = open_driver("cuda")
        with pytest.raises(DeviceFailure, match="open_driver.*context=True"):
            UnifiedBuffer(broker, MIB)
    """)


# Plans


def test_a_plan_is_queued_in_order(run: Run) -> None:
    """Layers for the card, the cache for the host; and again for the next step."""
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


@pytest.mark.parametrize(("lacks", "cause"), [("0", "InvalidRequest"), ("89@1", "ManagedMemoryUnavailable")])
def test_a_plan_with_a_wrong_device_queues_nothing(run: Run, lacks: str, cause: str) -> None:
    """Wherever in the plan it stands: a device that is not there, or that takes no hints, is seen beforehand."""
    ordinal, devices = (1, "2") if cause == "ManagedMemoryUnavailable" else (7, "2")
    code = f"""
        with UnifiedBuffer(driver, MIB) as buffer:
            plan = PrefetchPlan().add(buffer.address, MIB, 0).add(buffer.address, MIB, {ordinal})
            with pytest.raises(PrefetchFailed, match="entry 1 .*device {ordinal}.* 0 ") as caught:
                plan.execute(driver)
            assert type(caught.value.__cause__) is {cause}
            assert caught.value.queued == ()
            assert not [line for line in asked() if "Prefetch" in line]
    """
    run(code, FAKE_CUDA_DEVICES=devices, FAKE_CUDA_LACKS=lacks)


# Without a GPU: policies, plans, and the refusals of the host driver


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
