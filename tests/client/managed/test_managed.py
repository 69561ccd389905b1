"""Managed memory on the real cuda-bindings over the fake card, and its refusals on the host driver.

The fake keeps each page's advice as a card does, so what was advised is read back; what it cannot show (pages that
move, kernels that read them) stands in tests/gpu. tests/docs/migrating_tests.md says which of
oxicuda-memory's tests is which of these.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.daemons import running
from tests.support.fake_cuda import build_fake_cuda, run_beside_fake_cuda
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
from membroker.vmm import Driver, Location, open_driver

PAGE = Path(__file__).parents[3] / "docs" / "managed.md"

_PRELUDE = """
import ctypes, gc, os, threading
import pytest
import cuda.bindings.driver as bindings
from membroker.errors import *
from membroker.managed.hints import *
from membroker.vmm import *
MIB = 1 << 20
fake = ctypes.CDLL("libcuda.so.1")
fake.fake_cuda_asked.restype = ctypes.c_char_p

def asked():
    return fake.fake_cuda_asked().decode().splitlines()

def attribute(name, address, size):
    kind = getattr(bindings.CUmem_range_attribute, f"CU_MEM_RANGE_ATTRIBUTE_{name}")
    result, value = bindings.cuMemRangeGetAttribute(8 if name == "ACCESSED_BY" else 4, kind, address, size)
    assert int(result) == 0, result
    return value

HOST, NOWHERE = -1, -2
driver = open_driver("cuda", context=True)
"""

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

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run a piece of code beside the fake libraries; it has a worker's `driver`, and `asked()`."""
    if os.environ.get("MEMBROKER_REQUIRE_FAKE_CUDA") != "1":
        pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
        pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    libraries = build_fake_cuda(tmp_path_factory.mktemp("fake_cuda"))
    if libraries is None:
        pytest.skip("no C compiler (gcc or cc) to build the fake libcuda with")

    def run_code(code: str, **environment: str) -> str:
        return run_beside_fake_cuda(libraries, _PRELUDE + textwrap.dedent(code), **environment)

    return run_code


@pytest.fixture
def host() -> Iterator[Driver]:
    driver = open_driver("host")
    yield driver
    driver.close()


# Policies


def test_the_default_policy_advises_nothing() -> None:
    """A program that was configured with no policy makes no call for it."""
    assert MigrationPolicy.Default.to_advice_pairs() == []


def test_read_mostly_is_one_advice_without_a_location() -> None:
    assert MigrationPolicy.ReadMostly.to_advice_pairs() == [(MemAdvice.SET_READ_MOSTLY, None)]


def test_prefer_device_names_its_device() -> None:
    """The seed dropped the ordinal and left the caller to pass the device a second time."""
    assert MigrationPolicy.PreferDevice(0).to_advice_pairs() == [(MemAdvice.SET_PREFERRED_LOCATION, 0)]
    assert MigrationPolicy.PreferDevice(3).to_advice_pairs() == [(MemAdvice.SET_PREFERRED_LOCATION, 3)]


def test_prefer_host_names_the_host() -> None:
    """The seed preferred whatever device was passed."""
    assert MigrationPolicy.PreferHost.to_advice_pairs() == [(MemAdvice.SET_PREFERRED_LOCATION, Location.HOST)]


def test_only_the_default_policy_is_default() -> None:
    assert MigrationPolicy.Default.is_default()
    others = MigrationPolicy.ReadMostly, MigrationPolicy.PreferDevice(0), MigrationPolicy.PreferHost
    assert not any(policy.is_default() for policy in others)


def test_a_policy_is_written_as_it_is_made() -> None:
    """A log line with the policy can be pasted into a program."""
    for text in ("Default", "ReadMostly", "PreferDevice(2)", "PreferHost"):
        policy = eval(f"MigrationPolicy.{text}")
        assert (str(policy), repr(policy)) == (f"MigrationPolicy.{text}",) * 2


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


