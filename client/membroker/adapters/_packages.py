"""Where an adapter finds its framework, and the sentence where it does not. Owns no more than that."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from membroker.errors import InvalidRequest


def framework(module: str, name: str, install: str) -> Any:
    """Import a framework's module, or raise `ImportError` with what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"this adapter needs {name}: {install} ({error})") from error


def check_card(name: str, *, on_card: bool) -> None:
    """Raise `InvalidRequest` where the broker's device is no card that `name` could compute on."""
    if not on_card:
        raise InvalidRequest(f"{name} works on a card, and this broker lends the host's memory: use NumPy or PyTorch")
