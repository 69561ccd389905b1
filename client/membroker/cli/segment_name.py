"""The names of segments on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

NAMES = (
    "MODEL and SEGMENT are letters, digits and ._-, begin with a letter, a digit or _, and have at most 96 characters; "
    "MODEL may have one slash inside, as in Qwen/Qwen3-8B; TENANT is lower case letters, digits and -, at most 24"
)
"""The grammar of names, for error messages."""

_TENANT = "[a-z0-9][a-z0-9-]{0,23}"
_OWN = "[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
MODEL = f"{_OWN}(?:/{_OWN})?"
_RESOURCE_NAME = re.compile(f"tenants/({_TENANT})/models/({MODEL})/segments/({_OWN})")
_NAME = re.compile(f"(?:(?:({_TENANT})/)?({MODEL})/)?({_OWN})")


@dataclass(frozen=True, slots=True)
class SegmentName:
    """A segment's name as typed: SEGMENT, MODEL/SEGMENT or TENANT/MODEL/SEGMENT; a part that was left out is empty.

    The first of three parts is a tenant, or belongs to a model's name: `within` decides.
    """

    tenant: str
    model: str
    segment: str
    is_resource_name: bool = False

    @classmethod
    def parse(cls, text: str) -> SegmentName:
        """Read one of the three, or a resource name. Raises `ValueError`."""
        if match := _RESOURCE_NAME.fullmatch(text):
            return cls(match[1], match[2], match[3], is_resource_name=True)
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not SEGMENT, MODEL/SEGMENT or TENANT/MODEL/SEGMENT, as in llama-7b/weights: {NAMES}"
            )
        return cls(match[1] or "", match[2] or "", match[3])

    def within(self, tenant: str) -> SegmentName:
        """Return what this means at the endpoint of `tenants/{tenant}`.

        There `a/b/c` is the segment `c` of the model `a/b`, unless `a` is that tenant.
        """
        if self.is_resource_name or not self.tenant or f"tenants/{self.tenant}" == tenant or "/" in self.model:
            return self
        return SegmentName("", f"{self.tenant}/{self.model}", self.segment)

    def __str__(self) -> str:
        """Return the name in the form that the library takes."""
        if self.tenant:
            return f"tenants/{self.tenant}/models/{self.model}/segments/{self.segment}"
        return f"{self.model}/{self.segment}" if self.model else self.segment
