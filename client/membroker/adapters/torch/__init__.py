"""PyTorch: tensors over borrowed memory, torch's own allocations borrowed from the broker, modules in segments.

This module only lists the public names. Without PyTorch, the import raises `ImportError` and says what to install.
"""

from .image import TensorImage, stored_tensor
from .memory import TorchMemory
from .modules import attach_module, publish_module, without_weights
from .moving import move_to_pool
from .tensors import address_tensor, device_of, empty, tensor

__all__ = [
    "TensorImage",
    "TorchMemory",
    "address_tensor",
    "attach_module",
    "device_of",
    "empty",
    "move_to_pool",
    "publish_module",
    "stored_tensor",
    "tensor",
    "without_weights",
]
