"""The arguments and the views of a segment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.daemons import Daemon, until
from tests.support.processes import is_settled
from tests.support.segments import holders, one_transport, sealed
from tests.support.sizes import MIB, PAGE

import membroker
from membroker import segment as segment_module
from membroker.v1.handoff_pb2 import Frame

pytestmark = one_transport


class TestArguments:
    def test_refused(self, daemon: Daemon, client: membroker.Client, model: membroker.Model) -> None:
        """Whatever is refused, nothing is charged, and the exception has the numbers."""
        wrong: list[Any] = [0, -1, 2**63, "everything", None]
        for size in wrong:
            with pytest.raises(membroker.InvalidRequest):
                model.create_segment("weights", size)
        for name in (3, None, b"m/weights", "w\udce9ights"):
            for call in (client.attach, client.delete_segment, lambda name: model.create_segment(name, 1)):
                with pytest.raises(membroker.InvalidRequest):
                    call(name)
        with pytest.raises(membroker.OutOfMemory) as refused:
            model.create_segment("weights", "257MiB")
        assert (refused.value.level, refused.value.requested_bytes) == ("capacity", 258 * MIB)
        assert (refused.value.available_bytes, refused.value.limit_bytes) == (256 * MIB, 256 * MIB)
        with pytest.raises(membroker.InvalidRequest, match="location"):
            model.create_segment("weights", 1, location="moon")
        with pytest.raises(membroker.MembrokerError, match="host_capacity"):
            model.create_segment("weights", 1, location="host")
        segment = model.create_segment("weights", 1)
        with pytest.raises(membroker.SegmentExists) as exists:
            model.create_segment("weights", 1)
        assert exists.value.metadata["state"] == "writing"
        segment.close()
        until(lambda: is_settled(daemon))
        model.unregister()
        with pytest.raises(membroker.ModelNotFound):
            model.create_segment("weights", 1)

    def test_ranges(self, client: membroker.Client, model: membroker.Model) -> None:
        """The last byte is one of its bytes, and no bytes at all can be read and written anywhere."""
        segment = model.create_segment("weights", 1)
        wrong: list[tuple[Any, Any]] = [(0.0, 1), (0, "1"), (0, -1)]
        for no_offset, no_size in wrong:
            for call in (segment.read, segment.span):
                with pytest.raises(membroker.InvalidRequest):
                    call(no_offset, no_size)
        for offset, size in ((-1, 1), (0, PAGE + 1), (PAGE, 1), (PAGE + 1, 0), (1, PAGE), (2**64 - 1, 2)):
            with pytest.raises(membroker.InvalidRequest):
                segment.read(offset, size)
            with pytest.raises(membroker.InvalidRequest):
                segment.write(offset, bytes(size))
        segment.write(PAGE - 1, b"z")
        assert segment.read(PAGE - 1, 1) == b"z"
        segment.write(PAGE, b"")
        assert segment.read(PAGE, 0) == b""

    def test_anything_with_bytes(self, client: membroker.Client, model: membroker.Model) -> None:
        segment = model.create_segment("weights", 1)
        array = np.frombuffer(b"abcd", np.uint16).reshape(2, 1)
        for data in (b"abcd", bytearray(b"abcd"), memoryview(b"abcd"), array):
            segment.write(3, bytes(4))
            segment.write(3, data)
            assert segment.read(2, 6) == b"\0abcd\0"
        segment.write(0, np.zeros((0, 3)))
        wrong: list[Any] = [None, "text", [1, 2], np.eye(4)[:, ::2], np.zeros(2, "datetime64[s]")]
        for data in wrong:
            with pytest.raises(membroker.InvalidRequest):
                segment.write(0, data)

    def test_progress(self, client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """A loader shows how far it is; what raises in between ends the write there."""
        told: list[tuple[int, int]] = []

        def tell(done: int, total: int) -> None:
            told.append((done, total))

        segment = model.create_segment("weights", 2 * PAGE)
        monkeypatch.setattr(segment_module, "CHUNK_BYTES", MIB)
        data = bytes(range(256)) * (5 * MIB // 512)
        segment.write(1, data, tell)
        assert told == [(done, len(data)) for done in (MIB, 2 * MIB, len(data))]
        assert segment.read(1, len(data)) == data
        with pytest.raises(ZeroDivisionError):
            segment.write(0, bytes(MIB) * 2, lambda *_: 1 / 0)
        assert segment.read(MIB + 1, 255) == data[MIB : MIB + 255]


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
            with pytest.raises(BufferError):
                segment.seal()
            assert segment.writable
            view[0] = 7
            del view
        with pytest.raises(membroker.SegmentNotSealed):
            client.attach("weights", timeout=0)
        segment.seal()
        assert segment.read(0, 4) == b"\7\0\0\7"

    def test_no_seal_while_a_thread_writes(
        self, client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One thread copies a large tensor, and another one seals: readers would have zeros for the rest of it."""
        monkeypatch.setattr(segment_module, "CHUNK_BYTES", MIB)
        segment = model.create_segment("weights", PAGE)

        def amid(done: int, total: int) -> None:
            if done < total:
                with pytest.raises(BufferError):
                    segment.seal()  # in the main thread, another one does the work

        segment.write(0, bytes([7]) * PAGE, amid)
        segment.seal()
        assert client.attach("weights").read(PAGE - 1, 1) == b"\7"

    def test_a_view_that_is_taken_during_the_seal(
        self, client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another thread takes a view while the broker has not answered yet: it is read-only already."""
        segment = model.create_segment("weights", 1)
        views: list[memoryview] = []
        connection = client._session.reconnecting
        ask = connection.call

        def slow(frame: Frame) -> Any:
            views.append(segment.view())
            with pytest.raises(membroker.SegmentNotWritable):
                segment.write(0, b"x")
            return ask(frame)

        monkeypatch.setattr(connection, "call", slow)
        segment.seal()
        assert views.pop().readonly

    def test_a_seal_whose_answer_is_lost(
        self, client: membroker.Client, model: membroker.Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Others read it already: the writer, who does not know, can write no more, and asks again."""
        ask = client._session.reconnecting.call
        for name, lost_by in (("interrupted", KeyboardInterrupt()), ("gone", membroker.BrokerUnavailable("gone"))):
            segment = model.create_segment(name, 1)
            segment.write(0, b"sealed")

            def lost(frame: Frame, lost_by: BaseException = lost_by) -> Any:
                ask(frame)
                raise lost_by

            with monkeypatch.context() as patch:
                patch.setattr(client._session.reconnecting, "call", lost)
                with pytest.raises(type(lost_by)):
                    segment.seal()
            with client.attach(name) as attached:
                with pytest.raises(membroker.SegmentNotWritable):
                    segment.write(0, b"broken")
                assert segment.view().readonly
                assert attached.read(0, 6) == b"sealed"
            segment.seal()
            with pytest.raises(membroker.SegmentNotWritable):
                segment.seal()
