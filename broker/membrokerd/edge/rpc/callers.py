"""Which process made a gRPC call: the proxy names each of its connections, and gRPC's server is told that name.

The name is that of the proxy's own socket, which nobody else can give to one that reaches the server. It is for the
log only: who may call is decided by who can open the public socket.
"""

from __future__ import annotations

import itertools
import re
import secrets
import socket
from contextlib import suppress

_SECRET = secrets.token_hex(8)
"""So that nobody on the machine has taken the names already."""
_NUMBERS = itertools.count()
_NAME = re.compile(rf"unix-abstract:membrokerd-{_SECRET}-\d+-(\d+)-(\d+)")


def announce(server: socket.socket, pid: int, uid: int) -> None:
    """Name a socket, before it connects to gRPC's server, after the process for which it does."""
    with suppress(OSError):  # without a name the call is served all the same
        server.bind(f"\0membrokerd-{_SECRET}-{next(_NUMBERS)}-{pid}-{uid}")


def caller_of(peer: str) -> dict[str, int]:
    """Return `by_uid` and `by_pid` of what gRPC calls its peer, as far as it was named.

    A process in another pid namespace has the pid 0.
    """
    found = _NAME.fullmatch(peer)
    return {"by_uid": int(found[2]), "by_pid": int(found[1])} if found else {}
