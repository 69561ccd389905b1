"""Segments between real processes: written by one, read by many, charged once, and outliving their writers.

Every test ends where it began: no segment, books of zero, the anchor and nothing else on the device, and as many
descriptors open in the daemon as before.
"""

from __future__ import annotations

import os
import re
import signal
import socket

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.raw import Session, reason
from tests.support.segment_workers import (
    FULL_NAME,
    SIZE,
    SegmentAsker,
    attach,
    clean,
    device_used,
    holders,
    reads,
    segments,
    state,
    wait_in_attach,
    write,
)
from tests.support.sizes import GIB, MIB
from tests.support.workers import (
    ANCHOR_BYTES,
    is_gone,
    worker,
    workers,
)

from membroker.v1 import broker_pb2 as pb
from membroker.v1.resources_pb2 import Segment as SegmentMessage
from membroker.v1.resources_pb2 import Session as SessionMessage

# Sharing


def test_bytes_are_charged_once_however_many_have_them_mapped(daemon: Daemon, transport: str) -> None:
    """Three engines of one model: one loads the weights, two map the same memory. The books, the device and the
    metrics have it once, under the model and under no session.
    """
    with clean(daemon), workers(3) as (writer, *readers):
        write(writer, daemon, transport)
        writer.do("segment.seal()")
        for each in readers:
            attach(each, daemon, transport)
        assert all(reads(each) for each in (writer, *readers))
        assert holders(daemon) == 3
        assert daemon.books().lent_bytes == SIZE
        until(lambda: device_used(daemon) == SIZE)
        (model,) = daemon.models()
        assert (model.books[0].used_bytes, model.books[0].segment_bytes, model.books[0].extents) == (SIZE, SIZE, 1)
        assert [books.used_bytes for one in daemon.sessions() for books in one.books if books.used_bytes] == []
        assert [list(one.segments) for one in daemon.sessions()] == [[FULL_NAME]] * 3
        figures = re.findall(
            r"^membroker_(model_used_bytes|device_lent_bytes)\{.*device\"\S* (\S+)$", daemon.metrics(), re.M
        )
        assert {name: float(value) for name, value in figures} == dict.fromkeys(
            ("model_used_bytes", "device_lent_bytes"), SIZE
        )
        writer.do("segment.close()")
        readers[0].do("segment.close()")
        assert (holders(daemon), daemon.books().lent_bytes) == (1, SIZE)
        assert reads(readers[1])
        readers[1].do("segment.delete()")
        assert (state(daemon), daemon.books().lent_bytes) == ("ENDING", SIZE)
        readers[1].do("segment.close()")
        until(lambda: not segments(daemon))
        assert [each.finish() for each in (writer, *readers)] == [0, 0, 0]


def test_the_writers_end_is_told_to_all_who_wait(daemon: Daemon, transport: str) -> None:
    """Nothing will seal what it wrote: the waiting readers are told at once, and the bytes are free again."""
    with clean(daemon), workers(3) as (writer, *readers):
        write(writer, daemon, transport)
        for each in readers:
            wait_in_attach(each, daemon, transport)
        writer.kill()
        for each in readers:
            refused = each.refused("attaching.result()")
            assert (refused.error, refused.reason) == ("WriterDied", "WRITER_DIED")
            assert "weights" in refused.message
        until(lambda: not segments(daemon))
        until(lambda: daemon.books().lent_bytes == 0 == device_used(daemon))
        readers[0].do("again = client.register_model('m').create_segment('weights', '256MiB'); again.close()")


def test_a_writer_without_a_connection_seals_by_grpc(daemon: Daemon) -> None:
    """Its token still does everything that brings no descriptors: seal, detach, delete."""
    with Session(daemon.endpoint()) as writer, worker() as reader:
        made = SegmentAsker(writer, "handoff").create(writer.register("m"), SIZE)
        wait_in_attach(reader, daemon, "handoff")
        writer.sock.shutdown(socket.SHUT_RDWR)
        until(lambda: daemon.device().detached_sessions == 1)
        asker = SegmentAsker(writer, "grpc")
        assert asker.seal(made.generation).state == SegmentMessage.SEALED
        assert reader.ask("attaching.result().read(0, 5) == bytes(5)")
        assert reason(asker.attach()) == "DELIVERY_FAILED"
        assert asker.detach(made.generation) == pb.DetachSegmentResponse()
        assert asker.delete().state == SegmentMessage.ENDING
        reader.do("client.close()")
        until(lambda: not segments(daemon))
        assert daemon.books().lent_bytes == 0
        assert [one.state for one in daemon.sessions()] == [SessionMessage.DETACHED], "it ends with this process"


# Deaths


