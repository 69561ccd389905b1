"""Import a framework, or say what to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from ..errors import InvalidRequest


def framework(module: str, name: str, install: str) -> Any:
    """Import a framework's module, or raise `ImportError` with what to install."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ImportError(f"this adapter needs {name}: {install} ({error})") from error


def check_card(name: str, *, on_card: bool) -> None:
    """Raise `InvalidRequest` if the broker's device is not a GPU, which the framework `name` needs."""
    if not on_card:
        raise InvalidRequest(f"{name} needs a GPU, and this broker lends host memory: use NumPy or PyTorch")
