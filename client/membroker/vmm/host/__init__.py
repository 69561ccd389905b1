"""The host driver: the driver contract over memfd and mmap, for machines without a GPU.

It enforces CUDA's rules, so that what passes here passes on a GPU. It must never import anything of CUDA.
"""

from .driver import HostDriver

__all__ = ["HostDriver"]
