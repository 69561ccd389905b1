"""PyTorch: tensors over borrowed memory, torch's own allocations borrowed from the broker, modules in segments.

This module only lists the public names. Without PyTorch, the import raises `ImportError` and says what to install.
"""

from membroker.adapters._torch_memory import TorchMemory
from membroker.adapters._torch_modules import attach_module, publish_module, without_weights
from membroker.adapters._torch_tensors import device_of, tensor

__all__ = ["TorchMemory", "attach_module", "device_of", "publish_module", "tensor", "without_weights"]
