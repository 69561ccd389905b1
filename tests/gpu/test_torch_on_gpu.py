"""PyTorch on a real card: tensors, the MemPool over the broker, and modules in segments, with a daemon of its own.

Each test runs its workers in processes of their own: an allocator is a process's for good, and a hang or a fault of one
must not be the others'. A worker that hangs says where each of its threads stood. Nothing else may use the card.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.sizes import MIB

from membroker.vmm import DriverUnavailable
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"
SECONDS = 120

_PRELUDE = f"""
import contextlib, faulthandler, gc, hashlib, sys, threading
faulthandler.dump_traceback_later({SECONDS}, exit=True)
import torch
import membroker
from membroker.adapters.torch import TorchMemory, attach_module, publish_module, tensor, without_weights
MIB = 1 << 20
client = membroker.connect(sys.argv[1])

def used():
    return model.stats().books["device"].used_bytes

def digest(net):
    tokens = torch.arange(64, device="cuda").view(4, 16)
    return hashlib.sha256(net(tokens).float().cpu().numpy().tobytes()).hexdigest()

class Net(torch.nn.Module):
    def __init__(self, dtype=torch.float32, width=256):
        super().__init__()
        self.embed = torch.nn.Embedding(64, width, dtype=dtype)
        self.inner = torch.nn.Linear(width, width, dtype=dtype)
        self.head = torch.nn.Linear(width, 64, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.full((width,), 0.5), persistent=False)
    def forward(self, tokens):
        state = self.embed(tokens)
        return self.head(torch.relu(self.inner(state + self.shift.to(state.dtype))))
"""


@pytest.fixture(scope="module", autouse=True)
def _a_card_and_torch() -> None:
    try:
        CudaDriver().close()
    except DriverUnavailable as error:
        pytest.skip(f"no NVIDIA card to test on: {error}")
    torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    if not torch.version.cuda:
        pytest.skip("this PyTorch is built without CUDA")


@pytest.fixture
def card() -> Iterator[Daemon]:
    """A daemon that owns 4 GiB of the card, and 64 MiB of the host."""
    with running({"driver": "cuda", "capacity": "4GiB", "host_capacity": "64MiB"}) as daemon:
        (daemon.root,) = (daemon.directory / "run").glob("gpu-*")
        yield daemon


def start(card: Daemon, code: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start a worker of tenant red that runs `code` after the prelude."""
    command = [sys.executable, "-c", _PRELUDE + textwrap.dedent(code), str(card.endpoint())]
    env = {**os.environ, **(environment or {})}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )


def finish(worker: subprocess.Popen[str]) -> list[str]:
    """Return the lines that a worker wrote; it ended with status 0."""
    out, err = worker.communicate(timeout=SECONDS + 60)
    assert worker.returncode == 0, f"{out}\n{err}"
    return out.splitlines()


