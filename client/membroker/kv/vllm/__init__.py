"""vLLM's KV cache over a membroker pool, by vLLM's own flags. See docs/vllm.md.

This module lists the names that the flags take: the connector `Membroker` and the worker class `Worker`. Each is loaded
when it is asked for, because vLLM's worker for CPUs replaces parts of torch when it is imported. Besides, it has the
logger of all modules here.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

__all__ = ["Membroker", "Worker"]

logger: logging.Logger = logging.getLogger("vllm.membroker")  # vLLM shows only loggers below its own

_ELSEWHERE = {"Membroker": "connector", "Worker": "worker"}


def __getattr__(name: str) -> Any:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module 'membroker.kv.vllm' has no attribute {name!r}")
    value = getattr(import_module(f"membroker.kv.vllm.{_ELSEWHERE[name]}"), name)
    globals()[name] = value
    return value
