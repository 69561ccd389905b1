"""Tensors over borrowed memory on a real GPU: every dtype, both locations, lifetimes."""

from __future__ import annotations

import pytest
from tests.support.daemons import Daemon
from tests.support.torch_workers import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


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
