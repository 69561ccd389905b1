"""DLPack and the CUDA array interface: borrowed bytes as a tensor of any framework that reads either.

Owns the conversion of a range of a buffer, a pool or a segment to an object that `from_dlpack` takes. Keeps a span of
the range until the last tensor over it is gone. It must never read the bytes, which may be on a GPU.

NumPy creates the structure that a framework gets, and this module overwrites its device and dtype. The reason is the
deleter, which a framework calls in any thread, without the GIL, during an exception, or after the interpreter has
exited. NumPy's deleter is compiled and is safe in all these cases. A deleter in Python, through ctypes, loses the
exception ("error return without exception set") and kills the process at exit (both observed).

https://dmlc.github.io/dlpack/latest (1.1 and its predecessors), and
https://nvidia.github.io/numba-cuda/user/cuda_array_interface.html (version 3).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .arguments import shape_of
from .dtypes import word_of
from .errors import InvalidRequest
from .views import Span
from .vmm.driver import DeviceInfo
from .vmm.sizes import MAX_BYTES

if TYPE_CHECKING:
    import numpy.typing as npt

CPU, CUDA = 1, 2
"""DLPack's device types (`kDLCPU`, `kDLCUDA`)."""

_MAX_DIMENSIONS = 32
_READ_ONLY = 1
_VERSIONED, _UNVERSIONED = b"dltensor_versioned", b"dltensor"


class _Dtype(NamedTuple):
    """DLPack's code and bits of an element, and a NumPy dtype of the same size."""

    code: int
    bits: int
    stand_in: str


# F4 and F6 pack several elements into a byte, which no framework supports.
_DTYPES = {
    "BOOL": _Dtype(6, 8, "bool"),
    "I8": _Dtype(0, 8, "i1"),
    "U8": _Dtype(1, 8, "u1"),
    "F8_E4M3": _Dtype(10, 8, "u1"),
    "F8_E4M3FNUZ": _Dtype(11, 8, "u1"),
    "F8_E5M2": _Dtype(12, 8, "u1"),
    "F8_E5M2FNUZ": _Dtype(13, 8, "u1"),
    "F8_E8M0": _Dtype(14, 8, "u1"),
    "I16": _Dtype(0, 16, "i2"),
    "U16": _Dtype(1, 16, "u2"),
    "F16": _Dtype(2, 16, "f2"),
    "BF16": _Dtype(4, 16, "u2"),
    "I32": _Dtype(0, 32, "i4"),
    "U32": _Dtype(1, 32, "u4"),
    "F32": _Dtype(2, 32, "f4"),
    "I64": _Dtype(0, 64, "i8"),
    "U64": _Dtype(1, 64, "u8"),
    "F64": _Dtype(2, 64, "f8"),
    "C64": _Dtype(5, 64, "c8"),
}
_BFLOAT, _FIRST_FLOAT8 = 4, 7


class Exportable(Protocol):
    """A `Buffer`, a `GrowableBuffer`, a `VirtualMemoryPool`, a `Segment` or a `SparseArray`."""

    def span(self, offset: int, size: int, /) -> Span:
        """Keep [offset, offset + size) mapped while the result is alive."""
        ...


