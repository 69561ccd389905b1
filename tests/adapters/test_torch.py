"""PyTorch over the host driver: tensors, what torch calls for memory, and modules in segments, with a real daemon.

The MemPool itself exists on a GPU only: tests/gpu/test_torch_on_gpu.py.
"""

from __future__ import annotations

import ctypes
import gc
import re
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.daemons import Daemon, until
from tests.support.sizes import MIB

import membroker
from membroker.safetensors import InvalidTensorIndex

torch = pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
adapter = pytest.importorskip("membroker.adapters.torch")
lendings = pytest.importorskip("membroker.adapters.torch.lending")

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
]


@pytest.fixture
def client(daemon: Daemon) -> Iterator[membroker.Client]:
    with membroker.connect(daemon.endpoint()) as one:
        yield one


@pytest.fixture
def model(client: membroker.Client) -> membroker.Model:
    return client.register_model("torch", virtual_capacity="64MiB")


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Run `work` in a thread of its own, as torch's C++ threads run, and return its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def bytes_of(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


class Tied(torch.nn.Module):  # type: ignore[misc]
    """Two names for one weight, a shared block, a buffer that is kept, one that is not, and one of each odd kind."""

    def __init__(self, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16, dtype=dtype)
        self.block = torch.nn.Linear(16, 16, dtype=dtype)
        self.again = self.block
        self.head = torch.nn.Linear(16, 32, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=dtype))
        self.nothing = torch.nn.Parameter(torch.empty(0, 4, dtype=dtype))
        self.register_buffer("steps", torch.tensor(7, dtype=torch.int64))
        self.register_buffer("angles", torch.arange(16, dtype=torch.float32), persistent=False)

    def forward(self, tokens: Any) -> Any:
        inner = self.again(torch.relu(self.block(self.embed(tokens)))) * self.scale
        return self.head(inner + self.angles.to(inner.dtype))


class Wrapped(torch.Tensor):  # type: ignore[misc]
    """A tensor that is more than its bytes, as quantized ones are."""


