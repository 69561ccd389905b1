"""PyTorch: tensors over borrowed memory, torch's own allocations borrowed from the broker, modules in segments.

Owns the step from bytes to `torch.Tensor`, the allocator behind a `torch.cuda.MemPool`, and what a module is in a
segment. It must never run Python under torch's allocator lock: a thread that frees a tensor waits for that lock with
the interpreter's lock in its hands, and two that wait for each other stand still.
"""

from __future__ import annotations

import _thread
import ctypes
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple

from membroker.adapters.dlpack import export
from membroker.buffer import Buffer
from membroker.errors import ClosedError, InvalidRequest, MembrokerError, OutOfMemory
from membroker.model import Model
from membroker.pool import VirtualMemoryPool
from membroker.segment import Segment
from membroker.tensor_index import TensorIndex, TensorInfo, write_index
from membroker.vmm.driver import DeviceInfo, Location

try:
    import torch
except ImportError as error:
    raise ImportError("membroker.adapters.torch needs PyTorch: pip install torch") from error

logger = logging.getLogger("membroker")

# safetensors' words. A float4 of torch is two elements in a byte.
_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
_DTYPES = {text: getattr(torch, name) for text, name in _NAMES.items() if hasattr(torch, name)}
_TEXTS = {dtype: text for text, dtype in _DTYPES.items()}


# --- tensors ---


def tensor(
    source: Buffer | Segment | VirtualMemoryPool, dtype: torch.dtype, shape: Sequence[int], offset: int = 0
) -> torch.Tensor:
    """Return `shape` elements of `dtype` from byte `offset` of a buffer, a segment or a pool; nothing is copied.

    A CUDA tensor on a card, a CPU tensor on the host driver; any dtype of torch. The memory stays as long as the
    tensor lives, or a view of it: closing the owner waits for the last of them and for the work on the device, and
    a pool refuses to deallocate the range (`BufferError`). torch has no read-only tensors: writing to one over a
    segment that is sealed or attached ends the process on the host, and its CUDA context on a card.

    Raises `InvalidRequest` for a range outside of the source or an offset that is no multiple of the element,
    `NotMapped` where a pool's page has no memory, and `ClosedError`.
    """
    shape = tuple(shape)
    if offset % dtype.itemsize:
        raise InvalidRequest(f"a tensor of {dtype} begins at a multiple of {dtype.itemsize} bytes, not at {offset}")
    size = math.prod(shape) * dtype.itemsize
    # DLPack has not all of torch's dtypes, in no version: torch itself makes them of bytes.
    memory = export(source, "U8", (size,), offset, ignore_read_only=True)
    return torch.from_dlpack(memory).view(dtype).view(shape)


def device_of(info: DeviceInfo) -> torch.device:
    """Return torch's device for the device of a driver: `model.driver.device`, for one."""
    return torch.device("cpu") if info.driver == "host" else torch.device("cuda", info.ordinal)


# --- torch's own allocations ---


