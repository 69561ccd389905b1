"""Threads of the library: how one is started, and the typed error where none can be.

A process may have no thread left as it may have no descriptor left. It must never keep a thread, nor decide what is
left undone without it: the caller undoes what it began.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from .errors import ThreadLimit
from .wire.threads import SHORT, shortage


def start_thread(target: Callable[..., object], name: str, *arguments: object) -> threading.Thread:
    """Start a thread that does not keep the process alive, and return it. Raises `ThreadLimit`."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise ThreadLimit(SHORT.format(why=f"{name}: {error}")) from error
    return thread


def check_threads(count: int) -> None:
    """Raise `ThreadLimit` unless so many threads can run at the same time."""
    if why := shortage(count):
        raise ThreadLimit(why)