class TestTensor:
    def test_every_dtype(self, model: membroker.Model) -> None:
        """A tensor over a buffer is the buffer's bytes, whatever its dtype, and what is written shows in both."""
        for dtype in (getattr(torch, name) for name in DTYPES if hasattr(torch, name)):
            self.check_dtype(model, dtype)

    def check_dtype(self, model: membroker.Model, dtype: Any) -> None:
        with model.allocate("2MiB") as buffer:
            tensor = adapter.tensor(buffer, dtype, (3, 4), offset=4096)
            assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (dtype, (3, 4), True)
            assert tensor.data_ptr() == buffer.address + 4096
            assert bytes_of(tensor) == bytes(12 * dtype.itemsize)
            pattern = bytes(index % 2 for index in range(12 * dtype.itemsize))
            buffer.view()[4096 : 4096 + len(pattern)] = pattern
            assert bytes_of(tensor) == pattern
            tensor.view(torch.uint8).fill_(1)
            assert buffer.view()[4096 : 4096 + len(pattern)] == b"\1" * len(pattern)
            del tensor

    def test_a_word_of_safetensors_is_its_dtype(self, model: membroker.Model) -> None:
        """One word for all frameworks: what `export` takes, `tensor` takes; what is neither is told with the words."""
        with model.allocate("2MiB") as buffer:
            for word, dtype in (("F32", torch.float32), ("BF16", torch.bfloat16), ("F8_E4M3", torch.float8_e4m3fn)):
                assert adapter.tensor(buffer, word, (4,), 4096).dtype == dtype
            for wrong in ("f4", 4, None):
                with pytest.raises(membroker.InvalidRequest, match=r"is not a dtype.* F32,"):
                    adapter.tensor(buffer, wrong, (4,))

    def test_it_computes(self, model: membroker.Model) -> None:
        """Gradients flow to a parameter that stands in a buffer."""
        with model.allocate("2MiB") as buffer:
            weight = adapter.tensor(buffer, torch.float32, (4, 4)).copy_(torch.eye(4)).requires_grad_()
            (torch.arange(4.0) @ weight).sum().backward()
            assert weight.grad.tolist() == [[float(row)] * 4 for row in range(4)]
            del weight

    def test_scalar_and_empty(self, model: membroker.Model) -> None:
        with model.allocate("2MiB") as buffer:
            assert adapter.tensor(buffer, torch.int64, ()).item() == 0
            assert tuple(adapter.tensor(buffer, torch.bfloat16, (0, 5)).shape) == (0, 5)
            assert tuple(adapter.tensor(buffer, torch.bfloat16, (0, 5), offset=buffer.size).shape) == (0, 5)

    def test_a_pools_range(self, model: membroker.Model) -> None:
        """A tensor over several pages keeps them from being released; when it is gone they can be."""
        with model.pool(page_size="2MiB") as pool:
            pool.allocate(0, "8MiB")
            tensor = adapter.tensor(pool, torch.float32, (1024, 1024), offset=MIB)
            tensor.fill_(1.5)
            row = tensor[3]
            del tensor
            with pytest.raises(BufferError):
                pool.deallocate(0, "2MiB")
            pool.deallocate(6 * MIB, 1)
            assert row.sum().item() == 1536.0
            del row
            pool.deallocate(0, "2MiB")
            with pytest.raises(membroker.NotMapped):
                adapter.tensor(pool, torch.uint8, (1,))

    def test_a_growable_buffer(self, model: membroker.Model) -> None:
        """A cache in bfloat16 grows by the token: the tensor of the first tokens is the beginning of the next one."""
        with model.growable_buffer(0, "64MiB", "2MiB") as buffer:
            rows = [adapter.tensor(buffer, torch.bfloat16, (64,), buffer.grow(128)).fill_(row) for row in range(3)]
            buffer.grow("8MiB")
            assert adapter.tensor(buffer, torch.bfloat16, (3, 64))[:, 5].tolist() == [0, 1, 2]
            with pytest.raises(BufferError):
                buffer.resize(256)
            rows.pop()
            buffer.resize(256)
            assert [row.sum().item() for row in rows] == [0, 64]
            with pytest.raises(membroker.InvalidRequest, match="do not lie"):
                adapter.tensor(buffer, torch.bfloat16, (64,), 256)
            rows.clear()

    def test_a_sparse_array(self, model: membroker.Model) -> None:
        """Any rows of tiles that are there, over the borders of tiles, in any dtype of torch; no others."""
        with model.sparse_array((8192, 1024), "BF16") as table:
            table.back(1, 2)
            rows = adapter.tensor(table, torch.bfloat16, (1024, 1024), 2 * MIB + MIB).fill_(3)
            assert table[1024 + 512].astype("float32").tolist() == [3.0] * 1024
            with pytest.raises(membroker.NotMapped, match="tile 3 "):
                adapter.tensor(table, torch.bfloat16, (1024, 1024), 5 * MIB)
            del rows
            table.drop(1, 2)

    def test_a_tensor_outlives_its_buffer_and_its_client(self, daemon: Daemon) -> None:
        """A view of a tensor is all that is left; everything comes back when it goes."""
        client = membroker.connect(daemon.endpoint())
        buffer = client.register_model("torch").allocate("4MiB")
        view = adapter.tensor(buffer, torch.bfloat16, (1024, 1024)).fill_(3)[-1]
        buffer.close()
        client.close()
        del buffer, client
        gc.collect()
        assert daemon.books().lent_bytes == 4 * MIB
        assert view.sum().item() == 3072
        del view
        until(lambda: daemon.books().lent_bytes == 0)
        until(lambda: not daemon.sessions())

    def test_a_tensor_keeps_a_forgotten_buffer(self, daemon: Daemon, model: membroker.Model) -> None:
        tensor = adapter.tensor(model.allocate("2MiB"), torch.uint8, (MIB,))
        gc.collect()
        assert tensor.fill_(9).sum().item() == 9 * MIB
        del tensor
        until(lambda: daemon.books().lent_bytes == 0)

    def test_saving_and_copying_are_torchs_own(self, model: membroker.Model) -> None:
        with model.allocate("2MiB") as buffer:
            tensor = adapter.tensor(buffer, torch.float32, (8,)).fill_(4)
            copy = tensor.clone()
            assert copy.data_ptr() != tensor.data_ptr()
            del tensor
        assert copy.tolist() == [4.0] * 8

    @pytest.mark.parametrize(
        ("dtype", "shape", "offset", "message"),
        [
            ("float32", (1,), 2, "a multiple of 4 bytes"),
            ("uint8", (2 * MIB,), 1, "do not lie"),
            ("uint8", (1,), -1, "do not lie"),
            ("float32", (-1, 4), 0, "a shape is whole numbers"),
            ("float32", (-1, -4), 0, "a shape is whole numbers"),
            ("float32", 4, 0, "a shape is a sequence"),
            ("float32", (4.0,), 0, "a dimension is a whole number"),
            ("float32", (4,), 4.0, "is a whole number"),
            ("float32", (4,), "4", "is a whole number"),
        ],
    )
    def test_what_does_not_fit(self, model: membroker.Model, dtype: str, shape: Any, offset: Any, message: str) -> None:
        with model.allocate("2MiB") as buffer, pytest.raises(membroker.InvalidRequest, match=message):
            adapter.tensor(buffer, getattr(torch, dtype), shape, offset)

    def test_closed(self, model: membroker.Model) -> None:
        buffer = model.allocate("2MiB")
        buffer.close()
        with pytest.raises(membroker.ClosedError):
            adapter.tensor(buffer, torch.uint8, (1,))


