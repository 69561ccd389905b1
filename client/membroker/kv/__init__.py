"""An elastic KV cache for inference engines: a block table over a pool whose pages come and go. See docs/kv.md.

This module only lists the public names. `membroker.kv.capture` needs PyTorch, and is imported by itself.
"""

from .cache import ElasticCache
from .engine import Engine, Fence
from .layout import Layout, Strided
from .sleeper import Sleeper
from .state import CacheStats

__all__ = ["CacheStats", "ElasticCache", "Engine", "Fence", "Layout", "Sleeper", "Strided"]