def test_a_new_plan_is_empty() -> None:
    plan = PrefetchPlan()
    assert not plan
    assert len(plan) == 0
    assert plan.entries == ()


def test_a_plan_keeps_what_was_added_in_order() -> None:
    plan = PrefetchPlan()
    plan.add(0x1000, 4096, 0).add(0x2000, 8192, 1).add(0x4000, "1MiB", "host")
    assert len(plan) == 3
    assert plan
    assert plan.entries == (
        PrefetchEntry(0x1000, 4096, 0),
        PrefetchEntry(0x2000, 8192, 1),
        PrefetchEntry(0x4000, MIB, Location.HOST),
    )


def test_a_plan_is_chained() -> None:
    plan = PrefetchPlan()
    assert plan.add(0x100, 100, 0).add(0x200, 200, 0).add(0x300, 300, 0) is plan
    assert len(plan) == 3


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
    with pytest.raises(InvalidRequest, match="location"):
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
        with pytest.raises(ManagedMemoryUnavailable, match="managed memory needs a GPU, and this is the host driver"):
            door()


def test_applying_the_default_policy_asks_no_driver(host: Driver) -> None:
    """It advises nothing, so it does nothing, also where nothing could be advised."""
    apply_migration_policy(host, 0x1000, 4096, MigrationPolicy.Default)


# Hints, on the fake card


_FORMS = {
    "13": (13, "13000", "_v2"),
    "12": (12, "13000", "_v2"),
    "12 on a driver of 12.1": (12, "12010", ""),
}


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
    run("""
        with UnifiedBuffer(driver, MIB) as buffer:
            ManagedMemoryHints.from_unified(buffer).apply_policy(MigrationPolicy.PreferHost)
            assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == HOST
    """)


def test_a_policy_adds_and_the_default_takes_nothing_back(run: Run) -> None:
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
    """An address of somebody else's is taken as it is, and nothing is asked about it before the first hint."""
    run("""
        hints = ManagedMemoryHints.for_buffer(driver, 0x1000, 4096)
        assert (hints.address, hints.size) == (0x1000, 4096)
        other = ManagedMemoryHints.for_buffer(driver, 0xDEAD, "512B")
        assert (other.address, other.size) == (0xDEAD, 512)
        assert asked() == []
    """)


def test_memory_that_is_not_managed_is_refused_with_the_drivers_word(run: Run) -> None:
    run("""
        hints = ManagedMemoryHints.for_buffer(driver, 0x1000, 4096)
        for hint in (hints.set_read_mostly, lambda: hints.prefetch_to(0)):
            with pytest.raises(DeviceFailure, match=r"cuMem.* failed: CUDA_ERROR_INVALID_VALUE"):
                hint()
    """)


def test_hints_about_a_part_leave_the_rest(run: Run) -> None:
    """A framework's managed allocation of which one tensor is to stay on the host."""
    run("""
        with UnifiedBuffer(driver, 4 * MIB) as buffer:
            part = ManagedMemoryHints.for_buffer(driver, buffer.address + MIB, MIB)
            part.set_preferred_location("host")
            assert attribute("PREFERRED_LOCATION", buffer.address + MIB, MIB) == HOST
            assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == NOWHERE
            assert attribute("PREFERRED_LOCATION", buffer.address + 2 * MIB, 2 * MIB) == NOWHERE
    """)


def test_a_part_is_prefetched(run: Run) -> None:
    run("""
        with UnifiedBuffer(driver, 4 * MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            hints.prefetch_range("1MiB", 2 * MIB, 0)
            hints.prefetch_range(4 * MIB - 1, 1, "host")
            assert attribute("LAST_PREFETCH_LOCATION", buffer.address + MIB, 2 * MIB) == 0
            assert attribute("LAST_PREFETCH_LOCATION", buffer.address, MIB) == NOWHERE
            assert attribute("LAST_PREFETCH_LOCATION", buffer.address + 4 * MIB - 1, 1) == HOST
    """)