class CachingAllocator:
    """torch's allocator as the library sees it: its lock is free in `allocate`; each stream has a cache; no splits."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._sizes: dict[int, int] = {}
        self._cached: dict[int, int] = {}

    def segments(self) -> set[int]:
        with self._mutex:
            return set(self._sizes)

    def malloc(self, allocate: Callable[[int, int, None], int | None], size: int, stream: int) -> int | None:
        with self._mutex:
            for address, its_stream in self._cached.items():
                if its_stream == stream and self._sizes[address] >= size:
                    del self._cached[address]
                    return address
        new = allocate(size, 0, None)
        if new is not None:
            with self._mutex:
                self._sizes[new] = size
        return new

    def free(self, address: int, stream: int) -> None:
        with self._mutex:
            self._cached[address] = stream

    def empty(self) -> bool:
        with self._mutex:
            for address in self._cached:
                del self._sizes[address]
            self._cached.clear()
        return True


class TestLending:
    """What torch's C++ calls, called as it calls it: by address, from any thread, with C's types."""

    ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

    @pytest.fixture
    def alive(self) -> set[int]:
        """What torch says that it has."""
        return set()

    @pytest.fixture
    def lending(self, client: membroker.Client, alive: set[int]) -> Any:
        return lendings.TorchLending(client.register_model("lending", limit="8MiB"), 0, lambda: set(alive))

    def test_lends_and_collects(self, daemon: Daemon, lending: Any, alive: set[int]) -> None:
        """A piece is lent whole, kept while torch has it, and released once it was seen and is no longer there."""
        address = in_a_thread(lambda: self.ALLOCATE(lending.allocate_address)(4 * MIB, 0, None))
        assert lending.owns(address, 4 * MIB)
        assert not lending.owns(address + 1, 4 * MIB)
        assert lending.lent == 4 * MIB == daemon.books().lent_bytes
        assert lending.collect() == 0, "torch has not taken it yet"
        alive.add(address)
        assert lending.collect() == 0
        self.FREE(lending.free_address)(address, 4 * MIB, 0, None)
        assert lending.lent == 4 * MIB, "the function that torch calls under its lock does nothing"
        alive.clear()
        assert lending.collect() == 4 * MIB
        assert lending.lent == 0
        until(lambda: daemon.books().lent_bytes == 0)

    def test_denied(self, lending: Any, alive: set[int]) -> None:
        """Beyond the limit torch gets a null pointer, and the broker's sentence is there to be read."""
        allocate = self.ALLOCATE(lending.allocate_address)
        alive.add(allocate(8 * MIB, 0, None))
        assert allocate(2 * MIB, 0, None) is None
        assert lending.refusals == 1
        assert isinstance(lending.last_denial, membroker.OutOfMemory)
        assert "8.0 MiB" in str(lending.last_denial)

    def test_a_denial_first_collects_what_torch_has_freed(self, lending: Any, alive: set[int]) -> None:
        allocate = self.ALLOCATE(lending.allocate_address)
        address = allocate(8 * MIB, 0, None)
        alive.add(address)
        assert allocate(2 * MIB, 0, None) is None
        alive.clear()
        assert allocate(2 * MIB, 0, None)
        assert lending.lent == 2 * MIB

    def test_a_denial_first_empties_torchs_cache(self, client: membroker.Client, alive: set[int]) -> None:
        """What torch only caches goes back, and the allocation is tried again; torch hears nothing of the refusal."""

        def empty() -> bool:
            alive.clear()
            return True

        model = client.register_model("lending", limit="8MiB")
        lending = lendings.TorchLending(model, 0, lambda: set(alive), empty)
        allocate = self.ALLOCATE(lending.allocate_address)
        alive.add(allocate(6 * MIB, 0, None))
        address = allocate(4 * MIB, 0, None)
        assert lending.owns(address, 4 * MIB)
        assert (lending.lent, lending.reclaimed_bytes, lending.refusals) == (4 * MIB, 6 * MIB, 0)
        assert lending.last_denial is None

    def test_only_the_last_attempt_waits(
        self, client: membroker.Client, alive: set[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As long as torch may have something to release, nothing is waited for; after that, as the broker says."""
        waits: list[float | None] = []

        def empty() -> bool:
            if len(waits) < 3:
                alive.clear()
            return True

        model = client.register_model("lending", limit="8MiB")
        lending = lendings.TorchLending(model, 0, lambda: set(alive), empty)
        allocate, lend = self.ALLOCATE(lending.allocate_address), model.allocate
        alive.add(allocate(8 * MIB, 0, None))

        def note(size: int, **options: Any) -> Any:
            waits.append(options.get("wait"))
            return lend(size, **options)

        monkeypatch.setattr(model, "allocate", note)
        assert allocate(16 * MIB, 0, None) is None
        assert waits == [0, 0, None]
        assert lending.refusals == 1

    @pytest.mark.parametrize("size", [4 * MIB, 16 * MIB], ids=["lent after all", "refused"])
    def test_a_denial_keeps_nothing_of_the_program(self, client: membroker.Client, alive: set[int], size: int) -> None:
        """A traceback holds the frames below it, and they the tensors of a forward pass, which would stay lent."""

        def empty() -> bool:
            alive.clear()
            return True

        class Activations:
            """What a frame of the program holds."""

        def forward() -> weakref.ref[Activations]:
            held = Activations()
            allocate(size, 0, None)
            return weakref.ref(held)

        model = client.register_model("lending", limit="8MiB")
        lending = lendings.TorchLending(model, 0, lambda: set(alive), empty)
        allocate = self.ALLOCATE(lending.allocate_address)
        alive.add(allocate(8 * MIB, 0, None))
        gc.disable()
        try:
            assert forward()() is None
        finally:
            gc.enable()
        assert lending.refusals == (size > 8 * MIB)
        lending.collect(ended=True)

    def test_what_came_and_went_between_two_looks(self, lending: Any, alive: set[int]) -> None:
        """A thread that calls again has finished its last allocation; until then that memory may be in use."""
        allocate = self.ALLOCATE(lending.allocate_address)
        first, second = threading.Event(), threading.Event()

        def work() -> None:
            allocate(4 * MIB, 0, None)
            first.set()
            assert second.wait(60)
            alive.add(allocate(2 * MIB, 0, None))

        thread = threading.Thread(target=work)
        thread.start()
        assert first.wait(60)
        assert lending.collect() == 0, "torch may be taking it at this moment"
        second.set()
        thread.join()
        assert lending.collect() == 4 * MIB
        assert lending.lent == 2 * MIB
        alive.clear()
        assert lending.collect() == 2 * MIB

    def test_what_a_dead_thread_left_goes_at_the_end(self, lending: Any) -> None:
        in_a_thread(lambda: self.ALLOCATE(lending.allocate_address)(4 * MIB, 0, None))
        assert lending.collect() == 0
        assert lending.collect(ended=True) == 4 * MIB

    def test_threads_that_are_refused_at_once_share_what_goes_back(
        self, client: membroker.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One thread empties the cache while another is refused: the other waits for it, and gets its part."""
        alive: set[int] = set()
        empties, entered, refused = [0], threading.Event(), threading.Event()

        def empty() -> bool:
            empties[0] += 1
            entered.set()
            assert refused.wait(60)
            alive.clear()
            return True

        model = client.register_model("lending", limit="8MiB")
        lending = lendings.TorchLending(model, 0, lambda: set(alive), empty)
        allocate, found = self.ALLOCATE(lending.allocate_address), []
        alive.add(allocate(8 * MIB, 0, None))
        threads = [threading.Thread(target=lambda: found.append(allocate(4 * MIB, 0, None))) for _ in range(2)]
        threads[0].start()
        assert entered.wait(60)
        lend = model.allocate

        def seen_refused(size: int, **options: Any) -> Any:
            try:
                return lend(size, **options)
            except membroker.OutOfMemory:
                refused.set()
                raise

        monkeypatch.setattr(model, "allocate", seen_refused)
        threads[1].start()
        for thread in threads:
            thread.join()
        assert all(found)
        assert lending.refusals == 0
        assert empties == [1], "the second thread empties nothing that was just emptied"
        assert (lending.lent, lending.reclaimed_bytes) == (8 * MIB, 8 * MIB)
        lending.collect(ended=True)

    def test_three_threads_train_inside_one_limit(self, client: membroker.Client) -> None:
        """Each step needs larger tensors than the last, so torch caches what nothing fits into, on three streams.

        Before, the caches held the whole limit after some steps, and every later allocation was refused.
        """
        torch_ = CachingAllocator()
        model = client.register_model("lending", limit="120MiB")
        lending = lendings.TorchLending(model, 0, torch_.segments, torch_.empty)
        allocate = self.ALLOCATE(lending.allocate_address)
        steps, end = [0] * 3, time.monotonic() + 60

        def learn(thread: int) -> None:
            while steps[thread] < 12:
                assert time.monotonic() < end, f"no progress: steps {steps}"
                held: list[int] = []
                for _ in range(3):
                    address = torch_.malloc(allocate, (2 + steps[thread]) * MIB, thread)
                    if address is None:
                        break
                    held.append(address)
                steps[thread] += len(held) == 3
                for address in held:
                    torch_.free(address, thread)

        threads = [threading.Thread(target=learn, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert steps == [12, 12, 12]
        assert lending.reclaimed_bytes > 0
        assert lending.lent <= 120 * MIB
        torch_.empty()
        lending.collect(ended=True)
        assert lending.lent == 0

    def test_another_card_is_refused(self, lending: Any) -> None:
        assert self.ALLOCATE(lending.allocate_address)(2 * MIB, 3, None) is None
        assert "GPU 3" in str(lending.last_denial)

    def test_a_closed_client_keeps_what_torch_has(self, daemon: Daemon) -> None:
        """Unmapping under torch's tensors would end the process: it waits until torch has let go."""
        client = membroker.connect(daemon.endpoint())
        alive: set[int] = set()
        lending = lendings.TorchLending(client.register_model("lending"), 0, lambda: alive)
        address = self.ALLOCATE(lending.allocate_address)(2 * MIB, 0, None)
        alive.add(address)
        lending.collect()
        client.close()
        ctypes.memset(address, 7, 2 * MIB)
        assert self.ALLOCATE(lending.allocate_address)(2 * MIB, 0, None) is None
        assert isinstance(lending.last_denial, membroker.ClosedError)
        alive.clear()
        assert lending.collect() == 2 * MIB
        until(lambda: not daemon.sessions())

    def test_many_threads(self, daemon: Daemon, client: membroker.Client) -> None:
        """Threads that torch made, as they allocate while another collects: nothing is lent twice or lost."""
        alive: set[int] = set()
        taken: set[int] = set()
        lending = lendings.TorchLending(client.register_model("lending"), 0, lambda: set(alive))
        allocate, mine = self.ALLOCATE(lending.allocate_address), threading.Lock()

        def work() -> None:
            for _ in range(20):
                address = allocate(2 * MIB, 0, None)
                with mine:
                    assert address not in alive
                    alive.add(address)
                    taken.add(address)
                ctypes.memset(address, 1, 2 * MIB)
                with mine:
                    alive.discard(address)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            lending.collect()
        alive.update(taken)  # what came and went between two looks is seen once
        lending.collect()
        alive.clear()
        lending.collect()
        assert lending.lent == 0
        until(lambda: daemon.books().lent_bytes == 0)

    def test_there_is_no_mempool_on_the_host(self, model: membroker.Model) -> None:
        with pytest.raises(membroker.InvalidRequest, match="needs a GPU"):
            adapter.TorchMemory(model)


class TestModules:
    @pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
    def test_published_and_attached(self, client: membroker.Client, model: membroker.Model, name: str) -> None:
        """A module on the meta device answers exactly as the one that was published; what was tied is tied."""
        dtype = getattr(torch, name)
        torch.manual_seed(1)
        original, tokens = Tied(dtype), torch.arange(32).view(4, 8)
        adapter.publish_module(model, "weights", original).close()
        with adapter.without_weights():
            copy = Tied(dtype)
        assert all(parameter.is_meta for parameter in copy.parameters())
        with client.attach("weights") as segment:
            assert adapter.attach_module(segment, copy) is copy
        assert torch.equal(copy(tokens), original(tokens))
        assert copy.head.weight is copy.embed.weight
        assert copy.again is copy.block
        assert copy.steps.item() == 7
        assert not any(parameter.requires_grad for parameter in copy.parameters())
        assert [key for key, _ in copy.named_parameters()] == [key for key, _ in original.named_parameters()]

    def test_a_tie_is_stored_once(self, model: membroker.Model) -> None:
        """And says so as safetensors' own `save_model` does; what is not persistent stays out."""
        with adapter.publish_module(model, "weights", Tied(), metadata={"step": "9"}) as segment:
            index = segment.index()
            assert set(index) == {"embed.weight", "block.weight", "block.bias", "scale", "nothing", "steps"}
            assert index.metadata == {
                "format": "pt",
                "step": "9",
                "again.weight": "block.weight",
                "again.bias": "block.bias",
                "head.weight": "embed.weight",
            }

    def test_a_tied_parameter_named_format(self, model: membroker.Model) -> None:
        """The metadata has a word of its own under this name: the tie was lost, and nobody could attach."""
        published, empty = torch.nn.Module(), torch.nn.Module()
        published.weight = published.format = torch.nn.Parameter(torch.arange(4.0))
        empty.weight, empty.format = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
        with adapter.publish_module(model, "weights", published) as segment:
            assert segment.index().metadata["format"] == "pt"
            adapter.attach_module(segment, empty)
            assert empty.weight is empty.format
            assert empty.weight.tolist() == [0, 1, 2, 3]

    def test_what_shares_memory_is_stored_once(self, client: membroker.Client, model: membroker.Model) -> None:
        """Two parameters over the same bytes come back so; what overlaps in part comes back whole."""
        module = torch.nn.Module()
        base = torch.arange(8.0)
        module.one, module.two = torch.nn.Parameter(base), torch.nn.Parameter(base)
        module.part = torch.nn.Parameter(base[2:6])
        module.turned = torch.nn.Parameter(torch.arange(6.0).view(2, 3).t())
        with adapter.publish_module(model, "weights", module) as segment:
            assert set(segment.index()) == {"one", "part", "turned"}
        with client.attach("weights") as segment:
            adapter.attach_module(segment, module)
        assert module.one.data_ptr() == module.two.data_ptr()
        assert module.part.tolist() == [2.0, 3.0, 4.0, 5.0]
        assert module.turned.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]

    def test_two_views_of_the_same_bytes_that_read_them_differently(
        self, client: membroker.Client, model: membroker.Model
    ) -> None:
        """A conjugate and its imaginary part are views that torch negates as it reads: no bytes of their own."""
        numbers = torch.tensor([1 + 2j, 3 - 4j])
        module = torch.nn.Module()
        for name, view in (("up", numbers.imag), ("down", numbers.conj().imag), ("z", numbers), ("c", numbers.conj())):
            module.register_buffer(name, view)
        assert module.down.is_neg()
        adapter.publish_module(model, "weights", module).close()
        with client.attach("weights") as segment:
            adapter.attach_module(segment, module)
        assert (module.up.tolist(), module.down.tolist()) == ([2.0, -4.0], [-2.0, 4.0])
        assert (module.z.tolist(), module.c.tolist()) == ([1 + 2j, 3 - 4j], [1 - 2j, 3 + 4j])

    def test_fp8_is_aligned(self, client: membroker.Client, model: membroker.Model) -> None:
        """Small scales stand before fp8 weights in the format; each large weight begins at 256 bytes all the same."""
        module = torch.nn.Module()
        for number in range(3):
            module.register_parameter(f"scale{number}", torch.nn.Parameter(torch.tensor(1.0 + number)))
            weight = torch.randn(65, 65 + number).to(torch.float8_e4m3fn)
            module.register_parameter(f"w{number}", torch.nn.Parameter(weight, requires_grad=False))
        published = {key: bytes_of(value) for key, value in module.named_parameters()}
        adapter.publish_module(model, "weights", module).close()
        with client.attach("weights") as segment:
            index = segment.index()
            assert {index[f"w{number}"].offset % 256 for number in range(3)} == {0}
            assert {key[-1] for key in set(index) - set(published)} == {"!"}
            adapter.attach_module(segment, module)
        assert {key: bytes_of(value) for key, value in module.named_parameters()} == published
        assert module.w1.dtype == torch.float8_e4m3fn

    @pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
    def test_fp4_is_counted_as_safetensors_counts(self, client: membroker.Client, model: membroker.Model) -> None:
        module = torch.nn.Module()
        packed = torch.arange(64, dtype=torch.uint8).view(4, 16).view(torch.float4_e2m1fn_x2)
        module.weight = torch.nn.Parameter(packed, requires_grad=False)
        with adapter.publish_module(model, "weights", module) as segment:
            assert segment.index()["weight"].shape == (4, 32)
        with client.attach("weights") as segment:
            adapter.attach_module(segment, module)
        assert bytes_of(module.weight) == bytes(range(64))

    def test_it_is_a_safetensors_file(self, model: membroker.Model) -> None:
        """The reference reads the segment's bytes as `load_model` would: every tensor, and the names that are tied."""
        safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed here")
        original = Tied(torch.bfloat16)
        with adapter.publish_module(model, "weights", original) as segment:
            image = segment.read(0, segment.index().size)
        found = safetensors.load(image)
        assert all(torch.equal(value, original.state_dict()[key]) for key, value in found.items())

    def test_the_weights_outlive_the_segment_and_the_client(self, daemon: Daemon, model: membroker.Model) -> None:
        """A module keeps what it computes with; one copy stands there, charged once, until both are done with it."""
        original, tokens = Tied(), torch.arange(8).view(1, 8)
        adapter.publish_module(model, "weights", original).close()
        lent = daemon.books().lent_bytes
        copies = []
        for _ in range(3):
            reader = membroker.connect(daemon.endpoint())
            copies.append(adapter.attach_module(reader.attach("weights"), Tied()))
            reader.close()
        gc.collect()
        assert daemon.books().lent_bytes == lent
        assert len(daemon.sessions()) == 4
        assert all(torch.equal(copy(tokens), original(tokens)) for copy in copies)
        copies.clear()
        gc.collect()
        until(lambda: len(daemon.sessions()) == 1)

    def test_rnn(self, client: membroker.Client, model: membroker.Model) -> None:
        """A module that keeps a second list of its weights computes with the attached ones."""
        original, sample = torch.nn.LSTM(8, 8, num_layers=2), torch.randn(3, 1, 8)
        adapter.publish_module(model, "weights", original).close()
        copy = adapter.attach_module(client.attach("weights"), torch.nn.LSTM(8, 8, num_layers=2))
        assert torch.equal(copy(sample)[0], original(sample)[0])

    def test_what_does_not_fit_changes_nothing(self, client: membroker.Client, model: membroker.Model) -> None:
        """Every difference is named in one sentence, and the module is as it was."""
        adapter.publish_module(model, "weights", Tied()).close()
        other = Tied(torch.bfloat16)
        other.head = torch.nn.Linear(16, 32)
        other.embed = torch.nn.Embedding(33, 16)
        del other.scale
        before = dict(other.named_parameters())
        with client.attach("weights") as segment:
            with pytest.raises(membroker.InvalidRequest) as raised:
                adapter.attach_module(segment, other)
            assert dict(other.named_parameters()) == before
            message = str(raised.value)
            assert "embed.weight has the shape [33, 16] in the module and [32, 16] in the segment" in message
            assert re.search(r", and \d+ more$", message)
            with pytest.raises(membroker.InvalidRequest, match=r"embed\.weight has the shape"):
                adapter.attach_module(segment, other, strict=False)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda module: module.to(torch.bfloat16), r"is torch\.bfloat16 in the module and torch\.float32"),
            (lambda module: delattr(module, "scale"), "scale is not in the module"),
            (lambda module: setattr(module, "extra", torch.nn.Linear(2, 2)), r"extra\.weight is not in the segment"),
            (lambda module: module.to("meta"), r"angles is in no segment.*without_weights"),
        ],
    )
    def test_strict(self, client: membroker.Client, model: membroker.Model, change: Any, message: str) -> None:
        """What a strict attach refuses, a lenient one leaves as it is."""
        adapter.publish_module(model, "weights", Tied()).close()
        module = Tied()
        change(module)
        with client.attach("weights") as segment:
            with pytest.raises(membroker.InvalidRequest, match=message):
                adapter.attach_module(segment, module)
            adapter.attach_module(segment, module, strict=False)
            assert module.block.weight.dtype == torch.float32
            assert not module.block.weight.is_meta

    def test_a_module_ties_what_the_file_stores_once(self, client: membroker.Client, model: membroker.Model) -> None:
        """A checkpoint from elsewhere leaves a tied name out and says nothing: the module's own tie finds it."""
        untied = Tied()
        index_of = {"embed.weight": ("F32", (32, 16))}
        module = torch.nn.Module()
        module.embed, module.head = untied.embed, untied.head
        with model.create_segment("weights", "2MiB") as segment:
            index = segment.lay_out(index_of)
            segment.write(index["embed.weight"].offset, bytes_of(untied.embed.weight))
            segment.seal()
        with client.attach("weights") as segment:
            adapter.attach_module(segment, module)
        assert module.head.weight is module.embed.weight

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (lambda: torch.empty(4, device="meta"), "has no memory yet"),
            (lambda: torch.nn.parameter.UninitializedParameter(), "has no memory yet"),
            (lambda: torch.zeros(4, dtype=torch.complex128), "which safetensors does not have"),
            (lambda: torch.zeros(4, 4).to_sparse(), "only plain tensors"),
            (lambda: torch.zeros(2).as_subclass(Wrapped), "only plain tensors"),
        ],
    )
    def test_what_cannot_be_published(
        self, daemon: Daemon, model: membroker.Model, client: membroker.Client, value: Any, message: str
    ) -> None:
        module = torch.nn.Module()
        made = value()
        if isinstance(made, torch.nn.Parameter):
            module.register_parameter("odd", made)
        else:
            module.register_buffer("odd", made)
        with pytest.raises(membroker.InvalidRequest, match=f"odd .*{message}"):
            adapter.publish_module(model, "weights", module)
        assert not client.segments()
        assert daemon.books().lent_bytes == 0

    @pytest.mark.parametrize("name", ["a!", "!", "a x", "a\t", "a\0b"])
    def test_names_that_what_aligns_the_tensors_needs(
        self, client: membroker.Client, model: membroker.Model, name: str
    ) -> None:
        """A gap was filled under the very name of a tensor, which was lost: now the module's author is told."""
        module = torch.nn.Module()
        for each, size in (("a", 1), (name, 5000), ("b", 6000)):
            module.register_buffer(each, torch.full((size,), 7, dtype=torch.uint8))
        with pytest.raises(membroker.InvalidRequest, match=re.escape(repr(name)) + ' ends with "!", or has a space'):
            adapter.publish_module(model, "weights", module)
        assert not client.segments()

    def test_a_name_with_a_mark_in_its_middle(self, client: membroker.Client, model: membroker.Model) -> None:
        module = torch.nn.Module()
        for number, (name, size) in enumerate((("a", 1), ("a!x", 5000), ("b", 6000))):
            module.register_buffer(name, torch.full((size,), number, dtype=torch.uint8))
        published = {key: bytes_of(value) for key, value in module.named_buffers()}
        adapter.publish_module(model, "weights", module).close()
        with client.attach("weights") as segment:
            assert {segment.index()[name].offset % 256 for name in ("a!x", "b")} == {0}
            adapter.attach_module(segment, module)
        assert {key: bytes_of(value) for key, value in module.named_buffers()} == published

    def test_a_tensor_without_a_name_is_nobodys(self, model: membroker.Model) -> None:
        """A foreign file has a tensor named "": it stands for no parameter that the file lacks."""
        module = torch.nn.ParameterDict({"w": torch.ones(2, 2), "v": torch.ones(2, 2)})
        with model.create_segment("weights", "2MiB") as segment:
            segment.lay_out({"": ("F32", (2, 2))})
            segment.seal()
            with pytest.raises(membroker.InvalidRequest, match="v is not in the segment; w is not in"):
                adapter.attach_module(segment, module)

    def test_a_segment_that_does_not_fit_is_not_made(self, client: membroker.Client) -> None:
        small = client.register_model("small", limit="2MiB")
        with pytest.raises(membroker.OutOfMemory):
            adapter.publish_module(small, "weights", torch.nn.Linear(1024, 1024))
        assert not client.segments()

    def test_not_sealed_and_no_header(self, model: membroker.Model, client: membroker.Client) -> None:
        with model.create_segment("raw", "2MiB") as segment:
            with pytest.raises(membroker.InvalidRequest, match="seal it first"):
                adapter.attach_module(segment, Tied())
            segment.seal()
            with pytest.raises(InvalidTensorIndex):
                adapter.attach_module(segment, Tied())

    def test_other_threads_build_as_always(self) -> None:
        """`without_weights` is one thread's: a server that builds something else meanwhile gets its weights."""
        made: list[Any] = []
        with adapter.without_weights():
            thread = threading.Thread(target=lambda: made.append(torch.nn.Linear(2, 2)))
            thread.start()
            thread.join()
            mine = torch.nn.Linear(2, 2)
        assert mine.weight.is_meta
        assert not made[0].weight.is_meta
        assert not torch.nn.Linear(2, 2).weight.is_meta


