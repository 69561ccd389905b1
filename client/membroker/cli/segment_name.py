"""The names of segments on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from ..ext import names


@dataclass(frozen=True, slots=True)
class SegmentPath:
    """A segment's name as typed: SEGMENT, MODEL/SEGMENT or TENANT/MODEL/SEGMENT; a part that was left out is empty.

    The first of three parts is a tenant, or belongs to a model's name: `within` decides.
    """

    tenant: str
    model: str
    segment: str
    is_resource_name: bool = False

    @classmethod
    def parse(cls, text: str) -> SegmentPath:
        """Read one of the three, or a resource name. Raises `ValueError`."""
        if (parts := names.parse_segment(text)) and parts[1] != "-":
            return cls(*parts, is_resource_name=True)
        model, slash, segment = text.rpartition("/")
        tenant, _, within = model.partition("/")
        if within and names.valid_tenant(tenant):
            model = within
        else:
            tenant = ""
        if not names.valid_segment(segment) or (slash and not names.valid_model(model)):
            raise ValueError(
                f"{text!r} is not SEGMENT, MODEL/SEGMENT or TENANT/MODEL/SEGMENT, as in llama-7b/weights: "
                + names.grammar("MODEL" if names.valid_segment(segment) else "SEGMENT")
            )
        return cls(tenant, model, segment)

    def within(self, tenant: str) -> SegmentPath:
        """Return what this means at the endpoint of `tenants/{tenant}`.

        There `a/b/c` is the segment `c` of the model `a/b`, unless `a` is that tenant.
        """
        if self.is_resource_name or not self.tenant or f"tenants/{self.tenant}" == tenant or "/" in self.model:
            return self
        return SegmentPath("", f"{self.tenant}/{self.model}", self.segment)

    def __str__(self) -> str:
        """Return the name in the form that the library takes."""
        if self.tenant:
            return f"tenants/{self.tenant}/models/{self.model}/segments/{self.segment}"
        return f"{self.model}/{self.segment}" if self.model else self.segment
