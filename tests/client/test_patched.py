"""Programs that are no plain Python program: embedded, without arguments, or with a standard library that is patched.

Each is a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running

WORK = """
import membroker, threading
def main():
    with membroker.connect(ENDPOINT) as client:
        model = client.model("m", limit="16MiB")
        assert model.available().now_bytes == 16 << 20
        model.on_recall(lambda recall: None)
        with model.pool(page_size="2MiB", virtual_capacity="64MiB") as pool:
            pool.allocate(0, "4MiB")
            try:
                model.allocate("64MiB")
            except membroker.OutOfMemory:
                pass
            else:
                raise AssertionError("it was not refused")
        model.create_segment("weights", "2MiB").seal()
        client.attach("m/weights").close()
        client.delete_segment("m/weights")
        def borrow():
            for _ in range(10):
                with model.allocate("4MiB", timeout=60):
                    pass
        threads = [threading.Thread(target=borrow) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(client.sessions()[0].client, flush=True)
main()
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[Daemon]:
    with running() as daemon:
        yield daemon


def run(daemon: Daemon, before: str) -> str:
    """Run a program that begins with `before`, and return what it prints, or its last line of an error."""
    code = f"import sys\nENDPOINT = {str(daemon.endpoint())!r}\n{before}\n{WORK}"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_SECONDS)
    return (done.stdout if done.returncode == 0 else done.stderr).strip().rpartition("\n")[2]


@pytest.mark.parametrize(
    ("before", "name"),
    [
        ("sys.argv = ['/srv/serve.py', 'x']", "serve.py"),
        ("del sys.argv", "PYTHON"),
        ("sys.argv = []; sys.executable = None", "python"),
        ("sys.argv = [b'x', 7]; sys.stdin = sys.stderr = None", "PYTHON"),
    ],
)
def test_without_what_a_program_usually_has(broker: Daemon, before: str, name: str) -> None:
    """An embedded interpreter (uWSGI, a plugin of a C++ server) sets what it likes."""
    assert run(broker, before) == name.replace("PYTHON", sys.executable.rpartition("/")[2])


def test_under_gevent(broker: Daemon) -> None:
    """Its tasks stand for threads, and its waits for the kernel's: all works, also the library's own threads."""
    assert run(broker, "from gevent import monkey; monkey.patch_all()") == sys.executable.rpartition("/")[2]


@pytest.mark.parametrize(
    "before",
    [
        "from gevent import monkey; monkey.patch_all(thread=False)",
        "from gevent import monkey; monkey.patch_all(socket=False)",
        "import select; del select.poll",  # as eventlet does
    ],
)
def test_what_is_patched_in_part_is_refused(broker: Daemon, before: str) -> None:
    """A thread of the library would wait in the kernel, and with it all tasks; the program would hang."""
    said = run(broker, before)
    assert said.startswith("membroker.errors.InvalidRequest: the standard library is patched in part")
    assert "gevent.monkey.patch_all()" in said
