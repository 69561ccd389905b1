"""CUDA graphs over borrowed memory, and recalls beside torch's cache and its captures."""

from __future__ import annotations

import pytest
from tests.support.daemons import Daemon
from tests.support.torch_workers import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_a_graph_is_captured_and_replayed(daemon: Daemon) -> None:
    """Its memory is the broker's, lies still between replays whatever else is allocated, and comes back with it."""
    run(
        daemon,
        """
        model = client.model("gpu", limit="2GiB")
        torch.manual_seed(0)
        with TorchMemory(model) as memory:
            with memory.use():
                net = Net().to(memory.device).requires_grad_(False)
                tokens = torch.randint(64, (32, 128), device=memory.device)
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for _ in range(3):
                        net(tokens)
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with memory.capture(graph):
                    found = net(tokens)
                assert memory.owns(found)
                for _ in range(5):
                    tokens.copy_(torch.randint(64, (32, 128), device=memory.device))
                    junk = [torch.full((8 * MIB,), -1.0, device=memory.device) for _ in range(4)]
                    del junk
                    graph.replay()
                    assert torch.allclose(found, net(tokens), atol=1e-3)
                    memory.trim()
                with_graph = memory.lent_bytes
                try:
                    with memory.capture(torch.cuda.CUDAGraph()):
                        memory.trim()
                except membroker.InvalidRequest as error:
                    print(error)
                assert torch.allclose(found, net(tokens), atol=1e-3)
            del graph, found
            gc.collect()
            torch.cuda.synchronize()
            memory.trim()
            assert memory.lent_bytes < with_graph
            del net, tokens
            gc.collect()
        assert used() == 0, used()
        """,
    )


_TWO = """
        import os, time
        blue = membroker.connect(os.environ["BLUE"]).model("sure")
        def ask():
            with blue.allocate("2GiB", timeout=60) as found:
                told.append(found.size)
        told = []
        asking = threading.Thread(target=ask)
        model = client.model("gpu")
"""


def test_a_recall_releases_what_torch_caches(guaranteed: Daemon) -> None:
    """torch has cached what another tenant is guaranteed. The tenant gets it, and living tensors stay as they are."""
    run(
        guaranteed,
        _TWO
        + """
        with TorchMemory(model) as memory, memory.use():
            kept = torch.full((MIB << 6,), 3.0, device=memory.device)
            for _ in range(2):
                while True:  # what was recalled for blue is held for it a little longer
                    try:
                        junk = torch.empty(2 << 30, dtype=torch.uint8, device=memory.device)
                        break
                    except torch.OutOfMemoryError:
                        time.sleep(0.05)
                del junk
                ask()
            assert memory.owns(kept)
            assert float(kept.sum()) == 3.0 * (MIB << 6)
            assert told == [2 << 30] * 2
            del kept
        """,
        {"BLUE": str(guaranteed.endpoint("blue"))},
    )


def test_a_capture_outlasts_recalls_and_garbage(guaranteed: Daemon) -> None:
    """Amid a capture another tenant wants its memory, and a buffer becomes garbage: both wait for its end."""
    run(
        guaranteed,
        _TWO
        + """
        with TorchMemory(model) as memory:
            with memory.use():
                junk = torch.empty(2 << 30, dtype=torch.uint8, device=memory.device)
                del junk
                tokens = torch.full((256, 256), 2.0, device=memory.device)
                side = torch.cuda.Stream()
                with torch.cuda.stream(side):
                    tokens @ tokens
                torch.cuda.synchronize()
                garbage = model.allocate("2MiB")
                spare = model.pool(page_size="2MiB", virtual_capacity="64MiB")
                spare.prepare("4MiB")
                graph = torch.cuda.CUDAGraph()
                with memory.capture(graph):
                    found = tokens @ tokens
                    asking.start()
                    del garbage
                    gc.collect()
                    while not client._recalls._open:
                        time.sleep(0.001)
                    assert spare.stats().spare_pages == 2
                    found = found + 1
                asking.join(60)
                assert told == [2 << 30]
                assert spare.stats().spare_pages == 0
                graph.replay()
                torch.cuda.synchronize()
                assert float(found[0, 0]) == 2.0 * 2.0 * 256 + 1
            del graph, found, tokens
            gc.collect()
            torch.cuda.synchronize()
            memory.trim()
        """,
        {"BLUE": str(guaranteed.endpoint("blue"))},
    )
