"""SGLang's kernels, of which a CPU without AMX calls none: SGLang imports some nevertheless."""

from typing import Any
from unittest.mock import MagicMock

__path__: list[str] = []


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock()
