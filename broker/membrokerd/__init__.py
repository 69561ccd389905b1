"""membrokerd: the one process that owns the memory lent on a GPU."""
