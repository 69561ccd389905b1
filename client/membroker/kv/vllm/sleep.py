"""Weights that are borrowed from the broker, so that they are in the books and can be released while the engine sleeps.

Owns their pool and its session. The session is one of its own that answers no recalls: weights cannot be recalled, so
the broker must not lend this engine what others are guaranteed for them.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any, NamedTuple

from ... import Client, VirtualMemoryPool, connect
from ...adapters.torch import device_of, move_to_pool
from ...errors import InvalidRequest
from ..bounds import START_SECONDS, refuse, say_wait
from . import logger
from .settings import BORROWED, endpoint_of, settings_in


def why_kept(config: Any) -> str:
    """Return in half a sentence why a sleeping engine keeps weights that are not borrowed."""
    if _is_shared(config):
        return "other engines may use the same ones (--load-format membroker)"
    return 'they are vLLM\'s own memory (give "weights": "borrowed" to release them, too)'


def _is_shared(config: Any) -> bool:
    return str(config.load_config.load_format) == "membroker"


class BorrowedWeights(NamedTuple):
    """The weights of one engine, or of one rank, in a pool. Their memory goes with the parameters."""

    client: Client
    pool: VirtualMemoryPool


def wants_borrowed(config: Any) -> bool:
    """Return whether the user wants the weights of a `VllmConfig` to be borrowed.

    Raises `InvalidRequest` for weights that are not to be moved, or were never tried.
    """
    if settings_in(config.kv_transfer_config).weights != BORROWED:
        return False
    refusals = {
        'are in the books already with --load-format membroker: leave "weights" out': _is_shared(config),
        'were not tried with quantized models, whose kernels may know their addresses: leave "weights" out': (
            config.model_config.quantization is not None
        ),
        'were not tried with LoRA: leave "weights" out': config.lora_config is not None,
    }
    refuse("borrowed weights", refusals)
    return True


def borrow(config: Any, module: Any) -> BorrowedWeights:
    """Move a module's parameters to a pool. It waits for the broker."""
    begun, settings = time.monotonic(), settings_in(config.kv_transfer_config)
    name = settings.name(config.model_config.served_model_name)
    with ExitStack() as undo:
        client = undo.enter_context(connect(endpoint_of(settings.endpoint, config.parallel_config)))
        model = client.model(name, limit=settings.limit)
        device = device_of(model.driver.device)
        wanted = [parameter for parameter in module.parameters() if parameter.device == device]
        if not wanted:
            raise InvalidRequest(f"this engine has no weights on {device}, whose memory the broker lends")
        say_wait(sum(parameter.nbytes for parameter in wanted), model, logger)
        pool = move_to_pool(wanted, model, timeout=START_SECONDS)
        undo.pop_all()
    logger.info(
        "membroker: moved %d bytes of weights of model %r into borrowed memory in %.2f s",
        pool.physical_usage_bytes,
        name,
        time.monotonic() - begun,
    )
    return BorrowedWeights(client, pool)
