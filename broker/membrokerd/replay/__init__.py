"""`membroker replay`: what was recorded, once more through the core, with other numbers. It needs no daemon."""

from __future__ import annotations
