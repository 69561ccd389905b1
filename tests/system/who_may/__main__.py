"""A process that does as it is told: `python -m tests.system.who_may CHANNEL UID DOOR THEIRS`."""

from __future__ import annotations

import ctypes
import encodings.ascii
import encodings.idna
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import grpc

from membroker.wire import frames as handoff

from . import Party, obey

LATER = (encodings.ascii, encodings.idna, ctypes, signal)  # what another user may not be able to read any more
grpc.insecure_channel("unix:/nonexistent").close()  # the same: grpc 1.85 imports parts of itself on the first use


def play(channel: int, uid: int, door: str, theirs: str) -> None:
    """Become a user, then do what comes on the channel, packet by packet, until it ends."""
    if uid:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
    party = Party(Path(door), Path(theirs))
    with socket.socket(fileno=channel) as control:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, 65_536, 2)
            if not data:
                return
            try:
                answer = {"answer": obey(party, json.loads(data), descriptors)}
            except Exception:  # noqa: BLE001 - the test that asked shall see it
                answer = {"failed": traceback.format_exc()}
            handoff.close_all(descriptors)
            control.send(json.dumps(answer).encode()[:65_536])


if __name__ == "__main__":
    play(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
