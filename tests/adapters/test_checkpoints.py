"""Checkpoints and the frameworks that read them: torch's tensors and JAX's arrays over a segment, and into one."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from tests.support.daemons import Daemon, until
from tests.support.garbage import collect
from tests.support.template import run
from tests.support.tensors import bytes_of

import membroker
from membroker import segment as segments
from membroker.checkpoint import publish_arrays

pytestmark = pytest.mark.shared_daemon


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self) -> Any:
        return pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")

    def test_tensors_are_written(self, client: membroker.Client, model: membroker.Model, torch: Any) -> None:
        """Of any dtype and any strides, also those that have no buffer in Python."""
        values = [
            torch.arange(6.0).view(2, 3).t(),
            torch.randn(5, dtype=torch.bfloat16, requires_grad=True),
            torch.tensor([1 + 2j, 3 - 4j]).conj(),
            torch.tensor(True),
            torch.zeros(0, 3),
            torch.randn(3, 4).to(torch.float8_e4m3fn)[:, ::2],
        ]
        told: list[tuple[int, int]] = []
        with model.create_segment("weights", "2MiB") as segment:
            for number, value in enumerate(values):
                segment.write(number * 256, value, lambda done, total: told.append((done, total)))
                size = value.numel() * value.itemsize
                assert segment.read(number * 256, size) == bytes_of(value.resolve_conj())
            assert told == [(24, 24), (10, 10), (16, 16), (1, 1), (6, 6)]
            for odd in (torch.zeros(4, 4).to_sparse(), torch.zeros(4, device="meta")):
                with pytest.raises(membroker.InvalidRequest):
                    segment.write(0, odd)
            with pytest.raises(membroker.InvalidRequest, match="do not lie in a segment"):
                segment.write((2 << 20) - 3, torch.zeros(1))
            segment.seal()
            with pytest.raises(membroker.SegmentNotWritable):
                segment.write(0, torch.ones(1))


class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self) -> Any:
        return pytest.importorskip("jax", reason="JAX is not installed: pip install jax")

    def test_every_array_of_a_segment(self, client: membroker.Client, model: membroker.Model, jax: Any) -> None:
        """Each begins where JAX wants it, whatever stands before it."""
        arrays = {
            "a": np.arange(30, dtype="f4").reshape(10, 3),
            "b": np.ones(5, "f2"),
            "c": np.zeros((3, 3), "f4"),
            "d": np.arange(7, dtype="i4"),
            "e": jax.numpy.arange(3, dtype=jax.numpy.bfloat16),
        }
        publish_arrays(model, "weights", arrays).close()
        with client.attach("weights") as segment:
            found = segment.tensors("jax")
            assert found.keys() == arrays.keys()
            assert all(np.array_equal(np.asarray(found[name]), np.asarray(arrays[name])) for name in arrays)
            index = segment.index()
            places = {name: segment.address + index[name].offset for name in arrays}
            assert {name: array.unsafe_buffer_pointer() for name, array in found.items()} == places, "nothing is copied"
        del found
        collect()


# In other processes: a sealed segment is pickled by its name, and a spawned DataLoader attaches it


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


def test_what_cannot_be_pickled_says_what_to_do(client: membroker.Client, model: membroker.Model) -> None:
    with (
        model.create_segment("weights", 1) as segment,
        pytest.raises(TypeError, match=r"only a sealed, open segment can be pickled, and .*being written"),
    ):
        pickle.dumps(segment)
    for one in (client, model):
        with pytest.raises(TypeError, match=r"belongs to this process .*: in the other process, connect\(\)"):
            pickle.dumps(one)


@pytest.mark.deep
def test_a_spawned_data_loader(daemon: Daemon) -> None:
    """Two workers read the rows of one segment: none of them gets a copy, and none is left."""
    pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    done = run(["-m", "tests.support.spawned_loader", str(daemon.endpoint())])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["190.0", "4"]
