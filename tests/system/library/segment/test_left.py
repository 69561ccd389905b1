"""A segment that a program has published and left, as by its death: run again, it publishes under the same name."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.daemons import Daemon, until
from tests.support.segments import one_transport
from tests.support.workers import workers

import membroker
from membroker.checkpoint import publish_arrays

pytestmark = one_transport
LIMIT = "6MiB"
"""Room for the weights once."""
SIZE = 4 << 20


def publish(model: membroker.Model, number: int) -> membroker.Segment:
    return publish_arrays(model, "weights", {"w": np.full(SIZE - 512, number, "u1")})


def value(segment: membroker.Segment) -> int:
    return int(segment.tensors()["w"][0])


def test_its_publisher_is_killed(daemon: Daemon, client: membroker.Client) -> None:
    """It is killed after it has published, or while it writes. The next run has the name, and room for the weights."""
    for name, then in (("published", "segment.seal()"), ("half", "segment.write(0, b'half')")):
        with workers(1) as (worker,):
            worker.connect(daemon)
            worker.do(f"segment = client.model({name!r}, limit={LIMIT!r}).create_segment('weights', {SIZE})")
            worker.do(then)
            worker.kill()
        until(lambda: [one.name for one in client.sessions()] == [client.session])
        with publish(client.model(name, limit=LIMIT), 2) as again:
            assert value(again) == 2


def test_a_reader_and_a_publisher_that_live_keep_it(daemon: Daemon, client: membroker.Client) -> None:
    """It is taken from nobody: not from a reader, and not from a program that has published it and lives."""
    model = client.model("m")
    with membroker.connect(daemon.endpoint()) as publisher:
        publish(publisher.model("m"), 1).close()
        with pytest.raises(membroker.SegmentExists) as refused:
            publish(model, 2)
        assert (refused.value.metadata["state"], refused.value.metadata["sessions"]) == ("sealed", "0")
        reader = client.attach("weights")
    with pytest.raises(membroker.SegmentExists) as refused:
        publish(model, 2)
    assert refused.value.metadata["sessions"] == "1"
    assert value(reader) == 1
    reader.close()
    with publish(model, 2) as again:
        assert value(again) == 2


def test_a_cell_runs_again(daemon: Daemon, client: membroker.Client, model: membroker.Model) -> None:
    """A notebook publishes, closes and publishes again; it takes the name from no holder, of a deleted segment neither.

    Who creates a segment instead must find what another one has loaded, and has left.
    """
    with membroker.connect(daemon.endpoint()) as publisher:
        publish(publisher.model("m"), 1).close()
    with pytest.raises(membroker.SegmentExists):
        model.create_segment("weights", SIZE)
    for state in ("sealed", "ending"):
        with publish(model, 2) as held:
            if state == "ending":
                held.delete()
            with pytest.raises(membroker.SegmentExists) as refused:
                publish(model, 3)
            assert (refused.value.metadata["state"], refused.value.metadata["sessions"]) == (state, "1")
            assert value(held) == 2
    publish(model, 4).close()
