"""Import PyTorch, or say what to install."""

from __future__ import annotations

try:
    import torch as torch
except ImportError as error:
    raise ImportError("membroker.adapters.torch needs PyTorch: pip install torch") from error
