"""A tiny model of transformers with random weights, and its continuous batching: stock, or over a broker's memory.

The same for a CPU and a GPU. A token has 12 KiB of KV cache, in float32: 6 KiB in each of two layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import membroker
from membroker.kv.transformers import ElasticManager
from tests.support.daemons import DEADLINE_SECONDS, Daemon
from tests.support.engine_batches import Batch, batch_of
from tests.support.sizes import MIB

TOKENS_PER_BLOCK = 32
BLOCKS = 1024
TOKEN_BYTES = 12 << 10
HAS_SECTORS = "page_size" in {field.name for field in fields(ContinuousBatchingConfig)}
"""transformers 5.23 has one tensor for all layers, and 5.17 two for each layer."""
GROUP = 2 * MIB if HAS_SECTORS else 8 * MIB
"""Bytes that come and go together with pages of 2 MiB."""
AT_REST = 4 * MIB if HAS_SECTORS else 24 * MIB
"""Padding, and what is kept ahead: one group, and another one because blocks straddle."""

BATCHES = {
    "one": batch_of(1, 1, 200, 8),
    "burst": batch_of(2, 14, 500, 16),
    "shared": batch_of(3, 8, 400, 8, shared=320),
    "few": batch_of(4, 2, 500, 8),
    "long": batch_of(5, 12, 100, 120),
    "deep": batch_of(6, 1, 2500, 120),
}
BURST = 14 * 500 * TOKEN_BYTES
"""Bytes of KV cache that the prompts of the burst fill."""


def tiny_model(device: str = "cpu", **changes: Any) -> Any:
    """The same weights each time."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=96,
        vocab_size=512,
        max_position_embeddings=4096,
        initializer_range=0.2,
        **changes,
    )
    return Qwen3ForCausalLM(config).eval().to(device)


def settings(**changes: Any) -> tuple[GenerationConfig, ContinuousBatchingConfig]:
    """Greedy, and with no end token."""
    size = {"page_size" if HAS_SECTORS else "block_size": TOKENS_PER_BLOCK}
    batching = ContinuousBatchingConfig(**{**size, "num_blocks": BLOCKS, "max_batch_tokens": 1024, **changes})
    return GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=8), batching


def stock(model: Any, batches: dict[str, Batch], **changes: Any) -> dict[str, list[list[int]]]:
    """What transformers' own manager answers, with all of its memory from the beginning."""
    generation, batching = settings(**changes)
    return {
        name: tokens_of(model.generate_batch(prompts, generation, batching, max_new_tokens=tokens))
        for name, (prompts, tokens) in batches.items()
    }


def tokens_of(outputs: dict[str, Any]) -> list[list[int]]:
    """What was generated, in the order of the requests. None may have failed."""
    assert [one.error for one in outputs.values()] == [None] * len(outputs)
    return [one.generated_tokens for one in outputs.values()]


def answer(manager: ElasticManager, name: str) -> list[list[int]]:
    """What an elastic manager answers to a batch."""
    return tokens_of(manager.generate_batch(*BATCHES[name]))


def collect(manager: ElasticManager, asked: Sequence[str]) -> list[list[int]]:
    """The answers to requests that were added."""
    found: dict[str, Any] = {}
    while len(found) < len(asked):
        result = manager.get_result(timeout=DEADLINE_SECONDS)
        assert result is not None, "the manager ended, or took a minute for a request"
        if result.is_finished():
            found[result.request_id] = result
    return tokens_of({name: found[name] for name in asked})


@contextmanager
def serving(
    endpoint: Path,
    model: Any,
    name: str,
    *,
    limit: str | None = None,
    batching: dict[str, Any] | None = None,
    **bounds: Any,
) -> Iterator[ElasticManager]:
    """Serve `model` with memory of the broker, under a name of the broker's."""
    with membroker.connect(endpoint) as client:
        lender = client.register_model(name, virtual_capacity="1GiB", limit=limit)
        with (
            lender.pool(page_size="2MiB") as pool,
            ElasticManager(model, pool, *settings(**(batching or {})), **bounds) as one,
        ):
            yield one


def used(daemon: Daemon, name: str) -> int:
    """Bytes that a model has borrowed."""
    return sum(one.books[0].used_bytes for one in daemon.models() if one.name.endswith(f"/{name}"))


def peak(daemon: Daemon, name: str) -> int:
    """The most bytes that a model has borrowed."""
    return max(one.books[0].peak_bytes for one in daemon.models() if one.name.endswith(f"/{name}"))
