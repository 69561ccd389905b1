"""`TorchMemory` on a real GPU: what torch borrows, caches and releases, its refusals, streams and threads."""

from __future__ import annotations

import pytest
from tests.support.daemons import Daemon
from tests.support.torch_workers import run

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def test_forward_and_backward_are_brokered(daemon: Daemon) -> None:
    """Weights, gradients, the optimizer's state, and every segment that torch has, also autograd's threads' own."""
    run(
        daemon,
        """
        model = client.model("gpu", limit="2GiB")
        assert not torch.cuda.is_initialized() or torch.cuda.memory_reserved() == 0
        with TorchMemory(model) as memory:
            with memory.use():
                net = Net().to(memory.device)
                optimizer = torch.optim.AdamW(net.parameters())
                threads = set()
                net.inner.weight.register_hook(lambda gradient: threads.add(threading.get_ident()))
                for _ in range(5):
                    tokens = torch.randint(64, (64, 128), device=memory.device)
                    loss = torch.nn.functional.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            assert threads and threading.get_ident() not in threads, "autograd has a thread of its own for a GPU"
            for weight in net.parameters():
                assert memory.owns(weight) and memory.owns(weight.grad)
                assert all(memory.owns(state) for state in optimizer.state[weight].values() if state.is_cuda)
            there = {segment["address"] for segment in torch.cuda.memory_snapshot()}
            lent = set(memory._lending._lent)
            assert there == lent, (there - lent, lent - there)
            assert used() == memory.lent_bytes == torch.cuda.memory_reserved() > 0
            del net, optimizer, tokens, loss, weight
            gc.collect()
        assert memory.lent_bytes == 0 and used() == 0, (memory, used())
        """,
    )


def test_out_of_memory_is_torchs_own(daemon: Daemon) -> None:
    """torch's exception, with the broker's sentence as a note; what was there computes on, and less is lent."""
    (sentence,) = run(
        daemon,
        """
        model = client.model("gpu", limit="256MiB")
        with TorchMemory(model) as memory:
            with memory.use():
                kept = torch.ones(MIB, device=memory.device)
            for _ in range(3):
                try:
                    with memory.use():
                        torch.empty(512 * MIB, dtype=torch.uint8, device=memory.device)
                except torch.OutOfMemoryError as error:
                    (note,) = error.__notes__
                else:
                    raise AssertionError("it was lent beyond the limit")
            assert isinstance(memory.last_denial, membroker.OutOfMemory) and memory.last_denial.level == "model"
            with memory.use():
                assert (kept + torch.ones(MIB, device=memory.device)).sum().item() == 2 * MIB
                blocks = []
                try:
                    while True:
                        blocks.append(torch.empty(20 * MIB, dtype=torch.uint8, device=memory.device))
                except torch.OutOfMemoryError:
                    blocks.clear()
            with memory.use():
                torch.empty(200 * MIB, dtype=torch.uint8, device=memory.device)
            assert memory.refusals == 4
            del kept
        assert used() == 0
        print(note)
        """,
    )
    assert "may hold 256.0 MiB" in sentence


def test_what_a_live_pool_cannot_give_back_and_trim_can(daemon: Daemon) -> None:
    """Fact: empty_cache returns nothing of a live MemPool. `trim` returns every segment without a tensor."""
    run(
        daemon,
        """
        model = client.model("gpu")
        with TorchMemory(model) as memory, memory.use():
            tensors = [torch.full((30 * MIB,), number, dtype=torch.uint8, device="cuda") for number in range(100)]
            assert used() == memory.lent_bytes >= 3000 * MIB
            before, tensors = memory.lent_bytes, tensors[70:]
            torch.cuda.empty_cache()
            assert used() == memory.lent_bytes == before
            assert memory.trim() >= 70 * 30 * MIB
            assert 900 * MIB <= used() == memory.lent_bytes <= 1000 * MIB
            for number, one in enumerate(tensors, 70):
                assert one.eq(number).all().item()
            more = [torch.full((30 * MIB,), 1, dtype=torch.uint8, device="cuda") for _ in range(70)]
            assert all(memory.owns(one) for one in more)
            del tensors, more, one
            memory.trim()
            assert used() == memory.lent_bytes <= 100 * MIB      # what workspaces there are
        assert used() == 0
        """,
    )


def test_a_refusal_gives_back_what_torch_caches(daemon: Daemon) -> None:
    """Fact: torch frees the cached segments of a pool with the use count 0, also while it routes to that pool.

    So an allocation that the limit refuses gets memory after all. Then `torch.cuda.empty_cache` works as always.
    """
    run(
        daemon,
        """
        model = client.model("gpu", limit="128MiB")
        with TorchMemory(model) as memory:
            for _ in range(3):      # an open pool cannot be routed to again: each block gets a new one
                before = memory.reclaimed_bytes
                with memory.use():
                    kept = torch.full((20 * MIB,), 7, dtype=torch.uint8, device="cuda")
                    cached = [torch.empty(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
                    cached.clear()
                    one = torch.full((60 * MIB,), 8, dtype=torch.uint8, device="cuda")
                    assert memory.owns(one) and used() == memory.lent_bytes <= 90 * MIB
                    assert memory.reclaimed_bytes - before == 80 * MIB and memory.refusals == 0
                    assert kept[0].item() == kept[-1].item() == 7 and one[0].item() == one[-1].item() == 8
                    del one
                    torch.cuda.empty_cache()
                    large = torch.empty(90 * MIB, dtype=torch.uint8, device="cuda")
                    assert memory.owns(large) and kept[0].item() == kept[-1].item() == 7
                    del large
                assert memory.lent_bytes <= 30 * MIB, "an open pool keeps no cache after the block"
                del kept
                memory.trim()
        assert used() == 0
        """,
    )


