"""One dispatcher for both transports: a session's request in, a response or a refusal out.

It also has the register of tokens: which session a token is for, and at which endpoint it is valid. Tokens are kept
as hashes only, and never printed.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from google.protobuf.message import Message

from membroker.wire import names

from ..core import effects as fx
from ..core import snapshot
from ..core.denied import Denied, Reason, deny
from ..core.names import ModelName
from ..core.rows import SessionRow
from ..runtime.decisions import EXPLAINED, Decisions
from ..runtime.loop import Loop, Reply
from ..system import logs
from . import convert, messages

TimesOf = Callable[[str, str], Callable[[float], None]]
"""Returns what notes the seconds of a request, by its method and its transport."""


class Dispatcher:
    """Hands the requests of both transports to the core."""

    def __init__(self, loop: Loop, times_of: TimesOf, decisions: Decisions) -> None:
        self.loop = loop
        self._decisions = decisions
        self.times_of = times_of
        self._sessions: dict[str, int] = {}
        """By the hash of its token."""
        self._hashes: dict[int, str] = {}
        loop.on_forget.append(self._forget)
        for row in loop.broker.ledger.sessions.values():
            self.admit(row)

    def admit(self, row: SessionRow) -> None:
        """Accept a session's token."""
        self._sessions[row.token_hash] = row.session
        self._hashes[row.session] = row.token_hash

    def find(self, token: str, endpoint: str) -> SessionRow:
        """Return the session that a token is for, if it is valid at this endpoint; else raise `Refused`."""
        if not token:
            raise convert.Refused(deny(Reason.TOKEN_REQUIRED))
        row = self.loop.broker.ledger.sessions.get(self._sessions.get(hash_of(token), 0))
        if row is None or row.endpoint != endpoint:
            raise convert.Refused(deny(Reason.TOKEN_REJECTED))
        return row

    def request(self, session: int, tenant: str, request_id: int, message: Message, respond: Reply) -> int | None:
        """Put a request to the core; `respond` gets its result or refusal, now or later.

        Returns the number of the call, or None if the request was refused before the core saw it.
        """
        make_event = partial(convert.to_event, session=session, tenant=tenant, request_id=request_id, request=message)
        try:
            return self.loop.ask(make_event, respond)
        except convert.Refused as refused:
            respond(refused.denied)
            return None

    def refused(self, session: int, request_id: int, method: str, message: Any, denied: Denied) -> None:
        """Log a refusal. Of a borrow for a model of the session's own tenant, keep why it was refused, too."""
        logs.log_denied(session, method, denied)
        if denied.reason not in EXPLAINED or getattr(message, "ahead", False) or not hasattr(message, "model"):
            return
        ledger, parts = self.loop.broker.ledger, names.parse_model(message.model)
        row = ledger.sessions.get(session)
        if parts is None or row is None or row.tenant != parts[0] or ModelName(*parts) not in ledger.models:
            return
        size = min(max(0, convert.size_of(message)), names.MAX_BYTES)  # it may be refused before its size is checked
        where = convert.parse_location(message.location)
        self._decisions.refused(session, request_id, ModelName(*parts), where, size, denied)

    def response(self, result: fx.Result) -> tuple[str, Any]:
        """Return the response of a request, and the name of its field in a handoff Reply; raises `Refused`."""
        if not isinstance(result, fx.Registered):
            return convert.from_result(result)
        broker = self.loop.broker
        if result.name not in broker.ledger.models:  # its session ended after the answer
            raise convert.Refused(deny(Reason.MODEL_NOT_FOUND, model=str(result.name)))
        return "model", messages.from_model(snapshot.take_model(broker, result.name))

    def _forget(self, session: int) -> None:
        digest = self._hashes.pop(session, None)
        if digest is not None:
            del self._sessions[digest]


def new_token() -> tuple[str, str]:
    """Return a new secret, and the hash by which it is known."""
    token = secrets.token_urlsafe(32)
    return token, hash_of(token)


def hash_of(token: str) -> str:
    """Return the hash by which a token is stored."""
    return hashlib.sha256(token.encode()).hexdigest()
