"""The dtypes of safetensors: their words, sizes and order, and the names that other packages give them.

Owns the table and the translations. It must not import NumPy or a framework before a caller uses one.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

from .errors import InvalidRequest

# A name in another process's header can have 100 MB: a message shows its beginning and its end.
_SHORT = reprlib.Repr()
_SHORT.maxstring, _SHORT.maxlevel = 60, 2
quoted: Callable[[object], str] = _SHORT.repr


class Dtype(NamedTuple):
    """An element: its `bits`, and its `name` in NumPy, or in ml_dtypes (`extension`), or "" if it is packed."""

    bits: int
    name: str = ""
    extension: bool = False


# In the order of the reference's enum. Its writer places the last of these first.
DTYPES = {
    "BOOL": Dtype(8, "bool"),
    "F4": Dtype(4),
    "F6_E2M3": Dtype(6),
    "F6_E3M2": Dtype(6),
    "U8": Dtype(8, "uint8"),
    "I8": Dtype(8, "int8"),
    "F8_E5M2": Dtype(8, "float8_e5m2", extension=True),
    "F8_E4M3": Dtype(8, "float8_e4m3fn", extension=True),
    "F8_E8M0": Dtype(8, "float8_e8m0fnu", extension=True),
    "F8_E4M3FNUZ": Dtype(8, "float8_e4m3fnuz", extension=True),
    "F8_E5M2FNUZ": Dtype(8, "float8_e5m2fnuz", extension=True),
    "I16": Dtype(16, "int16"),
    "U16": Dtype(16, "uint16"),
    "F16": Dtype(16, "float16"),
    "BF16": Dtype(16, "bfloat16", extension=True),
    "I32": Dtype(32, "int32"),
    "U32": Dtype(32, "uint32"),
    "F32": Dtype(32, "float32"),
    "C64": Dtype(64, "complex64"),
    "F64": Dtype(64, "float64"),
    "I64": Dtype(64, "int64"),
    "U64": Dtype(64, "uint64"),
}
RANKS = {text: rank for rank, text in enumerate(DTYPES)}
_TEXTS = {dtype.name: text for text, dtype in DTYPES.items() if dtype.name}


def numpy_dtype(word: str, raw: bool) -> Any:
    """Return NumPy's dtype for safetensors' word; with `raw`, unsigned integers for those that NumPy lacks."""
    import numpy as np

    dtype = DTYPES[word]
    if dtype.name and not dtype.extension:
        return np.dtype(dtype.name).newbyteorder("<")
    if raw:
        return np.dtype("<u2" if dtype.bits == 16 else "u1")
    if not dtype.name:
        raise InvalidRequest(f"NumPy has no packed {word}: raw=True gives the bytes as uint8")
    try:
        return np.dtype(getattr(import_module("ml_dtypes"), dtype.name))
    except (ImportError, AttributeError) as error:
        raise InvalidRequest(
            f"{word} needs {dtype.name} of the package ml_dtypes (pip install ml_dtypes): {error}; "
            f"raw=True gives it as uint{dtype.bits}"
        ) from None


def word_of(dtype: Any) -> str:
    """Return safetensors' word for a dtype of NumPy, ml_dtypes, torch or JAX, for its name, or for the word itself.

    So `"BF16"`, `"bfloat16"`, `"torch.bfloat16"`, `torch.bfloat16`, `ml_dtypes.bfloat16` and `jnp.bfloat16` are the
    same. Raises `InvalidRequest` for anything else, including NumPy's codes such as `"f4"`, and as `dtype_of`.
    """
    if isinstance(dtype, str) or (type(dtype).__module__, type(dtype).__name__) == ("torch", "dtype"):
        name = str(dtype).removeprefix("torch.")
        if name in DTYPES or name in _TEXTS:
            return _TEXTS.get(name, name)
    elif numpy := sys.modules.get("numpy"):
        if isinstance(dtype, numpy.dtype):
            return dtype_of(dtype)
        if isinstance(dtype, type) and issubclass(dtype, numpy.generic):  # np.float16, ml_dtypes.bfloat16
            with suppress(TypeError):  # an abstract class of NumPy is not a dtype
                return dtype_of(numpy.dtype(dtype))
        elif callable(dtype) and isinstance(of_jax := getattr(dtype, "dtype", None), numpy.dtype):  # jnp.float32
            return dtype_of(of_jax)
    raise InvalidRequest(
        f"{quoted(dtype)} is not a dtype that safetensors has: take NumPy's, ml_dtypes', torch's, JAX's, its name, or "
        + ", ".join(DTYPES)
    )


def dtype_of(array: Any) -> str:
    """Return safetensors' word for the dtype of a NumPy array, or for a `numpy.dtype` itself.

    Raises `InvalidRequest` for a dtype that the format lacks (float128, text, records, and ml_dtypes' F4 and F6, which
    take a byte each), and for big-endian data.
    """
    dtype = getattr(array, "dtype", array)
    name, order = getattr(dtype, "name", None), getattr(dtype, "byteorder", None)
    if name not in _TEXTS:
        raise InvalidRequest(f"safetensors has no dtype for {quoted(dtype)}")
    if order == ">" or (order == "=" and sys.byteorder == "big"):
        raise InvalidRequest(f"{name} is big-endian here, and the format little-endian: use array.astype with a '<'")
    return _TEXTS[name]
