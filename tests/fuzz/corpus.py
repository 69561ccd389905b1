"""Where fuzzing starts: real frames, real requests, real documents; and what bends them.

`budget` is how long a fuzz lasts: a fixed, derandomised number of examples in the tests, as long as FUZZ_SECONDS says
with `make fuzz`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from google.protobuf.duration_pb2 import Duration
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from membroker.v1 import broker_pb2 as bpb
from membroker.v1 import handoff_pb2 as pb
from membroker.v1 import resources_pb2 as rpb

SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
"""How long each fuzz lasts; 0 in the tests."""
PAGE = 2 << 20
MODEL = "tenants/red/models/mine"
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 64, 65_536, 65_537, PAGE, PAGE + 1, 1 << 31, 1 << 62, (1 << 63) - 1, -(1 << 63)]),
    st.integers(-(1 << 63), (1 << 63) - 1),
)
UNSIGNED = NUMBERS.map(lambda number: number % (1 << 64))
NAMES = st.one_of(
    st.sampled_from(
        [MODEL, "tenants/blue/models/honest", "tenants/red", "tenants/red/models/", "mine", "", "../..", "m\n"]
    ),
    st.text(max_size=80),
)
LOCATIONS = st.one_of(st.sampled_from([0, 1, 2, 3, 77, -1]), st.integers(-(1 << 31), (1 << 31) - 1))

ALLOCATE = st.builds(
    bpb.AllocateExtentsRequest,
    request_id=UNSIGNED,
    model=NAMES,
    location=LOCATIONS,
    extent_bytes=NUMBERS,
    count=NUMBERS,
)
RELEASE = st.builds(
    bpb.ReleaseExtentsRequest, request_id=UNSIGNED, extent_ids=st.lists(UNSIGNED, max_size=20), no_reply=st.booleans()
)
DECLARE = st.builds(
    bpb.DeclareMemoryRequest, request_id=UNSIGNED, model=NAMES, location=LOCATIONS, declared_bytes=NUMBERS
)
REGISTER = st.builds(
    bpb.RegisterModelRequest,
    request_id=UNSIGNED,
    model_id=NAMES,
    virtual_capacity_bytes=st.none() | NUMBERS,
    limits=st.lists(st.builds(rpb.Limit, location=LOCATIONS, limit_bytes=NUMBERS), max_size=3),
    exclusive=st.booleans(),
    replace_limits=st.booleans(),
)
UNREGISTER = st.builds(bpb.UnregisterModelRequest, request_id=UNSIGNED, name=NAMES)


def mostly(likely: st.SearchStrategy[Any], anything: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw what hits something three times of four."""
    return st.integers(0, 3).flatmap(lambda chance: anything if chance == 3 else likely)


SEALED, ENDING, WRITTEN = (1 << 40) + 5, (1 << 40) + 8, (1 << 40) + 10
"""Segments of the bench in test_fuzz_core; test_fuzz_daemon puts its own in their place."""
GENERATIONS = mostly(st.sampled_from([SEALED, WRITTEN, ENDING]), UNSIGNED)
LABELS = ["sealed", "written", "new", "other", "ending"]
SEGMENTS = mostly(
    st.sampled_from([f"tenants/red/models/{model}/segments/{label}" for label in LABELS for model in ("mine", "-")]),
    st.one_of(
        st.sampled_from(
            [
                *(f"{MODEL}/segments/{label}" for label in ("-", "", "A", "a" * 64, "../sealed", "sealed\n")),
                "tenants/blue/models/-/segments/sealed",
                "tenants/blue/models/honest/segments/weights",
            ]
        ),
        NAMES,
    ),
)
WAITS = mostly(
    st.sampled_from([None, Duration(), Duration(seconds=1), Duration(nanos=5)]),
    st.builds(Duration, seconds=NUMBERS, nanos=st.integers(-(1 << 31), (1 << 31) - 1)),
)
CREATE = st.builds(
    bpb.CreateSegmentRequest,
    request_id=UNSIGNED,
    model=mostly(st.just(MODEL), NAMES),
    segment_id=mostly(st.sampled_from(LABELS), st.one_of(st.sampled_from(["", "-", "a/b"]), st.text(max_size=70))),
    location=mostly(st.sampled_from([0, 1]), LOCATIONS),
    size_bytes=mostly(st.integers(1, 9).map(lambda pages: pages * PAGE), NUMBERS),
    delete_when_left=st.booleans(),
)
SEAL = st.builds(bpb.SealSegmentRequest, request_id=UNSIGNED, generation=GENERATIONS)
ATTACH = st.builds(bpb.AttachSegmentRequest, request_id=UNSIGNED, name=SEGMENTS, wait=WAITS)
DETACH = st.builds(bpb.DetachSegmentRequest, request_id=UNSIGNED, generation=GENERATIONS, no_reply=st.booleans())
DELETE = st.builds(
    bpb.DeleteSegmentRequest,
    request_id=UNSIGNED,
    name=SEGMENTS,
    generation=mostly(st.just(0), GENERATIONS),
    only_if_left=st.booleans(),
)
OF_SEGMENTS = st.one_of(CREATE, SEAL, ATTACH, DETACH, DELETE)
REQUESTS = st.one_of(ALLOCATE, RELEASE, DECLARE, REGISTER, UNREGISTER, OF_SEGMENTS)
PAGES = {"page_size": st.integers(-(1 << 31), (1 << 31) - 1), "page_token": NAMES}
READS = st.one_of(
    st.builds(bpb.GetDeviceRequest),
    st.builds(bpb.GetAvailableRequest, model=mostly(st.just(MODEL), NAMES), location=LOCATIONS),
    st.builds(bpb.GetModelRequest, name=mostly(st.just(MODEL), NAMES)),
    st.builds(bpb.ListModelsRequest, **PAGES),
    st.builds(bpb.ListSessionsRequest, **PAGES),
    st.builds(bpb.ListSegmentsRequest, **PAGES),
    st.builds(bpb.ListDecisionsRequest, name=mostly(st.sampled_from([MODEL, "sessions/1/requests/2"]), NAMES)),
)

