"""What the examples say to a wrong command line, and to a broker that does not lend: a sentence, never a traceback."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from tests.support.daemons import Daemon
from tests.support.template import run as run_python

from membroker.v1 import admin_pb2

pytestmark = [pytest.mark.deep, pytest.mark.shared_daemon]

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"growable_numpy.py": "numpy", "sparse_numpy.py": "numpy", "kv_engine.py": "torch"}


def refused(name: str, *arguments: str, endpoint: Path | str = "/nowhere") -> tuple[int, str]:
    """Run an example that is to fail; return its status and what it says."""
    needed = NEEDS.get(name, "torch" if "torch" in name else "sys")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed here")
    environment = {**os.environ, "MEMBROKER_ENDPOINT": str(endpoint)}
    done = run_python(
        [str(EXAMPLES / name), *arguments], imports=["torch"] if needed == "torch" else [], env=environment
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("command", "status", "complaint"),
    [
        ("bare_client.py", 2, "ENDPOINT"),
        ("offload.py banana", 2, "cannot read 'banana' as a size"),
        ("segments.py x", 2, "'x' is not a number of seconds"),
        ("segments.py -1", 2, "SECONDS"),
        ("segments.py nan", 2, "'nan' is not a number of seconds"),
        ("torch_training.py x", 2, "invalid int value: 'x'"),
        ("torch_shared_weights.py x", 2, "invalid int value: 'x'"),
        # The bare client has no library to tell it what is wrong.
        ("bare_client.py /nowhere", 1, "no broker at /nowhere: [Errno 2] No such file or directory\n"),
        ("kv_engine.py", 1, "the example did not finish: /nowhere does not exist. Is membrokerd running"),
    ],
)
def test_a_wrong_command_line_and_no_daemon(command: str, status: int, complaint: str) -> None:
    found, said = refused(*command.split())
    assert found == status
    assert complaint in said
    assert status == 2 or said.startswith(complaint)


@pytest.mark.parametrize(
    "name",
    ["growable_numpy.py", "sparse_numpy.py", "segments.py", "growable_torch.py", "sparse_torch.py", "torch_turns.py"],
)
def test_a_broker_that_is_drained(daemon: Daemon, name: str) -> None:
    """An operator wants the device back: the example ends with the broker's sentence."""
    with daemon.admin_stub() as stub:
        stub.Drain(admin_pb2.DrainRequest())
        status, said = refused(name, endpoint=daemon.endpoint())
        stub.Undrain(admin_pb2.UndrainRequest())
    assert status == 1
    assert "an operator is draining this device" in said