def test_no_bytes_are_not_prefetched(run: Run) -> None:
    run("""
        with UnifiedBuffer(driver, MIB) as buffer:
            with pytest.raises(InvalidRequest, match="at least 1"):
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
                with pytest.raises(InvalidRequest, match="do not lie in 4096 bytes"):
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
                with pytest.raises(InvalidRequest, match="there is no device .*: this process sees 1"):
                    hint()
            assert asked() == before
    """)


def test_device_is_the_drivers_own(run: Run) -> None:
    """`"device"` and `"host"` are the two locations of everything else here; an ordinal is needed for other cards."""
    run("""
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            hints.set_preferred_location("device")
            hints.prefetch_to(Location.DEVICE)
            assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == 0
            assert attribute("LAST_PREFETCH_LOCATION", buffer.address, MIB) == 0
    """)


def test_a_device_without_concurrent_access_takes_no_hints(run: Run) -> None:
    """CUDA would say `INVALID_DEVICE` of a device that is there: the sentence has the attribute's name."""
    code = """
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            for hint in (
                hints.set_read_mostly,
                hints.unset_preferred_location,
                lambda: hints.set_accessed_by(0),
                lambda: hints.prefetch_to("host"),
                lambda: hints.apply_policy(MigrationPolicy.PreferDevice(0)),
            ):
                with pytest.raises(ManagedMemoryUnavailable, match="device 0 .*CONCURRENT_MANAGED_ACCESS"):
                    hint()
            buffer.view()[:5] = b"bytes"
    """
    run(code, FAKE_CUDA_LACKS="89")


def test_it_is_the_named_device_that_is_asked(run: Run) -> None:
    """Of two cards one is too old: hints for the other go on."""
    code = """
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            with pytest.raises(ManagedMemoryUnavailable, match="device 1 "):
                hints.set_preferred_location(1)
            hints.set_preferred_location(0)
            assert attribute("PREFERRED_LOCATION", buffer.address, MIB) == 0
    """
    run(code, FAKE_CUDA_DEVICES="2", FAKE_CUDA_LACKS="89@1")


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
                with pytest.raises(InvalidRequest, match="a stream is"):
                    hints.prefetch_to(0, stream)
                with pytest.raises(InvalidRequest, match="a stream is"):
                    plan.execute(driver, stream)
            with pytest.raises(DeviceFailure, match="CUDA_ERROR_INVALID_HANDLE"):
                hints.prefetch_to(0, 0xDEAD)
            assert not [line for line in asked() if "Prefetch" in line]
    """)


def test_hints_come_from_any_thread(run: Run) -> None:
    """A thread that has never called CUDA has no context: the driver's own is lent to it for the call."""
    run("""
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
            thread = threading.Thread(target=hints.prefetch_to, args=(0,))
            thread.start(); thread.join()
            assert attribute("LAST_PREFETCH_LOCATION", buffer.address, MIB) == 0
    """)


def test_without_a_context_the_error_says_how_to_get_one(run: Run) -> None:
    """A broker's driver has none, and must never get one by the back door."""
    run("""
        broker = open_driver("cuda")
        with pytest.raises(DeviceFailure, match="open_driver.*context=True"):
            UnifiedBuffer(broker, MIB)
    """)


