"""JAX: arrays over borrowed memory, by DLPack. JAX's own memory cannot be borrowed: XLA takes no allocator.

It must never let JAX copy silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dlpack import Exportable, export
from ..errors import InvalidRequest
from ..ext import word_of
from ..safetensors import TensorInfo
from ..segment import Segment
from ._packages import framework

_WIDE = {"I64", "U64", "F64"}


CARD_ALIGNMENT, HOST_ALIGNMENT = 16, 64
"""What XLA requires. On a GPU it reports an error only when it computes (observed with jax 0.11 on an H200)."""


def array(source: Exportable, shape: Sequence[int], dtype: Any, offset: int = 0) -> Any:
    """Return a `jax.Array` over bytes of a buffer, a pool or a segment; nothing is copied.

    JAX treats its arrays as constant: do not write to the memory afterwards. A sealed segment is a good source. Never
    donate the array (`donate_argnums`): XLA would write to it, which on a GPU destroys the process's CUDA context.
    JAX's streams do not wait for earlier writes: synchronize before. The range is held, as with `dlpack.export`, until
    JAX has dropped the array and has finished the work that uses it.

    Raises what `dlpack.export` raises, and `InvalidRequest` if JAX would have to copy or would refuse later: 64-bit
    dtypes without `jax_enable_x64`, and an offset that is not a multiple of 16 on a GPU, or of 64 on the host.
    """
    jax = framework("jax", "JAX", "pip install 'jax[cuda13]', or jax for the host")
    dtype = word_of(dtype)
    if dtype in _WIDE and not jax.config.jax_enable_x64:
        raise InvalidRequest(f"JAX would copy {dtype} to 32 bits: set jax_enable_x64")
    tensor = export(source, shape, dtype, offset, ignore_read_only=True)
    alignment = CARD_ALIGNMENT if tensor.on_card else HOST_ALIGNMENT
    if tensor.address % alignment:
        raise InvalidRequest(
            f"JAX would have to copy what is not aligned to {alignment} bytes, and offset {offset} is not: begin the "
            f"array at a multiple of {alignment}, as every tensor of a segment does"
        )
    dlpack = framework("jax.dlpack", "JAX", "pip install jax")
    try:
        return dlpack.from_dlpack(tensor, copy=False)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"JAX does not accept {dtype} of shape {tensor.shape} without a copy: {error}") from error


def stored_tensor(segment: Segment, info: TensorInfo) -> Any:
    """Return an array of a segment's index; nothing is copied. Raises what `array` raises, with the tensor's name."""
    try:
        return array(segment, info.shape, info.dtype, info.offset)
    except InvalidRequest as error:
        raise InvalidRequest(f"{info.name}: {error}") from error
