"""What one page costs the daemon: `python -m benchmarks.load.walk [--old TREE]`.

One client borrows a page of 2 MiB and releases it, over frames of its own. Daemons of two trees serve it in turns, so
that whatever else the machine does is shared. The CPU time is that of the daemon's process, its kernel time included.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from membroker.v1 import broker_pb2 as pb
from membroker.v1.handoff_pb2 import Ack, Frame
from membroker.wire import frames as handoff

from ..harness import command
from ..harness.daemon import Daemon, configuration, running
from .wire import RawSession, allocate_frame

TURN = 200
"""Pages that one daemon lends before the other has its turn."""


class Caller(RawSession):
    """A session that borrows a page and releases it, with the packets that the library would send."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon.endpoint())
        self._daemon, self._model = daemon, self.register("walk")
        self._counts = self._welcome.protocol_revision > 0
        self._taken = 0
        self.cpu: list[float] = []
        """Seconds of the daemon's CPU for each page, turn by turn."""
        self.round_trips: list[float] = []

    def take_turn(self) -> None:
        """Borrow and release TURN pages."""
        before = self._daemon.cpu_seconds()
        for _ in range(TURN):
            self._borrow()
        self.cpu.append((self._daemon.cpu_seconds() - before) / TURN)

    def _borrow(self) -> None:
        request = allocate_frame(self._model, 1, next(self._request_ids))
        start = time.perf_counter()
        self._send(request)
        packet = handoff.receive(self._socket)
        self.round_trips.append(time.perf_counter() - start)
        handoff.close_all(packet.descriptors)
        delivery = packet.frame.delivery
        assert delivery.HasField("reply"), packet.frame
        self._taken += 1
        if not self._counts:
            self._send(Frame(request_id=request.request_id, ack=Ack(part=0)))
        release = pb.ReleaseExtentsRequest(extent_ids=delivery.extent_ids, no_reply=True)
        self._send(Frame(request_id=next(self._request_ids), release=release))

    def _send(self, frame: Frame) -> None:
        frame.acknowledged = self._taken if self._counts else 0
        super()._send(frame)


def walked(trees: Mapping[str, Path | None], turns: int, stock: str = "64MiB") -> dict[str, Caller]:
    """Let daemons of these trees, this one's if it is None, lend pages in turns; return what each caller saw."""
    with ExitStack() as stack:
        callers = {
            name: Caller(stack.enter_context(running(configuration("host", stock=stock), tree)))
            for name, tree in trees.items()
        }
        for _ in range(turns):
            for caller in callers.values():
                caller.take_turn()
        for caller in callers.values():
            caller.close()
    return callers


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print a line for each tree."""
    parser = command.parser("benchmarks.load.walk", __doc__)
    parser.add_argument("--old", type=Path, metavar="TREE", help="a checkout of this repository to compare with")
    parser.add_argument("--turns", type=int, default=25, help=f"turns of {TURN} pages for each tree (25)")
    parser.add_argument("--stock", default="64MiB", help="the daemons' warm pool (64MiB); 0MiB: each page is created")
    options = parser.parse_args(arguments)
    trees = {"new": None} if options.old is None else {"old": options.old, "new": None}
    callers = walked(trees, options.turns, options.stock)
    print("CPU of the daemon for one page and its release, and the round trip of the page, in us:")
    print(f"{'tree':6}{'CPU':>10}{'p50':>10}{'p99':>10}")
    for name, caller in callers.items():
        times = statistics.quantiles(caller.round_trips[TURN:], n=100)
        cpu = statistics.median(caller.cpu[1:])
        print(f"{name:6}{cpu * 1e6:10.1f}{times[49] * 1e6:10.1f}{times[98] * 1e6:10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
