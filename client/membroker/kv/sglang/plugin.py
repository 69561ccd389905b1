"""The entry point `sglang.srt.plugins`: registers the hooks if `MEMBROKER_SGLANG` is set, and does nothing otherwise.

SGLang calls it in each of its processes. It logs what a plugin raises and starts without it, so a wrong setting must
not be raised here: `hooks` raises it when the engine makes its cache.
"""

from __future__ import annotations

import logging
import os

from .settings import VARIABLE

logger: logging.Logger = logging.getLogger("membroker")


def register() -> None:
    """Register the hooks with SGLang's own registry."""
    if VARIABLE not in os.environ:
        return
    try:
        from . import hooks
    except ImportError as error:
        logger.error("%s is set, but membroker cannot extend this SGLang: %s", VARIABLE, error)  # noqa: TRY400
        return
    hooks.register()
