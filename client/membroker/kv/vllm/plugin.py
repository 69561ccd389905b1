"""The entry point `vllm.general_plugins`: makes names known that flags of vLLM take, in every process of vLLM.

vLLM calls it in each of its processes, whether these names are used or not. So it must never raise, because vLLM would
not start then.
"""

from __future__ import annotations

from . import last_line, logger


def register() -> None:
    """Register the connector, and the loader unless this vLLM lacks what it is made of."""
    last_line.begin()
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector("Membroker", "membroker.kv.vllm", "Membroker")
    except (ImportError, ValueError) as error:  # a name may be registered once
        logger.warning('"kv_connector": "Membroker" is not available with this vLLM: %s', error)
    try:
        from vllm.model_executor.model_loader import register_model_loader

        from .weights import Loader
    except ImportError as error:
        logger.warning("--load-format membroker is not available with this vLLM: %s", error)
        return
    register_model_loader("membroker")(Loader)