class TorchMemory:
    """What torch allocates on the card, borrowed for `model`: a `torch.cuda.MemPool` without compiled code.

        with TorchMemory(model) as memory, memory.use():
            train()                            # forward, backward and optimizer, in every thread

    torch caches what it was lent, as always: an allocation from its cache costs the same as without a broker, and the
    broker sees segments of 2 MiB, of 20 MiB, or of large tensors. Where it lends no more, torch raises its own
    `torch.OutOfMemoryError`; `last_denial` is the broker's word for it, and a note on the exception.

    **A live MemPool gives nothing back.** `torch.cuda.empty_cache()` returns nothing of it, however much of it is
    free (3,000 of 3,000 MiB stayed, torch 2.11). `trim` exchanges the MemPool for a new one, and returns every segment
    in which no tensor lives; one small tensor keeps its whole segment. Nothing comes back by itself.

    What torch does while allocations are routed, as inside `torch.cuda.use_mem_pool`: it frees no cache and retries
    before it gives up, and a tensor that was used on a second stream (`record_stream`) is reused only after the
    block, or after a `trim`. Capture graphs with `capture`, not with `torch.cuda.graph`.

    The allocator runs with torch's setting `release_lock_on_cudamalloc`, which is set here for the whole process, and
    so it calls the broker with no lock of torch's held. What torch frees is noticed later, without a call back.
    Memory of torch cannot be shared by `torch.multiprocessing`: make a segment of it (`publish_module`).

    Raises `InvalidRequest` without a card, without torch's CUDA, and where torch's `expandable_segments` or its
    backend `cudaMallocAsync` are set; `DeviceFailure`.
    """

    def __init__(self, model: Model) -> None:
        self._device = _card_of(model)
        with torch.cuda.device(self._device):
            torch.cuda.init()
            _settle_allocator()
        self._lending = Lending(model, self._device.index, _segments_of_torch)
        self._allocator = _allocator_over(self._lending)
        self._users = 0
        self._routed = (0, 0)
        self._capturing = False
        self._closed = False
        self._pool = self._new_pool()
        self._graph_pools: list[Any] = []
        self._sentinel: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """The card, as torch names it."""
        return self._device

    @property
    def lent(self) -> int:
        """Bytes that torch has from the broker now, its cache included."""
        return self._lending.lent

    @property
    def last_denial(self) -> MembrokerError | None:
        """Why torch was last refused memory, or None."""
        return self._lending.last_denial

    def owns(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor's bytes lie in memory of the broker."""
        storage = tensor.untyped_storage()
        return self._lending.owns(storage.data_ptr(), max(1, storage.nbytes()))

    @contextmanager
    def use(self) -> Iterator[TorchMemory]:
        """Let every thread's CUDA allocations come from the broker in this block, those of autograd's threads too.

        For the whole process: threads that know nothing of it are charged as well. It may be entered again, and by
        several threads. Raises `InvalidRequest` while another `TorchMemory` is in use, and `ClosedError`.
        """
        self._enter()
        try:
            yield self
        except torch.OutOfMemoryError as error:
            if self.last_denial is not None:
                error.add_note(f"membroker: {self.last_denial}")
            raise
        finally:
            with _routing:
                self._users -= 1
                if not self._users:
                    self._unroute()

    def _enter(self) -> None:
        global _in_use
        with _routing:
            self._check_open()
            if _in_use is not None and _in_use is not self:
                raise InvalidRequest("another TorchMemory is in use: torch routes to one pool at a time")
            if not self._users:
                self._route()
            self._users += 1

    @contextmanager
    def capture(self, graph: torch.cuda.CUDAGraph, **options: Any) -> Iterator[None]:
        """Capture a CUDA graph in this block, whose memory is the broker's too; `options` are `torch.cuda.graph`'s.

        Each graph has memory of its own, which `trim` returns once the graph is reset, or garbage, and its tensors
        are gone. What other threads allocate meanwhile is torch's own. Raises as `use`.
        """
        with _routing:
            self._check_open()
            self._graph_pools.append(self._new_pool())
            with self._unrouted():
                self._capturing = True
                try:
                    with torch.cuda.graph(graph, pool=self._graph_pools[-1].id, **options):
                        yield
                finally:
                    self._capturing = False

    def trim(self) -> int:
        """Give back all segments in which no tensor lives, and return how many bytes that was.

        Up to 4 MiB stay lent, and what cuBLAS keeps as its workspaces. Waits for the work on the device. A moment long
        the allocations of other threads are torch's own, so call it where they have none to make. Not for inside a
        `torch.cuda.use_mem_pool` or a capture of another's making: torch itself ends the process there. Raises
        `InvalidRequest` during a `capture`, and `ClosedError`.
        """
        with _routing:
            self._check_open()
            return self._exchange(self._new_pool())

    def close(self) -> None:
        """Give back what no tensor lives in, for good. Idempotent: call it again when the last tensors are gone.

        Memory under a tensor that lives stays lent until then, and the session with it. Raises `InvalidRequest` in a
        block of `use` or `capture`.
        """
        with _routing:
            if self._users or self._capturing:
                raise InvalidRequest("this memory is in use: close it outside of the block")
            self._closed = True
            self._exchange(None)

    def __enter__(self) -> TorchMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<membroker TorchMemory on {self._device}, {self.lent} bytes lent{', closed' * self._closed}>"

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this memory is closed")
        if self._capturing:
            raise InvalidRequest("a graph is being captured: its memory stays as it is until the block ends")

    # The pools. `_routing` is held.

    def _exchange(self, pool: Any) -> int:
        """Put `pool` in the place of torch's pool, or nothing for good, and collect what torch lets go of."""
        sentinel = self._new_sentinel() if pool is not None else None
        with self._unrouted():
            # All that is in the old pool is seen to be there, so that it is missed afterwards.
            self._lending.collect()
            old, self._pool = [self._pool], pool
            if old[0] is not None:
                _drop(old.pop())
            self._sentinel = sentinel
            self._drop_graph_pools()
            if pool is None and not self._graph_pools:
                # torch keeps them for good. Not in `trim`: a graph, or another thread's kernel, may use them.
                torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        return self._lending.collect()

    def _new_sentinel(self) -> torch.Tensor | None:
        """Return a tensor in the pool that is about to go, so that torch keeps its table of the pool one trim longer.

        A thread that borrows just now has let go of torch's lock in the middle of an allocation, with that table in
        its hands. Where there is no room for a tensor there are others.
        """
        before = self._lending.last_denial
        try:
            with ExitStack() as stack:
                if not self._users:
                    stack.enter_context(torch.cuda.use_mem_pool(self._pool, self._device))
                return torch.empty(1, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            self._lending.last_denial = before
            return None

    def _drop_graph_pools(self) -> None:
        ended = [pool for pool in self._graph_pools if pool.use_count() <= 1]
        self._graph_pools = [pool for pool in self._graph_pools if pool not in ended]
        while ended:
            _drop(ended.pop())

    def _new_pool(self) -> Any:
        with torch.cuda.device(self._device):
            pool = torch.cuda.MemPool(self._allocator)
        # A pool that ends at a moment of the collector's, or the interpreter's, can end the process: see `_drop`.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        return pool

    @contextmanager
    def _unrouted(self) -> Iterator[None]:
        routed = self._users > 0
        if routed:
            self._unroute()
        try:
            yield
        finally:
            if routed:
                self._route()

    def _route(self) -> None:
        global _in_use
        # Not `use_mem_pool`, which routes the calling thread only: a backward pass allocates in threads of autograd's.
        torch._C._cuda_beginAllocateToPool(self._device.index, self._pool.id)
        self._routed = self._pool.id
        _in_use = self

    def _unroute(self) -> None:
        global _in_use
        torch._C._cuda_endAllocateToPool(self._device.index, self._routed)
        torch._C._cuda_releasePool(self._device.index, self._routed)
        _in_use = None


_routing = threading.RLock()
"""Held while allocations are routed anew: torch has one table of that for a card."""
_in_use: TorchMemory | None = None
_FOREVER: list[Any] = []
"""torch may call an allocator as long as the process lives."""


def _drop(pool: Any) -> None:
    """Let go of a MemPool. Nothing is routed: torch's destructor asserts that, and an assertion there ends the process.

    The caller keeps no reference, not even in a variable.
    """
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(pool))


def _card_of(model: Model) -> torch.device:
    info = model.driver.device
    if info.driver == "host":
        raise InvalidRequest(
            "torch's MemPool exists on a card only, and this broker lends the host twin's memory: "
            "make CPU tensors over it with tensor()"
        )
    if not torch.cuda.is_available():
        raise InvalidRequest("this PyTorch has no CUDA, or finds no card: the broker's is there")
    return device_of(info)


def _settle_allocator() -> None:
    """Let torch call its allocator with no lock held, or raise `InvalidRequest` where its settings forbid all this."""
    if torch.cuda.get_allocator_backend() != "native":
        raise InvalidRequest("torch runs with the backend cudaMallocAsync, which has no pools of others: leave it out")
    settings = _allocator_settings()
    if settings.get("expandable_segments"):
        raise InvalidRequest("torch runs with expandable_segments:True, which maps memory of its own: leave it out")
    if settings.get(_RELEASES_LOCK):
        return
    before = settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
    text = f"{before},{_RELEASES_LOCK}:True" if before else f"{_RELEASES_LOCK}:True"
    if hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        torch._C._accelerator_setAllocatorSettings(text)
    else:
        torch.cuda.memory._set_allocator_settings(text)
    if not _allocator_settings().get(_RELEASES_LOCK):
        raise InvalidRequest(f"torch did not take {text}: set PYTORCH_CUDA_ALLOC_CONF={_RELEASES_LOCK}:True")


_RELEASES_LOCK = "release_lock_on_cudamalloc"


def _allocator_settings() -> dict[str, Any]:
    settings: dict[str, Any] = torch.cuda.memory._snapshot().get("allocator_settings", {})
    return settings


def _segments_of_torch() -> set[int]:
    """Return the addresses of all segments that torch's allocator has now."""
    return {segment["address"] for segment in torch.cuda.memory_snapshot()}


def _allocator_over(lending: Lending) -> Any:
    allocator = torch._C._cuda_customAllocator(lending.allocate_address, lending.free_address)
    _FOREVER.append((lending, allocator))
    return allocator


@dataclass(slots=True, eq=False)
class _Lent:
    """A segment of torch's. `hold` keeps it mapped when its client is closed; `seen` says that torch has it."""

    buffer: Buffer
    hold: object
    seen: bool = False


class Lending:
    """The two functions that torch calls for memory, and what it was lent. Knows nothing of pools or routing.

    `allocate_address` and `free_address` are C functions, `void*(size_t, int, void*)` and `void(void*, size_t, int,
    void*)`. The first borrows, in Python, called with no lock of torch's held. The second is called under torch's
    lock, where no Python may run, and so it is one that does nothing: what torch has freed is found by `collect`.
    `alive` tells the addresses that torch has.
    """

    def __init__(self, model: Model, device: int, alive: Callable[[], set[int]]) -> None:
        self.last_denial: MembrokerError | None = None
        self._alive = alive
        self._model = model
        self._device = device
        self._lent: dict[int, _Lent] = {}
        self._collecting = threading.Lock()
        self._function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)(
            self._allocate
        )

    @property
    def allocate_address(self) -> int:
        """The address of the function that borrows; it returns 0 when it is denied."""
        return _address_of(self._function)

    @property
    def free_address(self) -> int:
        """The address of a function of the interpreter's that reads a flag: compiled, without a lock or an effect."""
        return _address_of(ctypes.pythonapi.Py_IsInitialized)

    @property
    def lent(self) -> int:
        """Bytes that are lent now."""
        return sum(lent.buffer.size for lent in list(self._lent.values()))

    def owns(self, address: int, size: int) -> bool:
        """Say whether [address, address + size) lies in one piece that is lent."""
        return any(
            start <= address and address + size <= start + lent.buffer.size for start, lent in list(self._lent.items())
        )

    def collect(self) -> int:
        """Give back what was lent and torch no longer has, and return how many bytes that was.

        A piece that torch was never seen to have is left: it may be about to take it.
        """
        with self._collecting:
            return self._collect()

    def _collect(self) -> int:
        # In this order: what is lent after the first line is not touched, whatever its address was before.
        lent = list(self._lent.items())
        there = self._alive()
        given_back = 0
        for address, one in lent:
            if address in there:
                one.seen = True
            elif one.seen:
                del self._lent[address]
                given_back += one.buffer.size
                one.hold = None
                one.buffer.close()
        return given_back

    def _allocate(self, size: int, device: int, _stream: int | None) -> int:
        """Borrow for torch. Nothing may be raised into its C++."""
        try:
            return self._borrow(size, device)
        except KeyboardInterrupt:
            _thread.interrupt_main()
        except MembrokerError as error:
            self.last_denial = error
        except BaseException as error:
            logger.exception("an allocation of torch's failed")
            self.last_denial = MembrokerError(f"an allocation of torch's failed: {error!r}")
        return 0

    def _borrow(self, size: int, device: int) -> int:
        if device != self._device:
            raise InvalidRequest(f"torch asks for memory of card {device}, and the broker's is card {self._device}")
        try:
            buffer = self._model.allocate(size)
        except OutOfMemory:
            if not self._collect_at_once():
                raise
            buffer = self._model.allocate(size)
        address = buffer.address
        self._lent[address] = _Lent(buffer, buffer.hold(0, size))
        return address

    def _collect_at_once(self) -> int:
        """Collect, unless a thread is at it, perhaps this one, or a graph is captured, which forbids to wait."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return 0
        if not self._collecting.acquire(blocking=False):
            return 0
        try:
            return self._collect()
        finally:
            self._collecting.release()


def _address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# --- modules in segments ---


_ALIGNMENT = 256
_LARGE_BYTES = 4096
_PADDING = "!"
_MOST_NAMES = 5


class _Slot(NamedTuple):
    """Where a module keeps a parameter or a buffer: `own` is its name in `owner`, `name` in the whole module."""

    name: str
    owner: torch.nn.Module
    own: str
    is_parameter: bool
    persistent: bool
    value: torch.Tensor


def publish_module(
    model: Model,
    name: str,
    module: torch.nn.Module,
    *,
    metadata: Mapping[str, str] | None = None,
    location: Location | str = Location.DEVICE,
) -> Segment:
    """Make a segment of a module's parameters and buffers, and seal it. On any failure there is no segment.

    The segment is the image of a safetensors file, as `safetensors.torch.save_model` writes it: a parameter that has
    several names, or shares its memory exactly, stands there once, and `metadata` says which other names mean it.
    Buffers that are not persistent stay out, gradients too. Everything is stored row by row. Tensors of 4 KiB and
    more begin at a multiple of 256 bytes, which kernels for fp8 and bf16 ask for; what fills the gaps is a tensor
    whose name ends with "!".

    The module may stand on the card or on the host, and keeps its own memory: while this runs both are there. Raises
    what `Model.create_segment` raises, and `InvalidRequest` for a parameter on the meta device, or of a kind that has
    no plain bytes.
    """
    stored, ties = _contents(module)
    about = {**(metadata or {}), **ties, "format": "pt"}
    header, index = _layout({key: (_text_of(key, value), _stored_shape(value)) for key, value in stored.items()}, about)
    segment = model.create_segment(name, index.size, location)
    with ExitStack() as undo:
        undo.callback(segment.close)
        segment.write(0, header)
        for key, value in stored.items():
            _copy(value, segment, index[key])
        segment.seal()
        undo.pop_all()
    return segment


def attach_module(segment: Segment, module: torch.nn.Module, strict: bool = True) -> torch.nn.Module:
    """Put tensors over a sealed segment in the place of a module's parameters and buffers, and return the module.

    Nothing is copied: every process that attaches computes with the same bytes. They can only be read, so
    parameters have `requires_grad=False`. The module may be on the meta device (see `without_weights`); what it had is
    dropped, its other buffers move to the device of the weights, and names that are tied in the segment are tied
    here. The segment's memory stays until the last of these tensors is gone, whoever closes it before.

    Raises `InvalidRequest`, and has then changed nothing: when shapes differ; with `strict` also when dtypes differ,
    when the segment lacks a name of the module or has one more, or when a buffer that is not in it has no memory.
    Without `strict` those are left as they are, and dtypes are the segment's. Raises `InvalidTensorIndex` for a segment
    that has no header.
    """
    if segment.writable:
        raise InvalidRequest(f"{segment.resource_name} is still being written: seal it first")
    index = segment.index()
    slots = list(_slots(module))
    found = _matched(slots, index)
    problems = [problem for slot in slots for problem in _differences(slot, index, found, strict)]
    if strict:
        wanted = set(found.values())
        problems += [f"{key} is not in the module" for key in index if key not in wanted and not key.endswith(_PADDING)]
    if problems:
        more = f", and {len(problems) - _MOST_NAMES} more" if len(problems) > _MOST_NAMES else ""
        raise InvalidRequest(
            f"{segment.resource_name} does not fit the module: {'; '.join(problems[:_MOST_NAMES])}{more}"
        )
    _put(segment, index, slots, found)
    return module


@contextmanager
def without_weights() -> Iterator[None]:
    """Build modules in this block, and this thread, whose parameters take no memory: `attach_module` brings them.

    They are on torch's meta device. Buffers are computed as always, those too that are in no checkpoint and that
    `torch.device("meta")` would lose.
    """
    thread = threading.get_ident()

    def on_meta(_module: Any, _name: str, parameter: Any) -> Any:
        if threading.get_ident() != thread or parameter is None or parameter.is_meta:
            return None
        return torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = torch.nn.modules.module.register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        handle.remove()


def _slots(module: torch.nn.Module) -> Iterator[_Slot]:
    """Yield every place of a parameter or buffer, a shared module's once for each of its names."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        before = f"{prefix}." if prefix else ""
        for own, value in owner._parameters.items():
            if value is not None:
                yield _Slot(before + own, owner, own, True, True, value)
        for own, value in owner._buffers.items():
            if value is not None:
                yield _Slot(before + own, owner, own, False, own not in owner._non_persistent_buffers_set, value)


