"""Real keepers of descriptors for tests, and a client that says to them what it likes."""

from __future__ import annotations

import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from membroker.wire.descriptors import close_all, peer_of
from membrokerd.restart import keeper as fdstore
from tests.support.daemons import DEADLINE_SECONDS

LOOK_SECONDS = 0.05
_RUN = f"""
import resource, signal, sys
from membrokerd.restart import keeper as fdstore
looking, is_needed = [], fdstore.Keeper._is_needed
fdstore.Keeper._is_needed = lambda keeper: not looking or is_needed(keeper)
fdstore.LOOK_SECONDS = {LOOK_SECONDS}
signal.signal(signal.SIGUSR1, lambda *_: looking.append(True))
most = int(sys.argv[2])
if most:
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
sys.exit(fdstore.main([sys.argv[1], *sys.argv[3:]]))
"""


class Keeper:
    """A running membroker-fdstore. `descriptors`: its limit."""

    def __init__(self, path: Path, descriptors: int = 0, *options: str) -> None:
        self.path = path
        command = [sys.executable, "-c", _RUN, str(path), str(descriptors), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.said = self.process.stdout.readline().strip()

    def look(self) -> None:
        """Let it look whether it is of use, from now on, and often."""
        self.process.send_signal(signal.SIGUSR1)

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def ended(self) -> tuple[int, str]:
        """Return its exit status and what it complained of, once it has ended."""
        _, complaint = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, complaint

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()


class Client:
    """Who is connected to a keeper."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(DEADLINE_SECONDS)
        self.sock.connect(str(path))

    def say(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send a packet, whatever it is."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        self.sock.sendmsg([data], rights)

    def hear(self) -> tuple[dict[str, Any], list[int]]:
        """Return an answer and its descriptors; EOFError when there will be none."""
        packet = fdstore.receive(self.sock)
        if not packet.data:
            raise EOFError
        return packet.message(), packet.descriptors

    def ask(self, number: int, descriptors: Sequence[int] = (), **request: Any) -> dict[str, Any]:
        """Send a request and return the answer to it, which has no descriptors."""
        self.say(json.dumps({"number": number, **request}).encode(), descriptors)
        answer, none = self.hear()
        assert not none
        return answer

    def put(self, contents: dict[str, bytes]) -> None:
        files = [memfd(content) for content in contents.values()]
        assert self.ask(1, files, put=list(contents)) == {"number": 1}
        close_all(files)

    def contents(self) -> dict[str, bytes]:
        """Return the content of every file that is kept, by name."""
        found: dict[str, bytes] = {}
        while True:
            self.say(json.dumps({"number": 2, "list": len(found)}).encode())
            answer, descriptors = self.hear()
            assert len(answer["names"]) <= fdstore.MAX_DESCRIPTORS
            assert not any(map(os.get_inheritable, descriptors))
            found |= zip(answer["names"], map(content_of, descriptors), strict=True)
            close_all(descriptors)
            if len(found) >= answer["count"]:
                return found

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.sock.close()


def end_keeper(path: Path) -> None:
    """End the keeper that listens at a path, if one does, and wait until it has."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(str(path))
        except OSError:
            return
        pid, _ = peer_of(sock)
        pidfd = os.pidfd_open(pid)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert select.select([pidfd], [], [], DEADLINE_SECONDS)[0]
        os.close(pidfd)


def memfd(content: bytes) -> int:
    descriptor = os.memfd_create("kept")
    os.write(descriptor, content)
    return descriptor


def content_of(descriptor: int) -> bytes:
    return os.pread(descriptor, 4096, 0)
