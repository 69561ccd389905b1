"""A broker that dies, is restarted or upgraded while a worker computes: what the worker's process sees of it.

The broker is played by the test; the client is a whole one, with its sockets, threads and memory.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from tests.client.session.test_calls import Taker
from tests.support.daemons import until
from tests.support.fake_broker import (
    MODEL,
    PAGE,
    TOKEN,
    Caller,
    PlayedBroker,
    buffer,
    drop_all,
    is_away,
    line,
    model,
    playing,
)
from tests.support.processes import ends, heard, is_waiting, mapped_extents, open_extents, tell, worker

import membroker
from membroker.session.connection import Connection
from membroker.session.inventory import HeldResources, Inventory
from membroker.v1 import broker_pb2, resources_pb2
from membroker.v1 import handoff_pb2 as pb
from membroker.vmm.driver import Location
from membroker.wire import frames as handoff


class TestCallsInFlight:
    """Each ends as if it had been made once."""

    def test_an_allocation_is_made_anew(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """The request had been read, and not answered: it comes again, under another id, and is held once."""
        caller = Caller(lambda: model(client).allocate(PAGE))
        first = broker.hear("allocate")
        broker.hang_up()
        held = broker.resume()
        assert not held.extent_ids
        again = broker.hear("allocate")
        assert again.request_id > first.request_id
        assert (again.allocate.model, again.allocate.count) == (MODEL, 1)
        reply = pb.Reply(allocate=broker_pb2.AllocateExtentsResponse(count=1))
        (extent_id,) = broker.deliver(again.request_id, 1, reply=reply)
        broker.hear("ack")
        one = caller.value()
        one.view()[:5] = b"hello"
        broker.hang_up()
        assert list(broker.resume().extent_ids) == [extent_id]
        assert bytes(one.view()[:5]) == b"hello"
        assert broker.hears_nothing()

    def test_what_half_arrived_is_dropped(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """One packet of two was mapped: it is unmapped before anything is stated, and both are borrowed anew."""
        pool = model(client).pool(page_size=PAGE)
        caller = Caller(lambda: pool.allocate(0, 3 * PAGE))
        request_id = broker.hear("allocate").request_id
        broker.deliver(request_id, 2, part=0, parts=2)
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
        self, broker: PlayedBroker, client: membroker.Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A thread is slow at mapping when the broker dies: what it maps is nobody's, so its undoing comes first."""
        pool = model(client).pool(page_size=PAGE)
        bind, lost = pool._holding.region.bind_descriptors, client._session.connection
        began, go_on = threading.Event(), threading.Event()

        def slow(*arguments: Any) -> int:
            began.set()
            assert go_on.wait(30)
            return bind(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(pool._holding.region, "bind_descriptors", slow)
            caller = Caller(lambda: pool.allocate(0, PAGE))
            broker.deliver(broker.hear("allocate").request_id, 1, parts=2)
            assert began.wait(30)
            drop_all(broker, client)
            until(lambda: lost._changed._waiting)
            assert not broker.is_knocked_at()
        go_on.set()
        broker.greet_again()
        request_id, _ = broker.hear_holds()
        assert mapped_extents() == open_extents() == 0
        broker.agree(request_id)
        broker.lend()
        caller.value()

    def test_an_answer_that_came_counts(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """The broker answered with its last breath, to a thread that had not read it yet."""
        caller = Caller(lambda: model(client).declare(7))
        request_id = broker.hear("declare").request_id
        broker.reply(request_id, declare=broker_pb2.DeclareMemoryResponse(declared_bytes=7))
        broker.hang_up()
        caller.value()
        held = broker.resume()
        assert [declaration.declared_bytes for declaration in held.declarations] == [7]
        assert broker.hears_nothing(), "it was made twice"

    def test_two_threads(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """Both calls are undone, both come again, and each gets its own memory."""
        callers = [Caller(lambda: model(client).allocate(PAGE)) for _ in range(2)]
        first = {broker.hear("allocate").request_id for _ in callers}
        broker.deliver(min(first), 1, reply=None, parts=2)
        broker.hear("ack")
        broker.hang_up()
        assert not broker.resume().extent_ids
        ids = broker.lend(calls=2)
        addresses = {caller.value().address for caller in callers}
        assert len(addresses) == 2
        broker.hang_up()
        assert sorted(broker.resume().extent_ids) == ids

    def test_refused_at_the_second_time(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """Another tenant was quicker after the restart: the refusal is the call's."""
        caller = Caller(lambda: model(client).allocate(PAGE))
        broker.hear("allocate")
        broker.hang_up()
        broker.resume()
        broker.refuse(broker.hear("allocate").request_id, "MODEL_LIMIT")
        assert isinstance(caller.end().error, membroker.OutOfMemory)

    def test_refused_because_it_stops(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """An upgrade: the old daemon takes nothing new in its last second, and the call is for the new one."""
        caller = Caller(lambda: model(client).allocate(PAGE))
        broker.refuse(broker.hear("allocate").request_id, "STOPPING")
        broker.hang_up()
        broker.resume()
        broker.lend()
        assert caller.value().size == PAGE

    def test_a_segment_is_attached_anew(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """It had arrived, and its answer not."""
        caller = Caller(lambda: client.attach("m/weights"))
        request_id = broker.hear("attach_segment").request_id
        broker.deliver(request_id, 1, parts=2, segment=77)
        broker.hear("ack")
        broker.hang_up()
        assert not broker.resume().segments
        broker.hand_over_segment(broker.hear("attach_segment").request_id, 77)
        segment = caller.value()
        assert segment.read(0, 2) == b"\0\0"
        broker.hang_up()
        assert [(one.generation, one.times) for one in broker.resume().segments] == [(77, 1)]

    def test_a_segment_is_sealed_and_deleted(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """The seal is said again; the delete had been done, and its answer was lost."""
        caller = Caller(lambda: model(client).create_segment("weights", 1))
        broker.hand_over_segment(broker.hear("create_segment").request_id, 77)
        segment = caller.value()
        caller = Caller(segment.seal)
        broker.hear("seal_segment")
        broker.hang_up()
        assert [one.generation for one in broker.resume().segments] == [77]
        sealed = broker.hear("seal_segment")
        assert sealed.seal_segment.generation == 77
        broker.reply(sealed.request_id, segment=resources_pb2.Segment(generation=77, size_bytes=PAGE))
        caller.value()
        caller = Caller(segment.delete)
        broker.hear("delete_segment")
        broker.hang_up()
        broker.resume()
        broker.refuse(broker.hear("delete_segment").request_id, "SEGMENT_NOT_FOUND")
        assert caller.value().state == "ending"
        caller = Caller(segment.delete)
        broker.refuse(broker.hear("delete_segment").request_id, "SEGMENT_NOT_FOUND")
        assert isinstance(caller.end().error, membroker.SegmentNotFound), "this one was asked once"

    def test_a_driver_that_cannot_unmap(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """What is stuck in the device is held: calling it given back would lend it to somebody else's account."""
        pool = model(client).pool(page_size=PAGE)
        caller = Caller(lambda: pool.allocate(0, 2 * PAGE))
        request_id = broker.hear("allocate").request_id
        (extent_id,) = broker.deliver(request_id, 1, parts=2)
        broker.hear("ack")
        region, unbind = pool._holding.region, pool._holding.region.unbind

        def stuck(offset: int, size: int) -> None:
            raise RuntimeError("the device is lost")

        region.unbind = stuck  # type: ignore[method-assign]
        broker.hang_up()
        assert list(broker.resume().extent_ids) == [extent_id]
        assert "lost" in str(caller.end().error)
        region.unbind = unbind  # type: ignore[method-assign]


class TestHolds:
    """What is stated is what is held: what was given back meanwhile is not, and nothing is forgotten."""

    def test_given_back_during_the_outage(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """A tensor dies while nobody is there: nothing is raised, and the new broker hears by omission."""
        kept, kept_id = buffer(broker, client)
        gone, _ = buffer(broker, client)
        broker.die()
        until(lambda: is_away(client))
        gone.close()
        assert mapped_extents() == 1
        broker.listen()
        assert list(broker.resume().extent_ids) == [kept_id]
        assert broker.hears_nothing(), "it was given back twice"
        kept.view()[:1] = b"x"

    def test_given_back_between_the_holds_and_the_answer(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """It was stated already: the broker hears of it after its answer, before any other call."""
        _kept, _ = buffer(broker, client)
        gone, gone_id = buffer(broker, client)
        attached = Caller(lambda: client.attach("m/weights"))
        broker.hand_over_segment(broker.hear("attach_segment").request_id, 77)
        segment = attached.value()
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

    def test_declared_less_between_the_holds_and_the_answer(
        self, broker: PlayedBroker, client: membroker.Client
    ) -> None:
        """Host memory is freed while the broker reads what was held: it hears of it after its answer."""
        declarations = client._session.declarations
        caller = Caller(lambda: declarations.add(MODEL, Location.HOST, 7))
        broker.reply(broker.hear("declare").request_id, declare=broker_pb2.DeclareMemoryResponse(declared_bytes=7))
        caller.value()
        broker.hang_up()
        broker.greet_again()
        request_id, frames = broker.hear_holds()
        assert [one.declared_bytes for frame in frames for one in frame.declarations] == [7]
        declarations.end(MODEL, Location.HOST, 4)
        assert broker.hears_nothing(), "said before the broker had agreed to anything"
        broker.agree(request_id)
        told = broker.hear("declare")
        assert told.declare.declared_bytes == 3
        broker.reply(told.request_id, declare=broker_pb2.DeclareMemoryResponse(declared_bytes=3))
        until(lambda: not is_away(client))
        broker.hang_up()
        assert [one.declared_bytes for one in broker.resume().declarations] == [3]

    def test_declared_less_while_another_declaration_waits(
        self, broker: PlayedBroker, client: membroker.Client
    ) -> None:
        """One thread's declaration waits for its answer; another frees host memory, and does not wait with it."""
        declarations = client._session.declarations
        first = Caller(lambda: declarations.add(MODEL, Location.HOST, 8))
        broker.reply(broker.hear("declare").request_id, declare=broker_pb2.DeclareMemoryResponse(declared_bytes=8))
        first.value()
        second = Caller(lambda: declarations.add(MODEL, Location.HOST, 5))
        waiting = broker.hear("declare")
        assert waiting.declare.declared_bytes == 13
        Caller(lambda: declarations.end(MODEL, Location.HOST, 3)).value()
        assert broker.hears_nothing(), "it could overtake the declaration before"
        broker.reply(waiting.request_id, declare=broker_pb2.DeclareMemoryResponse(declared_bytes=13))
        told = broker.hear("declare")
        assert told.declare.declared_bytes == 10
        broker.reply(told.request_id, declare=broker_pb2.DeclareMemoryResponse(declared_bytes=10))
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
            broker.accept()
            broker.welcome()
            assert heard(process) == "connected"
            assert broker.hear("declare").declare.declared_bytes == 7
            until(lambda: is_waiting(process.pid))
            process.send_signal(signal.SIGINT)
            until(broker.is_knocked_at)
            broker.hang_up()
            assert not broker.resume().declarations
            assert heard(process) == "interrupted"
            request = broker.hear("declare")
            assert request.declare.declared_bytes == 5
            broker.reply(request.request_id, declare=broker_pb2.DeclareMemoryResponse(declared_bytes=5))
            broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
            broker.hang_up()
            ends(process)

    def test_more_than_a_frame_has(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """A cache of ten thousand pages, models with long names, and segments: in several frames, each a legal one."""
        inventory = line(client).inventory
        inventory.borrowed(range(1 << 40, (1 << 40) + 10_000))
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

    def test_declarations(self, broker: PlayedBroker, client: membroker.Client) -> None:
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

    def test_a_segment_that_is_attached_twice(self, broker: PlayedBroker, client: membroker.Client) -> None:
        segments = []
        for _ in range(3):
            caller = Caller(lambda: client.attach("m/weights"))
            broker.hand_over_segment(broker.hear("attach_segment").request_id, 77)
            segments.append(caller.value())
        segments.pop().close()
        assert broker.hear("detach_segment").detach_segment.generation == 77
        broker.hang_up()
        until(lambda: is_away(client))
        segments.pop().close()
        assert [(one.generation, one.times) for one in broker.resume().segments] == [(77, 1)]

    def test_what_the_broker_does_not_know(
        self, broker: PlayedBroker, client: membroker.Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its journal was cut short: that stays mapped, the user reads of it, and nobody is ever told it is back."""
        known, known_id = buffer(broker, client)
        unknown, unknown_id = buffer(broker, client)
        caller = Caller(lambda: client.attach("m/weights"))
        broker.hand_over_segment(broker.hear("attach_segment").request_id, 77)
        segment = caller.value()
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

    def test_a_pool_gives_back_the_known_half(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """One request for both would be refused as a whole."""
        pool = model(client).pool(page_size=PAGE)
        caller = Caller(lambda: pool.allocate(0, 2 * PAGE))
        ids = broker.lend(2)
        caller.value()
        broker.hang_up()
        broker.resume(unknown_extent_ids=ids[:1])
        until(lambda: not is_away(client))
        pool.close()
        assert list(broker.hear("release").release.extent_ids) == ids[1:]

    def test_the_inventory_of_many(self) -> None:
        """Striking what is not there returns what was, and the rest stays."""
        inventory = Inventory()
        inventory.borrowed([1, 2, 3])
        assert list(inventory.strike_extents([2, 3, 4])) == [2, 3]
        assert not inventory.strike_segment(7)
        assert inventory.held() == HeldResources(frozenset({1}))


class TestOutage:
    """Calls wait, and the session tries, whatever stands in the way."""

    def test_a_call_waits(self, broker: PlayedBroker, client: membroker.Client) -> None:
        broker.die()
        until(lambda: is_away(client))
        callers = [Caller(lambda: model(client).allocate(PAGE)) for _ in range(3)]
        until(lambda: len(line(client)._changed._waiting) >= 3)
        broker.listen()
        broker.resume()
        broker.lend(calls=3)
        assert [caller.value().size for caller in callers] == [PAGE] * 3

    def test_a_call_waits_for_so_long(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """Then it raises, with what was tried; the session goes on when somebody is there at last."""
        one, extent_id = buffer(broker, client)
        line(client)._outage = 0.5
        broker.die()
        calls: list[Callable[[], object]] = [lambda: model(client).allocate(PAGE), lambda: model(client).declare(1)]
        for call in calls:
            with pytest.raises(
                membroker.BrokerUnavailable, match=r"start it again \(`membrokerd`\).*waited 0.5 s"
            ) as it:
                call()
            assert "nobody listens" in str(it.value)
        line(client)._outage = 0.0
        with pytest.raises(membroker.BrokerUnavailable, match="is gone: what is mapped stays valid"):
            model(client).allocate(PAGE)
        line(client)._outage = 30.0
        broker.listen()
        assert list(broker.resume().extent_ids) == [extent_id]
        another, _ = buffer(broker, client)
        one.close()
        another.close()

    def test_obstacles(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """A dead socket, none, a broker that hangs up, stops, is full, dies at the Holds, refuses them; one works."""
        one, extent_id = buffer(broker, client)
        broker.die()
        until(lambda: is_away(client))
        tried = lambda: line(client)._trouble  # noqa: E731 - what the last attempt met
        until(lambda: "nobody listens" in tried())
        (broker.directory / "handoff.sock").unlink()
        until(lambda: "has no handoff.sock" in tried())
        broker.listen()
        assert broker.accept().resume_token == TOKEN
        broker.hang_up()
        for reason in ("STOPPING", "TOO_MANY_SESSIONS"):
            assert broker.accept().resume_token == TOKEN
            broker.refuse(1, reason)
            broker.hang_up()
        broker.greet_again()
        broker.hang_up()
        broker.greet_again()
        broker.hear_holds()
        broker.hang_up()
        broker.greet_again()
        broker.refuse(broker.hear_holds()[0], "JOURNAL_FULL")
        broker.hang_up()
        assert list(broker.resume().extent_ids) == [extent_id]
        until(lambda: not is_away(client))
        one.close()
        assert list(broker.hear("release").release.extent_ids) == [extent_id]

    def test_again_and_again(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """A daemon in a crash loop: a call outlives five of them."""
        caller = Caller(lambda: model(client).allocate(PAGE))
        ids = [broker.hear("allocate").request_id]
        for _ in range(5):
            broker.hang_up()
            broker.resume()
            ids.append(broker.hear("allocate").request_id)
        assert ids == sorted(set(ids))
        broker.hang_up()
        broker.resume()
        broker.lend()
        assert caller.value().size == PAGE

    def test_nobody_calls(
        self, broker: PlayedBroker, client: membroker.Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A worker computes for hours: its session is taken up again all the same, with two lines in the log."""
        one, extent_id = buffer(broker, client)
        with caplog.at_level(logging.INFO, "membroker"):
            broker.hang_up()
            assert list(broker.resume().extent_ids) == [extent_id]
            until(lambda: len(caplog.messages) >= 2)
        assert [message.partition("/")[0] for message in caplog.messages] == ["the broker at "] * 2
        assert "is gone: what is mapped stays valid, reconnecting" in caplog.messages[0]
        assert "is back after" in caplog.messages[1]
        one.view()[:1] = b"x"

    def test_a_violation_is_not_repeated(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """The broker says that what we sent was wrong: the same again would be wrong again."""
        caller = Caller(lambda: model(client).allocate(PAGE))
        broker.hear("allocate")
        broker.refuse(0, "PROTOCOL_VIOLATION")
        broker.hang_up()
        assert isinstance(caller.end().error, membroker.ProtocolError)
        with pytest.raises(membroker.ProtocolError):
            model(client).allocate(PAGE)
        assert line(client)._state == "connected"

    def test_ctrl_c_while_a_call_waits(self, broker: PlayedBroker) -> None:
        """A person does not want to wait: the call raises, nothing stays mapped, and the session goes on later."""
        script = """
import logging
logging.disable()
from membroker.model import Model
from membroker.v1 import resources_pb2
client = connect()
pool = Model(client._session, resources_pb2.Model(name="m", virtual_capacity_bytes=1 << 30)).pool(page_size=PAGE)
say("connected")
try:
    pool.allocate(0, 3 * PAGE)
    raise SystemExit("it was not interrupted")
except KeyboardInterrupt:
    pass
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert "membroker-extent" not in open("/proc/self/maps").read()
say("interrupted")
pool.allocate(0, PAGE)
say("allocated")
client.close()
"""
        with worker(script, broker, "handoff") as process:  # type: ignore[arg-type]
            broker.accept()
            broker.welcome()
            assert heard(process) == "connected"
            request_id = broker.hear("allocate").request_id
            broker.deliver(request_id, 2, parts=2)
            broker.hear("ack")
            broker.die()
            until(lambda: mapped_extents(process.pid) == 0)
            until(lambda: is_waiting(process.pid))
            process.send_signal(signal.SIGINT)
            assert heard(process) == "interrupted"
            broker.listen()
            assert not broker.resume().extent_ids
            broker.lend(1)
            assert heard(process) == "allocated"
            broker.hear("release")
            broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
            broker.hang_up()
            ends(process)

    def test_fork_during_an_outage(self, broker: PlayedBroker) -> None:
        """A data loader is forked while the library reconnects: it has none of it, and the parent's session goes on."""
        script = """
import logging
logging.disable()
from membroker.model import Model
from membroker.v1 import resources_pb2
client = connect()
model = Model(client._session, resources_pb2.Model(name="m", virtual_capacity_bytes=1 << 30))
buffer = model.allocate(1)
say("lent")
wait()
while not client._session.connection.lost or not client._session.reconnecting._trouble: pass
child = os.fork()
if not child:
    signal.alarm(20)
    assert threading.active_count() == 1
    for call in (lambda: model.allocate(1), lambda: model.declare(1), buffer.view):
        try:
            call()
        except membroker.ClosedError:
            continue
        os._exit(1)
    buffer.close(); client.close()
    assert "membroker-extent" not in open("/proc/self/maps").read()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
say("forked")
another = model.allocate(1)
say("lent again")
client.close()
"""
        with worker(script, broker, "handoff") as process:  # type: ignore[arg-type]
            broker.accept()
            broker.welcome()
            (extent_id,) = broker.lend()
            assert heard(process) == "lent"
            broker.die()
            tell(process)
            assert heard(process) == "forked"
            broker.listen()
            assert list(broker.resume().extent_ids) == [extent_id]
            broker.lend()
            assert heard(process) == "lent again"
            assert {broker.hear("release").WhichOneof("kind") for _ in range(2)} == {"release"}
            broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
            broker.hang_up()
            ends(process)


class TestClose:
    """Whatever the broker does, closing unmaps and raises nothing."""

    def test_the_broker_is_back_in_time(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """A service shuts down during an upgrade: the new daemon hears that it left."""
        buffer(broker, client)
        broker.die()
        until(lambda: is_away(client))
        caller = Caller(client.close)
        until(lambda: mapped_extents() == 0)
        broker.listen()
        assert not broker.resume().extent_ids
        broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
        broker.hang_up()
        caller.value()

    def test_the_broker_is_not_back(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """And a call of another thread that waits for it is told that the client is closed."""
        one, _ = buffer(broker, client)
        broker.die()
        waiting = Caller(lambda: model(client).allocate(PAGE))
        until(lambda: is_away(client) and line(client)._changed._waiting)
        line(client)._timeout = 0.01
        client.close()
        assert isinstance(waiting.end().error, membroker.ClosedError)
        assert one.closed
        assert mapped_extents() == 0
        with pytest.raises(membroker.ClosedError):
            model(client).allocate(PAGE)

    def test_a_view_outlives_the_outage(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """A closed client's last array lives on over a restart: the session is there to end with it."""
        one, extent_id = buffer(broker, client)
        view = one.view()
        client.close()
        broker.hang_up()
        assert list(broker.resume().extent_ids) == [extent_id]
        until(lambda: not is_away(client))
        view[:1] = b"x"
        view.release()
        del view
        assert list(broker.hear("release").release.extent_ids) == [extent_id]
        broker.reply(broker.hear("goodbye").request_id, goodbye=pb.GoodbyeResponse())
        broker.hang_up()

    def test_at_exit(self, broker: PlayedBroker) -> None:
        """A script ends while the broker is away: at once, and without a word. Its end is its goodbye."""
        script = """
import logging, time
logging.disable()
client = connect()
say("connected")
wait()
while not client._session.connection.lost: pass
"""
        with worker(script, broker, "handoff") as process:  # type: ignore[arg-type]
            broker.accept()
            broker.welcome()
            assert heard(process) == "connected"
            broker.die()
            tell(process)
            assert process.wait(4) == 0, "it waited for a broker to say goodbye to"
            ends(process)

    @pytest.mark.parametrize("answered", [True, False])
    def test_an_ordinary_end_is_no_outage(
        self, broker: PlayedBroker, client: membroker.Client, caplog: pytest.LogCaptureFixture, answered: bool
    ) -> None:
        """The broker closes after a Goodbye, answered or not: nobody reconnects, and nothing is logged."""
        caller = Caller(client.close)
        request_id = broker.hear("goodbye").request_id
        if answered:
            broker.reply(request_id, goodbye=pb.GoodbyeResponse())
        broker.hang_up()
        caller.value()
        assert not caplog.messages


class TestSessionLost:
    """The broker that is there now has never heard of the session."""

    @pytest.mark.parametrize("old", [False, True])
    def test_the_token_is_rejected(self, broker: PlayedBroker, client: membroker.Client, old: bool) -> None:
        """Its state was wiped, or it is of a version that opens another session: calls say so, closing still works."""
        told: list[membroker.Notice] = []
        client.on_notice(told.append)
        one, _ = buffer(broker, client)
        pool = model(client).pool(page_size=PAGE)
        caller = Caller(lambda: pool.allocate(0, PAGE))
        broker.hear("allocate")
        broker.hang_up()
        assert broker.accept().resume_token == TOKEN
        if old:
            broker.welcome()
        else:
            broker.refuse(1, "TOKEN_REJECTED")
        assert isinstance(caller.end().error, membroker.SessionLost)
        for call in (lambda: model(client).allocate(PAGE), lambda: pool.allocate(0, 1), lambda: client.attach("m/w")):
            with pytest.raises(membroker.SessionLost, match=r"does not know this session.*call connect\(\) again"):
                call()
        one.view()[:5] = b"hello"
        until(lambda: told == [membroker.Disconnected(), membroker.Forgotten()])
        one.close()
        pool.close()
        assert mapped_extents() == 0
        client.close()

    def test_it_is_an_unavailable_broker(self) -> None:
        """Who catches that today goes on to do so."""
        assert issubclass(membroker.SessionLost, membroker.BrokerUnavailable)


class TestNotices:
    def test_a_callback_that_is_none(self, client: membroker.Client) -> None:
        """It is refused at once, and not in a log when the first notice comes."""
        with pytest.raises(membroker.InvalidRequest, match="on_notice takes a function"):
            client.on_notice(3)  # type: ignore[arg-type]

    def test_a_life(self, broker: PlayedBroker, client: membroker.Client, caplog: pytest.LogCaptureFixture) -> None:
        """An operator drains the device, thinks better of it, and restarts the daemon: each is told, in order."""
        told: list[membroker.Notice] = []
        deadline = Timestamp()
        deadline.FromDatetime(datetime(2030, 1, 2, 3, 4, tzinfo=UTC))

        def fail(notice: membroker.Notice) -> None:
            raise ValueError("a user's mistake")

        client.on_notice(fail)
        client.on_notice(told.append)
        broker.notice(draining=pb.Draining(deadline=deadline))
        broker.notice(draining=pb.Draining())
        broker.notice(undrained=pb.Undrained())
        broker.notice(stopping=pb.Stopping())
        until(lambda: len(told) == 4)
        broker.hang_up()
        broker.resume()
        until(lambda: len(told) == 6)
        assert told[:5] == [
            membroker.Draining(datetime(2030, 1, 2, 3, 4, tzinfo=UTC)),
            membroker.Draining(None),
            membroker.Undrained(),
            membroker.Stopping(),
            membroker.Disconnected(),
        ]
        assert isinstance(told[5], membroker.Resumed)
        assert 0 < told[5].outage_seconds < 30
        broker.notice(undrained=pb.Undrained())
        until(lambda: told[6:] == [membroker.Undrained()])
        assert "a user's mistake" in caplog.text

    def test_a_drain_that_goes_on(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """The notice came between connect() and on_notice(): it is told, and after its end no more."""
        line(client).on_notice(lambda _: None)
        broker.notice(draining=pb.Draining())
        until(lambda: line(client)._draining)
        told: list[membroker.Notice] = []
        client.on_notice(told.append)
        until(lambda: told == [membroker.Draining(None)])
        broker.notice(undrained=pb.Undrained())
        until(lambda: not line(client)._draining)
        broker.notice(draining=pb.Draining())
        until(lambda: line(client)._draining)
        broker.hang_up()
        broker.resume()
        until(lambda: not is_away(client))
        late: list[membroker.Notice] = []
        client.on_notice(late.append)
        broker.notice(undrained=pb.Undrained())
        until(lambda: membroker.Undrained() in late)
        assert membroker.Draining(None) not in late, "a drain of the broker before"

    def test_a_callback_that_exits(
        self, broker: PlayedBroker, client: membroker.Client, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A program wants to end when its broker does, and says so in the library's thread: that goes on, and says so.

        Else nothing that is garbage would ever be given back, and no other callback hear anything.
        """
        told: list[membroker.Notice] = []
        client.on_notice(lambda _: sys.exit("the user's own end"))
        client.on_notice(told.append)
        broker.notice(stopping=pb.Stopping())
        until(lambda: told == [membroker.Stopping()])
        line(client).later(lambda: sys.exit("what a finalizer left"))
        broker.notice(undrained=pb.Undrained())
        until(lambda: told[1:] == [membroker.Undrained()])
        assert "the user's own end" in caplog.text
        assert "what a finalizer left" in caplog.text

    def test_a_callback_may_call(self, broker: PlayedBroker, client: membroker.Client) -> None:
        """It gives back what it can when the broker drains, and borrows when it is back: nothing stands still."""
        one, extent_id = buffer(broker, client)
        bought: list[membroker.Buffer] = []

        def react(notice: membroker.Notice) -> None:
            if isinstance(notice, membroker.Draining):
                one.close()
            if isinstance(notice, membroker.Disconnected):
                bought.append(model(client).allocate(PAGE))

        client.on_notice(react)
        broker.notice(draining=pb.Draining())
        assert list(broker.hear("release").release.extent_ids) == [extent_id]
        broker.hang_up()
        broker.resume()
        broker.lend()
        until(lambda: bought)
        bought.pop().close()


class TestConnect:
    """Who comes first waits for the other."""

    def test_a_broker_that_starts_later(self, caplog: pytest.LogCaptureFixture) -> None:
        """A pod's worker is quicker than its daemon: no directory, then no socket, then a dead one, a stopping one."""
        with playing() as broker, caplog.at_level(logging.INFO, "membroker"):
            broker.die()
            (broker.directory / "handoff.sock").unlink()
            caller = Caller(lambda: membroker.connect(broker.directory, timeout=30))
            until(lambda: caplog.messages)
            broker.listen()
            broker.accept()
            broker.refuse(1, "STOPPING")
            broker.hang_up()
            broker.accept()
            broker.hang_up()
            broker.accept()
            broker.welcome()
            client = caller.value()
            assert [message[:34] for message in caplog.messages] == ["waiting up to 30 s for a broker: /"]
            broker.die()
            client._session.reconnecting._outage = 0
            client.close()

    def test_no_device_yet(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody said which endpoint, and the runtime directory is empty: it is found when it is there."""
        if os.path.exists("/run/membroker"):
            pytest.skip("this machine runs a broker")
        with playing() as broker:
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(broker.directory))
            monkeypatch.delenv("MEMBROKER_ENDPOINT", raising=False)
            caller = Caller(lambda: membroker.connect(timeout=30))
            tenants = broker.directory / "membroker" / "host" / "tenants"
            tenants.mkdir(parents=True)
            (tenants / "default").symlink_to(broker.directory)
            broker.accept()
            broker.welcome()
            client = caller.value()
            broker.die()
            client._session.reconnecting._outage = 0
            client.close()

    def test_for_so_long(self) -> None:
        """Then the sentence is the one that says what is missing."""
        with pytest.raises(membroker.BrokerUnavailable, match="does not exist"):
            membroker.connect("/nowhere/at/all", timeout=0.2)

    @pytest.mark.parametrize("reason", ["ENDPOINT_FORBIDDEN", "UNSUPPORTED_VERSION", "TOO_MANY_SESSIONS"])
    def test_what_waiting_does_not_mend(self, broker: PlayedBroker, reason: str) -> None:
        caller = Caller(lambda: membroker.connect(broker.directory, timeout=3600))
        broker.accept()
        broker.refuse(1, reason)
        assert getattr(caller.end().error, "reason", "") == reason


def test_the_end_is_noticed_behind_a_last_answer() -> None:
    """A thread reads its answer, and nobody reads on: the session has to be taken up again all the same."""
    mine, yours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = Connection(mine, "/test", Inventory())
    request = broker_pb2.DeclareMemoryRequest()
    caller = Caller(lambda: connection.call(pb.Frame(declare=request)))
    until(lambda: connection._reader is not None)
    end = Caller(connection.read_to_the_end)
    until(lambda: connection._changed._waiting)
    request_id = handoff.decode(yours.recv(4096)).request_id
    yours.send(handoff.encode(pb.Frame(request_id=request_id, reply=pb.Reply(declare={}))))
    caller.value()
    yours.close()
    end.value()
    assert connection.lost
    connection.close()


def test_a_connection_waits_for_its_calls() -> None:
    """Idle is when the last call has undone what it did, whoever asks first."""
    mine, yours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection = Connection(mine, "/test", Inventory())
    undoing, go_on = threading.Event(), threading.Event()

    class Slow(Taker):
        def undo(self) -> None:
            undoing.set()
            assert go_on.wait(30)

    request = broker_pb2.AllocateExtentsRequest(count=1)
    caller = Caller(lambda: connection.call(pb.Frame(allocate=request), Slow()))
    yours.recv(4096)
    yours.close()
    assert undoing.wait(30)
    assert connection.lost
    waiting = Caller(connection.wait_until_idle)
    until(lambda: connection._changed._waiting)
    assert waiting.is_alive()
    go_on.set()
    waiting.value()
    assert isinstance(caller.end().error, membroker.BrokerUnavailable)
    connection.close()
