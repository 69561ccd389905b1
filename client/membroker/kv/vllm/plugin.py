"""The entry point `vllm.general_plugins`: makes `--load-format membroker` known in every process of vLLM.

vLLM calls it in each of its processes, whether that load format is used or not.
"""

from __future__ import annotations


def register() -> None:
    """Register the loader."""
    from vllm.model_executor.model_loader import register_model_loader

    from .weights import Loader

    register_model_loader("membroker")(Loader)
