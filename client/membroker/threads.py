"""Threads of the library: how one is started, and the typed error where none can be.

A process may have no thread left as it may have no descriptor left. It must never keep a thread, nor decide what is
left undone without it: the caller undoes what it began.

gevent and eventlet can put tasks of their own in the place of threads. Then the waits have to be theirs too, or a
thread of the library that waits would stop the whole program.
"""

from __future__ import annotations

import _thread
import select
import socket
import threading
from collections.abc import Callable

from .errors import InvalidRequest, ThreadLimit
from .wire.threads import SHORT, shortage


def start_thread(target: Callable[..., object], name: str, *arguments: object) -> threading.Thread:
    """Start a thread that does not keep the process alive, and return it. Raises `ThreadLimit`."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        if isinstance(error.__context__, KeyboardInterrupt):  # it came while `start` waited for the thread, which runs
            raise error.__context__ from None
        raise ThreadLimit(SHORT.format(why=f"{name}: {error}")) from error
    return thread


def check_patches() -> None:
    """Raise `InvalidRequest` where the standard library is patched in part, so that calls would wait for ever."""
    patched = {
        "socket.socket": socket.socket.__module__ != "socket",
        "select.poll": getattr(getattr(select, "poll", None), "__module__", "") != "select",
        "_thread.start_new_thread": _thread.start_new_thread.__module__ != "_thread",
    }
    if hasattr(select, "poll") and len(set(patched.values())) == 1:
        return
    here = ", ".join(f"{name} is {'patched' if is_patched else 'not'}" for name, is_patched in patched.items())
    if not hasattr(select, "poll"):
        here = "select.poll is removed"
    raise InvalidRequest(
        f"the standard library is patched in part ({here}): a call would stop the whole program. Before the first "
        "call, patch all of it (`gevent.monkey.patch_all()`), or none of these (`eventlet.monkey_patch(socket=False, "
        "select=False, thread=False)`)"
    )


def check_threads(count: int) -> None:
    """Raise `ThreadLimit` unless so many threads can run at the same time."""
    if why := shortage(count):
        raise ThreadLimit(why)
