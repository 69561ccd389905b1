"""Work of many tenants, in the order in which one thread does it: time is shared by tenants, not by what they ask for.

Owns the order, and does none of the work.
"""

from __future__ import annotations

import heapq
import itertools
from typing import Generic, TypeVar

_T = TypeVar("_T")

MAX_REMEMBERED = 1_024
"""How many tenants that wait for nothing are remembered at least, with what they have used."""


class TenantQueues(Generic[_T]):
    """One queue for each tenant. The tenant that has used the least time comes first, and of it what waits longest.

    A tenant that has used more than others comes again when they have used as much: it is in debt until then, however
    many pieces of work it has. A tenant that begins to wait has nothing saved: it begins where the one before it was.

    The work of the tenant `first` comes before that of all others.
    """

    def __init__(self, first: str | None = None) -> None:
        self._first = first
        self._waiting: dict[str, dict[_T, None]] = {}
        """The work of each tenant that waits, the oldest first."""
        self._used: dict[str, float] = {}
        """The time that each tenant has used, in seconds; at least `_now` of one that waits."""
        self._now = 0.0
        """What the tenant that came last had used then."""
        self._order: list[tuple[float, int, str]] = []
        """A heap with an entry for each tenant that waits: what it had used, and a number to keep equals in order."""
        self._numbers = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, tenant: str, work: _T) -> None:
        """Let work wait behind the tenant's other work. What waits already keeps its place."""
        waiting = self._waiting.get(tenant)
        if waiting is not None:
            waiting.setdefault(work)
            return
        self._waiting[tenant] = {work: None}
        self._used[tenant] = max(self._now, self._used.get(tenant, 0.0))
        self._enter(tenant)

    def take(self) -> tuple[str, _T]:
        """Return the work that comes next, and its tenant; some must wait."""
        used, _, tenant = heapq.heappop(self._order)
        while used < self._used[tenant] and tenant != self._first:  # it has used more since it entered
            self._enter(tenant)
            used, _, tenant = heapq.heappop(self._order)
        self._now = max(self._now, used)
        waiting = self._waiting[tenant]
        work = next(iter(waiting))
        del waiting[work]
        if waiting:
            self._enter(tenant)
        else:
            del self._waiting[tenant]
        return tenant, work

    def go_on(self, tenant: str) -> bool:
        """Let a tenant that was charged go on at once if nothing waits, as if it had waited. Return whether it may."""
        if self._waiting:
            return False
        if tenant != self._first:
            self._now = max(self._now, self._used[tenant])
        return True

    def charge(self, tenant: str, seconds: float) -> None:
        """Note that a tenant has used so much time."""
        self._used[tenant] = max(self._now, self._used.get(tenant, 0.0)) + seconds
        if len(self._used) > len(self._waiting) * 2 + MAX_REMEMBERED:
            self._used = {each: self._used[each] for each in self._waiting}

    def _enter(self, tenant: str) -> None:
        used = self._used[tenant] if tenant != self._first else -1.0
        heapq.heappush(self._order, (used, next(self._numbers), tenant))
