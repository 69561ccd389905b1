"""A daemon with faults where it has a token in its hands: `python -m tests.support.faulty_daemon` for `membrokerd`.

It fails as it looks a token up, and as it answers one, on both transports.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from membrokerd.cli import main
from membrokerd.edge import dispatch, listings
from membrokerd.edge.handoff import connection

_find, _request = dispatch.Dispatcher.find, dispatch.Dispatcher.request


def _planted(*_: Any, **__: Any) -> NoReturn:
    raise RuntimeError("planted")


def _find_or_fault(self: Any, token: Any, endpoint: Any) -> Any:
    ticket = _find(self, token, endpoint)
    return _planted(token) if ticket.tenant == "blue" else ticket


def _request_or_fault(self: Any, session: Any, tenant: Any, *rest: Any) -> Any:
    faults = type(rest[1]).__name__ == "DeclareMemoryRequest"
    return _planted(self, rest) if faults else _request(self, session, tenant, *rest)


if __name__ == "__main__":
    dispatch.Dispatcher.find = _find_or_fault  # type: ignore[method-assign]
    dispatch.Dispatcher.request = _request_or_fault  # type: ignore[method-assign]
    listings.BookMessages.list_models = _planted  # type: ignore[method-assign, assignment]
    connection.HandoffConnection._goodbye = _planted  # type: ignore[method-assign, assignment]
    sys.exit(main())
