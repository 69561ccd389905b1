"""membrokerd: the one process that owns the memory lent on a GPU."""

__version__ = "0.1.0"
