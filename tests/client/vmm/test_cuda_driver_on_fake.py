"""The real `CudaDriver` on the real cuda-bindings, over a card made of memfds: no GPU is needed.

What a fake cannot show (costs, scrubbing, contexts' bytes, faults) stands in tests/gpu. Each piece of code runs in
a process of its own (`run_beside_fake_cuda` says why).
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.fake_cuda import build_fake_cuda, run_beside_fake_cuda

FAKE_UUID = "66616b65-2d63-7564-612d-636172642d30"

_PRELUDE = """
import ctypes, functools, json, os, sys, threading
import pytest
from membroker.vmm import *
from membroker.vmm.cuda.driver import CudaDriver
GRANULE = 2 << 20
fake = ctypes.CDLL("libcuda.so.1")
"""

_RUN_CHECKS = """
import traceback
from membroker.testing import CHECKS, TWO_DEVICE_CHECKS
makers = [functools.partial(open_driver, "cuda", device, context=True) for device in {devices}]
results = {{}}
for check in {checks}:
    try:
        check(*makers)
        results[check.__name__] = ""
    except Exception:
        results[check.__name__] = traceback.format_exc()
print(json.dumps(results))
"""

Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(beside_fake_cuda: Run) -> Run:
    """Run a piece of code beside the fake libraries, on a card of its own, and return what it prints."""
    return lambda code, **environment: beside_fake_cuda(_PRELUDE + textwrap.dedent(code), **environment)


@pytest.mark.parametrize(("checks", "devices"), [("CHECKS", [0]), ("TWO_DEVICE_CHECKS", [0, 1])])
def test_cards_keep_a_drivers_promises(run: Run, checks: str, devices: list[int]) -> None:
    results = json.loads(run(_RUN_CHECKS.format(devices=devices, checks=checks), FAKE_CUDA_DEVICES="2"))
    assert results
    assert not any(results.values()), "\n".join(results.values())


def test_a_card_copies_in_its_own_context_whichever_is_current(run: Run) -> None:
    """Two cards in one thread: the second's context is current, and a copy there to the first's memory would fault.

    What a card was granted is taken back from it alone.
    """
    code = """
        first, second = CudaDriver(0, context=True), CudaDriver(1, context=True)
        handle, address = first.create(GRANULE), first.reserve(GRANULE)
        first.map(address, handle)
        first.set_access(address, GRANULE, AccessFlags.READ_WRITE)
        second.release(second.create(GRANULE))
        first.write(address, b"first")
        assert first.read(address, 5) == b"first"
        second.set_access(address, GRANULE, AccessFlags.READ_WRITE)
        assert second.read(address, 5) == b"first"
        second.set_access(address, GRANULE, AccessFlags.NONE)
        with pytest.raises(DriverError, match=second.device.uuid):
            second.read(address, 1)
        first.write(address, b"x")
    """
    run(code, FAKE_CUDA_DEVICES="2")


@pytest.mark.deep
def test_ctrl_c_loses_no_memory_of_the_card(run: Run) -> None:
    """Ctrl-C at each point of a borrowing without a broker: once its descriptors are closed, the card is empty."""
    code = """
        from tests.support.interrupts import interrupted_at
        driver = CudaDriver(context=True)
        empty, address = driver.memory(Location.DEVICE).free, driver.reserve(2 * GRANULE)

        def borrow(descriptors):
            descriptors += driver.lend(GRANULE, 2)
            driver.map_descriptors(address, descriptors, GRANULE)

        point, struck = 0, True
        while struck:
            point, descriptors = point + 1, []
            _, struck = interrupted_at(point, functools.partial(borrow, descriptors))
            driver.unmap(address, 2 * GRANULE)
            for descriptor in descriptors:
                os.close(descriptor)
            assert driver.memory(Location.DEVICE).free == empty, point
        print(point)
    """
    assert int(run(code)) > 20


def test_a_copier_works_in_its_own_context_whichever_is_current(run: Run) -> None:
    """A framework makes another card current between two chunks: an event of that one marks nothing on this stream."""
    code = """
        first, second = CudaDriver(0, context=True), CudaDriver(1, context=True)
        handle, address = first.create(GRANULE), first.reserve(GRANULE)
        first.map(address, handle)
        first.set_access(address, GRANULE, AccessFlags.READ_WRITE)
        first.write(address, b"here")
        second.release(second.create(GRANULE))
        pinned = first.pin(GRANULE)
        copier = first.copier()
        for current in (second, None, first):
            fake.cuCtxSetCurrent(ctypes.c_void_p(int(current._context)) if current else None)
            copier.copy(pinned, address, GRANULE)
            copier.wait(copier.mark())
            assert ctypes.string_at(pinned, 4) == b"here"
            ctypes.memset(pinned, 0, 4)
        fake.cuCtxSetCurrent(None)
        copier.close()
        first.unpin(pinned)
        for call in (lambda: CudaDriver().pin(GRANULE), CudaDriver().copier):
            with pytest.raises(DriverError, match="context=True"):
                call()
    """
    run(code, FAKE_CUDA_DEVICES="2")


def test_the_broker_never_makes_a_context(run: Run) -> None:
    """A context is 518 MiB of the card in each process that has one, and a sticky error away from death.

    The figure of the device is NVML's, as are the processes that compute; bytes can be neither copied nor viewed.
    """
    run("""
        driver = CudaDriver()
        assert allocation_granularity(driver) == GRANULE
        assert allocation_granularity(driver, recommended=True) == 2 * GRANULE
        handle, address = driver.create(3 * GRANULE), driver.reserve(3 * GRANULE)
        os.close(driver.export(handle))
        assert driver.memory(Location.DEVICE) == MemoryInfo(16 << 30, (16 << 30) - 3 * GRANULE)
        assert driver.memory(Location.HOST) is None
        driver.synchronize()
        assert driver.processes() == []
        driver.map(address, handle)
        driver.set_access(address, 3 * GRANULE, AccessFlags.READ_WRITE)
        assert driver.processes() == [(os.getpid(), 3 * GRANULE)]
        with pytest.raises(DriverError) as caught:
            driver.read(address, 1)
        assert (caught.value.call, caught.value.name, caught.value.code) == (
            "cuMemcpyDtoH", "CUDA_ERROR_INVALID_CONTEXT", 201)
        with pytest.raises(DriverError, match="CUDA_ERROR_NOT_SUPPORTED"):
            driver.view(address, 1)
        driver.unmap(address, 3 * GRANULE)
        driver.release(handle)
        assert driver.memory(Location.DEVICE).used == 0
        assert fake.fake_cuda_contexts() == 0
        driver.close()
    """)


def test_a_worker_retains_one_context_and_lets_it_go(run: Run) -> None:
    """It is current on each thread that calls. While a graph is captured nobody may wait for the card."""
    run("""
        driver = CudaDriver(context=True)
        assert fake.fake_cuda_contexts() == 1
        handle, address = driver.create(GRANULE), driver.reserve(GRANULE)
        driver.map(address, handle)
        driver.set_access(address, GRANULE, AccessFlags.READ_WRITE)
        seen = []
        thread = threading.Thread(target=lambda: (driver.write(address, b"x"), driver.synchronize(), seen.append(1)))
        thread.start(); thread.join()
        assert seen == [1]
        with pytest.raises(DriverOutOfMemory, match=" 512.0 TiB ") as refused:
            driver.reserve(1 << 49)  # CUDA says that it is out of memory, and a reservation takes none
        assert refused.value.name == "CUDA_ERROR_OUT_OF_MEMORY"
        pinned, synchronize = driver.pin(GRANULE), driver.synchronize

        def refusing():
            raise DriverError("cuCtxSynchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", 900)

        driver.synchronize = refusing
        with pytest.raises(DriverError, match="CAPTURE"):
            driver.unpin(pinned)
        driver.synchronize = synchronize
        driver.unpin(pinned)
        with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_VALUE"):
            driver.unpin(pinned)
        driver.close()
        driver.close()
        assert fake.fake_cuda_contexts() == 0
        links = [os.readlink(path) for n in os.listdir("/proc/self/fd") if os.path.islink(path := f"/proc/self/fd/{n}")]
        assert not [link for link in links if "memfd:fake" in link]
    """)


def test_the_card_is_described_and_found_by_its_uuid(run: Run) -> None:
    """Ordinals move with CUDA_VISIBLE_DEVICES; the UUID, and NVML's index, do not."""
    run(f"""
        info = CudaDriver().device
        assert info == DeviceInfo("GPU-{FAKE_UUID}", "Fake GPU", "cuda", GRANULE, 3, "1.2.3", 0, 2 * GRANULE), info
        assert CudaDriver(info.uuid).device == info
        assert CudaDriver(info.uuid.upper()).device == info
        for other in ("GPU-00000000-0000-0000-0000-000000000000", "", 7, -1):
            with pytest.raises(DriverUnavailable, match="no GPU") as caught:
                CudaDriver(other)
    """)


