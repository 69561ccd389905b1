"""The record of decisions, which `membroker explain` shows."""

from __future__ import annotations

import itertools

from membrokerd.core.denied import Reason, deny
from membrokerd.core.names import ModelName
from membrokerd.runtime.decisions import KEPT_OF_A_MODEL, MODELS_OF_A_TENANT, TENANTS, Decisions


def test_the_record_is_bounded_and_a_tenant_fills_only_its_own() -> None:
    """A worker that is refused all the time pushes out its own oldest refusals, and nobody else's."""
    record, denied = Decisions(), deny(Reason.MODEL_LIMIT)
    record.refused(1, 1, ModelName("quiet", "m"), "device", 1, denied)
    for number, request in itertools.product(range(3 * MODELS_OF_A_TENANT), range(3 * KEPT_OF_A_MODEL)):
        record.refused(2, request, ModelName("noisy", f"m{number}"), "device", 1, denied)
    assert len(record.of_model(ModelName("quiet", "m"))) == 1
    kept = [record.of_model(ModelName("noisy", f"m{number}")) for number in range(3 * MODELS_OF_A_TENANT)]
    assert [len(one) for one in kept] == [0] * 2 * MODELS_OF_A_TENANT + [KEPT_OF_A_MODEL] * MODELS_OF_A_TENANT
    newest = [one.request_id for one in kept[-1]]
    assert newest == [*range(3 * KEPT_OF_A_MODEL - 1, 2 * KEPT_OF_A_MODEL - 1, -1)], "the newest first"
    for number in range(2 * TENANTS):
        record.refused(3, 1, ModelName(f"t{number}", "m"), "device", 1, denied)
    assert sum(bool(record.of_model(ModelName(f"t{number}", "m"))) for number in range(2 * TENANTS)) == TENANTS
