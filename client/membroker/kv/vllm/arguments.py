"""What vLLM needs on its command line for an elastic KV cache. docs/vllm.md says why. It imports no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Final

from ...errors import InvalidRequest
from ..command import Options

TRANSFER: Final = '{"kv_connector":"Membroker","kv_connector_module_path":"membroker.kv.vllm","kv_role":"kv_producer"}'


def arguments(command: Sequence[str], capacity: int) -> tuple[list[str], dict[str, str]]:
    """Return what a command of vLLM lacks: words at its end, and no variables.

    `capacity` is how many bytes of addresses its cache gets. Raises `InvalidRequest` if the command's own options keep
    the cache from being elastic.
    """
    given = Options(command)
    transfer = given.text_of("kv-transfer-config")
    if transfer is not None and "Membroker" not in transfer:
        raise InvalidRequest(
            "--kv-transfer-config names another connector, so this KV cache would not be elastic: name Membroker in it "
            "too (a MultiConnector has both), or give `membroker run` --engine none"
        )
    needed = {
        "kv-transfer-config": TRANSFER,
        "worker-cls": "membroker.kv.vllm.Worker",
        "kv-cache-memory-bytes": str(capacity),
        "gpu-memory-utilization": "0.05",  # vLLM does not start unless this part of the GPU is free
    }
    lacking = [(f"--{name}", value) for name, value in needed.items() if given.text_of(name) is None]
    return list(chain.from_iterable(lacking)), {}
