"""The example of docs/protocol.md, run as its reader would run it, against a real daemon."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.sizes import MIB

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "bare_client.py"

# Two whole sessions in one process, since a leak may hide in the first. gRPC keeps descriptors of its own for good,
# none of them a socket, and closes its sockets a moment after the channel was closed.
_TWICE = """
import os, runpy, sys, time
from pathlib import Path
def held():
    found = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:
            continue
    return sorted(link for link in found if "socket:" in link or "memfd:" in link)
before = held()
main = runpy.run_path(sys.argv[1])["main"]
main(sys.argv[2])
main(sys.argv[2])
assert "membroker-extent" not in Path("/proc/self/maps").read_text()
end = time.monotonic() + 120
while held() != before:
    assert time.monotonic() < end, (before, held())
    time.sleep(0.005)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with warnings of what was left open as errors."""
    command = [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)


def test_it_borrows_writes_and_gives_back(daemon: Daemon) -> None:
    """Its five lines say what happened; afterwards nothing is lent, nobody is there, and nothing is open."""
    daemon.device()  # the admin channel is open from here on
    descriptors = daemon.descriptors()
    done = run(str(EXAMPLE), str(daemon.endpoint()))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "welcome: tenants/red on host",
        "borrowed 2 pages for tenants/red/models/bare: page 0, page 1",
        f"released {4 * MIB} bytes",
        "last answer: goodbye",
    ]
    assert not daemon.sessions()
    books = daemon.books()
    assert (books.lent_bytes, books.releasing_bytes, books.unaccounted_bytes) == (0, 0, 0)
    (model,) = daemon.models()
    assert (model.allocations_total, model.releases_total) == (2, 2)
    assert (model.books[0].used_bytes, model.books[0].peak_bytes) == (0, 4 * MIB)
    until(lambda: daemon.descriptors() <= descriptors)


def test_it_leaks_no_descriptor_and_no_mapping(daemon: Daemon) -> None:
    """A second session in the same process leaves exactly the descriptors that it found."""
    done = run("-c", _TWICE, str(EXAMPLE), str(daemon.endpoint()))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("last answer: goodbye") == 2


def test_a_refusal_is_the_brokers_own_sentence() -> None:
    """Where the tenant may hold one page only, the example ends with the numbers, and leaves nothing lent."""
    with running({"tenants": {"red": {"limit": "2MiB"}}}) as daemon:
        done = run(str(EXAMPLE), str(daemon.endpoint()))
        assert done.returncode == 1
        assert "may hold 2.0 MiB" in done.stderr
        until(lambda: not daemon.sessions())
        assert daemon.books().lent_bytes == 0


def test_it_takes_nothing_from_the_library() -> None:
    """The author of a client in another language has the stubs, and nothing else of ours."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(EXAMPLE.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module or "")
    ours = {name for name in imported if name.startswith("membroker")}
    assert ours == {"membroker.v1", "membroker.v1.handoff_pb2"}
    assert os.access(EXAMPLE, os.R_OK)
