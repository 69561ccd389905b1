"""`PoolRange`: what an allocation of a pool returns. It is the address, and knows the rest of the allocation.

Owns the few facts that a program would otherwise compute or keep beside the address. It must never release memory by
itself: an address that is garbage frees nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

from ..arguments import check_framework, check_range, shape_of
from ..dlpack import export, size_of
from ..dtypes import word_of
from ..safetensors import TensorInfo, numpy_array
from ..tracebacks import ends_at_the_caller
from ..views import Span
from ..vmm.sizes import format_size
from .backing import Waitable


class _Pool(Protocol):
    """The pool of a range, as far as the range uses it."""

    def span(self, offset: int, size: int, /) -> Span: ...

    def view(self, offset: int, size: int, /) -> memoryview: ...

    def free(self, where: int, /, *, after: Waitable | None = None) -> None: ...


@ends_at_the_caller()
class PoolRange(int):
    """The bytes of one allocation of a pool. It is an int, the address, and keeps the pool as a view does.

    Sums, copies and pickles of it are plain ints, and so is its text; its `repr` says what it is. A compaction that
    moves the allocation changes neither the int nor `offset`: compute both from the moves, or `pin` the range.
    Only a pool makes one.
    """

    _of: tuple[_Pool, int, int]  # one attribute: each of them takes 50 ns of a call that takes a microsecond
    freed = False
    """Whether the allocation was released with this range, here or by the pool's `free`."""

    @property
    def address(self) -> int:
        """The address as a plain int."""
        return int(self)

    @property
    def offset(self) -> int:
        """Where it begins in the pool, in bytes."""
        return self._of[1]

    @property
    def nbytes(self) -> int:
        """Its size as it was requested, in bytes."""
        return self._of[2]

    def tensor(self, shape: Sequence[int], dtype: Any, framework: str = "torch", *, offset: int = 0) -> Any:
        """Return `shape` elements of `dtype` from byte `offset` of this range on; nothing is copied.

        It is a tensor of `"torch"`, or an array of `"numpy"` (on the host driver) or `"jax"`, as the framework's
        adapter makes it. While it lives, the range cannot be freed. Raises `InvalidRequest` for what does not lie in
        the range, `NotMapped` when it was freed, and what the adapter raises.
        """
        check_framework(framework)
        if framework == "numpy":
            word, size = word_of(dtype), size_of(shape, dtype)
            view = self._of[0].view(*self._part(offset, size))
            return numpy_array(view, TensorInfo("of a range", word, shape_of(shape), 0, size))
        # The adapters are extensions, which know this module: so they are imported by name.
        adapter = import_module(f"membroker.adapters.{framework}")
        make = adapter.tensor if framework == "torch" else adapter.array
        return make(self, shape, dtype, offset)

    def span(self, offset: int, size: int) -> Span:
        """Keep `size` bytes from byte `offset` of this range on, as `VirtualMemoryPool.span` does: for the adapters."""
        return self._of[0].span(*self._part(offset, size))

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's type of the device, and its number."""
        return export(self, (self.nbytes,), "U8").__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        """Return the bytes as a tensor of uint8 for one consumer, such as `torch.from_dlpack`. See `dlpack.export`."""
        return export(self, (self.nbytes,), "U8").__dlpack__(**options)

    def free(self, *, after: Waitable | None = None) -> None:
        """Release the allocation, as `VirtualMemoryPool.free` does. Raises what that raises, and `NotMapped` twice."""
        self._of[0].free(self, after=after)

    def _part(self, offset: int, size: int) -> tuple[int, int]:
        """Return the offset of a part in the pool, and its size, after checking that it lies in the range."""
        offset, size = check_range(offset, size, self.nbytes, "a range")
        return self.offset + offset, size

    def __str__(self) -> str:
        return int.__repr__(self)

    def __repr__(self) -> str:
        freed = ", freed" * self.freed
        return f"<membroker PoolRange of {format_size(self.nbytes)} at {int(self):#x}, offset {self.offset}{freed}>"

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def range_of(pool: _Pool, address: int, offset: int, nbytes: int) -> PoolRange:
    """Return the range of an allocation. A constructor of the class's own would take four times as long."""
    made = PoolRange(address)
    made._of = pool, offset, nbytes
    return made
