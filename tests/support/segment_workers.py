"""Workers that write, attach and read one segment, and what an operator sees of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from membroker.v1 import broker_pb2 as pb
from membroker.v1.resources_pb2 import Segment as SegmentMessage
from tests.support.daemons import Daemon, until
from tests.support.raw import Asker
from tests.support.sizes import MIB
from tests.support.workers import (
    ANCHOR_BYTES,
    PAGE,
    Worker,
    descriptors_at_start,
    until_clean,
)

SIZE = 8 * MIB
FULL_NAME = "tenants/red/models/m/segments/weights"


@contextmanager
def clean(daemon: Daemon) -> Iterator[None]:
    """A story that leaves nothing behind."""
    at_start = descriptors_at_start(daemon)
    yield
    until(lambda: not segments(daemon))
    until_clean(daemon, at_start)


def segments(daemon: Daemon) -> list[Any]:
    """Every segment, by the admin's list."""
    with daemon.admin_stub() as stub:
        return list(stub.ListSegments(pb.ListSegmentsRequest(page_size=1000)).segments)


def state(daemon: Daemon) -> str:
    """The state of the only segment; nothing if there is no segment."""
    return " ".join(SegmentMessage.State.Name(one.state) for one in segments(daemon))


def holders(daemon: Daemon) -> int:
    """How many sessions hold the only segment."""
    (one,) = segments(daemon)
    return int(one.sessions)


def device_used(daemon: Daemon) -> int:
    """What the device shows in use beyond the anchor."""
    return int(daemon.books().device_used_bytes) - ANCHOR_BYTES


def delete(daemon: Daemon) -> None:
    """Delete the segment as an operator does."""
    with daemon.admin_stub() as stub:
        stub.DeleteSegment(pb.DeleteSegmentRequest(name=FULL_NAME))


def write(one: Worker, daemon: Daemon, transport: str, size: int = SIZE, location: str = "device") -> Worker:
    """Have a worker make the segment and write to both its ends."""
    one.connect(daemon, transport=transport)
    one.do("model = client.register_model('m')")
    one.do(f"segment = model.create_segment('weights', {size}, {location!r})")
    one.do("segment.write(0, b'first'); segment.write(segment.size - 4, b'last')")
    return one


def attach(one: Worker, daemon: Daemon, transport: str, outage: float | None = None) -> Worker:
    """Have a worker attach the segment."""
    one.connect(daemon, transport=transport, outage=outage)
    one.do("segment = client.attach('weights')")
    return one


def wait_in_attach(one: Worker, daemon: Daemon, transport: str) -> Worker:
    """Have a worker attach the segment in a thread, which waits."""
    one.connect(daemon, transport=transport)
    one.do("attaching = Attaching(client.register_model('n'), client, 'weights')")
    assert one.ask("attaching.is_waiting()")
    return one


def reads(one: Worker) -> bool:
    """Say whether a worker reads what was written."""
    both = "[segment.read(0, 5).decode(), segment.read(segment.size - 4, 4).decode()]"
    return bool(one.ask(both) == ["first", "last"])


class SegmentAsker(Asker):
    """The requests about segments, by one transport."""

    def create(self, model: str, size: int = PAGE, segment_id: str = "weights", location: Any = 0) -> Any:
        """CreateSegment."""
        request = pb.CreateSegmentRequest(model=model, segment_id=segment_id, size_bytes=size, location=location)
        return self._ask("create_segment", "CreateSegment", request)

    def seal(self, generation: int) -> Any:
        """SealSegment."""
        return self._ask("seal_segment", "SealSegment", pb.SealSegmentRequest(generation=generation))

    def attach(self, name: str = FULL_NAME) -> Any:
        """AttachSegment, without waiting."""
        return self._ask("attach_segment", "AttachSegment", pb.AttachSegmentRequest(name=name))

    def detach(self, generation: int) -> Any:
        """DetachSegment."""
        return self._ask("detach_segment", "DetachSegment", pb.DetachSegmentRequest(generation=generation))

    def delete(self, name: str = FULL_NAME, generation: int = 0) -> Any:
        """DeleteSegment."""
        request = pb.DeleteSegmentRequest(name=name, generation=generation)
        return self._ask("delete_segment", "DeleteSegment", request)
