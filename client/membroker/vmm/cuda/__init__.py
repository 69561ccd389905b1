"""The CUDA driver: the driver contract over `cuMem*`, and NVML for what the device has in use.

The only package that names a CUDA function. Importing it must not load the bindings; opening a driver does.
"""

from .driver import CudaDriver

__all__ = ["CudaDriver"]
