"""A broker that dies, is restarted or upgraded while a worker computes: what the worker's process sees of it.

The broker is played by the test; the client is a whole one, with its sockets, threads and memory.
"""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tests.client.session.taking import enter, take_leave
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.fake_broker import MODEL, PAGE, Caller, PlayedBroker, buffer, drop_all, is_away, line, model
from tests.support.processes import ends, heard, is_waiting, mapped_extents, open_extents, worker

import membroker
from membroker import Client, Segment, interrupts
from membroker.session.inventory import Inventory
from membroker.v1 import broker_pb2, resources_pb2
from membroker.v1 import handoff_pb2 as pb
from membroker.vmm.driver import Location

KIND = (MODEL, resources_pb2.LOCATION_DEVICE, PAGE)


def attached(broker: PlayedBroker, client: Client) -> Segment:
    """Return a segment that the broker has handed over."""
    caller = Caller(lambda: client.attach("m/weights"))
    broker.hand_over_segment(broker.hear("attach_segment").request_id, 77)
    segment: Segment = caller.value()
    return segment


def hear_declared(broker: PlayedBroker, size: int) -> None:
    """Hear that so many bytes are declared, and agree."""
    frame = broker.hear("declare")
    assert frame.declare.declared_bytes == size
    broker.reply(frame.request_id, declare=broker_pb2.DeclareMemoryResponse(declared_bytes=size))


