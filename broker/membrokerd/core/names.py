"""Names: what events, effects, facts and rows are about."""

from __future__ import annotations

from typing import Literal, NamedTuple

Location = Literal["device", "host"]
LOCATIONS: tuple[Location, ...] = ("device", "host")
QuotaKey = tuple[str, str | None, Location]
"""What a quota is for: a tenant, one of its models or None, and a location."""


class ModelName(NamedTuple):
    """A model: its tenant and its own name."""

    tenant: str
    model: str

    def __str__(self) -> str:
        return f"tenants/{self.tenant}/models/{self.model}"


ANY_MODEL = "-"
"""In a segment's name, in place of the model: any model of the tenant."""


class SegmentName(NamedTuple):
    """A segment: its model, or `ANY_MODEL`, and its own name (`label`)."""

    tenant: str
    model: str
    label: str

    def __str__(self) -> str:
        return f"tenants/{self.tenant}/models/{self.model}/segments/{self.label}"
