"""The life of a segment as a program sees it: written, sealed, read and deleted; its names; waiting for its seal."""

from __future__ import annotations

import time
from functools import partial

import pytest
from tests.support.daemons import Daemon, until
from tests.support.fake_broker import Caller
from tests.support.garbage import collect
from tests.support.processes import is_settled, mapped_extents
from tests.support.segments import holders, one_transport, protections, sealed
from tests.support.sizes import MIB, PAGE
from tests.support.workers import workers

import membroker

pytestmark = one_transport

ANCHOR_BYTES = 2 * MIB


class TestLife:
    def test_written_sealed_read_and_deleted(self, daemon: Daemon, transport: str) -> None:
        """One engine loads the weights, another maps the same bytes: they are charged once, and outlive the first."""
        with membroker.connect(daemon.endpoint(), transport=transport) as reader:
            with membroker.connect(daemon.endpoint(), transport=transport) as writer:
                segment = writer.model("llama").create_segment("weights", "3MiB")
                assert (segment.name, segment.size, segment.location) == ("weights", 4 * MIB, "device")
                assert segment.resource_name == "tenants/red/models/llama/segments/weights"
                assert segment.read(0, 4 * MIB) == bytes(4 * MIB)
                segment.write(4 * MIB - 5, b"hello")
                segment.view()[:2] = b"hi"
                (listed,) = reader.segments()
                assert (listed.state, listed.sessions, listed.writer) == ("writing", 1, writer.session)
                segment.seal()
                attached = reader.attach("weights")
                assert attached.generation == segment.generation == reader.segments()[0].generation
                assert attached.address != segment.address
                assert attached.size == 4 * MIB
                assert attached.read(0, 2) + attached.read(4 * MIB - 5, 5) == b"hihello"
                for one in (segment, attached):
                    assert not one.writable
                    with pytest.raises(membroker.SegmentNotWritable):
                        one.write(0, b"x")
                    with pytest.raises(membroker.SegmentNotWritable):
                        one.seal()
                assert reader.sessions()[0].segments == (segment.resource_name,)
                assert daemon.books().lent_bytes == 4 * MIB
                until(lambda: daemon.books().device_used_bytes == 4 * MIB + ANCHOR_BYTES)
                (books,) = [one.books[0] for one in daemon.models() if one.name.endswith("/llama")]
                assert (books.used_bytes, books.segment_bytes) == (4 * MIB, 4 * MIB)
            assert holders(reader) == {"weights": 1}
            assert bytes(attached.view()[:2]) == b"hi"
            ending = attached.delete()
            assert (ending.state, ending.sessions) == ("ending", 1)
            assert [one.state for one in reader.segments()] == ["ending"]
            assert attached.read(4 * MIB - 5, 5) == b"hello", "a deleted segment stays where it is mapped"
            assert daemon.books().lent_bytes == 4 * MIB
            attached.close()
            until(lambda: is_settled(daemon) and not reader.segments())

    def test_what_the_kernel_allows(self, client: membroker.Client, model: membroker.Model) -> None:
        """The seal takes the writer's own mapping too, and a reader never has another."""
        segment = model.create_segment("weights", 1)
        assert protections() == ["rw-s"]
        segment.seal()
        assert protections() == ["r--s"]
        with client.attach("weights"):
            assert protections() == ["r--s"] * 2

    def test_two_attaches_of_one_process(self, client: membroker.Client, model: membroker.Model) -> None:
        """Two parts of a program attach the same weights, and each closes its own, also if one closes twice."""
        sealed(model, data=b"both")
        one, two = client.attach("weights"), client.attach("weights")
        assert one.address != two.address
        assert holders(client) == {"weights": 1}
        one.close()
        one.close()
        for call in (one.view, one.seal, one.index, lambda: one.read(0, 1), lambda: one.address):
            with pytest.raises(membroker.ClosedError):
                call()
        assert two.read(0, 4) == b"both"
        assert holders(client) == {"weights": 1}
        two.close()
        until(lambda: holders(client) == {"weights": 0})

    def test_deleted_twice(self, client: membroker.Client, model: membroker.Model) -> None:
        """A second delete by the object is not one of the segment that has the name by now."""
        segment = model.create_segment("weights", 1)
        segment.seal()
        segment.delete()
        with pytest.raises(membroker.SegmentNotFound):
            segment.delete()
        with pytest.raises(membroker.SegmentExists) as refused:
            model.create_segment("weights", 1)
        assert refused.value.metadata["state"] == "ending"
        segment.close()
        until(lambda: not client.segments())
        again = model.create_segment("weights", 1)
        assert again.generation != segment.generation
        with pytest.raises(membroker.SegmentNotFound):
            segment.delete()
        assert holders(client) == {"weights": 1}

    def test_deleted_when_left(self, daemon: Daemon, client: membroker.Client, model: membroker.Model) -> None:
        """Engines share it, and its writer is gone. The last two are killed in one moment, and nothing is left."""
        with workers(3) as engines:
            for engine in engines:
                engine.connect(daemon)
            with model.create_segment("weights", 1, delete_when_left=True) as segment:
                segment.seal()
                for engine in engines:
                    engine.do("segment = client.attach('weights')")
            engines[0].do("segment.close()")
            until(lambda: holders(client) == {"weights": 2})  # a detach has no answer
            for engine in engines[1:]:
                engine.process.kill()
            until(lambda: not client.segments())
            until(lambda: daemon.books().lent_bytes == 0)

    def test_closed_with_its_client(self, daemon: Daemon, client: membroker.Client) -> None:
        """What was sealed lives on; what was not is given up."""
        with membroker.connect(daemon.endpoint()) as closes:
            model = closes.model("m")
            whole, half = model.create_segment("whole", 1), model.create_segment("half", 1)
            whole.seal()
            attached = closes.attach("whole")
        assert (whole.closed, half.closed, attached.closed) == (True, True, True)
        assert mapped_extents() == 0
        until(lambda: holders(client) == {"whole": 0})

    def test_garbage(self, daemon: Daemon, client: membroker.Client, model: membroker.Model) -> None:
        """A program loses its segments: each is let go of as if it was closed."""
        sealed(model)
        attached, written = client.attach("weights"), model.create_segment("cache", 1)
        assert holders(client) == {"weights": 1, "cache": 1}
        del attached, written
        collect()
        until(lambda: holders(client) == {"weights": 0})
        until(lambda: mapped_extents() == 0)
        until(lambda: daemon.books().lent_bytes == PAGE)


