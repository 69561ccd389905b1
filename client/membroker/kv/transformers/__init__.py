"""transformers' continuous batching with a KV cache over a membroker pool, by subclass. See docs/transformers.md.

This module only lists the public names. It needs PyTorch and transformers.
"""

from .manager import ElasticManager

__all__ = ["ElasticManager"]
