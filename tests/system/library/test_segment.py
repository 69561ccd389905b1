"""Segments as a program uses them, against a real daemon: their life, their views, and every way that it goes wrong.

Whatever happens, the broker's books are the judge: who holds a segment, what it is charged, and that nothing is
left when it is over.
"""

from __future__ import annotations

import errno
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.fake_lender import FlakyDriver
from tests.support.processes import (
    EXTENT,
    descriptors,
    ends,
    heard,
    is_settled,
    is_waiting,
    mapped_extents,
    open_extents,
    tell,
    worker,
)
from tests.support.sizes import GIB, MIB

import membroker
from membroker import segment as segment_module
from membroker.safetensors import InvalidTensorIndex
from membroker.segment import publish_arrays, segment_size
from membroker.v1 import broker_pb2, resources_pb2
from membroker.vmm.driver import DriverError, Handle, Location

PAGE = 2 * MIB
ANCHOR_BYTES = 2 * MIB


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """One daemon for all tests: each leaves it as it was, which `nothing_is_left` holds it to."""
    with running() as one:
        yield one


@pytest.fixture(autouse=True)
def nothing_is_left(daemon: Daemon) -> Iterator[None]:
    """Delete what a test has sealed; then nothing is held, charged or mapped."""
    yield
    with daemon.admin_stub() as admin:
        for one in admin.ListSegments(broker_pb2.ListSegmentsRequest()).segments:
            if one.state == resources_pb2.Segment.SEALED:
                admin.DeleteSegment(broker_pb2.DeleteSegmentRequest(name=one.name))
        until(lambda: not daemon.sessions())
        until(lambda: not admin.ListSegments(broker_pb2.ListSegmentsRequest()).segments)
    until(lambda: is_settled(daemon))
    assert (mapped_extents(), open_extents()) == (0, 0)


@pytest.fixture
def client(daemon: Daemon, transport: str) -> Iterator[membroker.Client]:
    with membroker.connect(daemon.endpoint(), transport=transport) as one:
        yield one


one_transport = pytest.mark.parametrize("transport", ["handoff"])
"""Of tests in which the broker is not asked anything that others do not ask by both."""


@pytest.fixture
def model(client: membroker.Client) -> membroker.Model:
    return client.register_model("m")


def holders(client: membroker.Client) -> dict[str, int]:
    """Who holds what: sessions by the segment's own name."""
    return {one.name.rpartition("/")[2]: one.sessions for one in client.segments()}