# Plans, on the fake card


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
            with pytest.raises(PrefetchFailed, match="entry 1 .*to device {ordinal}.* 0 queued before it") as caught:
                plan.execute(driver)
            assert type(caught.value.__cause__) is {cause}
            assert caught.value.queued == ()
            assert not [line for line in asked() if "Prefetch" in line]
    """
    run(code, FAKE_CUDA_DEVICES=devices, FAKE_CUDA_LACKS=lacks)


def test_an_empty_plan_does_nothing(run: Run) -> None:
    run("""
        PrefetchPlan().execute(driver)
        assert asked() == []
    """)


# Buffers, on the fake card


def test_a_buffer_is_read_and_written_by_the_processor(run: Run) -> None:
    """The size is in bytes and as asked; an array over the view is an array over the memory."""
    run("""
        import numpy
        with UnifiedBuffer(driver, "1MiB") as buffer:
            assert (buffer.size, buffer.closed, buffer.driver) == (MIB, False, driver)
            array = numpy.frombuffer(buffer.view(), "float32")
            array[:] = 3.0
            assert bytes(buffer.view()[-4:]) == numpy.float32(3).tobytes()
            assert ctypes.string_at(buffer.address, 4) == numpy.float32(3).tobytes()
            assert len(buffer.view()) == MIB
            interface = buffer.__cuda_array_interface__
            assert interface == {"shape": (MIB,), "typestr": "|u1", "data": (buffer.address, False), "version": 3}
            del array
    """)


def test_close_waits_for_the_work_and_frees_once(run: Run) -> None:
    """A kernel may still read the pages that were prefetched for it."""
    run("""
        buffer = UnifiedBuffer(driver, MIB)
        assert f"at {buffer.address:#x}" in repr(buffer)
        ManagedMemoryHints.from_unified(buffer).prefetch_to(0)
        buffer.close()
        buffer.close()
        assert buffer.closed and "closed" in repr(buffer)
        assert asked()[-3:] == [f"cuMemPrefetchAsync_v2 +0 {MIB} 0 default", "cuCtxSynchronize", "cuMemFree"]
    """)


def test_a_closed_buffer_refuses(run: Run) -> None:
    """Its address may be another allocation's by now: hints that were made before the end raise as well."""
    run("""
        with UnifiedBuffer(driver, MIB) as buffer:
            hints = ManagedMemoryHints.from_unified(buffer)
        before = asked()
        for use in (
            lambda: buffer.address,
            lambda: buffer.__cuda_array_interface__,
            buffer.view,
            lambda: ManagedMemoryHints.from_unified(buffer),
            hints.set_read_mostly,
            lambda: hints.prefetch_to(0),
            lambda: hints.apply_policy(MigrationPolicy.PreferHost),
        ):
            with pytest.raises(ClosedError, match="closed"):
                use()
        assert asked() == before
    """)


def test_a_living_view_keeps_the_memory(run: Run) -> None:
    """An array that leaves the block is good until it dies, in whatever thread: then the memory goes, once."""
    run("""
        with UnifiedBuffer(driver, MIB) as buffer:
            kept = [buffer.view()[:4]]
            kept[0][:] = b"left"
        assert buffer.closed
        assert asked().count("cuMemFree") == 0
        assert bytes(kept[0]) == b"left"
        thread = threading.Thread(target=kept.clear)
        thread.start(); thread.join()
        assert asked()[-2:] == ["cuCtxSynchronize", "cuMemFree"]
        assert asked().count("cuMemFree") == 1
    """)


def test_a_call_under_way_holds_off_the_end(run: Run) -> None:
    """One thread closes while another is about to prefetch by the address."""
    run("""
        buffer = UnifiedBuffer(driver, MIB)
        entered, leave = threading.Event(), threading.Event()
        def use():
            with buffer.in_use():
                entered.set()
                leave.wait(60)
        thread = threading.Thread(target=use)
        thread.start()
        assert entered.wait(60)
        buffer.close()
        assert asked().count("cuMemFree") == 0
        with pytest.raises(ClosedError):
            buffer.view()
        assert asked().count("cuMemFree") == 0
        leave.set(); thread.join()
        assert asked().count("cuMemFree") == 1
    """)


