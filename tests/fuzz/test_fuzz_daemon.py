"""Bent conversations with a real daemon, over a real socket.

A conversation is a true one, Hello to Goodbye, of which packets were bent, doubled, swapped or left out. Whatever is
said, the daemon lives, an honest worker of another tenant borrows and gives back, and when the stranger is gone its
session is the only thing that it could leave: no descriptor of the daemon's stays open.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st
from tests.daemons import Daemon, running, until
from tests.fuzz.corpus import FRAMES, PAGE, bent, budget, lasting
from tests.system import raw

import membroker
from membroker import handoff
from membroker.v1 import handoff_pb2 as pb

HELLO, *TALK = FRAMES[:7]
GOODBYE = pb.Frame(request_id=(1 << 64) - 1, goodbye=pb.Goodbye()).SerializeToString()


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Draw what a stranger says: mostly a true Hello first, then real packets, bent ones, and noise."""
    packet = st.one_of(st.sampled_from(TALK), bent(), bent(), st.binary(min_size=1, max_size=64))
    first = [HELLO] if draw(st.integers(0, 9)) else []
    return first + draw(st.lists(packet, max_size=8))


def talk(daemon: Daemon, packets: list[bytes]) -> None:
    """Say it all, and read until the broker hangs up or has answered the Goodbye that ends every conversation."""
    with raw.Connection(daemon.endpoint("red")) as stranger:
        with suppress(OSError):
            for data in packets:
                stranger.send_bytes(data)
            stranger.send_bytes(GOODBYE)
        with suppress(OSError, handoff.EndOfConnection):
            while True:
                stranger.receive()


STRANGER = """
import socket, sys
path, last = sys.argv[1], bytes.fromhex(sys.argv[2])
for line in sys.stdin:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
        stranger.settimeout(20)
        stranger.connect(path)
        try:
            for data in [*map(bytes.fromhex, line.split()), last]:
                stranger.send(data)
            while stranger.recv(65536):
                pass
        except TimeoutError:
            sys.exit("the broker neither answered nor hung up")
        except OSError:
            pass
"""
"""A process of its own, without the library: its sessions end with it, however it left them."""


def test_bent_conversations() -> None:
    """One daemon hears them all, from processes that come and go."""
    with running() as daemon, membroker.connect(str(daemon.endpoint("blue"))) as worker:
        model = worker.register_model("honest")
        before, greeted = daemon.descriptors(), daemon.device().revision
        socket = str(daemon.endpoint("red") / "handoff.sock")

        @budget(60)
        @given(st.lists(conversations(), min_size=1, max_size=5))
        def fuzz(said: list[list[bytes]]) -> None:
            lines = "".join(" ".join(data.hex() for data in packets) + "\n" for packets in said)
            command = [sys.executable, "-I", "-S", "-c", STRANGER, socket, GOODBYE.hex()]
            subprocess.run(command, input=lines, text=True, check=True, timeout=100)
            with model.allocate(PAGE) as buffer:
                buffer.view()[:5] = b"hello"

        lasting(fuzz)
        assert daemon.device().revision > greeted + 100, "the strangers were not even greeted"
        until(lambda: len(daemon.sessions()) == 1 and daemon.books().releasing_bytes == 0)
        until(lambda: daemon.descriptors() <= before)


def test_refused_packets_leave_the_revision() -> None:
    """Noise and bent requests without a session: not one fact is written, and nothing stays open."""
    with running() as daemon, membroker.connect(str(daemon.endpoint("blue"))) as worker:
        model = worker.register_model("honest")
        before, revision = daemon.descriptors(), daemon.device().revision

        @budget(100)
        @given(st.one_of(st.sampled_from(TALK), st.binary(max_size=200), bent(TALK)))
        def fuzz(data: bytes) -> None:
            with suppress(handoff.BrokenPacket):
                if handoff.decode(data).HasField("hello"):
                    return
            talk(daemon, [data])

        lasting(fuzz)
        assert daemon.device().revision == revision
        until(lambda: daemon.descriptors() <= before)
        with model.allocate(PAGE):
            assert daemon.device().revision > revision