def test_extents_are_made_for_rdma_where_the_card_can(run: Run) -> None:
    """`gpuDirectRDMACapable` is decided at creation and never later; host memory is not asked for it."""
    code = """
        driver = CudaDriver()
        driver.create(GRANULE, Location.HOST)
        assert fake.fake_cuda_rdma() == 0
        driver.create(GRANULE)
        print(fake.fake_cuda_rdma())
    """
    assert run(code) == "1\n"
    assert run(code, FAKE_CUDA_LACKS="110") == "0\n"


@pytest.mark.parametrize(("attribute", "lack"), [("102", "virtual memory management"), ("103", "file descriptors")])
def test_a_card_that_cannot_lend_is_refused(run: Run, attribute: str, lack: str) -> None:
    code = f"""
        with pytest.raises(DriverUnavailable, match="{lack}"):
            CudaDriver()
    """
    run(code, FAKE_CUDA_LACKS=attribute)


def test_missing_packages_are_said_with_what_to_install(run: Run) -> None:
    run(r"""
        for name in ("pynvml", "cuda.bindings.driver"):
            kept = sys.modules.pop(name, None)
            sys.modules[name] = None
            with pytest.raises(DriverUnavailable, match=r"pip install .membroker\[cuda\]"):
                CudaDriver()
            del sys.modules[name]
    """)


