"""SGLang's KV cache over a membroker pool, by SGLang's own registry of plugins. See docs/sglang.md.

This module imports nothing: SGLang calls `plugin.register`, and only with `MEMBROKER_SGLANG` set it imports the rest.
"""
