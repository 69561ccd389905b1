"""The running daemon: the event loop between the core and the world, and what works beside it.

It carries out what the core says. It knows no socket of a peer, and decides nothing about memory.
"""
