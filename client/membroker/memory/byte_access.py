"""What a resource of bytes is to other code: a buffer of Python's, an array of NumPy's, a tensor by DLPack.

Owns the protocols, and nothing of the memory: each of them takes a view or a span of the resource, so it keeps the
memory as those do. It must never copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..dlpack import device_of, export
from ..views import Span
from .lifetime import AtAddress

if TYPE_CHECKING:
    import numpy.typing as npt


class ByteAccess(AtAddress):
    """A resource of `size` bytes. `np.asarray`, `torch.from_dlpack`, `len` and slices take it as they take a buffer.

    From Python 3.12 on, `memoryview` does, too; before that a class cannot be a buffer, so call `view()`. On a GPU only
    `from_dlpack` and `len` work: the CPU cannot read its memory.
    """

    @property
    def size(self) -> int:
        """The bytes."""
        raise NotImplementedError

    def view(self) -> memoryview:
        """Return the bytes as a memoryview, on the host driver."""
        raise NotImplementedError

    def span(self, offset: int, size: int) -> Span:
        """Keep [offset, offset + size) mapped while the result lives."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """`size`, as arrays call it."""
        return self.size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int | slice) -> Any:
        """Return a byte, or a part of `view()`."""
        return self.view()[key]

    def __setitem__(self, key: int | slice, value: Any) -> None:
        """Write a byte, or as many as the slice has."""
        self.view()[key] = value

    def __buffer__(self, _flags: int) -> memoryview:
        """Return `view()`: what `memoryview`, `bytes` and `file.readinto` call from Python 3.12 on."""
        return self.view()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        """Return the bytes for `np.asarray`, as uint8. It refuses what it would have to copy, as NumPy asks."""
        import numpy as np

        array = np.asarray(self.view())
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"the bytes are uint8, and {dtype} would be a copy: use np.asarray(…).view")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's type of the device, and its number."""
        return device_of(self._holding.source.driver.device)

    def __dlpack__(self, **options: Any) -> Any:
        """Return the bytes as a tensor of uint8 for one consumer, such as `torch.from_dlpack`. See `dlpack.export`."""
        return export(self, (self.size,), "U8").__dlpack__(**options)
