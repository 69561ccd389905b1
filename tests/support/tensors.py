"""What tests of PyTorch share."""

from __future__ import annotations

from typing import Any


def bytes_of(tensor: Any) -> bytes:
    """Return the bytes of a tensor, of any dtype."""
    import torch

    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())
