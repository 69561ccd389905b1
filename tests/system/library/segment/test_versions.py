"""A name that moves, for servers that reload: the newest version, readers that wait for it, and what is left."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.fake_broker import Caller
from tests.support.segments import holders, one_transport

import membroker
from membroker import versions
from membroker.checkpoint import publish_arrays
from membroker.session.session import Session

pytestmark = one_transport


def publish(model: membroker.Model, number: int) -> None:
    publish_arrays(model, "current", {"w": np.full(3, number, "i4")}, replace=True).close()


def value(segment: membroker.Segment) -> int:
    return int(segment.tensors()["w"][0])


def test_a_server_reloads(client: membroker.Client, model: membroker.Model) -> None:
    """It serves the old version until it has the new one; the old one's bytes are free when it has closed it."""
    publish(model, 1)
    serving = client.attach("current")
    assert (serving.name, value(serving)) == ("current.version-1", 1)
    with pytest.raises(membroker.SegmentNotSealed, match="no version that is newer than generation"):
        client.attach("current", newer_than=serving, timeout=0)
    publish(model, 2)
    assert value(serving) == 1, "it goes on"
    newer = client.attach("m/current", newer_than=serving)
    assert (newer.name, value(newer)) == ("current.version-2", 2)
    serving.close()
    newer.close()
    until(lambda: holders(client) == {"current.version-2": 0})
    assert client.delete_segment("m/current").name.endswith("/current.version-2")
    with pytest.raises(membroker.SegmentNotFound):
        client.attach("current")
    with pytest.raises(membroker.SegmentNotFound) as refused:
        client.delete_segment("current")
    assert refused.value.reason == "SEGMENT_NOT_FOUND", "as the broker said"


def test_the_name_is_never_without_a_segment(client: membroker.Client, model: membroker.Model) -> None:
    """While a version is written, and after its writer has failed, the name means the last one that was sealed.

    Of two publishers the one that began last wins, in whatever order they seal: it never goes back to an older one.
    """
    publish(model, 1)
    half = model.create_segment("current", 1, replace=True)
    with client.attach("current") as found:
        assert value(found) == 1
    half.close()
    until(lambda: holders(client) == {"current.version-1": 0})
    first, second = (model.create_segment("current", 1, replace=True) for _ in range(2))
    for segment in (second, first):
        segment.seal()
        with client.attach("current") as found:
            assert found.name == second.name == "current.version-3"
        segment.close()


def test_those_who_wait_get_the_next_one(daemon: Daemon, client: membroker.Client, model: membroker.Model) -> None:
    """A thread of a server waits; it gets the version that is published then, whether it is being written already."""
    publish(model, 1)

    def newer(serving: membroker.Segment) -> int:
        with (
            membroker.connect(daemon.endpoint()) as other,
            other.attach("m/current", newer_than=serving, timeout=DEADLINE_SECONDS) as found,
        ):
            return value(found)

    with client.attach("current") as serving:
        waiting = Caller(lambda: newer(serving))
        publish(model, 2)
        assert waiting.value() == 2
    with client.attach("current") as serving, model.create_segment("current", 4096, replace=True) as segment:
        waiting = Caller(lambda: newer(serving))
        until(lambda: len(daemon.sessions()) == 2)
        index = segment.lay_out({"w": ("I32", (3,))})
        segment.write(index["w"].offset, np.full(3, 3, "i4"))
        segment.seal()
        assert waiting.value() == 3


def test_other_names_are_left_alone(client: membroker.Client, model: membroker.Model) -> None:
    others = {"current.version-x", "current.version-0", "currently.version-1"}
    for name in others:
        model.create_segment(name, 1).seal()
    publish(client.model("other"), 1)
    publish(model, 1)
    publish(model, 2)
    names = {one.name.partition("/models/")[2] for one in client.segments() if one.state == "sealed"}
    assert names == {
        "other/segments/current.version-1",
        *(f"m/segments/{name}" for name in {*others, "current.version-2"}),
    }
    with pytest.raises(membroker.InvalidRequest, match="name one, as in m/current or other/current"):
        client.attach("current")
    with client.attach("other/current") as found:
        assert found.name == "current.version-1"


def test_a_name_that_ends_with_a_number(client: membroker.Client, model: membroker.Model) -> None:
    """`llama-3.1` is another model than `llama-3`, and no version of it: neither is taken for the other."""
    publish_arrays(model, "llama-3.1", {"w": np.zeros(1)}).close()
    for call in (client.attach, client.delete_segment):
        with pytest.raises(membroker.SegmentNotFound):
            call("llama-3")
    publish_arrays(model, "llama-3", {"w": np.zeros(1)}, replace=True).close()
    publish_arrays(model, "llama-3.1", {"w": np.zeros(1)}, replace=True).close()
    until(lambda: holders(client) == {"llama-3.version-1": 0, "llama-3.1.version-1": 0})


def test_a_version_that_is_deleted_as_it_is_attached(
    client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the attach comes a newer one: the attach looks again."""
    publish(model, 1)
    attach, names = membroker.Segment.attach, []

    def late(session: Any, name: str, timeout: float) -> membroker.Segment:
        names.append(name.rpartition("/")[2])
        if names[-1] == "current.version-1":
            publish(model, 2)
        return attach(session, name, timeout)

    monkeypatch.setattr(versions.Segment, "attach", late)
    with client.attach("current") as found:
        assert value(found) == 2
    assert names == ["current", "current.version-1", "current.version-2"]


def test_an_interrupt_after_the_seal(
    client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes as the older version is deleted: the newer one stays, or the name would be without a segment.

    If the broker goes then, the older ones cannot be listed, and the seal does not fail.
    """
    publish(model, 1)
    delete = Session.delete_segment

    def interrupted(session: Session, request: Any) -> Any:
        delete(session, request)
        raise KeyboardInterrupt

    def gone(*_: object) -> Any:
        raise membroker.BrokerUnavailable("the broker is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Session, "delete_segment", interrupted)
        with pytest.raises(KeyboardInterrupt):
            publish(model, 2)
    until(lambda: holders(client) == {"current.version-2": 0})
    with model.create_segment("current", 1, replace=True) as segment, monkeypatch.context() as patched:
        patched.setattr(versions, "rows_of", gone)
        segment.seal()
    until(lambda: holders(client) == {"current.version-2": 0, "current.version-3": 0})
    publish(model, 4)
    until(lambda: holders(client) == {"current.version-4": 0})
