"""The entry point `vllm.general_plugins`: makes `--load-format membroker` known in every process of vLLM.

vLLM calls it in each of its processes, whether that load format is used or not. So it must never raise, because vLLM
would not start then.
"""

from __future__ import annotations

import logging

logger = logging.getLogger("vllm.membroker")  # vLLM shows only loggers below its own


def register() -> None:
    """Register the loader, unless this vLLM lacks what it is made of."""
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from .weights import Loader
    except ImportError as error:
        logger.warning("--load-format membroker is not available with this vLLM: %s", error)
        return
    register_model_loader("membroker")(Loader)
