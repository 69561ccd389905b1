"""Weights that become a segment: a checkpoint, files of safetensors on a disk, or arrays of a program.

Owns the public names: `files` reads what is on the disk, and `publish` copies. It must trust no file.
"""

from .files import Checkpoint, InvalidCheckpoint, open_checkpoint
from .publish import publish_arrays, publish_checkpoint

__all__ = ["Checkpoint", "InvalidCheckpoint", "open_checkpoint", "publish_arrays", "publish_checkpoint"]