SEGMENT = f"{MODEL}/segments/sealed"
FROM_CLIENT = [
    frame.SerializeToString()
    for frame in (
        pb.Frame(request_id=1, hello=pb.Hello(protocol_version=1, client="seed")),
        pb.Frame(request_id=2, allocate=bpb.AllocateExtentsRequest(model=MODEL, extent_bytes=PAGE, count=3)),
        pb.Frame(request_id=2, ack=pb.Ack(part=0)),
        pb.Frame(request_id=3, release=bpb.ReleaseExtentsRequest(extent_ids=[(1 << 40) + 2, (1 << 40) + 3])),
        pb.Frame(request_id=4, release=bpb.ReleaseExtentsRequest(extent_ids=[1], no_reply=True)),
        pb.Frame(request_id=5, declare=bpb.DeclareMemoryRequest(model=MODEL, declared_bytes=1 << 20)),
        pb.Frame(
            request_id=7,
            create_segment=bpb.CreateSegmentRequest(model=MODEL, segment_id="new", size_bytes=2 * PAGE),
        ),
        pb.Frame(request_id=8, seal_segment=bpb.SealSegmentRequest(generation=SEALED)),
        pb.Frame(request_id=9, attach_segment=bpb.AttachSegmentRequest(name=SEGMENT)),
        pb.Frame(request_id=9, ack=pb.Ack(part=0)),
        pb.Frame(
            request_id=10,
            attach_segment=bpb.AttachSegmentRequest(name=f"{MODEL}/segments/written", wait=Duration(seconds=2)),
        ),
        pb.Frame(request_id=11, detach_segment=bpb.DetachSegmentRequest(generation=SEALED)),
        pb.Frame(request_id=12, detach_segment=bpb.DetachSegmentRequest(generation=SEALED, no_reply=True)),
        pb.Frame(request_id=13, delete_segment=bpb.DeleteSegmentRequest(name=SEGMENT, generation=SEALED)),
        pb.Frame(request_id=14, get_device=bpb.GetDeviceRequest()),
        pb.Frame(request_id=15, get_available=bpb.GetAvailableRequest(model=MODEL)),
        pb.Frame(request_id=16, get_model=bpb.GetModelRequest(name=MODEL)),
        pb.Frame(request_id=17, list_models=bpb.ListModelsRequest(page_size=3)),
        pb.Frame(request_id=18, list_sessions=bpb.ListSessionsRequest(page_token="0" * 16)),
        pb.Frame(request_id=19, list_segments=bpb.ListSegmentsRequest()),
        pb.Frame(request_id=20, list_decisions=bpb.ListDecisionsRequest(name=MODEL)),
        pb.Frame(request_id=10, cancel=pb.Cancel()),
        pb.Frame(request_id=6, goodbye=pb.Goodbye()),
    )
]
FRAMES = FROM_CLIENT + [
    frame.SerializeToString()
    for frame in (
        pb.Frame(request_id=1, welcome=pb.Welcome(session="sessions/1", token="t", capacities=[rpb.Limit()])),
        pb.Frame(request_id=2, delivery=pb.Delivery(part=0, parts=1, extent_bytes=PAGE, extent_ids=range(64))),
        pb.Frame(request_id=2, reply=pb.Reply(allocate=bpb.AllocateExtentsResponse(count=3, extent_bytes=PAGE))),
        pb.Frame(request_id=9, delivery=pb.Delivery(parts=1, extent_bytes=PAGE, extent_ids=[3], segment=1 << 40)),
        pb.Frame(request_id=9, reply=pb.Reply(segment=rpb.Segment(name=SEGMENT, generation=1 << 40, sessions=2))),
        pb.Frame(request_id=11, reply=pb.Reply(detach_segment=bpb.DetachSegmentResponse())),
        pb.Frame(request_id=15, reply=pb.Reply(available=bpb.Available(now_bytes=PAGE, limit_bytes=0))),
        pb.Frame(request_id=17, reply=pb.Reply(models=bpb.ListModelsResponse(next_page_token=MODEL))),
        pb.Frame(notice=pb.Notice(stopping=pb.Stopping())),
    )
]


@st.composite
def bent(draw: st.DrawFn, seeds: list[bytes] = FRAMES) -> bytes:
    """Draw a seed with some bytes changed, cut out, doubled, or put in from another seed."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        to = min(len(data), at + draw(st.integers(0, 8)))
        how = draw(st.sampled_from(["flip", "cut", "double", "put", "splice"]))
        if how == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[at:to]
        elif how == "double":
            data[at:at] = data[at:to]
        elif how == "put":
            data[at:at] = draw(st.binary(min_size=1, max_size=12))
        else:
            data[at:] = draw(st.sampled_from(seeds))[at:]
    return bytes(data)


def budget(examples: int) -> Callable[[Any], Any]:
    """Decorate a test of hypothesis: derandomised and so many examples, or FUZZ_SECONDS of new ones each time."""
    quiet = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
    if not SECONDS:
        return settings(max_examples=examples, derandomize=True, **quiet)  # type: ignore[arg-type]
    return settings(max_examples=examples, print_blob=True, **quiet)  # type: ignore[arg-type]


def lasting(fuzz: Callable[[], None]) -> None:
    """Run a test of hypothesis once; with FUZZ_SECONDS again and again, until they have passed."""
    end = time.monotonic() + SECONDS
    fuzz()
    while time.monotonic() < end:
        fuzz()
