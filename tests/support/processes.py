"""What the library's tests see from outside: worker processes that run a script, and what this process holds."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.garbage import collect
from tests.support.workers import proc_of, state_of

EXTENT = "membroker-extent"
GRPC_THREADS = ("event_engine", "grpc_", "lifeguard")
GRPC_SECONDS = 2.0


def descriptors() -> int:
    """Return how many descriptors this process has open, without those of garbage, and those that gRPC is closing.

    An earlier test may have left both, and they would go in the middle of the test that counts.
    """
    collect()
    wait_for_grpc()
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def descriptors_limited(most: int) -> Iterator[None]:
    """Let this process have descriptors below this number alone."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def wait_for_grpc() -> None:
    """Wait until gRPC has closed its own descriptors, which it does on a thread, some time after its last channel.

    If a channel is open, this returns after GRPC_SECONDS.
    """
    with suppress(AssertionError):
        until(_has_no_thread_of_grpc, GRPC_SECONDS)


def _has_no_thread_of_grpc() -> bool:
    """Say whether all threads of gRPC have ended. One that ends just now may have started the last one."""
    names = (Path(f"/proc/self/task/{thread}/comm") for thread in os.listdir("/proc/self/task"))
    try:
        return not any(name.read_text().startswith(GRPC_THREADS) for name in names)
    except OSError:
        return False


def mapped_extents(pid: int | str = "self") -> int:
    """Return how many extents a process has mapped, as the kernel sees it."""
    return Path(f"/proc/{pid}/maps").read_text().count(EXTENT)


def threads_of_library() -> set[threading.Thread]:
    """Return its threads in this process. Also of an earlier test, whose objects may not be collected yet."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("membroker")}


def open_extents(pid: int | str = "self") -> int:
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return sum(EXTENT in link for link in links)


def is_settled(daemon: Daemon) -> bool:
    """Whether nothing is lent, and the device agrees."""
    books = daemon.books()
    return not books.lent_bytes and not books.releasing_bytes and not books.unaccounted_bytes


@contextmanager
def worker(script: str, daemon: Daemon, transport: str) -> Iterator[subprocess.Popen[str]]:
    """A worker process. It says a line when it gets somewhere, and goes on when it is told one."""
    prelude = (
        "import os\nos.environ['GRPC_VERBOSITY'] = 'ERROR'  # gRPC remarks on every fork beside a call of its own\n"
        "import gc, resource, signal, sys, threading\n"
        "import membroker\n"
        "from tests.support.garbage import collect\n"
        "PAGE = 2 << 20\n"
        "def say(*words): print(*words, flush=True)\n"
        "def wait(): assert sys.stdin.readline()\n"
        "def connect(**more): return membroker.connect(sys.argv[1], transport=sys.argv[2], **more)\n"
    )
    command = [sys.executable, "-c", prelude + script, str(daemon.endpoint()), transport]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def heard(process: subprocess.Popen[str]) -> str:
    """Return the next line of a worker, or what it died of."""
    line = process.stdout.readline()
    if not line:
        raise AssertionError(process.communicate(timeout=DEADLINE_SECONDS)[1])
    return line.strip()


def tell(process: subprocess.Popen[str]) -> None:
    """Let a worker that waits go on."""
    process.stdin.write("go on\n")
    process.stdin.flush()


def ends(process: subprocess.Popen[str]) -> None:
    """The worker ends by itself, well, and without a word on stderr."""
    _, errors = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, errors) == (0, ""), errors


def is_waiting(pid: int) -> bool:
    """Whether the main thread of a process is inside a system call in which it sleeps."""
    call = proc_of(pid, "syscall").partition(" ")[0]
    return state_of(pid) == "S" and call in ("47", "7", "271", "202", "281", "441")
