"""Buffers of managed memory on the fake GPU, and the examples of docs/managed.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, running
from tests.support.sizes import MIB

from membroker.errors import InvalidRequest
from membroker.managed.hints import UnifiedBuffer
from membroker.vmm import Driver

PAGE = Path(__file__).parents[3] / "docs" / "managed.md"
Run = Callable[..., str]


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
            with pytest.raises(ClosedError):
                use()
        assert asked() == before
    """)


def test_a_living_view_keeps_the_memory(run: Run) -> None:
    """An array that leaves the block is good until it dies, in whatever thread: then the memory goes, once.

    So it is of a buffer that is forgotten. One that cannot be had leaves nothing.
    """
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
        buffer = UnifiedBuffer(driver, MIB)
        view = buffer.view()
        del buffer
        gc.collect()
        assert asked().count("cuMemFree") == 1
        del view
        gc.collect()
        assert asked().count("cuMemFree") == 2
        before = asked()
        with pytest.raises(DeviceFailure, match="cuMemAllocManaged .*CUDA_ERROR_OUT_OF_MEMORY"):
            UnifiedBuffer(driver, "1TiB")
        gc.collect()
        assert asked() == before
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


def test_a_buffer_of_no_size_is_refused(host: Driver) -> None:
    """Before the driver is looked at: it is the program that is wrong, on any machine."""
    for size in (0, -1, "", "no", 1 << 63, None, 1.5, True):
        with pytest.raises(InvalidRequest):
            UnifiedBuffer(host, size)  # type: ignore[arg-type]


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
            timeout=DEADLINE_SECONDS,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        charged, sentence, left = done.stdout.splitlines()
        assert (charged, left) == (f"charged {16 * MIB}", "charged 0")
        assert sentence.startswith("managed memory needs a GPU, and this is the host driver")
