"""`membroker demo`: the main job in a few scenes, with a daemon and workers as real processes.

It shows what the library does and must never be imported by it.
"""

from .scenes import main

__all__ = ["main"]