class TestNames:
    def test_by_each_of_its_names(self, client: membroker.Client, model: membroker.Model) -> None:
        """A short name does where it is alone; two models with a segment of one name want the model's too."""
        sealed(model, data=b"m")
        whole = "tenants/red/models/m/segments/weights"
        for name in ("weights", "m/weights", whole, whole.replace("/m/", "/-/")):
            with client.attach(name, timeout=0) as segment:
                assert segment.resource_name == whole
        sealed(client.model("n"), data=b"n")
        with pytest.raises(membroker.InvalidRequest, match="m/weights or n/weights") as refused:
            client.attach("weights")
        assert refused.value.reason == "SEGMENT_AMBIGUOUS"
        client.delete_segment("m/weights")
        until(lambda: len(client.segments()) == 1)
        with client.attach("weights") as segment:
            assert segment.read(0, 1) == b"n"

    def test_what_is_not_there(self, client: membroker.Client, model: membroker.Model) -> None:
        """It is said at once, however long one would wait; another tenant's segment is not there either."""
        sealed(model)
        for name in ["other", "m/other", "other/weights", "tenants/blue/models/m/segments/weights"]:
            for call in (partial(client.attach, timeout=24 * 3600), client.delete_segment):
                with pytest.raises(membroker.SegmentNotFound):
                    call(name)
            assert holders(client) == {"weights": 0}


class TestWaiting:
    def test_attached_when_it_is_sealed(self, daemon: Daemon, client: membroker.Client, model: membroker.Model) -> None:
        """The readers start first and wait; the seal lets all of them go on, with what was written last."""

        def read() -> bytes:
            with client.attach("weights") as segment:
                return segment.read(0, 4)

        segment = model.create_segment("weights", 1)
        readers = [Caller(read) for _ in range(3)]
        with pytest.raises(membroker.SegmentNotSealed):
            client.attach("weights", timeout=0)
        segment.write(0, b"last")
        assert all(reader.is_alive() for reader in readers)
        segment.seal()
        assert [reader.value() for reader in readers] == [b"last"] * 3
        assert holders(client) == {"weights": 1}

    def test_for_a_time(self, client: membroker.Client, model: membroker.Model) -> None:
        segment = model.create_segment("weights", 1)
        for timeout in (0, 0.2):
            began = time.monotonic()
            with pytest.raises(membroker.SegmentNotSealed) as refused:
                client.attach("weights", timeout=timeout)
            assert timeout <= time.monotonic() - began
            assert isinstance(refused.value, TimeoutError)
        segment.seal()
        client.attach("weights", timeout=0).close()
        with pytest.raises(membroker.InvalidRequest, match="timeout"):
            client.attach("weights", timeout=24 * 3600 + 1)