def test_trim_frees_what_other_streams_used(daemon: Daemon) -> None:
    """Fact: while it routes to a pool, torch does not free a tensor that was passed to `record_stream`."""
    run(
        daemon,
        """
        model = client.model("gpu", limit="128MiB")
        with TorchMemory(model) as memory, memory.use():
            side = torch.cuda.Stream()
            passed = torch.ones(100 * MIB, dtype=torch.uint8, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                passed.record_stream(side)
                passed.add_(1)
            del passed
            torch.cuda.synchronize()
            try:
                torch.empty(90 * MIB, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                assert memory.refusals == 1
            else:
                raise AssertionError("torch has learned to free it: say so in the docs")
            assert memory.trim() >= 100 * MIB
            assert memory.owns(torch.empty(90 * MIB, dtype=torch.uint8, device="cuda"))
        assert used() == 0, used()
        """,
    )


def test_no_thread_waits_for_another(daemon: Daemon) -> None:
    """Threads that borrow, free with the interpreter's lock held, empty caches, trim, and speak with the broker.

    With a callback under torch's allocator lock this stands still within seconds: one thread has that lock and waits
    for the interpreter's, another frees a tensor with the interpreter's lock and waits for torch's.
    """
    run(
        daemon,
        """
        sys.setswitchinterval(1e-5)
        model = client.model("gpu", limit="3GiB")
        failures = []
        def guarded(work):
            def run():
                try:
                    work()
                except BaseException as error:
                    failures.append(error)
            return threading.Thread(target=run)
        stop = threading.Event()
        with TorchMemory(model) as memory, memory.use():
            def borrow():
                for number in range(60):
                    try:
                        blocks = [torch.empty((20 + 2 * n) * MIB, dtype=torch.uint8, device="cuda") for n in range(8)]
                    except torch.OutOfMemoryError:
                        pass
                    blocks = None
            def spared():  # the borrowers may have it all
                return contextlib.suppress(torch.OutOfMemoryError, membroker.OutOfMemory)
            def free():
                while not stop.is_set():
                    with spared():
                        small = [torch.empty(1024, device="cuda") for _ in range(64)]
                        del small[::2]
                        del small
            def empty():
                while not stop.is_set():
                    torch.cuda.empty_cache()
                    torch.cuda.memory_stats()
            def speak():
                while not stop.is_set():
                    with spared():
                        model.allocate("2MiB").close()
                    model.stats()
            def learn():
                weight = torch.randn(512, 512, device="cuda", requires_grad=True)
                while not stop.is_set():
                    with spared():
                        (weight @ weight).sum().backward()
                    weight.grad = None
            beside = [guarded(work) for work in (free, free, empty, speak, learn)]
            borrowers = [guarded(borrow) for _ in range(3)]
            for thread in beside + borrowers:
                thread.start()
            while any(thread.is_alive() for thread in borrowers):
                memory.trim()
            stop.set()
            for thread in beside:
                thread.join()
            assert not failures, failures
        """,
    )


def test_a_closed_client_and_the_end_of_the_process(daemon: Daemon) -> None:
    """Tensors compute on when the client is closed under them, and a process may end in the middle of everything."""
    run(
        daemon,
        """
        model = client.model("gpu")
        memory = TorchMemory(model)
        with memory.use():
            one = torch.ones(MIB, device=memory.device)
            graph = torch.cuda.CUDAGraph()
            with memory.capture(graph):
                two = one + 1
            graph.replay()
            assert (one + two).sum().item() == 3 * MIB
            client.close()
            assert (one + two).sum().item() == 3 * MIB
            try:
                torch.empty(64 * MIB, device=memory.device)
            except torch.OutOfMemoryError:
                assert isinstance(memory.last_denial, membroker.ClosedError)
            else:
                raise AssertionError("lent without a client")
            memory._enter()      # routed to the very end
        """,
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [("expandable_segments:True", "remove that setting"), ("backend:cudaMallocAsync", "remove that setting")],
)
def test_settings_that_do_not_go_together(daemon: Daemon, setting: str, words: str) -> None:
    """torch's own settings that would go around the broker are refused in a sentence."""
    (sentence,) = run(
        daemon,
        """
        model = client.model("gpu")
        try:
            TorchMemory(model)
        except membroker.InvalidRequest as error:
            print(error)
        """,
        {"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting},
    )
    assert words in sentence


def test_other_settings_of_torchs_stay(daemon: Daemon) -> None:
    """What the user has set is kept beside the one setting that this needs."""
    run(
        daemon,
        """
        model = client.model("gpu")
        with TorchMemory(model) as memory:
            settings = torch.cuda.memory._snapshot()["allocator_settings"]
            assert settings["release_lock_on_cudamalloc"], settings
            assert settings["max_split_size"] == 64 * MIB, settings
        """,
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
    )