class DlpackTensor:
    """`shape` elements of `dtype` at `address`, in C order, for `from_dlpack` of any framework. Made by `export`.

    `dtype` is as for `dtypes.word_of`; the attribute is the safetensors name (`"BF16"`). `device` is DLPack's
    pair of type and number. This object and every tensor that a framework makes from it keep `owner` alive. The last
    one drops it, in any thread.

    Raises `InvalidRequest` for a dtype that DLPack does not have, an invalid shape, or an address that is not a
    multiple of the element size. Raises `ImportError` without NumPy.
    """

    def __init__(
        self,
        owner: object,
        address: int,
        shape: Sequence[int],
        dtype: Any,
        device: tuple[int, int],
        read_only: bool = False,
    ) -> None:
        size_of(shape, dtype)
        dtype, shape = word_of(dtype), shape_of(shape)
        self._dtype = _DTYPES[dtype]
        if address % (self._dtype.bits // 8):
            raise InvalidRequest(f"{dtype} at {address:#x} is not aligned to its {self._dtype.bits // 8} bytes")
        self.dtype = dtype
        self.device = device
        self.read_only = read_only
        self._array = _unread_array(owner, address, shape, self._dtype.stand_in)

    @property
    def address(self) -> int:
        """The address of the first byte, in this process."""
        return int(self._array.ctypes.data)

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements in each dimension; () for a scalar."""
        return tuple(self._array.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self._array.nbytes)

    @property
    def typestr(self) -> str:
        """NumPy's type string for an element: for BF16 and F8, an unsigned integer of the same size."""
        return str(self._array.dtype.str)

    @property
    def on_card(self) -> bool:
        """Whether the memory is on a GPU, so that only a GPU can read it."""
        return self.device[0] != CPU

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the type of the device and its number."""
        return self.device

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule for one consumer: with version and flags if the consumer and NumPy (2.1) support them.

        Does not wait for `stream`: the writer of the memory must synchronize. Raises `BufferError` for another device,
        for a copy, and for read-only memory that the consumer cannot be told about.
        """
        if copy:
            raise BufferError("borrowed memory is not copied by the export: copy it in the framework")
        if dl_device is not None and tuple(dl_device) != self.device:
            raise BufferError(f"the memory is on DLPack's device {self.device} and cannot be exported to {dl_device}")
        if stream is not None and not self.on_card:
            raise BufferError("host memory has no streams")
        capsule = _capsule(self._array, versioned=max_version is not None and max_version[0] >= 1)
        self._write_over(capsule)
        return capsule

    def _write_over(self, capsule: Any) -> None:
        """Overwrite the device, the dtype and the flags in NumPy's structure by those of this tensor."""
        if _is_capsule(capsule, _VERSIONED):
            versioned = _ManagedVersioned.from_address(_pointer_in(capsule, _VERSIONED))
            tensor = versioned.tensor
            versioned.flags |= _READ_ONLY if self.read_only else 0
        elif self.read_only:
            raise BufferError(
                "the memory is read-only, and DLPack before 1.0 cannot say so; "
                "use export(…, ignore_read_only=True) for a framework that never writes to it"
            )
        else:
            tensor = _Managed.from_address(_pointer_in(capsule, _UNVERSIONED)).tensor
        tensor.device_type, tensor.device_id = self.device
        tensor.code, tensor.bits = self._dtype.code, self._dtype.bits

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The tensor as a CUDA array: for GPU memory, in a dtype that NumPy has. Otherwise `AttributeError`.

        The consumer must keep this object alive.
        """
        if not self.on_card:
            raise AttributeError("host memory is not a CUDA array: use __dlpack__")
        if not is_numpys(self.dtype):
            raise AttributeError(f"the CUDA array interface has no {self.dtype}: use __dlpack__, or export U8 or U16")
        return {"shape": self.shape, "typestr": self.typestr, "data": (self.address, self.read_only), "version": 3}

    def __repr__(self) -> str:
        return f"<membroker DlpackTensor of {self.dtype} {list(self.shape)} at {self.address:#x}>"


def export(
    source: Exportable, shape: Sequence[int], dtype: Any, offset: int = 0, *, ignore_read_only: bool = False
) -> DlpackTensor:
    """Return `shape` elements of `dtype` from byte `offset` of a buffer, a pool or a segment; nothing is copied.

    The result, and every tensor made from it, hold the range as a live view does. A closed owner releases its memory
    when they are gone, and until then a pool refuses to free the range. A sealed or attached segment is exported
    read-only; `ignore_read_only` omits the flag, for a framework that never writes. The mapping stays read-only: a
    write ends the process on the host, and its CUDA context on a GPU.

    Raises `InvalidRequest` (for a pool, `InvalidOffset`) for a range outside the source, an offset that is not a
    multiple of the element size, an unknown dtype or an invalid shape; `NotMapped` for a page without memory;
    `ClosedError`; `ImportError`.
    """
    span = source.span(offset, size_of(shape, dtype))
    read_only = not span.writable and not ignore_read_only
    return DlpackTensor(span, span.address, shape, dtype, device_of(span.device), read_only=read_only)


def is_numpys(dtype: str) -> bool:
    """Return whether NumPy, and so the CUDA array interface, has the dtype: all but BF16 and F8."""
    code = _DTYPES[dtype].code
    return code != _BFLOAT and code < _FIRST_FLOAT8


def device_of(device: DeviceInfo) -> tuple[int, int]:
    """Return DLPack's pair for a driver's device."""
    return (CPU, 0) if device.driver == "host" else (CUDA, device.ordinal)


def size_of(shape: Sequence[int], dtype: Any) -> int:
    """Return the bytes of a tensor. Raises `InvalidRequest` for a dtype that DLPack does not have, or a bad shape."""
    known = _DTYPES.get(word_of(dtype))
    if known is None:
        raise InvalidRequest(f"DLPack does not have the dtype {dtype!r}; it has {', '.join(_DTYPES)}")
    shape = shape_of(shape)
    if len(shape) > _MAX_DIMENSIONS:
        raise InvalidRequest(f"a tensor has up to {_MAX_DIMENSIONS} dimensions, not {len(shape)}")
    # Check the other dimensions even if one is 0: strides would overflow.
    if math.prod(max(1, dimension) for dimension in shape) * known.bits // 8 > MAX_BYTES:
        raise InvalidRequest(f"a tensor of shape {shape!r} has more than 2^63-1 bytes")
    return math.prod(shape) * known.bits // 8


def _unread_array(owner: object, address: int, shape: Sequence[int], stand_in: str) -> npt.NDArray[Any]:
    """Return an array at `address` that keeps `owner` alive. NumPy does not read the bytes."""
    try:
        import numpy as np
    except ImportError as error:
        raise ImportError("the DLPack adapter needs NumPy: pip install numpy") from error
    typestr = np.dtype(stand_in).str
    interface = {"data": (address, False), "shape": tuple(shape), "typestr": typestr, "version": 3}
    # The array keeps the object with the interface, and so the owner.
    array: npt.NDArray[Any] = np.asarray(SimpleNamespace(owner=owner, __array_interface__=interface))
    return array


# --- the capsule, created by NumPy ---


class _Tensor(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    """`DLManagedTensorVersioned`."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer_in = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _capsule(array: npt.NDArray[Any], *, versioned: bool) -> Any:
    if versioned:
        with suppress(TypeError):  # NumPy before 2.1 takes no version
            return array.__dlpack__(max_version=(1, 0))
    return array.__dlpack__()
