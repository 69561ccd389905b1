"""The client in C of docs/protocol.md: compiled as its reader would compile it, and run against a real daemon."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.fake_broker import Caller, playing
from tests.support.sizes import PAGE

SOURCE = Path(__file__).parents[2] / "examples" / "c" / "client.c"
STRICT = ("-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror")
CHECKED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler (cc) on this machine")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, compiled without a warning; with the compiler's own checks at run time, where it has them."""
    path = tmp_path_factory.mktemp("c") / "client"
    command = ["cc", *STRICT, "-o", str(path), str(SOURCE)]
    if subprocess.run([*command, *CHECKED], capture_output=True, check=False).returncode:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    return path


def run(program: Path, endpoint: Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    return subprocess.run([program, endpoint], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)


def test_it_registers_borrows_shares_and_leaves(program: Path) -> None:
    """Its lines say what happened; afterwards nothing is lent, and no session is left."""
    with running({"capacity": "512MiB"}) as daemon:
        for _ in range(2):
            done = run(program, daemon.endpoint())
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout.splitlines() == [
                f"welcome: tenants/red on host, granularity {PAGE}",
                "registered tenants/red/models/from-c",
                "borrowed 130 pages, the last one reads 129",
                f"released {130 * PAGE} bytes",
                f'segment tenants/red/models/from-c/segments/greeting: {2 * PAGE} bytes, reads "hello from C"',
                "last answer: goodbye",
            ]
            until(lambda: not daemon.books().lent_bytes)  # the name of its segment is free then
        assert not daemon.sessions()


def test_a_refusal_is_the_brokers_own_sentence(program: Path, daemon: Daemon) -> None:
    """130 pages are more than this broker lends: the program ends with the numbers, and leaves nothing lent."""
    done = run(program, daemon.endpoint())
    assert done.returncode == 1
    assert "the broker may lend 256.0 MiB" in done.stderr
    until(lambda: not daemon.sessions())
    assert daemon.books().lent_bytes == 0


def test_an_older_broker_is_told_apart(program: Path) -> None:
    """One that does not know the frames of this program says so in its Welcome, by leaving the revision out."""
    with playing() as broker:
        caller = Caller(lambda: run(program, broker.endpoint()))
        assert broker.accept().client == "C example"
        broker.welcome()
        done = caller.value()
        assert done.returncode == 1
        assert "too old" in done.stderr
