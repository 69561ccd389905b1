"""Models by their shape alone: vLLM needs no more than a config.json when weights are random.

Speed and memory depend on the shape, not on what the weights say.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_ELEMENT_BYTES = {"bfloat16": 2, "float32": 4}


def _sizes(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
    }


SHAPES: dict[str, dict[str, Any]] = {
    # 12 KiB of KV cache a token, and a block of 32 tokens in float32, as vLLM's CPU build takes it
    "tiny": _QWEN3
    | _sizes(64, 128, 2, 8, 8, 96)
    | {"max_position_embeddings": 2048, "torch_dtype": "float32", "vocab_size": 512},
    "qwen3-0.6b": _QWEN3 | _sizes(1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": _QWEN3 | _sizes(2048, 6144, 28, 16, 8, 128),
    "llama-3.1-8b": _LLAMA | _sizes(4096, 14336, 32, 32, 8, 128),
}


def write(name: str) -> Path:
    """Write the config.json of a shape, and return its directory: always the same, as vLLM's compile cache knows it."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "membroker-bench" / name
    place.mkdir(parents=True, exist_ok=True)
    file, text = place / "config.json", json.dumps(SHAPES[name], indent=1)
    if not file.exists() or file.read_text() != text:  # a new time would make the engines' weights different ones
        file.write_text(text)
    return place


def weight_bytes(name: str) -> int:
    """Return the bytes of a model's weights."""
    shape = SHAPES[name]
    hidden, head, vocabulary = shape["hidden_size"], shape["head_dim"], shape["vocab_size"]
    attention = 2 * hidden * head * (shape["num_attention_heads"] + shape["num_key_value_heads"])
    norms = 2 * hidden + 2 * head * (shape["model_type"] == "qwen3")
    layer = attention + 3 * hidden * shape["intermediate_size"] + norms
    ends = vocabulary * hidden * (1 if shape["tie_word_embeddings"] else 2) + hidden
    return int((shape["num_hidden_layers"] * layer + ends) * _ELEMENT_BYTES[shape["torch_dtype"]])


def token_bytes(name: str) -> int:
    """Return the bytes of KV cache that one token takes."""
    shape = SHAPES[name]
    elements = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return int(elements * _ELEMENT_BYTES[shape["torch_dtype"]])
