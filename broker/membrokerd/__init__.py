"""membrokerd: the one process that owns the memory lent on a GPU.

The kernel: core, system, config, device, restart, runtime, edge. Extensions: observe, replay, all_gpus.
`daemon` puts them together, and `cli` starts it.
"""

__version__ = "0.1.0"
