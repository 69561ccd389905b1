"""JAX: arrays over borrowed memory, by DLPack. JAX's own memory cannot be borrowed: XLA takes no allocator.

Owns nothing. It must never let JAX copy unasked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from membroker.adapters._packages import framework
from membroker.adapters.dlpack import Source, export
from membroker.errors import InvalidRequest
from membroker.tensor_index import word_of

_WIDE = {"I64", "U64", "F64"}


CARD_ALIGNMENT = 16
"""XLA takes no buffer at another multiple, and says so only when it computes (seen with jax 0.11 on an H200)."""


def array(source: Source, dtype: Any, shape: Sequence[int], offset: int = 0) -> Any:
    """Return a `jax.Array` over bytes of a buffer, a pool or a segment; nothing is copied.

    JAX takes its arrays to be constant: nobody may write to the memory any more, which a sealed segment is for. Never
    donate one (`donate_argnums`): XLA would write over it, which on a card ends the process's CUDA context. Its
    streams wait for nothing: who wrote the memory has waited for that before. The range is held, as `dlpack.export`
    says, until JAX has let go of the array, and has done what it was asked to do with it.

    Raises what `dlpack.export` raises, and `InvalidRequest` where JAX would have to copy or would refuse later: 64
    bits without `jax_enable_x64`, an offset that is no multiple of 16 on a card, or of 64 on the host.
    """
    jax = framework("jax", "JAX", "pip install 'jax[cuda13]', or jax for the host")
    dtype = word_of(dtype)
    if dtype in _WIDE and not jax.config.jax_enable_x64:
        raise InvalidRequest(f"JAX would copy {dtype} to 32 bits: set jax_enable_x64")
    tensor = export(source, dtype, shape, offset, ignore_read_only=True)
    if tensor.on_card and tensor.address % CARD_ALIGNMENT:
        raise InvalidRequest(
            f"JAX wants its arrays at a multiple of {CARD_ALIGNMENT} bytes, and this one is at {tensor.address:#x}"
        )
    dlpack = framework("jax.dlpack", "JAX", "pip install jax")
    try:
        return dlpack.from_dlpack(tensor, copy=False)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequest(f"JAX does not take {dtype} at {tensor.address:#x} as it is: {error}") from error