def _contents(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return what is to be stored, by its first name, and the other names of it."""
    stored: dict[str, torch.Tensor] = {}
    ties: dict[str, str] = {}
    names: dict[Any, str] = {}
    for slot in _slots(module):
        if not slot.persistent:
            continue
        _check_plain(slot.name, slot.value)
        first = names.setdefault(_identity(slot.value), slot.name)
        if first == slot.name:
            stored[slot.name] = slot.value
        else:
            ties[slot.name] = first
    return stored, ties


def _identity(value: torch.Tensor) -> Any:
    """Return what two tensors have in common that are the same bytes in the same form."""
    if not value.numel():
        return id(value)
    return value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.is_conj()


def _check_plain(name: str, value: torch.Tensor) -> None:
    if value.is_meta or isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
        raise InvalidRequest(f"{name} has no memory yet (it is on the meta device, or lazy): load the module first")
    # Quantized wrappers and the like are tensors of several parts: they say themselves that they are no plain ones.
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.layout != torch.strided:
        what = f"{type(value).__name__} of layout {value.layout}"
        raise InvalidRequest(f"{name} is a {what}: only plain tensors have bytes that another process can use")


def _text_of(name: str, value: torch.Tensor) -> str:
    if value.dtype not in _TEXTS:
        raise InvalidRequest(f"{name} is of {value.dtype}, which safetensors does not have")
    return _TEXTS[value.dtype]


def _stored_shape(value: torch.Tensor) -> tuple[int, ...]:
    """Return the shape in safetensors' elements: torch counts pairs of float4."""
    shape = tuple(value.shape)
    return (*shape[:-1], 2 * shape[-1]) if _TEXTS.get(value.dtype) == "F4" else shape


def _shape_in_torch(info: TensorInfo) -> tuple[int, ...]:
    return (*info.shape[:-1], info.shape[-1] // 2) if info.dtype == "F4" else info.shape


def _layout(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> tuple[bytes, TensorIndex]:
    """Return a header in which large tensors are aligned: the format has no gaps, so tensors of nothing fill them."""
    _, index = write_index(tensors, metadata, alignment=_ALIGNMENT)
    filled, shift, before = dict(tensors), 0, ""
    for name, info in index.items():
        gap = -(info.offset + shift) % _ALIGNMENT
        if gap and before and info.size >= _LARGE_BYTES:
            # Of the dtype before it, and with a name just behind its name: that is where it is placed.
            dtype = index[before].dtype
            elements = gap * 2 if dtype == "F4" else gap // _DTYPES[dtype].itemsize
            filled[before + _PADDING] = (dtype, (elements,))
            shift += gap
        before = name
    return write_index(filled, metadata, alignment=_ALIGNMENT)


def _copy(value: torch.Tensor, segment: Segment, info: TensorInfo) -> None:
    if info.size:
        with torch.no_grad():
            tensor(segment, value.dtype, tuple(value.shape), info.offset).copy_(value.detach())


def _matched(slots: Sequence[_Slot], index: TensorIndex) -> dict[str, str]:
    """Return the stored name for each name of a module: its own, one it is tied to there, or one it is tied to here."""
    found: dict[str, str] = {}
    here: dict[int, str] = {}
    for slot in slots:
        key = slot.name if slot.name in index else index.metadata.get(slot.name, "")
        if key in index and slot.persistent:
            found[slot.name] = key
            here.setdefault(id(slot.value), key)
    for slot in slots:
        if slot.persistent and slot.name not in found and id(slot.value) in here:
            found[slot.name] = here[id(slot.value)]
    return found


def _differences(slot: _Slot, index: TensorIndex, found: Mapping[str, str], strict: bool) -> Iterator[str]:
    """Yield what stands between a slot and the segment, in words."""
    if slot.name not in found:
        if strict and slot.persistent:
            yield f"{slot.name} is not in the segment"
        elif strict and slot.value.is_meta:
            yield (
                f"{slot.name} is in no segment (a buffer that is not persistent), and on the meta device: "
                "build the module with without_weights()"
            )
        return
    info = index[found[slot.name]]
    if info.dtype not in _DTYPES:
        yield f"{slot.name} is {info.dtype} in the segment, which this torch does not have"
    elif tuple(slot.value.shape) != _shape_in_torch(info):
        here, there = list(slot.value.shape), list(_shape_in_torch(info))
        yield f"{slot.name} has the shape {here} in the module and {there} in the segment"
    elif strict and slot.value.dtype != _DTYPES[info.dtype]:
        yield f"{slot.name} is {slot.value.dtype} in the module and {_DTYPES[info.dtype]} in the segment"


def _put(segment: Segment, index: TensorIndex, slots: Sequence[_Slot], found: Mapping[str, str]) -> None:
    """Set the tensors in their places: one object for all names that mean the same."""
    made: dict[tuple[str, bool], torch.Tensor] = {}
    views: dict[str, torch.Tensor] = {}
    place = device_of(segment.hold(0, segment.size).device)
    for slot in slots:
        key = found.get(slot.name)
        if key is None:
            if not slot.is_parameter and not slot.value.is_meta:
                slot.owner._buffers[slot.own] = slot.value.to(place)
            continue
        if key not in views:
            info = index[key]
            views[key] = tensor(segment, _DTYPES[info.dtype], _shape_in_torch(info), info.offset)
        one = made.get((key, slot.is_parameter))
        if one is None:
            one = torch.nn.Parameter(views[key], requires_grad=False) if slot.is_parameter else views[key]
            made[key, slot.is_parameter] = one
        # By setattr, as torch's own load_state_dict does: an RNN keeps a second list of its weights.
        setattr(slot.owner, slot.own, one)
