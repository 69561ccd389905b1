"""An elastic KV cache for inference engines: block tables over a pool whose pages come and go. See docs/kv.md.

This module only lists the public names. `membroker.kv.capture` needs PyTorch and is imported by itself.
"""

from .layout import Layout, Strided

__all__ = ["Layout", "Strided"]
