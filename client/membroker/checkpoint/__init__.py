"""Checkpoints: files of safetensors on a disk, and the segment that they become.

Owns the public names: `files` reads what is on the disk, and `publish` copies it. It must trust no file.
"""

from .files import Checkpoint, InvalidCheckpoint, open_checkpoint
from .publish import publish_checkpoint

__all__ = ["Checkpoint", "InvalidCheckpoint", "open_checkpoint", "publish_checkpoint"]