def test_without_torch_it_says_so() -> None:
    """A plain sentence, and only who imports the adapter hears it."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import membroker, membroker.adapters\n"
        "try:\n    import membroker.adapters.torch\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "membroker.adapters.torch needs PyTorch: pip install torch\n"


def test_tensors_at_the_end_of_the_process(daemon: Daemon) -> None:
    """A tensor in a module's global outlives everything: the process ends with status 0 and without a word."""
    code = (
        "import sys, torch, membroker\n"
        "from membroker.adapters.torch import tensor\n"
        "client = membroker.connect(sys.argv[1])\n"
        "kept = tensor(client.register_model('end').allocate('2MiB'), torch.float32, (1024,))\n"
        "kept.fill_(1)\n"
    )
    command = [sys.executable, "-X", "dev", "-c", code, str(daemon.endpoint())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    until(lambda: daemon.books().lent_bytes == 0)


class TestAddressTensor:
    """A tensor over addresses of a pool, as an engine's KV cache: pages come and go beneath it."""

    def test_pages_come_and_go(self, model: membroker.Model) -> None:
        with model.pool(page_size="2MiB") as pool:
            cache = adapter.address_tensor(pool, "bfloat16", (2, 64, 1 << 16), 4 * MIB)
            assert cache.shape == (2, 64, 1 << 16)
            assert cache.data_ptr() == pool.base_address + 4 * MIB
            assert pool.physical_usage_bytes == 0
            pool.allocate(4 * MIB + (9 << 17), "2MiB")  # rows of 128 KiB
            cache[0, 9] = 1.5
            assert cache[0, 9].sum() == 1.5 * (1 << 16)
            assert cache[0, 10].sum() == 0
            pool.deallocate(4 * MIB + (9 << 17), "2MiB")
            assert pool.physical_usage_bytes == 0
            pool.allocate(4 * MIB + (9 << 17), "2MiB")
            assert cache[0, 9].sum() == 0, "a page that is new has no bytes of before"

    def test_it_keeps_the_addresses(self, model: membroker.Model) -> None:
        pool = model.pool(page_size="2MiB")
        cache = adapter.address_tensor(pool, "uint8", (1 << 20,))
        holding = weakref.ref(pool._holding)
        pool.close()
        assert holding().state == "ending"
        del cache
        gc.collect()
        until(lambda: holding() is None or holding().state == "ended")

    def test_what_is_refused(self, model: membroker.Model) -> None:
        with model.pool(page_size="2MiB", virtual_capacity="4MiB") as pool:
            with pytest.raises(membroker.InvalidOffset):
                adapter.address_tensor(pool, "uint8", (4 * MIB + 1,))
            with pytest.raises(membroker.InvalidRequest, match="begins at a multiple"):
                adapter.address_tensor(pool, "float32", (4,), 2)
        with pytest.raises(membroker.ClosedError):
            adapter.address_tensor(pool, "uint8", (1,))
