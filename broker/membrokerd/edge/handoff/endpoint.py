"""One endpoint, as its connections see it: the tenant that they charge, and where they report a refusal."""

from __future__ import annotations

from dataclasses import dataclass, field

from membroker.vmm import DeviceInfo
from membroker.wire.names import MAX_FRAME_BYTES

from ...core.denied import Denied
from ...restart.process_watch import Watch
from ...system.accounts import Accounts
from ..acceptor import Refusals
from ..dispatch import Dispatcher
from ..listings import BookMessages
from .outbox import OutboxCounters


@dataclass(slots=True)
class HandoffEndpoint:
    """An endpoint. It belongs to `tenant`; if that is None, each user is a tenant."""

    name: str
    tenant: str | None
    dispatcher: Dispatcher
    views: BookMessages
    device: DeviceInfo
    traffic: OutboxCounters
    watch: Watch
    refusals: Refusals
    buffer: bytearray = field(default_factory=lambda: bytearray(MAX_FRAME_BYTES))
    accounts: Accounts = field(default_factory=Accounts)
    closed: Denied | None = None
    """Why no session can be opened here any more; those that there are go on."""

    def tenant_of(self, uid: int) -> str:
        """Return the tenant of a user: the endpoint's tenant, or the user's account if the endpoint has no tenant."""
        return self.tenant or f"uid-{self.accounts.owner_of(uid)}"
