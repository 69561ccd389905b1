"""Which guarantees cannot be kept beside the limits and the capacity, in sentences for an operator.

The core finds them; `membrokerd --check-config`, the start, a reload and a replay say them. It must never read a file.
"""

from __future__ import annotations

from collections.abc import Mapping

from membroker.vmm import format_exact

from ..core.admission import Misfit, misfits
from ..core.names import Location, QuotaKey
from ..core.policy import Rules
from ..core.rows import Quota


def misfit_sentences(quotas: Mapping[QuotaKey, Quota], rules: Rules) -> list[str]:
    """Return a sentence for each guarantee that cannot be kept."""
    return [_sentence(misfit, where) for where in rules.capacities for misfit in misfits(quotas, rules, where)]


def _sentence(misfit: Misfit, where: Location) -> str:
    size, most = format_exact(misfit.size), format_exact(misfit.most)
    return f"{misfit.what} would be {size} of {where} memory, more than {misfit.bound}, {most}"
