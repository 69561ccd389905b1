"""Random weights whose answers depend on the whole context, so that a wrong byte in the KV cache is a wrong token.

vLLM's own dummy weights are within 0.001 of zero, those of the norms too: attention then adds next to nothing, and each
answer depends on the token before it alone. vLLM imports this module in its worker, by `worker_extension_cls`, before
it looks for the loader of `--load-format`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

if "MEMBROKER_ENDPOINT" in os.environ:  # other engines may be of another vLLM, without what membroker needs
    from membroker.kv.vllm import plugin

    plugin.register()  # vLLM finds `--load-format membroker` by an entry point, which a source tree does not have

FOCUS = 4.0
"""Makes the scores of attention this much larger, so that few positions get most of it."""


class Extension:
    """Adds nothing to vLLM's worker: naming it is what imports this module."""


@register_model_loader("bench-random")
class Loader(DummyModelLoader):  # type: ignore[misc]
    """Makes the same weights in each process on the same kind of device."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Write the weights: norms are 1, and the others keep the size of what goes through them."""
        with torch.no_grad():
            for number, (name, weight) in enumerate(model.named_parameters()):
                if weight.dim() < 2:
                    weight.fill_(FOCUS if name.endswith("q_norm.weight") else 1.0)
                    continue
                generator = torch.Generator(device=weight.device).manual_seed(number)
                # Without a norm on queries and keys it is their projection that makes the scores larger.
                scale = FOCUS**0.5 if "qkv_proj" in name else 1.0
                weight.normal_(std=scale * weight.shape[-1] ** -0.5, generator=generator)
