"""A daemon for the tests of programs that borrow: `python -m membrokerd.testing DIRECTORY --config FILE`.

Owns the faults that `membroker.testing.broker` asks it for. A file in DIRECTORY/faults is a fault to come, and the
daemon removes it as the fault happens: `refuse-…` refuses the next request for bytes. The daemon ends with the process
that started it, and then removes DIRECTORY, which is its own: so the keeper of its descriptors ends, too. It must be
used by tests alone: nothing of `membrokerd` imports it.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

from membroker.wire.standard import forget_inheritance

from .cli import main
from .core.admission import over
from .core.denied import Reason
from .core.requests import DebitRequest, Decision, Refuse
from .core.waiting import Waiting

DIRECTORY = Path(sys.argv[1] if len(sys.argv) > 1 else os.devnull)

_decide = Waiting.decide


class RefusingWaiting(Waiting):
    """Refuses a new request while there is a fault for it, as if the capacity were lent."""

    def decide(self, request: DebitRequest) -> Decision:
        """Refuse the request, or decide it as always."""
        is_new = request.state == "new" and request.size > 0 and not request.is_ahead
        if not (is_new and _take()):
            return _decide(self, request)
        total = self._books.ledger.totals[request.location]
        level = Reason.CAPACITY, "capacity", total.charged, total.capacity, 0
        return Refuse(over(level, request.name, request.location, request.size))


def _take() -> bool:
    """Say whether there is a fault, and remove it."""
    for fault in DIRECTORY.glob("faults/refuse-*"):
        fault.unlink()
        return True
    return False


def _end_with_parent() -> None:
    """Stop when the other end of the standard input is closed: its process has ended."""
    while os.read(0, 1):
        pass
    atexit.register(shutil.rmtree, DIRECTORY, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    forget_inheritance()
    Waiting.decide = RefusingWaiting.decide  # type: ignore[assignment, method-assign]
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    sys.exit(main(sys.argv[2:]))
