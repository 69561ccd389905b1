"""The command `membroker`, before anything of it is imported, which takes a third of a second: Ctrl-C is quiet by then.

It must import nothing that is slow.
"""

from __future__ import annotations

import signal

from ..wire.standard import open_standard_descriptors


def main() -> int:
    """Run one command and return its exit status: 130 where Ctrl-C has ended it."""
    open_standard_descriptors()
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing was begun that would have to be ended in order
    from .main import main as run

    try:
        signal.signal(signal.SIGINT, before)
        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
