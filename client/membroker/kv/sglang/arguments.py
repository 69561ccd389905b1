"""What SGLang needs on its command line and in its environment for an elastic KV cache. It imports no SGLang."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from ..command import Options
from .settings import VARIABLE

PAGE_TOKENS: Final = "64"


def arguments(command: Sequence[str], capacity: int) -> tuple[list[str], dict[str, str]]:
    """Return what a command of SGLang lacks: words at its end, and variables.

    `capacity` is how many bytes of addresses its cache gets.
    """
    words = [] if Options(command).text_of("page-size") else ["--page-size", PAGE_TOKENS]
    return words, {VARIABLE: json.dumps({"capacity": capacity})}
