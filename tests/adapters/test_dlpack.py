"""Borrowed memory as tensors of NumPy and PyTorch, over the host driver and a real daemon: no copy, no dangling."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.garbage import collect
from tests.support.sizes import MIB, PAGE

import membroker
from membroker import Client, dlpack
from membroker.checkpoint import publish_arrays
from membroker.dlpack import DlpackTensor, export
from membroker.errors import ClosedError, InvalidRequest, NotMapped
from membroker.model import Model

np = pytest.importorskip("numpy", reason="DLPack is tested with NumPy: pip install numpy")

pytestmark = pytest.mark.shared_daemon

NUMPYS = {"BOOL": "bool", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64"} | {
    f"{letter}{bits}": f"{name}{bits}" for letter, name in (("U", "uint"), ("I", "int")) for bits in (8, 16, 32, 64)
}


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="this is a test with PyTorch: its CPU build is enough")


def consume(tensor: DlpackTensor, by: str) -> Any:
    """Import a tensor with one of the frameworks that run here, as its users would."""
    return pytest.importorskip(by, reason=f"{by} is not installed").from_dlpack(tensor)


frameworks = pytest.mark.parametrize("by", ["numpy", "torch"])


class TestBytes:
    @frameworks
    def test_both_sides_see_the_same_bytes(self, model: Model, by: str) -> None:
        """An engine puts its cache into borrowed memory: what the kernel writes is where the broker lent it."""
        with model.allocate("1MiB") as buffer:
            array = consume(export(buffer, (16, 3), "F32", offset=64), by)
            assert tuple(array.shape) == (16, 3)
            array[2, 1] = 1.5
            assert np.frombuffer(buffer.view(), "<f4")[16 + 7] == 1.5
            del array
            # A checkpoint has a temperature of shape (), and an adapter of no rows at the very end.
            assert tuple(consume(export(buffer, (), "F32"), by).shape) == ()
            assert tuple(consume(export(buffer, (0, 5), "F32", offset=MIB), by).shape) == (0, 5)
        with pytest.raises(ClosedError):
            export(buffer, (4,), "U8")

    @frameworks
    def test_every_dtype_that_numpy_has(self, model: Model, by: str) -> None:
        with model.allocate("1MiB") as buffer:
            for dtype, name in NUMPYS.items():
                array = consume(export(buffer, (2, 3), dtype), by)
                assert str(array.dtype).removeprefix("torch.") == name
                array.reshape(-1)[1:2] = 1
                assert bytes(np.asarray(array).tobytes()) == bytes(buffer.view()[: 6 * array.itemsize])
                del array

    def test_a_range_of_a_pool(self, model: Model, torch: Any) -> None:
        """A cache in a pool: only what is backed can be exported, and what is exported cannot be freed."""
        with model.pool(page_size=PAGE) as pool:
            memory = pool.allocate(PAGE, 2 * PAGE)
            tensor = torch.from_dlpack(export(pool, (PAGE,), "BF16", offset=PAGE))
            tensor.fill_(1)
            assert bytes(pool.view(3 * PAGE - 2, 2)) == b"\x80\x3f"
            with pytest.raises(NotMapped):
                export(pool, (1,), "U8", offset=0)
            with pytest.raises(BufferError):
                pool.free(2 * PAGE, PAGE)
            del tensor
            every = torch.from_dlpack(memory)  # the range itself, as a buffer
            assert (every.shape, every.dtype, every[-1].item()) == ((2 * PAGE,), torch.uint8, 0x3F)
            del every
            pool.free(PAGE, 2 * PAGE)


class TestRefused:
    @pytest.mark.parametrize("shape", [(MIB,), (-1,), (1.0,), (1 << 62, 1 << 62), (0, 1 << 62), (1,) * 33])
    def test_what_does_not_lie_in_the_buffer(self, model: Model, shape: tuple[int, ...]) -> None:
        """A layout that was computed wrong is told so before a kernel runs over its neighbour."""
        with model.allocate("1MiB") as buffer:
            with pytest.raises(InvalidRequest):
                export(buffer, shape, "F32")
            for dtype, offset in (("F32", -4), ("U8", MIB), ("F32", 2), ("F4", 0)):
                with pytest.raises(InvalidRequest):
                    export(buffer, (1,), dtype, offset)

    def test_another_device_a_copy_a_stream(self, model: Model) -> None:
        with model.allocate("1MiB") as buffer:
            tensor = export(buffer, (4,), "U8")
            for wish in ({"dl_device": (dlpack.CUDA, 0)}, {"copy": True}, {"stream": 1}):
                with pytest.raises(BufferError):
                    tensor.__dlpack__(**wish)  # type: ignore[arg-type]
            with pytest.raises(AttributeError):
                tensor.__cuda_array_interface__
            del tensor


class TestReadOnly:
    """Segments that are sealed, or were attached."""

    @pytest.fixture
    def sealed(self, model: Model, client: Client) -> Iterator[membroker.Segment]:
        with publish_arrays(model, "weights", {"w": np.arange(8, dtype="<f4")}) as segment:
            yield segment
            client.delete_segment("llama/weights")

    def test_numpy_honours_it(self, sealed: membroker.Segment, client: Client) -> None:
        info = sealed.index()["w"]
        with client.attach("llama/weights") as attached:
            for segment in (sealed, attached):
                array = np.from_dlpack(export(segment, info.shape, info.dtype, info.offset))
                assert not array.flags.writeable
                assert array.tolist() == list(range(8))
                del array

    def test_who_cannot_be_told_is_refused_or_lied_to_on_request(self, sealed: membroker.Segment) -> None:
        """JAX asks for no version: nobody writes through it, so it may have the memory without the flag."""
        info = sealed.index()["w"]
        with pytest.raises(BufferError, match="ignore_read_only"):
            export(sealed, info.shape, info.dtype, info.offset).__dlpack__()
        tensor = export(sealed, info.shape, info.dtype, info.offset, ignore_read_only=True)
        assert '"dltensor"' in repr(tensor.__dlpack__())

    def test_a_writer_writes_by_tensors_and_seals_when_they_are_gone(
        self, model: Model, client: Client, torch: Any
    ) -> None:
        """Weights are computed straight into a segment: a tensor that could still write them puts off the seal."""
        with model.create_segment("made", "1MiB") as segment:
            tensor = torch.from_dlpack(export(segment, (4,), "F32"))
            tensor.copy_(torch.arange(4.0))
            with pytest.raises(BufferError):
                segment.seal()
            del tensor
            segment.seal()
            assert np.from_dlpack(export(segment, (4,), "F32")).tolist() == [0, 1, 2, 3]
        client.delete_segment("llama/made")


class TestLives:
    @frameworks
    def test_closing_waits_for_the_last_tensor(self, daemon: Daemon, model: Model, by: str) -> None:
        """An engine closes its buffer while a request still computes on a slice of it: nothing is pulled away."""
        buffer = model.allocate(PAGE)
        array, other = (consume(export(buffer, (PAGE,), "U8"), by) for _ in range(2))
        part = array[7:9]
        buffer.close()
        del array
        part[:] = 3
        assert other[7:9].tolist() == [3, 3]
        del other
        assert daemon.books().lent_bytes == PAGE
        del part
        until(lambda: daemon.books().lent_bytes == 0)

    @frameworks
    def test_a_tensor_keeps_a_buffer_that_nobody_else_knows(self, daemon: Daemon, by: str) -> None:
        """Also when its client was closed."""
        with membroker.connect(str(daemon.endpoint())) as client:
            array = consume(export(client.model("short").allocate(PAGE), (PAGE,), "U8"), by)
        collect()
        array[:3] = 5
        assert daemon.books().lent_bytes == PAGE
        del array
        until(lambda: daemon.books().lent_bytes == 0)

    @pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (2, 0)])
    def test_a_capsule_that_nobody_consumes(
        self, daemon: Daemon, model: Model, version: tuple[int, int] | None
    ) -> None:
        buffer = model.allocate(PAGE)
        capsule = export(buffer, (4,), "BF16").__dlpack__(max_version=version)
        buffer.close()
        assert daemon.books().lent_bytes == PAGE
        del capsule
        until(lambda: daemon.books().lent_bytes == 0)

    @pytest.mark.parametrize("by", ["numpy", "torch", "nobody"])
    def test_an_exception_survives_the_tensor_that_it_throws_away(self, model: Model, by: str) -> None:
        """A tensor that waits on the interpreter's stack dies while the exception is on its way.

        A deleter in Python would run at that moment, and lose it: "error return without exception set".
        """
        with model.allocate("1MiB") as buffer:
            tensor = export(buffer, (4,), "U8")
            make = DlpackTensor.__dlpack__ if by == "nobody" else partial(consume, by=by)
            with pytest.raises(ZeroDivisionError):
                print(make(tensor), 1 / 0)
            del tensor


@pytest.mark.deep
def test_tensors_that_outlive_the_interpreter(daemon: Daemon) -> None:
    """A program ends with tensors in its globals, in a cycle, and in a thread: no crash, no word on stderr."""
    pytest.importorskip("torch")
    code = f"""
        import threading, numpy, torch, membroker
        from membroker.dlpack import export
        client = membroker.connect({str(daemon.endpoint())!r})
        buffer = client.model("last").allocate("1MiB")
        tensor = torch.from_dlpack(export(buffer, (4,), "BF16"))
        array = numpy.from_dlpack(export(buffer, (4,), "F32"))
        capsule = export(buffer, (4,), "F32").__dlpack__()
        cycle = [tensor, array]
        cycle.append(cycle)
        kept = torch.nn.Parameter(torch.from_dlpack(export(buffer, (4,), "F32")))
        threading.Thread(target=lambda _tensor: threading.Event().wait(), args=(tensor,), daemon=True).start()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=DEADLINE_SECONDS
    )
    assert (done.returncode, done.stderr) == (0, "")
    until(lambda: daemon.books().lent_bytes == 0)


def test_what_a_card_would_hand_out() -> None:
    """The memory of GPU 1, as far as no GPU is needed: the device in the capsule, and the CUDA array interface."""
    tensor = DlpackTensor(None, 0x7F00_0000_0000, (2, 3), "F16", (dlpack.CUDA, 1), read_only=True)
    assert tensor.__dlpack_device__() == (2, 1)
    interface = {"shape": (2, 3), "typestr": "<f2", "data": (0x7F00_0000_0000, True), "version": 3}
    assert tensor.__cuda_array_interface__ == interface
    capsule = tensor.__dlpack__(stream=2, max_version=(1, 0), dl_device=(2, 1))
    assert '"dltensor_versioned"' in repr(capsule)
    inside = dlpack._ManagedVersioned.from_address(dlpack._pointer_in(capsule, b"dltensor_versioned"))
    assert (inside.tensor.device_type, inside.tensor.device_id, inside.flags) == (2, 1, 1)
    assert (inside.tensor.data, inside.tensor.code, inside.tensor.bits) == (0x7F00_0000_0000, 2, 16)
    with pytest.raises(AttributeError, match="BF16"):
        DlpackTensor(None, 0x1000, (2,), "BF16", (dlpack.CUDA, 1)).__cuda_array_interface__