def protections() -> list[str]:
    """What the kernel allows with each extent that is mapped here."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split()[1] for line in lines if EXTENT in line]


def sealed(model: membroker.Model, name: str = "weights", size: int | str = PAGE, data: bytes = b"") -> None:
    """Make a segment that nobody holds."""
    with model.create_segment(name, size) as segment:
        segment.write(0, data)
        segment.seal()


class TestLife:
    def test_written_sealed_read_and_deleted(self, daemon: Daemon, transport: str) -> None:
        """One engine loads the weights, another maps the same bytes: they are charged once, and outlive the first."""
        with membroker.connect(daemon.endpoint(), transport=transport) as reader:
            with membroker.connect(daemon.endpoint(), transport=transport) as writer:
                segment = writer.register_model("llama").create_segment("weights", "3MiB")
                assert (segment.name, segment.size, segment.location) == ("weights", 4 * MIB, "device")
                assert segment.resource_name == "tenants/red/models/llama/segments/weights"
                assert (segment.writable, segment.closed) == (True, False)
                assert segment.address % PAGE == 0
                assert segment.read(0, 4 * MIB) == bytes(4 * MIB)
                segment.write(4 * MIB - 5, b"hello")
                segment.view()[:2] = b"hi"
                (listed,) = reader.segments()
                assert (listed.state, listed.sessions, listed.writer) == ("writing", 1, writer.session)
                segment.seal()
                assert not segment.writable
                with pytest.raises(membroker.SegmentNotWritable, match="weights"):
                    segment.write(0, b"x")
                with pytest.raises(membroker.SegmentNotWritable):
                    segment.seal()

                attached = reader.attach("weights")
                assert attached.generation == segment.generation == reader.segments()[0].generation
                assert attached.address != segment.address
                assert (attached.size, attached.writable, attached.name) == (4 * MIB, False, "weights")
                assert attached.read(0, 2) + attached.read(4 * MIB - 5, 5) == b"hihello"
                with pytest.raises(membroker.SegmentNotWritable):
                    attached.write(0, b"x")
                with pytest.raises(membroker.SegmentNotWritable):
                    attached.seal()
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
        """Two parts of a program attach the same weights without knowing of each other; each closes its own."""
        sealed(model, data=b"both")
        one, two = client.attach("weights"), client.attach("weights")
        assert one.address != two.address
        assert holders(client) == {"weights": 1}
        one.close()
        assert two.read(0, 4) == b"both"
        assert holders(client) == {"weights": 1}
        two.close()
        until(lambda: holders(client) == {"weights": 0})

    def test_closed_twice(self, client: membroker.Client, model: membroker.Model) -> None:
        """The second close says nothing to the broker: another hold of the session is not its to end."""
        sealed(model)
        other = client.attach("weights")
        with client.attach("weights") as segment:
            segment.close()
        segment.close()
        assert segment.closed
        assert "closed" in repr(segment)
        assert (segment.name, segment.size) == ("weights", PAGE)
        for call in (segment.view, segment.seal, segment.index, lambda: segment.read(0, 1), lambda: segment.address):
            with pytest.raises(membroker.ClosedError, match="this segment is closed"):
                call()
        assert holders(client) == {"weights": 1}
        other.close()

    def test_deleted_twice(self, client: membroker.Client, model: membroker.Model) -> None:
        """A second delete by the object is not one of the segment that has the name by now."""
        segment = model.create_segment("weights", 1)
        segment.seal()
        segment.delete()
        with pytest.raises(membroker.SegmentNotFound):
            segment.delete()
        with pytest.raises(membroker.SegmentExists, match="ending"):
            model.create_segment("weights", 1)
        segment.close()
        until(lambda: not client.segments())
        anew = model.create_segment("weights", 1)
        assert anew.generation != segment.generation
        with pytest.raises(membroker.SegmentNotFound):
            segment.delete()
        assert holders(client) == {"weights": 1}

    def test_given_up_before_its_seal(self, client: membroker.Client, model: membroker.Model) -> None:
        """The loader raises half-way: what it has written is nobody's, and its name is free."""

        def load() -> None:
            with model.create_segment("weights", 1) as segment:
                segment.write(0, b"half")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            load()
        until(lambda: not client.segments())
        with pytest.raises(membroker.SegmentNotFound):
            client.attach("weights")
        assert model.create_segment("weights", 1).read(0, 4) == bytes(4)

    def test_closed_with_its_client(self, daemon: Daemon, transport: str) -> None:
        """What was sealed lives on; what was not is given up."""
        with membroker.connect(daemon.endpoint(), transport=transport) as other:
            with membroker.connect(daemon.endpoint(), transport=transport) as client:
                model = client.register_model("m")
                whole, half = model.create_segment("whole", 1), model.create_segment("half", 1)
                whole.seal()
                attached = client.attach("whole")
            assert whole.closed
            assert half.closed
            assert attached.closed
            assert mapped_extents() == 0
            until(lambda: holders(other) == {"whole": 0})
            other.delete_segment("whole")
            until(lambda: is_settled(daemon))

    def test_garbage(self, daemon: Daemon, client: membroker.Client, model: membroker.Model) -> None:
        """A program loses its segments: each is let go of as if it was closed."""
        sealed(model)
        attached, written = client.attach("weights"), model.create_segment("cache", 1)
        assert holders(client) == {"weights": 1, "cache": 1}
        del attached, written
        gc.collect()
        until(lambda: holders(client) == {"weights": 0})
        until(lambda: mapped_extents() == 0)
        until(lambda: daemon.books().lent_bytes == PAGE)

    def test_no_descriptor_is_left_behind(self, client: membroker.Client, model: membroker.Model) -> None:
        before = descriptors()
        for turn in range(60):
            with model.create_segment(f"s{turn}", 1) as segment:
                segment.seal()
                client.attach(segment.name).close()
                segment.delete()
        assert open_extents() == 0
        assert descriptors() < before + 30

    def test_of_a_card(self, client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """What frameworks ask of memory on a card, and are told of the twin's."""
        segment = model.create_segment("weights", 1)
        with pytest.raises(AttributeError, match="view"):
            segment.__cuda_array_interface__
        monkeypatch.setattr(segment, "_on_host", False)
        with pytest.raises(membroker.InvalidRequest, match="read"):
            segment.view()
        interface = {"shape": (PAGE,), "typestr": "|u1", "data": (segment.address, False), "version": 3}
        assert segment.__cuda_array_interface__ == interface
        segment.seal()
        assert segment.__cuda_array_interface__["data"] == (segment.address, True)


class TestNames:
    def test_by_each_of_its_names(self, client: membroker.Client, model: membroker.Model) -> None:
        """A short name does where it is alone; two models with a segment of one name want the model's too."""
        sealed(model, data=b"m")
        for name in (
            "weights",
            "m/weights",
            "tenants/red/models/m/segments/weights",
            "tenants/red/models/-/segments/weights",
        ):
            with client.attach(name, timeout=0) as segment:
                assert segment.resource_name == "tenants/red/models/m/segments/weights"
        sealed(client.register_model("n"), data=b"n")
        with pytest.raises(membroker.InvalidRequest, match="as in m/weights or n/weights") as refused:
            client.attach("weights")
        assert refused.value.reason == "SEGMENT_AMBIGUOUS"
        with client.attach("n/weights") as segment:
            assert segment.read(0, 1) == b"n"
        client.delete_segment("m/weights")
        until(lambda: len(client.segments()) == 1)
        with client.attach("weights") as segment:
            assert segment.read(0, 1) == b"n"
        client.delete_segment("weights")

    @pytest.mark.parametrize("name", ["other", "m/other", "other/weights", "tenants/blue/models/m/segments/weights"])
    def test_what_is_not_there(self, client: membroker.Client, model: membroker.Model, name: str) -> None:
        """It is said at once, however long one would wait; another tenant's segment is not there either."""
        sealed(model)
        began = time.monotonic()
        for call in (client.attach, client.delete_segment):
            with pytest.raises(membroker.SegmentNotFound):
                call(name)
        assert time.monotonic() - began < 30
        assert holders(client) == {"weights": 0}

    @pytest.mark.parametrize("name", ["", "/", "a/b/c", "-", "m/", "../x", "x" * 97, "x\ny", "tenants/red"])
    def test_what_is_no_name(self, client: membroker.Client, model: membroker.Model, name: str) -> None:
        for call in (client.attach, client.delete_segment, lambda name: model.create_segment(name, 1)):
            with pytest.raises((membroker.InvalidRequest, membroker.SegmentNotFound)):
                call(name)
        assert client.segments() == []

    @pytest.mark.parametrize("name", [3, None, b"m/weights", "w\udce9ights"])
    def test_what_is_not_even_text(self, client: membroker.Client, model: membroker.Model, name: Any) -> None:
        for call in (client.attach, client.delete_segment, lambda name: model.create_segment(name, 1)):
            with pytest.raises(membroker.InvalidRequest, match="the name of a segment is text"):
                call(name)
        with pytest.raises(membroker.InvalidRequest, match="the name of a model is text"):
            client.register_model(name)

    def test_another_tenants(self, daemon: Daemon, client: membroker.Client, model: membroker.Model) -> None:
        sealed(model)
        with membroker.connect(daemon.endpoint("blue")) as blue:
            assert blue.segments() == []
            for name in ("weights", "tenants/red/models/m/segments/weights"):
                with pytest.raises(membroker.SegmentNotFound):
                    blue.attach(name)
                with pytest.raises(membroker.SegmentNotFound):
                    blue.delete_segment(name)
            with membroker.connect(daemon.endpoint(), observer=True) as observer:
                assert [one.state for one in observer.segments()] == ["sealed"]
                with pytest.raises(membroker.AccessDenied):
                    observer.attach("weights")

    def test_listed_in_pages(
        self, client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from membroker import client as client_module

        monkeypatch.setattr(client_module, "MAX_PAGE_ROWS", 2)
        kept = [model.create_segment(f"s{number}", 1) for number in range(5)]
        assert [one.name for one in client.segments()] == [one.resource_name for one in kept]


class TestWaiting:
    def test_attached_when_it_is_sealed(self, daemon: Daemon, client: membroker.Client, model: membroker.Model) -> None:
        """The readers start first and wait; the seal lets all of them go on, with what was written last."""
        found: list[bytes] = []

        def read() -> None:
            with client.attach("weights") as segment:
                found.append(segment.read(0, 4))

        segment = model.create_segment("weights", 1)
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        with pytest.raises(membroker.SegmentNotSealed):
            client.attach("weights", timeout=0)
        segment.write(0, b"last")
        assert found == []
        segment.seal()
        for thread in threads:
            thread.join(30)
        assert found == [b"last"] * 3
        assert holders(client) == {"weights": 1}

    @pytest.mark.parametrize("end", ["close", "delete"])
    def test_its_writer_gives_up(self, client: membroker.Client, model: membroker.Model, end: str) -> None:
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                client.attach("weights")
            except membroker.MembrokerError as error:
                raised.append(error)

        segment = model.create_segment("weights", 1)
        thread = threading.Thread(target=wait)
        thread.start()
        # The broker answers a session's frames in order, and the attach is the next one of this connection or is not
        # yet there: then the segment is gone when it comes.
        getattr(segment, end)()
        thread.join(30)
        assert [type(error) for error in raised] in ([membroker.WriterDied], [membroker.SegmentNotFound])

    @pytest.mark.parametrize("timeout", [0, 0.2])
    def test_for_a_time(self, client: membroker.Client, model: membroker.Model, timeout: float) -> None:
        model.create_segment("other", 1)
        segment = model.create_segment("weights", 1)
        began = time.monotonic()
        with pytest.raises(membroker.SegmentNotSealed, match="longer wait") as refused:
            client.attach("weights", timeout=timeout)
        assert timeout <= time.monotonic() - began < timeout + 20
        assert isinstance(refused.value, TimeoutError)
        segment.seal()
        client.attach("weights", timeout=timeout).close()

    @pytest.mark.parametrize("timeout", [-1, -1e-9, float("nan"), float("inf"), 24 * 3600 + 1, "5", None])
    def test_for_a_time_that_is_none(self, client: membroker.Client, timeout: Any) -> None:
        with pytest.raises(membroker.InvalidRequest, match="timeout"):
            client.attach("weights", timeout=timeout)

    def test_for_a_day(self, client: membroker.Client, model: membroker.Model) -> None:
        sealed(model)
        client.attach("weights", timeout=24 * 3600).close()


@one_transport
class TestArguments:
    @pytest.mark.parametrize("size", [0, -1, 2**63 - 1, 2**63, "0", "everything", None])
    def test_sizes_that_are_none(self, client: membroker.Client, model: membroker.Model, size: int | str) -> None:
        with pytest.raises(membroker.InvalidRequest):
            model.create_segment("weights", size)
        assert client.segments() == []

    def test_refused(self, daemon: Daemon, client: membroker.Client, model: membroker.Model) -> None:
        """Whatever the broker refuses, nothing is charged, and the exception has the numbers."""
        with pytest.raises(membroker.OutOfMemory) as refused:
            model.create_segment("weights", "257MiB")
        assert (refused.value.level, refused.value.requested_bytes) == ("capacity", 258 * MIB)
        assert (refused.value.available_bytes, refused.value.limit_bytes) == (256 * MIB, 256 * MIB)
        with pytest.raises(membroker.InvalidRequest, match="location"):
            model.create_segment("weights", 1, location="moon")
        with pytest.raises(membroker.MembrokerError, match="host_capacity"):
            model.create_segment("weights", 1, location="host")
        segment = model.create_segment("weights", 1)
        with pytest.raises(membroker.SegmentExists, match="writing"):
            model.create_segment("weights", 1)
        segment.close()
        until(lambda: is_settled(daemon))
        model.unregister()
        with pytest.raises(membroker.ModelNotFound):
            model.create_segment("weights", 1)

    @pytest.mark.parametrize(
        ("offset", "size"),
        [(-1, 1), (0, -1), (0, PAGE + 1), (PAGE, 1), (PAGE + 1, 0), (1, PAGE), (2**64 - 1, 2), (2**63 - 1, 2**63 - 1)],
    )
    def test_ranges_outside(self, client: membroker.Client, model: membroker.Model, offset: int, size: int) -> None:
        segment = model.create_segment("weights", 1)
        with pytest.raises(membroker.InvalidRequest, match="do not lie in a segment"):
            segment.read(offset, size)
        if 0 <= size <= 2 * PAGE:
            with pytest.raises(membroker.InvalidRequest, match="do not lie in a segment"):
                segment.write(offset, bytes(size))

    def test_ranges_inside(self, client: membroker.Client, model: membroker.Model) -> None:
        """The last byte is one of its bytes, and no bytes at all can be read and written anywhere."""
        segment = model.create_segment("weights", 1)
        segment.write(PAGE - 1, b"z")
        assert segment.read(PAGE - 1, 1) == b"z"
        assert len(segment.read(0, PAGE)) == PAGE
        for offset in (0, 1, PAGE):
            segment.write(offset, b"")
            assert segment.read(offset, 0) == b""

    @pytest.mark.parametrize(
        "data", [b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), np.frombuffer(b"abcd", np.uint16).reshape(2, 1)]
    )
    def test_anything_with_bytes(self, client: membroker.Client, model: membroker.Model, data: Any) -> None:
        segment = model.create_segment("weights", 1)
        segment.write(3, data)
        assert segment.read(2, 6) == b"\0abcd\0"

    @pytest.mark.parametrize("data", [None, "text", [1, 2], np.eye(4)[:, ::2], np.zeros(2, "datetime64[s]")])
    def test_bytes_that_are_none(self, client: membroker.Client, model: membroker.Model, data: Any) -> None:
        segment = model.create_segment("weights", 1)
        with pytest.raises(membroker.InvalidRequest, match="is contiguous bytes, not"):
            segment.write(0, data)

    def test_an_array_of_nothing(self, client: membroker.Client, model: membroker.Model) -> None:
        model.create_segment("weights", 1).write(0, np.zeros((0, 3)))

    @pytest.mark.parametrize(("offset", "size"), [(0.0, 1), (0, 1.0), ("0", 1), (0, "1KiB"), (None, 1), (True, 1)])
    def test_ranges_that_are_none(
        self, client: membroker.Client, model: membroker.Model, offset: Any, size: Any
    ) -> None:
        segment, buffer = model.create_segment("weights", 1), model.allocate(1)
        for call in (segment.read, segment.span, buffer.span):
            with pytest.raises(membroker.InvalidRequest, match="is a whole number"):
                call(offset, size)

    def test_progress(self, client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """A loader shows how far it is; what raises in between ends the write there."""
        told: list[tuple[int, int]] = []

        def tell(done: int, total: int) -> None:
            told.append((done, total))

        segment = model.create_segment("weights", 2 * PAGE)
        segment.write(0, bytes(3 * MIB), tell)
        assert told == [(3 * MIB, 3 * MIB)]
        monkeypatch.setattr(segment_module, "CHUNK_BYTES", MIB)
        data = bytes(range(256)) * (5 * MIB // 512)
        told.clear()
        segment.write(1, data, tell)
        assert told == [(done, len(data)) for done in (MIB, 2 * MIB, len(data))]
        assert segment.read(1, len(data)) == data
        with pytest.raises(ZeroDivisionError):
            segment.write(0, bytes(MIB) * 2, lambda *_: 1 / 0)
        assert segment.read(MIB + 1, 255) == data[MIB : MIB + 255]


@one_transport
class TestViews:
    def test_a_view_keeps_a_closed_segment(self, client: membroker.Client, model: membroker.Model) -> None:
        sealed(model, data=b"hello")
        segment = client.attach("weights")
        view = segment.view()[:5]
        segment.close()
        assert segment.closed
        assert bytes(view) == b"hello"
        assert holders(client) == {"weights": 1}
        del view
        until(lambda: holders(client) == {"weights": 0})

    def test_a_view_keeps_a_forgotten_client(self, daemon: Daemon, transport: str) -> None:
        """A function returns an array over attached weights, and everything else of its own is garbage."""
        with membroker.connect(daemon.endpoint(), transport=transport) as writer:
            sealed(writer.register_model("m"), data=b"hello")

            def attach() -> memoryview:
                return membroker.connect(daemon.endpoint(), transport=transport).attach("weights").view()

            view = attach()
            gc.collect()
            assert bytes(view[:5]) == b"hello"
            assert holders(writer) == {"weights": 1}
            del view
            gc.collect()
            until(lambda: holders(writer) == {"weights": 0} and len(daemon.sessions()) == 1)

    def test_readers_cannot_write_through_a_view(self, client: membroker.Client, model: membroker.Model) -> None:
        segment = model.create_segment("weights", 1)
        segment.view()[:2] = b"ok"
        segment.seal()
        for each in (segment, client.attach("weights")):
            view = each.view()
            assert view.readonly
            assert bytes(view[:2]) == b"ok"
            with pytest.raises(TypeError):
                view[0] = 1
            with pytest.raises(ValueError):
                np.asarray(view)[0] = 1

    def test_no_seal_under_a_writable_view(self, client: membroker.Client, model: membroker.Model) -> None:
        """An array over the segment is still in somebody's hands: writing to it after the seal would kill them."""
        segment = model.create_segment("weights", 1)
        for view in (segment.view(), segment.view()[3:5], np.asarray(segment.view())):
            with pytest.raises(BufferError, match="view"):
                segment.seal()
            assert segment.writable
            view[0] = 7
            del view
        with pytest.raises(membroker.SegmentNotSealed):
            client.attach("weights", timeout=0)
        segment.seal()
        assert segment.read(0, 4) == b"\7\0\0\7"

    def test_a_view_that_is_taken_during_the_seal(
        self, client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another thread takes a view while the broker has not answered yet: it is read-only already."""
        segment = model.create_segment("weights", 1)
        views: list[memoryview] = []
        transport = client._session.transport
        ask = transport.seal_segment

        def slow(generation: int) -> Any:
            views.append(segment.view())
            with pytest.raises(membroker.SegmentNotWritable):
                segment.write(0, b"x")
            return ask(generation)

        monkeypatch.setattr(transport, "seal_segment", slow)
        segment.seal()
        assert views.pop().readonly

    def test_a_seal_that_fails(
        self, client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The broker could not seal it: it is being written as before, and can be sealed later."""
        segment = model.create_segment("weights", 1)

        def fail(generation: int) -> Any:
            raise membroker.DeviceFailure("no")

        with monkeypatch.context() as patch:
            patch.setattr(client._session.transport, "seal_segment", fail)
            with pytest.raises(membroker.DeviceFailure):
                segment.seal()
        assert segment.writable
        segment.view()[:2] = b"ok"
        segment.seal()
        assert segment.read(0, 2) == b"ok"

    @pytest.mark.parametrize("lost_by", [KeyboardInterrupt(), membroker.BrokerUnavailable("gone")])
    def test_a_seal_whose_answer_is_lost(
        self, client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch, lost_by: BaseException
    ) -> None:
        """Others read it already: the writer, who does not know, can write no more, and asks again."""
        segment = model.create_segment("weights", 1)
        segment.write(0, b"sealed")
        ask = client._session.transport.seal_segment

        def lost(generation: int) -> Any:
            ask(generation)
            raise lost_by

        with monkeypatch.context() as patch:
            patch.setattr(client._session.transport, "seal_segment", lost)
            with pytest.raises(type(lost_by)):
                segment.seal()
        with client.attach("weights") as attached:
            with pytest.raises(membroker.SegmentNotWritable):
                segment.write(0, b"broken")
            assert segment.view().readonly
            assert attached.read(0, 6) == b"sealed"
        segment.seal()
        with pytest.raises(membroker.SegmentNotWritable):
            segment.seal()


class SickDriver(FlakyDriver):
    """A device that fails to import after `imports_left` more, or to reserve, or to write."""

    def __init__(self) -> None:
        super().__init__()
        self.imports_left: int | None = None
        self.failure: BaseException = DriverError("dup", "EIO", errno.EIO)
        self.reserves = True
        self.writes = True

    def import_extent(self, descriptor: int, size: int, location: Location = Location.DEVICE) -> Handle:
        if self.imports_left is not None:
            if not self.imports_left:
                raise self.failure
            self.imports_left -= 1
        return super().import_extent(descriptor, size, location)

    def reserve(self, size: int, alignment: int = 0) -> int:
        if not self.reserves:
            raise DriverError("mmap", "ENOMEM", errno.ENOMEM)
        return super().reserve(size, alignment)

    def write(self, address: int, data: bytes | memoryview) -> None:
        if not self.writes:
            raise DriverError("write", "EIO", errno.EIO)
        super().write(address, data)


LARGE = 2 * GIB + PAGE
"""Three extents in two packets: 1 GiB twice, and the rest."""

FAILURES: dict[str, dict[str, Any]] = {
    **{f"import {number}": {"imports_left": number} for number in range(3)},
    "import interrupted": {"imports_left": 1, "failure": KeyboardInterrupt()},
    "reserve": {"reserves": False},
    **{f"map {number}": {"maps_left": number} for number in range(3)},
    "map interrupted": {"maps_left": 1, "map_failure": KeyboardInterrupt()},
    "set_access": {"lost": True},
}


@pytest.fixture(scope="module")
def large_daemon() -> Iterator[Daemon]:
    """A daemon with room for large segments, which are never written to."""
    with running({"capacity": "8GiB"}) as one:
        yield one


class TestFailures:
    @pytest.mark.parametrize("what", FAILURES)
    def test_half_way(self, large_daemon: Daemon, transport: str, what: str) -> None:
        """A create and an attach that fail at any step hold nothing afterwards: here, on the device, in the books."""
        daemon, driver = large_daemon, SickDriver()
        well = dict(vars(driver))
        with membroker.connect(daemon.endpoint(), transport=transport, driver=driver) as client:
            model = client.register_model("m")
            sealed(model, size=LARGE)
            client.attach("weights").close()
            for call in (lambda: client.attach("weights"), lambda: model.create_segment("other", LARGE)):
                vars(driver).update(FAILURES[what])
                with pytest.raises((membroker.DeviceFailure, KeyboardInterrupt)):
                    call()
                vars(driver).update({key: well[key] for key in FAILURES[what]})
                until(lambda: holders(client) == {"weights": 0})
                assert (mapped_extents(), open_extents()) == (0, 0)
                until(lambda: daemon.books().lent_bytes == LARGE)
                call().close()
            client.delete_segment("weights")
        until(lambda: is_settled(daemon) and not daemon.sessions())

    def test_the_device_is_lost_before_the_seal(self, daemon: Daemon, transport: str) -> None:
        """The work that fills the segment has failed on the card: it is not sealed."""
        driver = SickDriver()
        with membroker.connect(daemon.endpoint(), transport=transport, driver=driver) as client:
            segment = client.register_model("m").create_segment("weights", 1)
            driver.lost = True
            with pytest.raises(membroker.DeviceFailure, match="ILLEGAL_ADDRESS"):
                segment.seal()
            driver.lost = False
            assert segment.writable
            assert [one.state for one in client.segments()] == ["writing"]
            segment.seal()

    def test_no_descriptor_left(self, transport: str) -> None:
        """`ulimit -n` is nearly used up: a packet of descriptors is cut short, and the segment is not held for it."""
        script = """
client = connect()
model = client.register_model("m")
with model.create_segment("weights", "66GiB") as segment:
    segment.seal()
client.attach("weights").close()
client.segments()  # its gRPC channel stays open from here on
gc.collect()
opened = len(os.listdir("/proc/self/fd"))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
for call in (lambda: client.attach("weights"), lambda: model.create_segment("other", "66GiB")):
    for spare in (1, 10, 63, 64, 100):
        resource.setrlimit(resource.RLIMIT_NOFILE, (opened + spare, hard))
        try:
            call()
            raise SystemExit("it did not raise")
        except membroker.DescriptorLimit:
            pass
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(os.listdir("/proc/self/fd")) == opened
        assert "membroker-extent" not in open("/proc/self/maps").read()
        while [(one.name[-7:], one.sessions) for one in client.segments()] != [("weights", 0)]: pass
    call().close()
client.delete_segment("weights")
client.close()
say("well")
"""
        with running({"capacity": "140GiB"}) as daemon:
            with worker(script, daemon, transport) as process:
                assert heard(process) == "well"
                ends(process)
            until(lambda: is_settled(daemon))

    def test_the_broker_is_gone(self, transport: str) -> None:
        """The daemon dies: weights stay readable, one being written can be written on, and closing raises nothing."""
        with running() as daemon:
            self.survive(daemon, transport)

    def survive(self, daemon: Daemon, transport: str) -> None:
        client = membroker.connect(daemon.endpoint(), transport=transport, outage=0)
        model = client.register_model("m")
        sealed(model, data=b"hello")
        attached, written = client.attach("weights"), model.create_segment("other", 1)
        raised: list[type[BaseException]] = []

        def wait() -> None:
            try:
                client.attach("other")
            except membroker.MembrokerError as error:
                raised.append(type(error))

        waiting = threading.Thread(target=wait)
        waiting.start()
        daemon.kill()
        waiting.join(30)
        assert raised == [membroker.BrokerUnavailable]
        assert attached.read(0, 5) == b"hello"
        written.write(0, b"on")
        for call in (written.seal, attached.delete, lambda: client.attach("weights"), client.segments):
            with pytest.raises(membroker.BrokerUnavailable):
                call()
        assert written.writable
        written.write(0, b"and on")
        attached.close()
        written.close()
        assert mapped_extents() == 0
        client.close()


class TestInterrupt:
    def test_ctrl_c_while_it_waits(self, daemon: Daemon, transport: str) -> None:
        """A person gives up waiting for weights: the program goes on at once, whatever the writer does, and when the
        writer seals them hours later they are not held for a call that nobody waits for.
        """
        script = """
client = connect()
model = client.register_model("m")
say("attaches")
try:
    client.attach("weights", timeout=24 * 3600)
    raise SystemExit("it was not interrupted")
except KeyboardInterrupt:
    say("interrupted")
buffer = model.allocate(1)
assert client.device().locations["device"].lent_bytes == 2 * PAGE
del buffer  # a finalizer's work must not stand behind the call that was given up
gc.collect()
wait()
with client.attach("weights") as segment:
    say(segment.read(0, 4).decode())
wait()
client.close()
"""
        with membroker.connect(daemon.endpoint()) as writer, worker(script, daemon, transport) as process:
            segment = writer.register_model("m").create_segment("weights", 1)
            assert heard(process) == "attaches"
            until(lambda: is_waiting(process.pid))
            process.send_signal(signal.SIGINT)
            assert heard(process) == "interrupted"
            until(lambda: daemon.books().lent_bytes == PAGE)
            segment.write(0, b"late")
            segment.seal()
            until(lambda: holders(writer) == {"weights": 1})
            tell(process)
            assert heard(process) == "late"
            until(lambda: holders(writer) == {"weights": 1})
            segment.delete()
            segment.close()
            until(lambda: is_settled(daemon) and not writer.segments())
            tell(process)
            ends(process)

    def test_a_forgotten_client_does_not_wait_for_a_call_that_was_given_up(
        self, daemon: Daemon, transport: str
    ) -> None:
        """After Ctrl-C the program drops its client and works on: the session ends, though nobody has sealed."""
        script = """
def work():
    client = connect()
    say("attaches")
    client.attach("weights", timeout=24 * 3600)
try:
    work()
except KeyboardInterrupt:
    pass
say("interrupted")
for _ in sys.stdin:
    gc.collect()  # more than once: the thread that attached may not have ended yet
"""
        with membroker.connect(daemon.endpoint()) as writer, worker(script, daemon, transport) as process:
            held = writer.register_model("m").create_segment("weights", 1)
            assert heard(process) == "attaches"
            until(lambda: is_waiting(process.pid))
            process.send_signal(signal.SIGINT)
            assert heard(process) == "interrupted"
            until(lambda: tell(process) or len(daemon.sessions()) == 1)
            assert held.writable
            tell(process)
            ends(process)

    def test_ctrl_c_in_calls_by_grpc(self, daemon: Daemon, transport: str) -> None:
        """Interrupts rain on a program that reads the books; none may leave gRPC's channel locked for other threads."""
        script = """
client = connect()
model = client.register_model("m")
client.segments()  # its gRPC channel stays open from here on
hits, armed = 0, False
signal.signal(signal.SIGALRM, lambda *_: armed and signal.raise_signal(signal.SIGINT))
sys.unraisablehook = lambda _: None  # an interrupt in one of gRPC's finalizers is lost; the next one comes
for turn in range(100):
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.00002 * (turn % 50), 0.005)
        while True:
            client.segments()
            model.declare(0)
    except KeyboardInterrupt:
        armed = False
        hits += 1
signal.setitimer(signal.ITIMER_REAL, 0)
found = []
other = threading.Thread(target=lambda: found.append(client.device().pid), daemon=True)
other.start()
other.join(20)
say(hits, len(found))
client.close()
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "100 1"
            ends(process)

    def test_ctrl_c_while_another_thread_reads(self, daemon: Daemon, transport: str) -> None:
        """A thread waits in an attach and reads the socket for all; the main thread's calls are interrupted beside it,
        each by a KeyboardInterrupt, and the thread is served as if nothing had been.
        """
        script = """
client = connect()
model = client.register_model("m")
made = model.create_segment("weights", 1)
found = []
waiting = threading.Thread(target=lambda: found.append(client.attach("weights")))
waiting.start()
while client._session.connection._reader is None: pass
hits, armed = 0, False
signal.signal(signal.SIGALRM, lambda *_: armed and signal.raise_signal(signal.SIGINT))
sys.unraisablehook = lambda _: None  # an interrupt in one of gRPC's finalizers is lost; the next one comes
for turn in range(60):
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.00001 * (turn % 100), 0.005)
        while True:
            try:
                client.attach("weights", timeout=0)
            except membroker.SegmentNotSealed:
                pass
            except membroker.TooMany:
                pass  # calls given up before this one are not answered yet
    except KeyboardInterrupt:
        armed = False
        hits += 1
signal.setitimer(signal.ITIMER_REAL, 0)
made.seal()
waiting.join(20)
say(hits, len(found))
client.close()
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "60 1"
            ends(process)

    def test_ctrl_c_at_any_moment(self, daemon: Daemon, transport: str) -> None:
        """Interrupts rain on a loop that makes, seals and attaches segments: nothing stays mapped, held or charged."""
        script = """
client = connect()
model = client.register_model("m")
hits, armed = 0, False
model.create_segment("first", 1).close()  # imports what is imported late: no import is to be interrupted
signal.signal(signal.SIGALRM, lambda *_: armed and signal.raise_signal(signal.SIGINT))
sys.unraisablehook = lambda _: None  # an interrupt in one of gRPC's finalizers is lost; the next one comes
for turn in range(120):
    name = f"s{turn}"
    try:
        armed = True
        signal.setitimer(signal.ITIMER_REAL, 0.0001 + 0.0001 * (turn % 40))
        made = model.create_segment(name, 1)
        made.write(0, b"x")
        made.seal()
        with client.attach(name) as attached:
            assert attached.read(0, 1) == b"x"
        made.delete()
        made.close()
        armed = False
    except KeyboardInterrupt:
        armed = False
        hits += 1
    except membroker.TooMany:
        armed = False
    made = attached = None
    gc.collect()
# A seal that was interrupted may come to its end after its caller has gone on.
while left := [one for one in client.segments() if one.state in ("writing", "sealed")]:
    for one in left:
        if one.state == "sealed":
            client.delete_segment(one.name)
say(hits)
wait()
assert "membroker-extent" not in open("/proc/self/maps").read()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
say(len(os.listdir("/proc/self/fd")))
client.close()
"""
        with worker(script, daemon, transport) as process:
            assert int(heard(process)) > 0
            until(lambda: is_settled(daemon))
            assert daemon.sessions()[0].segments == []
            tell(process)
            assert int(heard(process)) < 40
            ends(process)


class TestFork:
    def test_a_child_holds_nothing(self, daemon: Daemon, transport: str) -> None:
        """A data loader forks: its copies of the segments raise, map nothing and end nothing of the parent's."""
        script = """
client = connect()
model = client.register_model("m")
made = model.create_segment("weights", 1)
made.write(0, b"hello")
made.seal()
attached, half = client.attach("weights"), model.create_segment("half", 1)
def refuses(call):
    try:
        call()
    except membroker.ClosedError as error:
        assert "forked" in str(error), error
        return True
child = os.fork()
if not child:
    try:
        for one in (made, attached, half):
            calls = [one.view, one.seal, one.delete, one.index, one.arrays, lambda: one.read(0, 1),
                     lambda: one.write(0, b"x"), lambda: one.address]
            assert all(refuses(call) for call in calls)
            assert one.closed and one.size == PAGE
            one.close()
        calls = [client.segments, lambda: client.attach("weights"), lambda: client.delete_segment("weights"),
                 lambda: model.create_segment("x", 1)]
        assert all(refuses(call) for call in calls)
        assert "membroker-extent" not in open("/proc/self/maps").read()
        del made, attached, half, one, model, client
        gc.collect()
        own = connect()
        assert own.attach("weights").read(0, 5) == b"hello"
        own.close()
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert attached.read(0, 5) == made.read(0, 5) == b"hello"
half.write(0, b"on")
half.seal()
say(*(f"{one.state}:{one.sessions}" for one in client.segments()))
wait()
made.delete()
half.delete()
client.close()
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "sealed:1 sealed:1"
            tell(process)
            ends(process)
        until(lambda: is_settled(daemon) and not daemon.sessions())


class TestExit:
    def test_without_close(self, daemon: Daemon, transport: str) -> None:
        """A script just ends with its segments in its globals: what it sealed is there for the next one."""
        script = """
client = connect()
model = client.register_model("m")
made = model.create_segment("weights", 1)
made.write(0, b"kept")
made.seal()
attached, half = client.attach("weights"), model.create_segment("half", 1)
view = attached.view()
say("end")
"""
        with worker(script, daemon, transport) as process:
            assert heard(process) == "end"
            ends(process)
        until(lambda: not daemon.sessions())
        with membroker.connect(daemon.endpoint()) as client:
            until(lambda: holders(client) == {"weights": 0})
            with client.attach("weights") as segment:
                assert segment.read(0, 4) == b"kept"


WEIGHTS = {
    "layer.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "layer.bias": np.array([1, -2], dtype=np.int64),
    "flag": np.array([True, False, True]),
    "scalar": np.float16(1.5).reshape(()),
    "nothing": np.empty((0, 7), dtype=np.uint8),
}


@one_transport
class TestTensors:
    def test_published_and_read_by_name(self, client: membroker.Client, model: membroker.Model) -> None:
        """One process publishes a model's weights, another finds them by name, shape and dtype, without a copy."""
        with publish_arrays(model, "weights", WEIGHTS, metadata={"step": "7"}) as published:
            assert not published.writable
            attached = client.attach("weights")
        index = attached.index()
        assert set(index) == set(WEIGHTS)
        assert index.metadata == {"step": "7"}
        assert index.size <= attached.size
        arrays = attached.arrays()
        for name, array in WEIGHTS.items():
            assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
            assert np.array_equal(arrays[name], array)
            assert not arrays[name].flags.writeable
            assert (index[name].dtype, index[name].size) != ("", None)
        place = arrays["layer.weight"].__array_interface__["data"][0]
        assert place == attached.address + index["layer.weight"].offset
        attached.close()
        assert arrays["layer.weight"][2, 3] == 11, "an array keeps the segment that it lies in"
        assert holders(client) == {"weights": 1}
        del arrays
        until(lambda: holders(client) == {"weights": 0})

    def test_laid_out_first_and_filled_later(self, client: membroker.Client, model: membroker.Model) -> None:
        """A loader that streams: it says what will be there, and copies tensor by tensor into arrays over it."""
        tensors = {"a": ("F32", [2, 3]), "b": ("BF16", (4,))}
        segment = model.create_segment("weights", segment_size(tensors))
        index = segment.lay_out(tensors)
        arrays = segment.arrays(raw=True)
        arrays["a"][:] = 2.5
        segment.write(index["b"].offset, b"\x80\x3f" * 4)
        with pytest.raises(BufferError):
            segment.seal()
        del arrays
        segment.seal()
        with client.attach("weights") as attached:
            read = attached.arrays(raw=True)
            assert (read["a"].tolist(), read["b"].tolist()) == ([[2.5] * 3] * 2, [0x3F80] * 4)
            with pytest.raises(ValueError, match="read-only"):
                read["a"][0, 0] = 1
            del read

    def test_what_does_not_fit(self, client: membroker.Client, model: membroker.Model) -> None:
        segment = model.create_segment("weights", 1)
        with pytest.raises(membroker.InvalidRequest, match=f"the segment has {PAGE}"):
            segment.lay_out({"a": ("U8", [PAGE])})
        assert segment.read(0, 8) == bytes(8)
        with pytest.raises(InvalidTensorIndex, match="no index was written"):
            segment.index()
        segment.lay_out({"a": ("U8", [PAGE - 256])})
        segment.seal()
        with pytest.raises(membroker.SegmentNotWritable):
            segment.lay_out({"a": ("U8", [1])})

    def test_on_any_failure_there_is_no_segment(self, daemon: Daemon, transport: str) -> None:
        driver = SickDriver()
        with membroker.connect(daemon.endpoint(), transport=transport, driver=driver) as client:
            model = client.register_model("m")
            for array in (np.array(["text"]), np.zeros(3, ">f4")):
                with pytest.raises(membroker.InvalidRequest):
                    publish_arrays(model, "weights", {**WEIGHTS, "bad": array})
            raised = []  # their tracebacks keep the segment: it must not be left to the garbage collector
            for fault, well in (("writes", True), ("lost", False)):
                setattr(driver, fault, not well)
                with pytest.raises(membroker.DeviceFailure) as failure:
                    publish_arrays(model, "weights", WEIGHTS)
                raised.append(failure)
                setattr(driver, fault, well)
                until(lambda: not client.segments() and is_settled(daemon))
                assert mapped_extents() == 0
            publish_arrays(model, "weights", WEIGHTS).close()
            with pytest.raises(membroker.SegmentExists):
                publish_arrays(model, "weights", WEIGHTS)
            assert holders(client) == {"weights": 0}

    @pytest.mark.parametrize(
        ("start", "says"),
        [
            ((1 << 63).to_bytes(8, "little"), "more than 16777216"),
            (b"\xff" * 8, "more than 16777216"),
            ((16 * MIB + 1).to_bytes(8, "little") + b"{" * 64, "more than 16777216"),
            ((16 * MIB).to_bytes(8, "little") + b'{"a":' + b"[" * (16 * MIB - 5), "nested too deeply"),
            ((16 * MIB).to_bytes(8, "little") + b"{" * (16 * MIB), "not JSON"),
            ((17 * MIB).to_bytes(8, "little"), "more than 16777216"),
            ((2).to_bytes(8, "little") + b"[]", "not with a brace"),
            (bytes(8), "no index was written"),
        ],
        ids=["2^63", "2^64-1", "16 MiB and 1", "deep", "braces", "17 MiB", "a list", "nothing"],
    )
    def test_a_hostile_header(
        self, client: membroker.Client, model: membroker.Model, start: bytes, says: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first bytes are another process's: whatever they say, it is refused in words, and soon, and no more than
        the longest header is copied.
        """
        sealed(model, size=18 * MIB, data=start)
        with client.attach("weights") as segment:
            began, read, sizes = time.monotonic(), segment.read, [0]
            monkeypatch.setattr(segment, "read", lambda offset, size: sizes.append(size) or read(offset, size))
            for call in (segment.index, segment.arrays):
                with pytest.raises(InvalidTensorIndex, match=says):
                    call()
            assert time.monotonic() - began < 20
            assert max(sizes) <= 8 + 16 * MIB
        assert mapped_extents() == 0

    def test_a_header_longer_than_its_segment(self, client: membroker.Client, model: membroker.Model) -> None:
        sealed(model, data=(3 * MIB).to_bytes(8, "little"))
        with client.attach("weights") as segment, pytest.raises(InvalidTensorIndex, match="of which 2097144 are there"):
            segment.index()

    def test_a_tensor_behind_the_end(self, client: membroker.Client, model: membroker.Model) -> None:
        header = b'{"a":{"dtype":"U8","shape":[2097152],"data_offsets":[0,2097152]}}'
        sealed(model, data=len(header).to_bytes(8, "little") + header)
        with client.attach("weights") as segment:
            for call in (segment.index, segment.arrays):
                with pytest.raises(InvalidTensorIndex, match="there are 2097152"):
                    call()

    def test_the_longest_header(self, client: membroker.Client, model: membroker.Model) -> None:
        """A header of exactly 16 MiB is read; so much is needed by some 160,000 tensors."""
        header = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(16 * MIB)
        sealed(model, size=18 * MIB, data=len(header).to_bytes(8, "little") + header + b"\7")
        with client.attach("weights") as segment:
            assert segment.arrays()["a"].tolist() == [7]


def test_threads_share_a_segment(daemon: Daemon, transport: str) -> None:
    """Eight threads of an engine attach, read and close the same weights again and again, and one deletes them."""
    errors: list[BaseException] = []

    def work(client: membroker.Client) -> None:
        try:
            for _ in range(10):
                with client.attach("weights") as segment:
                    assert segment.read(PAGE - 4, 4) == b"last"
        except BaseException as error:  # noqa: BLE001 - a thread hands on what it raised
            errors.append(error)

    def run(target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments)
        thread.start()
        return thread

    with membroker.connect(daemon.endpoint(), transport=transport) as client:
        sealed(client.register_model("m"), data=bytes(PAGE - 4) + b"last")
        for thread in [run(work, client) for _ in range(8)]:
            thread.join(60)
        assert errors == []
        until(lambda: holders(client) == {"weights": 0})
        client.delete_segment("weights")
        until(lambda: is_settled(daemon))
    assert mapped_extents() == 0