def run(card: Daemon, code: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """Run a worker to its end; afterwards nothing of it is lent."""
    lines = finish(start(card, code, environment))
    until(lambda: not card.sessions())
    until(lambda: card.books().lent_bytes + card.books().releasing_bytes == 0)
    return lines


# --- tensors ---


def test_tensors_in_every_dtype(card: Daemon) -> None:
    """The card's bytes, in each dtype that torch has, at the address that the buffer has."""
    run(
        card,
        """
        model = client.register_model("gpu")
        names = "bool uint8 int8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 "
        names += "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2"
        with model.allocate("2MiB") as buffer:
            for name in names.split():
                dtype = getattr(torch, name, None)
                if dtype is None:
                    continue
                one = tensor(buffer, dtype, (8, 4), offset=4096)
                assert (one.device, one.dtype, tuple(one.shape)) == (torch.device("cuda", 0), dtype, (8, 4)), name
                assert one.data_ptr() == buffer.address + 4096
                one.view(torch.uint8).fill_(3)
                torch.cuda.synchronize()
                size = 32 * dtype.itemsize
                assert model.driver.read(buffer.address + 4096, size) == b"\\3" * size, name
                model.driver.write(buffer.address + 4096, b"\\1" * size)
                assert one.view(torch.uint8).eq(1).all().item(), name
                del one
            left = tensor(buffer, torch.bfloat16, (64, 64)).fill_(0.5)
            assert (left @ left).eq(16).all().item()
            del left
        assert used() == 0
        """,
    )


def test_a_tensor_on_memory_of_the_host(card: Daemon) -> None:
    """An extent at the host is a CUDA tensor as well: the card reads it over the bus."""
    run(
        card,
        """
        model = client.register_model("gpu")
        with model.allocate("2MiB", location="host") as buffer:
            one = tensor(buffer, torch.float32, (1024,)).fill_(2)
            assert one.sum().item() == 2048
            del one
        """,
    )


def test_lifetimes_and_waiting(card: Daemon) -> None:
    """A tensor keeps its buffer; a buffer that is closed under running work is unmapped after it."""
    run(
        card,
        """
        model = client.register_model("gpu", virtual_capacity="64MiB")
        buffer = model.allocate("32MiB")
        view = tensor(buffer, torch.float32, (1024, 1024)).fill_(1)[5]
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
        one = tensor(buffer, torch.float32, (1024,))
        torch.cuda._sleep(2_000_000_000)
        one.fill_(1)
        done.record()
        del one
        buffer.close()
        assert done.query(), "close did not wait"

        pool = model.pool(page_size="2MiB")
        pool.allocate(0, "8MiB")
        one = tensor(pool, torch.int32, (MIB,), offset=MIB)
        try:
            pool.deallocate(0, "2MiB")
        except BufferError as error:
            print(error)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(1_000_000_000)
            one.fill_(1)
            done.record()
        del one
        pool.deallocate(0, "8MiB")
        assert done.query(), "deallocate did not wait"
        pool.close()
        torch.cuda.synchronize()
        assert used() == 0
        """,
    )


# --- the MemPool ---


def test_forward_and_backward_are_brokered(card: Daemon) -> None:
    """Weights, gradients, the optimizer's state, and every segment that torch has, also autograd's threads' own."""
    run(
        card,
        """
        model = client.register_model("gpu", limit="2GiB")
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
            assert threads and threading.get_ident() not in threads, "autograd has a thread of its own for a card"
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


def test_out_of_memory_is_torchs_own(card: Daemon) -> None:
    """torch's exception, with the broker's sentence as a note; what was there computes on, and less is lent."""
    (sentence,) = run(
        card,
        """
        model = client.register_model("gpu", limit="256MiB")
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


def test_what_a_live_pool_cannot_give_back_and_trim_can(card: Daemon) -> None:
    """Fact: empty_cache returns nothing of a live MemPool. `trim` returns every segment without a tensor."""
    run(
        card,
        """
        model = client.register_model("gpu")
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


def test_a_refusal_gives_back_what_torch_caches(card: Daemon) -> None:
    """Fact: torch frees the cached segments of a pool with the use count 0, also while it routes to that pool.

    So an allocation that the limit refuses gets memory after all. Then `torch.cuda.empty_cache` works as always.
    """
    run(
        card,
        """
        model = client.register_model("gpu", limit="128MiB")
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


def test_three_threads_train_inside_one_limit(card: Daemon, state: Callable[[str, str], None]) -> None:
    """Each step needs larger tensors than the last, so torch caches what nothing fits into, on three streams.

    Before, the caches held the whole limit after two steps, and every later allocation of every thread was refused. All
    three together fit: 0.5 GiB of activations, and 0.2 GiB of workspaces of cuBLAS. A step that is refused nevertheless
    drops what it has, and is tried again.
    """
    (figures,) = run(
        card,
        """
        import time
        model = client.register_model("gpu", limit="1GiB")
        end = time.monotonic() + 60
        steps, refused, failures = [0] * 3, [0] * 3, []
        def learn(thread):
            net = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1)).cuda()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
            losses = []
            while steps[thread] < 24:
                rows = 4096 + 256 * steps[thread]
                assert time.monotonic() < end, f"no progress: steps {steps}, refused {refused}, {memory.last_denial}"
                try:
                    numbers = torch.randn(rows, 1024, device="cuda")
                    loss = torch.nn.functional.mse_loss(net(numbers), numbers[:, :8].sum(1, keepdim=True))
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
                    steps[thread] += 1
                except torch.OutOfMemoryError:
                    refused[thread] += 1
                numbers = loss = None
            assert losses[-1] < losses[0], losses
            assert all(memory.owns(weight.grad) for weight in net.parameters())
        def work(thread):
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    learn(thread)
            except BaseException as error:
                failures.append(error)
        with TorchMemory(model) as memory:
            start = time.monotonic()
            with memory.use():
                threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            seconds = time.monotonic() - start
            assert not failures, failures
            assert memory.reclaimed_bytes > 0 and memory.refusals >= sum(refused)
        assert used() == 0, used()
        released = memory.reclaimed_bytes // MIB
        print(f"{sum(steps)} steps in {seconds:.1f} s, {sum(refused)} refused; refusals released {released} MiB")
        """,
    )
    state("three threads in one limit", figures)


def test_trim_frees_what_other_streams_used(card: Daemon) -> None:
    """Fact: while it routes to a pool, torch does not free a tensor that was passed to `record_stream`."""
    run(
        card,
        """
        model = client.register_model("gpu", limit="128MiB")
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


def test_several_streams(card: Daemon) -> None:
    """Tensors pass between streams with `record_stream`; nothing is overwritten, and all of it comes back."""
    run(
        card,
        """
        model = client.register_model("gpu", limit="2GiB")
        with TorchMemory(model) as memory:
            streams = [torch.cuda.Stream() for _ in range(4)]
            sums = []
            with memory.use():
                for number in range(50):
                    source = torch.full((4 * MIB,), number, dtype=torch.float32, device="cuda")
                    for stream in streams:
                        stream.wait_stream(torch.cuda.current_stream())
                        with torch.cuda.stream(stream):
                            work = source * 2
                            source.record_stream(stream)
                            sums.append((number, work.mean()))
                    del source, work
                    if number % 10 == 9:
                        torch.cuda.synchronize()
                        memory.trim()
            torch.cuda.synchronize()
            assert all(found.item() == 2 * number for number, found in sums)
            del sums
        assert used() == 0, used()
        """,
    )


def test_a_graph_is_captured_and_replayed(card: Daemon) -> None:
    """Its memory is the broker's, lies still between replays whatever else is allocated, and comes back with it."""
    run(
        card,
        """
        model = client.register_model("gpu", limit="2GiB")
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
        blue = membroker.connect(os.environ["BLUE"]).register_model("sure")
        def ask():
            with blue.allocate("2GiB", wait=60) as found:
                told.append(found.size)
        told = []
        asking = threading.Thread(target=ask)
        model = client.register_model("gpu")
"""


@pytest.fixture
def guaranteed() -> Iterator[Daemon]:
    """As `card`, and half of it is guaranteed to the tenant blue."""
    tenants = {"red": {}, "blue": {"guarantee": "2GiB"}}
    with running({"driver": "cuda", "capacity": "4GiB", "tenants": tenants, "recall_seconds": 30.0}) as daemon:
        (daemon.root,) = (daemon.directory / "run").glob("gpu-*")
        yield daemon


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


def test_a_graph_trains(card: Daemon) -> None:
    """A whole step, backward included, is captured and replayed, and learns as the uncaptured one does."""
    run(
        card,
        """
        model = client.register_model("gpu", limit="2GiB")
        torch.manual_seed(0)
        with TorchMemory(model) as memory:
            with memory.use():
                net = torch.nn.Sequential(torch.nn.Linear(8, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)).cuda()
                optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
                numbers = torch.randn(64, 8, device="cuda")
                def step():
                    optimizer.zero_grad(set_to_none=True)
                    loss = torch.nn.functional.mse_loss(net(numbers), numbers.sum(1, keepdim=True))
                    loss.backward()
                    optimizer.step()
                    return loss
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    first = [step().item() for _ in range(3)][0]
                torch.cuda.current_stream().wait_stream(side)
                graph = torch.cuda.CUDAGraph()
                with memory.capture(graph):
                    loss = step()
                for _ in range(200):
                    numbers.copy_(torch.randn(64, 8, device="cuda"))
                    graph.replay()
                assert loss.item() < first / 2
                assert all(memory.owns(weight.grad) for weight in net.parameters())
        """,
    )


def test_no_thread_waits_for_another(card: Daemon) -> None:
    """Threads that borrow, free with the interpreter's lock held, empty caches, trim, and speak with the broker.

    With a callback under torch's allocator lock this stands still within seconds: one thread has that lock and waits
    for the interpreter's, another frees a tensor with the interpreter's lock and waits for torch's.
    """
    run(
        card,
        """
        sys.setswitchinterval(1e-5)
        model = client.register_model("gpu", limit="3GiB")
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


def test_a_closed_client_and_the_end_of_the_process(card: Daemon) -> None:
    """Tensors compute on when the client is closed under them, and a process may end in the middle of everything."""
    run(
        card,
        """
        model = client.register_model("gpu")
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
def test_settings_that_do_not_go_together(card: Daemon, setting: str, words: str) -> None:
    """torch's own settings that would go around the broker are refused in a sentence."""
    (sentence,) = run(
        card,
        """
        model = client.register_model("gpu")
        try:
            TorchMemory(model)
        except membroker.InvalidRequest as error:
            print(error)
        """,
        {"PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting},
    )
    assert words in sentence


def test_other_settings_of_torchs_stay(card: Daemon) -> None:
    """What the user has set is kept beside the one setting that this needs."""
    run(
        card,
        """
        model = client.register_model("gpu")
        with TorchMemory(model) as memory:
            settings = torch.cuda.memory._snapshot()["allocator_settings"]
            assert settings["release_lock_on_cudamalloc"], settings
            assert settings["max_split_size"] == 64 * MIB, settings
        """,
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
    )


# --- modules ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_stand_once_for_several_processes(card: Daemon, dtype: str) -> None:
    """Three workers compute with the bytes of a fourth, and answer alike to the bit; the model is charged once."""
    publisher = start(
        card,
        f"""
        model = client.register_model("gpu")
        torch.manual_seed(0)
        net = Net(torch.{dtype}, 1024).cuda().requires_grad_(False)
        with publish_module(model, "weights", net) as segment:
            assert used() == segment.size < 2 * sum(weight.nbytes for weight in net.parameters()) + 2 * MIB
        print(digest(net), flush=True)
        sys.stdin.readline()
        charged = used()
        client.delete_segment("gpu/weights")
        print(charged // MIB)
        """,
    )
    assert publisher.stdout is not None
    expected = publisher.stdout.readline().strip()
    assert expected, publisher.communicate()[1]
    code = f"""
        with without_weights():
            net = Net(torch.{dtype}, 1024)
        with client.attach("gpu/weights") as segment:
            attach_module(segment, net)
        assert net.head.weight is net.embed.weight and net.shift.is_cuda
        assert not client.closed
        print(digest(net), flush=True)
        sys.stdin.readline()
        print(digest(net))
        """
    workers = [start(card, code) for _ in range(3)]
    for worker in workers:
        assert worker.stdout is not None
        found = worker.stdout.readline().strip()
        assert found == expected, worker.communicate()[1]
    used = card.books().lent_bytes
    out, err = publisher.communicate("\n", timeout=60)
    assert publisher.returncode == 0, err
    assert int(out) == used // MIB
    assert card.books().lent_bytes == used, "deleted, and still mapped by three"
    for worker in workers:
        out, err = worker.communicate("\n", timeout=60)
        assert (worker.returncode, out.strip()) == (0, expected), err
    until(lambda: card.books().lent_bytes + card.books().releasing_bytes == 0)


def test_fp8_weights_are_multiplied_where_they_stand(card: Daemon) -> None:
    """cuBLAS takes fp8 at 16 bytes only: small scales that stand before the weights do not push them off."""
    run(
        card,
        """
        model = client.register_model("gpu")
        def build():
            net = torch.nn.Module()
            net.scale = torch.nn.Parameter(torch.tensor(0.5, device="cuda"))
            weight = torch.randn(256, 256, device="cuda").to(torch.float8_e4m3fn)
            net.weight = torch.nn.Parameter(weight, requires_grad=False)
            return net
        torch.manual_seed(0)
        net = build()
        publish_module(model, "weights", net).close()
        copy = build()
        with client.attach("gpu/weights") as segment:
            attach_module(segment, copy)
        assert copy.weight.data_ptr() % 256 == 0
        assert torch.equal(copy.weight.view(torch.uint8), net.weight.view(torch.uint8))
        if torch.cuda.get_device_capability() >= (8, 9):
            sample, one = torch.randn(64, 256, device="cuda").to(torch.float8_e4m3fn), torch.tensor(1.0, device="cuda")
            @torch.no_grad()
            def multiply(net):
                scales = dict(scale_a=one, scale_b=net.scale)
                return torch._scaled_mm(sample, net.weight.t(), out_dtype=torch.bfloat16, **scales)
            assert torch.equal(multiply(copy), multiply(net))
        client.delete_segment("gpu/weights")
        """,
    )


def test_a_module_in_a_pool_of_torchs_is_published(card: Daemon) -> None:
    """What was trained in brokered memory becomes a segment, and the pool's copy can go."""
    run(
        card,
        """
        model = client.register_model("gpu")
        with TorchMemory(model) as memory:
            with memory.use():
                net = Net(torch.bfloat16).cuda()
            publish_module(model, "weights", net).close()
            before = {key: value.cpu() for key, value in net.state_dict().items()}
            attach_module(client.attach("gpu/weights"), net)
            gc.collect()
            memory.trim()
            assert memory.lent_bytes <= 6 * MIB, "the buffer that is not persistent, and what a trim leaves"
            assert all(torch.equal(value.cpu(), before[key]) for key, value in net.state_dict().items())
        client.delete_segment("gpu/weights")
        """,
    )


# --- the examples ---


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch_training.py", ["every gradient is the broker's: True", "refused by torch, which heard: the model"]),
        ("torch_turns.py", ["worker 2 is refused", "worker 2 serves with 32 MiB: 2"]),
        ("torch_shared_weights.py", ["3 of 3 workers answer", "once for all"]),
    ],
)
def test_the_examples(card: Daemon, name: str, words: list[str]) -> None:
    """As on the host twin, on the card."""
    environment = {**os.environ, "MEMBROKER_ENDPOINT": str(card.endpoint())}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(word in done.stdout for word in words), done.stdout
    until(lambda: not card.sessions() and card.books().lent_bytes == 0)