def test_a_construction_that_fails_leaves_no_context_and_no_nvml(run: Run) -> None:
    """NVML does not know the card, or CUDA fails after NVML has begun: what was started before is stopped again."""
    run("""
        import pynvml
        import cuda.bindings.driver as bindings
        known = pynvml.nvmlDeviceGetHandleByUUID
        pynvml.nvmlDeviceGetHandleByUUID = lambda uuid: (_ for _ in ()).throw(pynvml.NVMLError(6))
        for said in ("NVML_ERROR_NOT_FOUND", "cuMemGetAllocationGranularity failed: CUDA_ERROR_999"):
            with pytest.raises(DriverError, match=said):
                CudaDriver(context=True)
            assert fake.fake_cuda_contexts() == 0
            with pytest.raises(pynvml.NVMLError_Uninitialized):
                pynvml.nvmlShutdown()
            pynvml.nvmlDeviceGetHandleByUUID = known
            bindings.cuMemGetAllocationGranularity = lambda *_: (bindings.CUresult.CUDA_ERROR_UNKNOWN, 0)
    """)


"""As on GB10 and Jetson: NVML_ERROR_NOT_SUPPORTED."""


@pytest.mark.usefixtures("run")
def test_a_container_without_nvml_is_told_what_to_set(tmp_path: Path) -> None:
    """NVIDIA_DRIVER_CAPABILITIES=compute brings libcuda into a container and leaves NVML out."""
    libraries = build_fake_cuda(tmp_path / "fake")
    (libraries / "libnvidia-ml.so.1").unlink()
    code = """
        with pytest.raises(DriverUnavailable, match="NVIDIA_DRIVER_CAPABILITIES.*compute,utility"):
            CudaDriver()
    """
    run_beside_fake_cuda(libraries, _PRELUDE + textwrap.dedent(code))


def test_after_a_fork_calls_raise_and_abandon_calls_no_cuda(run: Run) -> None:
    """CUDA in a forked child can hang; abandoning only closes descriptors."""
    run("""
        driver = CudaDriver(context=True)
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(DriverError, match="CUDA_ERROR_NOT_INITIALIZED"):
                    driver.create(GRANULE)
                driver._cuda = driver._call = None
                driver.abandon()
                with pytest.raises(DriverError, match="CUDA_ERROR_DEINITIALIZED"):
                    driver.create(GRANULE)
                driver.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """)


def test_abandoning_closes_the_cards_descriptors_and_no_others(tmp_path: Path) -> None:
    from membroker.vmm.cuda.process import close_descriptors

    nvidia, other = tmp_path / "nvidiactl", tmp_path / "other"
    nvidia.touch()
    other.touch()
    gone, kept = os.open(nvidia, os.O_RDONLY), os.open(other, os.O_RDONLY)
    close_descriptors(f"{tmp_path}/nvidia")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(gone)
    os.close(kept)


def test_a_machine_without_a_driver_gets_a_sentence() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a libcuda")
    code = "from membroker.vmm import open_driver; open_driver('cuda')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "DriverUnavailable: cuInit failed: MISSING (0): there is no NVIDIA driver here" in done.stderr
