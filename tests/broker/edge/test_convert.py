"""What a message may not say, whatever the books are: it is refused before it is an event of the core."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from membroker.v1 import admin_pb2 as apb
from membroker.v1 import broker_pb2 as pb
from membroker.v1.resources_pb2 import Limit
from membrokerd.core.denied import Reason
from membrokerd.core.rows import Quota
from membrokerd.edge.convert import (
    Refused,
    changed_quota,
    parse_model,
    parse_quota_name,
    parse_session,
    to_event,
    to_sleep,
)

MINE = "tenants/red/models/mine"
MAX = (1 << 63) - 1


def refused(call: Callable[[], object]) -> Reason:
    with pytest.raises(Refused) as caught:
        call()
    return caught.value.denied.reason


def event(request: Any) -> Any:
    return to_event(1, 1, "red", 1, request)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda wait: pb.AllocateExtentsRequest(model=MINE, extent_bytes=1, count=1, wait=wait),
        lambda wait: pb.CreateSegmentRequest(model=MINE, segment_id="s", size_bytes=1, wait=wait),
        lambda wait: pb.AttachSegmentRequest(name=f"{MINE}/segments/s", wait=wait),
    ],
    ids=["allocate", "create", "attach"],
)
def test_a_wait_is_a_time_that_a_duration_can_say(request_of: Callable[[Duration], Any]) -> None:
    for seconds, nanos in ((-1, 0), (0, -1), (-1, 2_000_000_000), (1, 1_000_000_000), (-MAX - 1, 0)):
        wait = Duration(seconds=seconds, nanos=nanos)
        assert refused(lambda wait=wait: event(request_of(wait))) is Reason.INVALID_ARGUMENT, wait
    assert event(request_of(Duration(seconds=86_400, nanos=1))).wait_ns == 86_400_000_000_001  # the core's to refuse


def test_a_location_is_one_that_exists() -> None:
    for number in (-1, 9, 77):
        requests: list[Any] = [
            pb.AllocateExtentsRequest(model=MINE, extent_bytes=1, count=1, location=number),  # type: ignore[arg-type]
            pb.DeclareMemoryRequest(model=MINE, location=number),  # type: ignore[arg-type]
            pb.CreateSegmentRequest(model=MINE, segment_id="s", location=number),  # type: ignore[arg-type]
            pb.RegisterModelRequest(model_id="m", limits=[Limit(location=number, limit_bytes=1)]),  # type: ignore[arg-type]
        ]
        for request in requests:
            assert refused(lambda request=request: event(request)) is Reason.INVALID_ARGUMENT, request


def test_a_model_has_one_limit_for_each_location() -> None:
    """Location 0 is the device, too."""
    for first, second in ((1, 1), (0, 1), (2, 2)):
        limits = [Limit(location=first, limit_bytes=4), Limit(location=second, limit_bytes=4)]  # type: ignore[arg-type]
        assert refused(lambda limits=limits: event(pb.RegisterModelRequest(model_id="m", limits=limits))) is (
            Reason.INVALID_ARGUMENT
        )
    assert event(pb.RegisterModelRequest(model_id="m", limits=limits[:1])).limits == {"host": 4}


def test_names_that_are_none_are_refused_and_shown_in_part() -> None:
    """tests/client/test_names.py has the grammar. An error is sent in metadata, so a long name is cut."""
    long = "tenants/red/models/" + "a" * 10_000
    for text in ("", "mine", MINE + "\n", "tenants/red/models/../../blue/models/honest", long):
        for parse in (parse_model, parse_quota_name):
            assert refused(lambda text=text, parse=parse: parse(text)) is Reason.INVALID_NAME, text
        assert refused(lambda text=text: parse_session(text)) is Reason.INVALID_ARGUMENT, text
    with pytest.raises(Refused) as caught:
        parse_model(long)
    assert caught.value.denied.numbers["name"] == long[:100]
    assert refused(lambda: event(pb.RegisterModelRequest(model_id="a/b/c"))) is Reason.INVALID_NAME
    assert refused(lambda: event(pb.CreateSegmentRequest(model=MINE, segment_id="-"))) is Reason.INVALID_NAME


def test_a_quotas_field_must_be_named_by_the_mask() -> None:
    """A client that forgets the mask would set less than it says. Without a mask it is the limit that is set."""
    before = Quota(limit=1, guarantee=2, weight=3)
    wrong: list[tuple[list[str], dict[str, int]]] = [
        ([], {"weight": 2}),
        ([], {"guarantee_bytes": 2}),
        (["limit_bytes"], {"weight": 2}),
        (["weights"], {"weight": 2}),
        (["guarantee_bytes", "weights"], {"guarantee_bytes": 2}),
    ]
    for mask, fields in wrong:
        request = apb.SetQuotaRequest(name="tenants/red", **fields)
        request.update_mask.paths[:] = mask
        assert refused(lambda request=request: changed_quota(before, request)) is Reason.INVALID_ARGUMENT, request
    assert changed_quota(before, apb.SetQuotaRequest(limit_bytes=7)) == Quota(7, 2, 3)
    both = apb.SetQuotaRequest(weight=7)
    both.update_mask.paths[:] = ["guarantee_bytes", "weight"]
    assert changed_quota(before, both) == Quota(1, None, 7)


def test_a_sleep_is_asked_for_within_a_day() -> None:
    for seconds in (-1, 86_401):
        request = apb.SleepModelRequest(name=MINE, within=Duration(seconds=seconds))
        assert refused(lambda request=request: to_sleep(request)) is Reason.INVALID_ARGUMENT
    assert to_sleep(apb.SleepModelRequest(name=MINE)).within.seconds == 1
