"""Whether a process may start threads, tried: some libraries end a process in which they cannot start theirs.

Owns the sentence that says which limits there are. It must leave no thread behind.
"""

from __future__ import annotations

import threading

SHORT = (
    "this process may have no more threads ({why}): raise the limit of its user's processes (`ulimit -u`), of its unit "
    "(`TasksMax=`), or of its container or pod (`pids.max`)"
)


def shortage(count: int) -> str:
    """Return why `count` threads cannot run at the same time here, or an empty text."""
    go_on = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=go_on.wait, name="membroker-try", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        return SHORT.format(why=error)
    finally:
        go_on.set()
        for thread in started:
            thread.join()
    return ""
