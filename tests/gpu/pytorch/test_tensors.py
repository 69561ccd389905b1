"""Tensors over borrowed memory on a real GPU: every dtype, both locations, lifetimes."""

from __future__ import annotations

import pytest
from tests.support.daemons import Daemon
from tests.support.torch_workers import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_tensors_in_every_dtype(daemon: Daemon) -> None:
    """The GPU's bytes, in each dtype that torch has, at the address that the buffer has."""
    run(
        daemon,
        """
        model = client.model("gpu")
        names = "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 "
        names += "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
        with model.allocate("2MiB") as buffer:
            for name in names.split():
                dtype = getattr(torch, name, None)
                if dtype is None:
                    continue
                one = tensor(buffer, (8, 4), dtype, offset=4096)
                assert (one.device, one.dtype, tuple(one.shape)) == (torch.device("cuda", 0), dtype, (8, 4)), name
                assert one.data_ptr() == buffer.address + 4096
                one.view(torch.uint8).fill_(3)
                torch.cuda.synchronize()
                size = 32 * dtype.itemsize
                assert model.driver.read(buffer.address + 4096, size) == b"\\3" * size, name
                model.driver.write(buffer.address + 4096, b"\\1" * size)
                assert one.view(torch.uint8).eq(1).all().item(), name
                del one
            left = tensor(buffer, (64, 64), torch.bfloat16).fill_(0.5)
            assert (left @ left).eq(16).all().item()
            del left
        assert used() == 0
        """,
    )


def test_a_tensor_on_memory_of_the_host(daemon: Daemon) -> None:
    """An extent at the host is a CUDA tensor as well: the GPU reads it over the bus."""
    run(
        daemon,
        """
        model = client.model("gpu")
        with model.allocate("2MiB", location="host") as buffer:
            one = tensor(buffer, (1024,), torch.float32).fill_(2)
            assert one.sum().item() == 2048
            del one
        """,
    )


def test_lifetimes_and_waiting(daemon: Daemon) -> None:
    """A tensor keeps its buffer; a buffer that is closed under running work is unmapped after it."""
    run(
        daemon,
        """
        model = client.model("gpu", virtual_capacity="64MiB")
        buffer = model.allocate("32MiB")
        view = tensor(buffer, (1024, 1024), torch.float32).fill_(1)[5]
        buffer.close()
        del buffer
        gc.collect()
        assert view.sum().item() == 1024 and used() == 32 * MIB

        torch.cuda._sleep(1)
        view.add_(0)                           # the first launch of a kernel waits for all that runs
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)       # about a second
        view.add_(1)
        done = torch.cuda.Event()
        done.record()
        assert not done.query()
        del view                               # the background thread unmaps, after the work
        while used():
            pass
        assert done.query(), "unmapped before the work was done"

        buffer = model.allocate("32MiB")
        one = tensor(buffer, (1024,), torch.float32)
        torch.cuda._sleep(2_000_000_000)
        one.fill_(1)
        done.record()
        del one
        buffer.close()
        assert done.query(), "close did not wait"

        pool = model.pool(page_size="2MiB")
        pool.allocate(0, "8MiB")
        one = tensor(pool, (MIB,), torch.int32, offset=MIB)
        try:
            pool.free(0, "2MiB")
        except BufferError as error:
            print(error)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000_000)
            one.fill_(1)
            done.record()
        del one
        pool.free(0, "8MiB")
        assert done.query(), "free did not wait"
        pool.close()
        torch.cuda.synchronize()
        assert used() == 0
        """,
    )
