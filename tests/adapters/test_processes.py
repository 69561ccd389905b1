"""Segments and other processes: a sealed one is pickled by its name, and a spawned DataLoader attaches it."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from tests.support.daemons import Daemon, until
from tests.support.garbage import collect
from tests.support.template import run

import membroker
from membroker import segment as segments
from membroker.segment import publish_arrays

pytestmark = pytest.mark.shared_daemon


@pytest.fixture(autouse=True)
def no_client_stays() -> Any:
    """An unpickled segment's client lasts as long as its process, which is the tests' here."""
    yield
    for client in segments._clients.values():
        client.close()
    segments._clients.clear()


def test_a_sealed_segment_is_pickled_by_its_name(
    daemon: Daemon, client: membroker.Client, model: membroker.Model
) -> None:
    with publish_arrays(model, "weights", {"w": np.arange(5, dtype="i4")}) as segment:
        text = pickle.dumps(segment)
        assert len(text) < 300, "its name, and none of its bytes"
        with pickle.loads(text) as one, pickle.loads(text) as other:
            assert one.tensors()["w"].tolist() == [0, 1, 2, 3, 4]
            assert (one.generation, other.generation) == (segment.generation,) * 2
            collect()
        assert len(daemon.sessions()) == 2, "those of a process share a session"
        segment.delete()
    until(lambda: not client.segments())
    publish_arrays(model, "weights", {"w": np.zeros(1)}).close()
    with pytest.raises(membroker.SegmentNotFound, match="that one was deleted, and this is another"):
        pickle.loads(text)


def test_what_cannot_be_pickled_yet(model: membroker.Model) -> None:
    with model.create_segment("weights", 1) as segment:
        with pytest.raises(TypeError, match=r"only a sealed, open segment can be pickled, and .*being written"):
            pickle.dumps(segment)
        segment.seal()
    with pytest.raises(TypeError, match="closed"):
        pickle.dumps(segment)


def test_a_client_and_a_model_say_what_to_do(client: membroker.Client, model: membroker.Model) -> None:
    for one in (client, model):
        with pytest.raises(TypeError, match=r"belongs to this process .*: in the other process, connect\(\)"):
            pickle.dumps(one)


def test_a_spawned_data_loader(daemon: Daemon) -> None:
    """Two workers read the rows of one segment: none of them gets a copy, and none is left."""
    pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    done = run(["-m", "tests.support.spawned_loader", str(daemon.endpoint())])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["190.0", "4"]