def test_a_dead_readers_child_keeps_the_bytes_charged(daemon: Daemon, transport: str) -> None:
    """A reader is killed, and a child that was forked without the library's knowledge has the mapping still. The
    segment is deleted, and everybody else has left: only the device's own figure ends its charge.
    """
    with clean(daemon), workers(3) as (writer, reader, other):
        write(writer, daemon, transport)
        writer.do("segment.seal()")
        attach(reader, daemon, transport)
        child = reader.ask("fork_unseen()")
        try:
            reader.kill()
            until(lambda: holders(daemon) == 1)
            writer.do("segment.delete(); segment.close()")
            until(lambda: state(daemon) == "RELEASING")
            books = daemon.books()
            assert (books.lent_bytes, books.releasing_bytes) == (0, SIZE)
            other.connect(daemon, transport=transport)
            other.do("model = client.register_model('n')")
            assert other.refused("model.allocate('250MiB')").numbers == ("capacity", 250 * MIB, 248 * MIB, 256 * MIB)
            refused = other.refused("client.register_model('m').create_segment('weights', 1)")
            assert (refused.error, refused.metadata["state"]) == ("SegmentExists", "releasing")
            assert device_used(daemon) == SIZE
            assert state(daemon) == "RELEASING", "credited while a child still held it"
            assert not is_gone(child)
        finally:
            os.kill(child, signal.SIGKILL)
        until(lambda: not segments(daemon))
        assert "proven=false" not in daemon.log()
        other.do("model.allocate('256MiB').close()")


# Life


def test_a_large_segment_comes_in_packets(transport: str) -> None:
    """130 GiB are 130 extents, three packets: more than a window. Its seams are seen by nobody.

    Nothing of it is touched but eight bytes at each seam, so it costs no memory.
    """
    with running({"capacity": "140GiB"}) as daemon, clean(daemon), workers(2) as (writer, reader):
        size = 130 * GIB
        write(writer, daemon, transport, size)
        marks = (
            "marks = {at - 4: at.to_bytes(8, 'little') for at in range(1 << 30, segment.size, 1 << 30)}\n"
            "assert len(marks) == 129\n"
        )
        writer.do(marks + "for at, mark in marks.items(): segment.write(at, mark)\nsegment.seal()")
        (one,) = segments(daemon)
        assert (one.size_bytes, one.extents) == (size, 130)
        attach(reader, daemon, transport)
        reader.do(marks + "for at, mark in marks.items(): assert segment.read(at, 8) == mark, at")
        assert reads(reader)
        assert reader.ask("len([name for name in os.listdir('/proc/self/fd')]) < 40")
        assert daemon.books().lent_bytes == size
        reader.do("segment.delete(); segment.close()")
        writer.do("segment.close()")


def test_a_segment_of_host_memory(transport: str) -> None:
    """Weights that are swapped in and out lie in host memory, with a capacity, books and limits of its own."""
    tenants = {"red": {"host_limit": "32MiB"}}
    with (
        running({"host_capacity": "64MiB", "settle_seconds": 1.0, "tenants": tenants}) as daemon,
        clean(daemon),
        workers(2) as both,
    ):
        writer, reader = both
        write(writer, daemon, transport, location="host")
        writer.do("segment.seal()")
        attach(reader, daemon, transport)
        assert reads(reader)
        assert [each.ask("segment.location") for each in both] == ["host", "host"]
        assert [books.lent_bytes for books in daemon.device().locations] == [0, SIZE]
        until(lambda: [books.device_used_bytes for books in daemon.device().locations] == [ANCHOR_BYTES, SIZE])
        refused = writer.refused("model.create_segment('other', '26MiB', 'host')")
        assert refused.numbers == ("tenant", 26 * MIB, 24 * MIB, 32 * MIB)
        assert refused.metadata["location"] == "host"
        reader.kill()
        writer.do("segment.delete(); segment.close()")


@pytest.mark.deep
def test_two_hundred_lives_leave_no_descriptor(daemon: Daemon, transport: str) -> None:
    """A service that makes and drops segments all day: the daemon keeps nothing of those that are gone."""
    lives = (
        "for turn in range(200):\n"
        "    segment = model.create_segment(f's{turn}', 1)\n"
        "    segment.write(0, b'x'); segment.seal()\n"
        "    attached = client.attach(f's{turn}')\n"
        "    assert attached.read(0, 1) == b'x'\n"
        "    segment.close(); attached.delete(); attached.close()\n"
    )
    with clean(daemon), worker() as one:
        one.connect(daemon, transport=transport).do("model = client.register_model('m')")
        one.do(lives)
        until(lambda: not segments(daemon))
        assert daemon.books().lent_bytes == 0
        until(lambda: device_used(daemon) == 0)
        one.do("client.close()")
