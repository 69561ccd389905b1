"""JAX: arrays over borrowed memory, by DLPack. JAX's own memory cannot be borrowed: XLA takes no allocator.

It must never let JAX copy silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dlpack import Exportable, export
from ..errors import InvalidRequest
from ..ext import word_of
from ._packages import framework

_WIDE = {"I64", "U64", "F64"}


CARD_ALIGNMENT = 16
"""XLA requires this alignment, and reports an error only when it computes (observed with jax 0.11 on an H200)."""


def array(source: Exportable, dtype: Any, shape: Sequence[int], offset: int = 0) -> Any:
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
    tensor = export(source, dtype, shape, offset, ignore_read_only=True)
    if tensor.on_card and tensor.address % CARD_ALIGNMENT:
        raise InvalidRequest(
            f"JAX requires addresses at a multiple of {CARD_ALIGNMENT} bytes, and this one is {tensor.address:#x}"
        )
    dlpack = framework("jax.dlpack", "JAX", "pip install jax")
    try:
        return dlpack.from_dlpack(tensor, copy=False)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"JAX does not accept {dtype} at {tensor.address:#x} without a copy: {error}") from error
