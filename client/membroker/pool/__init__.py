"""`VirtualMemoryPool`: addresses for a whole capacity, and memory for the pages that are in use.

Page table, backing, compaction and offload are here. It must never import a session or a model: it knows a lender.
"""

from .pool import VirtualMemoryPool

__all__ = ["VirtualMemoryPool"]