class TestCallsInFlight:
    """Each ends as if it had been made once."""

    def test_a_call_that_was_interrupted_before_it_is_sent(self, broker: PlayedBroker, client: Client) -> None:
        """The interrupt has ended the connection before, and the session has resumed: this call nobody would end."""

        def call() -> None:
            interrupts.here.task = SimpleNamespace(interrupted=True)  # type: ignore[assignment]
            line(client).call(pb.Frame(attach_segment=broker_pb2.AttachSegmentRequest(name=f"{MODEL}/segments/s")))

        with pytest.raises(KeyboardInterrupt):
            Caller(call).value()
        assert broker.hears_nothing()

    def test_what_half_arrived_is_dropped(self, broker: PlayedBroker, client: Client) -> None:
        """One packet of two was mapped: it is unmapped before anything is stated, and both are borrowed anew."""
        pool = model(client).pool(page_size=PAGE)
        caller = Caller(lambda: pool.allocate(0, 3 * PAGE))
        request_id = broker.hear("allocate").request_id
        broker.deliver_pages(request_id, 2, part=0, parts=2)
        broker.hear("ack")
        assert mapped_extents() == 2
        broker.hang_up()
        broker.greet_again()
        answer_id, frames = broker.hear_holds()
        assert [list(holds.extent_ids) for holds in frames] == [[]]
        assert mapped_extents() == open_extents() == 0, "mapped, and stated as given back"
        broker.agree(answer_id)
        ids = broker.lend(3)
        assert caller.value() == pool.base_address
        pool.view(0, 3 * PAGE)[:] = b"\xa5" * 3 * PAGE
        broker.hang_up()
        assert list(broker.resume().extent_ids) == ids

    def test_nothing_is_stated_before_it_is_unmapped(
        self, broker: PlayedBroker, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A thread is slow at mapping when the broker dies: what it maps is nobody's, so its undoing comes first."""
        pool = model(client).pool(page_size=PAGE)
        bind, lost = pool._holding.region.bind_descriptors, client._session.connection
        began, go_on = threading.Event(), threading.Event()

        def slow(*arguments: Any) -> int:
            began.set()
            assert go_on.wait(DEADLINE_SECONDS)
            return bind(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(pool._holding.region, "bind_descriptors", slow)
            caller = Caller(lambda: pool.allocate(0, PAGE))
            broker.deliver_pages(broker.hear("allocate").request_id, 1, parts=2)
            assert began.wait(DEADLINE_SECONDS)
            drop_all(broker, client)
            until(lambda: lost._changed.waiting)
            assert not broker.is_knocked_at()
        go_on.set()
        broker.greet_again()
        request_id, _ = broker.hear_holds()
        assert mapped_extents() == open_extents() == 0
        broker.agree(request_id)
        broker.lend()
        caller.value()

    def test_an_answer_that_came_counts(self, broker: PlayedBroker, client: Client) -> None:
        """The broker answered with its last breath, to a thread that had not read it yet."""
        caller = Caller(lambda: model(client).declare(7))
        request_id = broker.hear("declare").request_id
        broker.reply(request_id, declare=broker_pb2.DeclareMemoryResponse(declared_bytes=7))
        broker.hang_up()
        caller.value()
        held = broker.resume()
        assert [declaration.declared_bytes for declaration in held.declarations] == [7]
        assert broker.hears_nothing(), "it was made twice"

    def test_a_segment_is_attached_anew(self, broker: PlayedBroker, client: Client) -> None:
        """It had arrived, and its answer not."""
        caller = Caller(lambda: client.attach("m/weights"))
        request_id = broker.hear("attach_segment").request_id
        broker.deliver_pages(request_id, 1, parts=2, segment=77)
        broker.hear("ack")
        broker.hang_up()
        assert not broker.resume().segments
        broker.hand_over_segment(broker.hear("attach_segment").request_id, 77)
        segment = caller.value()
        assert segment.read(0, 2) == b"\0\0"
        broker.hang_up()
        assert [(one.generation, one.times) for one in broker.resume().segments] == [(77, 1)]

    def test_a_segment_is_sealed_and_deleted(self, broker: PlayedBroker, client: Client) -> None:
        """The seal is said again, and was made before somebody deleted the segment; the delete had been done, too."""
        caller = Caller(lambda: model(client).create_segment("weights", 1))
        broker.hand_over_segment(broker.hear("create_segment").request_id, 77)
        segment = caller.value()
        caller = Caller(segment.seal)
        broker.hear("seal_segment")
        broker.hang_up()
        assert [one.generation for one in broker.resume().segments] == [77]
        sealed = broker.hear("seal_segment")
        assert sealed.seal_segment.generation == 77
        ending = resources_pb2.Segment(generation=77, size_bytes=PAGE, state=resources_pb2.Segment.ENDING)
        broker.reply(sealed.request_id, segment=ending)
        caller.value()
        assert not segment.writable
        caller = Caller(segment.delete)
        broker.hear("delete_segment")
        broker.hang_up()
        broker.resume()
        broker.refuse(broker.hear("delete_segment").request_id, "SEGMENT_NOT_FOUND")
        assert caller.value().state == "ending"
        caller = Caller(segment.delete)
        broker.refuse(broker.hear("delete_segment").request_id, "SEGMENT_NOT_FOUND")
        assert isinstance(caller.end().error, membroker.SegmentNotFound), "this one was asked once"


class TestHolds:
    """What is stated is what is held: what was given back meanwhile is not, and nothing is forgotten."""

    def test_given_back_between_the_holds_and_the_answer(self, broker: PlayedBroker, client: Client) -> None:
        """It was stated already: the broker hears of it after its answer, before any other call."""
        _kept, _ = buffer(broker, client)
        gone, gone_id = buffer(broker, client)
        segment = attached(broker, client)
        drop_all(broker, client)
        waiting = Caller(lambda: model(client).allocate(PAGE))
        broker.greet_again()
        request_id, frames = broker.hear_holds()
        assert gone_id in frames[0].extent_ids
        gone.close()
        segment.close()
        assert broker.hears_nothing(), "said before the broker had agreed to anything"
        broker.agree(request_id)
        release = broker.hear("release").release
        assert (list(release.extent_ids), release.no_reply) == ([gone_id], True)
        assert broker.hear("detach_segment").detach_segment.generation == 77
        broker.lend()
        waiting.value()

    def test_declared_less_between_the_holds_and_the_answer(self, broker: PlayedBroker, client: Client) -> None:
        """Host memory is freed while the broker reads what was held: it hears of it after its answer."""
        declarations = client._session.declarations
        caller = Caller(lambda: declarations.add(MODEL, Location.HOST, 7))
        hear_declared(broker, 7)
        caller.value()
        broker.hang_up()
        broker.greet_again()
        request_id, frames = broker.hear_holds()
        assert [one.declared_bytes for frame in frames for one in frame.declarations] == [7]
        declarations.end(MODEL, Location.HOST, 4)
        assert broker.hears_nothing(), "said before the broker had agreed to anything"
        broker.agree(request_id)
        hear_declared(broker, 3)
        until(lambda: not is_away(client))
        broker.hang_up()
        assert [one.declared_bytes for one in broker.resume().declarations] == [3]

    def test_declared_less_while_another_declaration_waits(self, broker: PlayedBroker, client: Client) -> None:
        """One thread's declaration waits for its answer; another frees host memory, and does not wait with it."""
        declarations = client._session.declarations
        first = Caller(lambda: declarations.add(MODEL, Location.HOST, 8))
        hear_declared(broker, 8)
        first.value()
        second = Caller(lambda: declarations.add(MODEL, Location.HOST, 5))
        waiting = broker.hear("declare")
        assert waiting.declare.declared_bytes == 13
        Caller(lambda: declarations.end(MODEL, Location.HOST, 3)).value()
        assert broker.hears_nothing(), "it could overtake the declaration before"
        broker.reply(waiting.request_id, declare=broker_pb2.DeclareMemoryResponse(declared_bytes=13))
        hear_declared(broker, 10)
        second.value()
        broker.hang_up()
        assert [one.declared_bytes for one in broker.resume().declarations] == [10]

    def test_ctrl_c_while_a_declaration_waits(self, broker: PlayedBroker) -> None:
        """The broker may agree to what no caller waits for any more: the session resumes, and states what is true."""
        script = f"""
import logging
logging.disable()
client = connect()
say("connected")
try:
    client._session.declarations.add({MODEL!r}, membroker.vmm.Location.HOST, 7)
    raise SystemExit("it was not interrupted")
except KeyboardInterrupt:
    say("interrupted")
client._session.declarations.add({MODEL!r}, membroker.vmm.Location.HOST, 5)
client.close()
"""
        with worker(script, broker, "handoff") as process:  # type: ignore[arg-type]
            enter(broker, process)
            assert broker.hear("declare").declare.declared_bytes == 7
            until(lambda: is_waiting(process.pid))
            process.send_signal(signal.SIGINT)
            until(broker.is_knocked_at)
            broker.hang_up()
            assert not broker.resume().declarations
            assert heard(process) == "interrupted"
            hear_declared(broker, 5)
            take_leave(broker)
            ends(process)

    def test_more_than_a_frame_has(self, broker: PlayedBroker, client: Client) -> None:
        """A cache of ten thousand pages, models with long names, and segments: in several frames, each a legal one."""
        inventory = line(client).inventory
        inventory.borrowed(range(1 << 40, (1 << 40) + 10_000), KIND)
        for generation in range(2_000):
            inventory.attached(generation, (1 << 60) + generation)
        names = [f"tenants/{'t' * 63}/models/{number:063}" for number in range(500)]
        for name in names:
            inventory.declared(broker_pb2.DeclareMemoryRequest(model=name, location=1, declared_bytes=1 << 62))
        broker.hang_up()
        broker.greet_again()
        request_id, frames = broker.hear_holds()
        assert [len(one.extent_ids) for one in frames if one.extent_ids] == [4096, 4096, 1808]
        assert sorted(id for one in frames for id in one.extent_ids) == list(range(1 << 40, (1 << 40) + 10_000))
        assert sum(len(one.segments) for one in frames) == 2_000
        assert [each.model for one in frames for each in one.declarations] == names
        assert [one.last for one in frames] == [False] * (len(frames) - 1) + [True]
        assert max(pb.Frame(holds=one).ByteSize() for one in frames) < 65_536 - 16
        broker.agree(request_id)
        until(lambda: not is_away(client))

    def test_declarations(self, broker: PlayedBroker, client: Client) -> None:
        """The last figure of each model and location, and none that is 0 or was refused."""
        for size, location in ((5, "device"), (7, "device"), (3, "host"), (0, "host")):
            caller = Caller(lambda size=size, location=location: model(client).declare(size, location))
            broker.reply(broker.hear("declare").request_id, declare=broker_pb2.DeclareMemoryResponse())
            caller.value()
        caller = Caller(lambda: model(client).declare(1 << 40))
        broker.refuse(broker.hear("declare").request_id, "MODEL_LIMIT")
        assert isinstance(caller.end().error, membroker.OutOfMemory)
        broker.hang_up()
        declared = [(one.model, one.location, one.declared_bytes) for one in broker.resume().declarations]
        assert declared == [(MODEL, resources_pb2.LOCATION_DEVICE, 7)]

    def test_a_segment_that_is_attached_twice(self, broker: PlayedBroker, client: Client) -> None:
        segments = []
        for _ in range(3):
            segments.append(attached(broker, client))
        segments.pop().close()
        assert broker.hear("detach_segment").detach_segment.generation == 77
        broker.hang_up()
        until(lambda: is_away(client))
        segments.pop().close()
        assert [(one.generation, one.times) for one in broker.resume().segments] == [(77, 1)]

    def test_what_the_broker_does_not_know(
        self, broker: PlayedBroker, client: Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its journal was cut short: that stays mapped, the user reads of it, and nobody is ever told it is back."""
        known, known_id = buffer(broker, client)
        unknown, unknown_id = buffer(broker, client)
        segment = attached(broker, client)
        broker.hang_up()
        broker.resume(unknown_extent_ids=[unknown_id], unknown_generations=[77])
        until(lambda: not is_away(client))
        assert "does not know 1 extents and 1 segments" in caplog.text
        unknown.view()[:1] = b"x"
        unknown.close()
        segment.close()
        known.close()
        assert list(broker.hear("release").release.extent_ids) == [known_id]
        assert broker.hears_nothing()
        assert mapped_extents() == 0

    def test_what_was_released_is_counted_once_by_model_and_location(self) -> None:
        """A release that is repeated after an interrupt, or an extent that the broker forgot, counts no second time."""
        inventory = Inventory()
        inventory.borrowed(range(10), KIND)
        inventory.borrowed([20], (MODEL, resources_pb2.LOCATION_HOST, 7 * PAGE))
        inventory.strike_call(5, [0])
        inventory.forget([1], [])
        for _ in range(2):
            inventory.strike_extents([0, 1, 2, 3, 20])
        assert list(inventory.strike_extents([])) == []
        assert inventory.released_bytes == {KIND[:2]: 2 * PAGE, (MODEL, resources_pb2.LOCATION_HOST): 7 * PAGE}

    def test_what_a_guest_declares_less_was_released(self) -> None:
        """Also when it declares the rest as memory that cannot be recalled. Who is no guest releases nothing."""
        inventory, place = Inventory(), (MODEL, resources_pb2.LOCATION_DEVICE)
        released = []
        for size, recallable in ((9, False), (5, False), (5, True), (8, True), (6, True), (3, False), (1, False)):
            inventory.declared(
                broker_pb2.DeclareMemoryRequest(
                    model=MODEL, location=place[1], declared_bytes=size * PAGE, recallable=recallable
                )
            )
            released.append(inventory.released_bytes[place] // PAGE)
        assert released == [0, 0, 0, 0, 2, 5, 5]