def test_many_threads_close_and_one_frees(run: Run) -> None:
    """Closers and users of one buffer at the same time, a hundred times: freed once each, and never in use."""
    run("""
        import sys
        sys.setswitchinterval(1e-6)
        for _ in range(100):
            buffer = UnifiedBuffer(driver, 4096)
            hints = ManagedMemoryHints.from_unified(buffer)
            failures = []
            def use():
                try:
                    hints.set_read_mostly()
                except ClosedError:
                    pass
                except Exception as error:
                    failures.append(error)
            threads = [threading.Thread(target=work) for work in (use, buffer.close, use, buffer.close)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert not failures, failures
            assert asked().count("cuMemFree") == asked().count("cuMemAllocManaged 4096")
    """)


def test_a_forgotten_buffer_is_freed(run: Run) -> None:
    run("""
        buffer = UnifiedBuffer(driver, MIB)
        view = buffer.view()
        del buffer
        gc.collect()
        assert asked().count("cuMemFree") == 0
        del view
        gc.collect()
        assert asked().count("cuMemFree") == 1
    """)


def test_after_a_fork_the_childs_buffer_raises_and_frees_nothing(run: Run) -> None:
    """CUDA does not survive a fork, and the pages are not inherited: even the view of them would fault."""
    run("""
        buffer = UnifiedBuffer(driver, MIB)
        hints = ManagedMemoryHints.from_unified(buffer)
        child = os.fork()
        if child == 0:
            try:
                assert buffer.closed
                for use in (buffer.view, lambda: buffer.address, hints.set_read_mostly):
                    with pytest.raises(ClosedError, match="forked"):
                        use()
                buffer.close()
                assert "cuMemFree" not in asked()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        buffer.view()[:1] = b"x"
        buffer.close()
    """)


@pytest.mark.parametrize("size", [0, -1, "", "no", 1 << 63, None, 1.5, True])
def test_a_buffer_of_no_size_is_refused(host: Driver, size: int) -> None:
    """Before the driver is looked at: it is the program that is wrong, on any machine."""
    with pytest.raises(InvalidRequest, match="a managed buffer"):
        UnifiedBuffer(host, size)


def test_a_device_without_managed_memory_says_so(run: Run) -> None:
    code = """
        with pytest.raises(ManagedMemoryUnavailable, match="device 0 has no managed memory"):
            UnifiedBuffer(driver, MIB)
        assert asked() == []
    """
    run(code, FAKE_CUDA_LACKS="83")


def test_a_buffer_that_cannot_be_had_leaves_nothing(run: Run) -> None:
    run("""
        with pytest.raises(DeviceFailure, match="cuMemAllocManaged failed: CUDA_ERROR_OUT_OF_MEMORY"):
            UnifiedBuffer(driver, "1TiB")
        gc.collect()
        assert asked() == []
    """)


def test_a_driver_that_is_closed_first_is_said(run: Run) -> None:
    """The wrong order at the end of a program: the memory went with the context, and the error says what is closed."""
    run("""
        buffer = UnifiedBuffer(driver, MIB)
        driver.close()
        with pytest.raises(DeviceFailure, match="this driver is closed"):
            buffer.close()
    """)


# The page


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def test_the_pages_example_runs_on_a_card(run: Run) -> None:
    """The first block, as its reader would run it where there is a GPU."""
    assert run(blocks()[0]).splitlines() == ["b'weights' at the host", "queued 2"]


def test_the_pages_worker_says_a_plain_sentence_on_the_host_driver() -> None:
    """The second block is a worker at a real daemon: declared and charged first, nothing left where there is no GPU."""
    with running() as daemon:
        done = subprocess.run(
            [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", blocks()[1]],
            env={**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint())},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        charged, sentence, left = done.stdout.splitlines()
        assert (charged, left) == (f"charged {16 * MIB}", "charged 0")
        assert sentence.startswith("managed memory needs a GPU, and this is the host driver")


def test_the_page_says_where_it_leads() -> None:
    """Each link of the page leads to a file."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGE.read_text())
    assert links
    assert [link for link in links if "://" not in link and not (PAGE.parent / link).exists()] == []
