"""One endpoint, as its connections see it: the tenant that they charge, and where they report a refusal."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from membroker.vmm import DeviceInfo
from membroker.wire.names import MAX_FRAME_BYTES

from ...core.denied import Reason
from ...restart.process_watch import Watch
from ...system import logs
from ..dispatch import Dispatcher
from .outbox import OutboxCounters
from .peer import Peer

REFUSED_LINE_SECONDS = 1.0


@dataclass(slots=True)
class HandoffEndpoint:
    """An endpoint. It belongs to `tenant`; if that is None, each uid is a tenant."""

    name: str
    tenant: str | None
    dispatcher: Dispatcher
    device: DeviceInfo
    traffic: OutboxCounters
    watch: Watch
    buffer: bytearray = field(default_factory=lambda: bytearray(MAX_FRAME_BYTES))
    _unsaid: int = 0
    _silent_until: float = 0.0

    def tenant_of(self, peer: Peer) -> str:
        """Return the tenant to charge: the endpoint's tenant, or the peer's uid if the endpoint has no tenant."""
        return self.tenant or f"uid-{peer.uid}"

    def refused(self, reason: Reason, **fields: object) -> None:
        """Count a refused connection. It is logged at most once a second, so that no peer can fill the log."""
        self.traffic.refused[reason.value] += 1
        self._unsaid += 1
        if time.monotonic() < self._silent_until:
            return
        logs.log("connection refused", endpoint=self.name, reason=reason.value, count=self._unsaid, **fields)
        self._unsaid = 0
        self._silent_until = time.monotonic() + REFUSED_LINE_SECONDS
