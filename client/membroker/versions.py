"""A name that moves: `current` means the newest sealed segment of `current`, `current.version-1` and so on.

Owns the names of versions, and which of them a name means. The broker knows each as a segment of its own, so readers of
an older one keep it, and a name that moves is never without a segment. It must delete only what is older than what it
has sealed. So a version must not have a name that a user would give to another segment, as `llama-3.1` is beside
`llama-3`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from . import arguments
from .cancellation import innermost
from .errors import InvalidRequest, MembrokerError, SegmentExists, SegmentNotFound, SegmentNotSealed, WriterDied
from .segment import Segment
from .session.rpc import rows_of
from .session.session import Session
from .v1 import broker_pb2 as pb
from .v1 import resources_pb2
from .vmm.driver import Location
from .vmm.sizes import Size

LOOK_SECONDS = 0.2
"""How often a wait for a newer version looks: no notice tells of one that is not being written yet."""

_VERSION = re.compile(r"(.+)\.version-([1-9][0-9]{0,8})")


def create_version(
    session: Session,
    model: str,
    name: str,
    size: Size,
    location: Location | str,
    timeout: float | None,
    *,
    delete_when_left: bool,
) -> Segment:
    """Create the next version of a name, under a model's resource name. Its seal deletes those that are older."""
    until = arguments.deadline_of(timeout)
    whole = f"{model}/segments/{arguments.name_of('segment', name)}"
    number = 1 + max((_number(row.name) for row in _versions(session, whole)), default=0)
    while True:
        left = None if until is None else max(0.0, until - time.monotonic())
        version, older = f"{name}.version-{number}", partial(_delete_older, session, whole)
        with suppress(SegmentExists):
            return Segment.create(
                session, model, version, size, location, left, delete_when_left=delete_when_left, on_sealed=older
            )
        number += 1  # another process publishes, too


def attach_newest(session: Session, name: str, timeout: float, newer_than: int | None) -> Segment:
    """Attach what a resource name means now, or once there is one of a generation above `newer_than`."""
    deadline, scope = time.monotonic() + arguments.seconds_of("timeout", timeout), innermost.get()
    if newer_than is None:
        try:
            return Segment.attach(session, name, timeout)
        except SegmentNotFound:
            if not _versions(session, name):
                raise
    while True:
        if scope is not None:
            scope.check()
        newer = [row for row in _versions(session, name) if row.generation > (newer_than or 0)]
        sealed = [row for row in newer if row.state == resources_pb2.Segment.SEALED]
        left = max(0.0, deadline - time.monotonic())
        if not newer and newer_than is None:
            raise SegmentNotFound(f"{name} was deleted meanwhile")
        with suppress(SegmentNotFound, WriterDied):
            if sealed:
                return Segment.attach(session, sealed[-1].name, 0.0)
            if newer:
                return Segment.attach(session, newer[-1].name, left)
        if not left:
            raise SegmentNotSealed(f"{name} has no version that is newer than generation {newer_than or 0}")
        time.sleep(min(LOOK_SECONDS, left))


def newest_name(session: Session, name: str) -> str | None:
    """Return the resource name of the newest version that can be attached, or will be, or None."""
    found = _versions(session, name)
    return found[-1].name if found else None


def _delete_older(session: Session, name: str, generation: int) -> None:
    with suppress(MembrokerError):  # the next seal tries again
        for row in _versions(session, name):
            if row.generation < generation and row.state == resources_pb2.Segment.SEALED:
                with suppress(SegmentNotFound):  # another publisher was faster
                    session.delete_segment(pb.DeleteSegmentRequest(name=row.name, generation=row.generation))


def _versions(session: Session, name: str) -> Sequence[resources_pb2.Segment]:
    """Return the segments of this resource name that are written or sealed, in the order of their generations."""
    model, _, own = name.rpartition("/segments/")
    found = []
    for row in rows_of(session.ask, "list_segments", pb.ListSegmentsRequest(), "segments"):
        of, _, label = row.name.rpartition("/segments/")
        version = _VERSION.fullmatch(label)
        is_named = own in (label, version[1] if version else label)
        is_there = row.state in (resources_pb2.Segment.WRITING, resources_pb2.Segment.SEALED)
        if is_named and is_there and (of == model or model.endswith("/-")):
            found.append(row)
    models = {row.name.rpartition("/segments/")[0] for row in found}
    if len(models) > 1:
        shown = " or ".join(sorted(f"{arguments.parts_of(model)[1]}/{own}" for model in models))
        raise InvalidRequest(f"several models have a segment {own}: name one, as in {shown}")
    return sorted(found, key=lambda row: row.generation)


def _number(name: str) -> int:
    version = _VERSION.fullmatch(name.rpartition("/")[2])
    return int(version[2]) if version else 0
