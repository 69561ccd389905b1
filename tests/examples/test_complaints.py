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
    ("name", "arguments", "complaint"),
    [
        ("bare_client.py", (), "ENDPOINT"),
        ("offload.py", ("banana",), "cannot read 'banana' as a size"),
        ("segments.py", ("x",), "'x' is not a number of seconds"),
        ("segments.py", ("-1",), "SECONDS"),
        ("segments.py", ("nan",), "'nan' is not a number of seconds"),
        ("torch_training.py", ("x",), "invalid int value: 'x'"),
        ("torch_shared_weights.py", ("x",), "invalid int value: 'x'"),
    ],
)
def test_a_wrong_command_line_is_status_2(name: str, arguments: tuple[str, ...], complaint: str) -> None:
    status, said = refused(name, *arguments)
    assert status == 2
    assert complaint in said


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


def test_no_daemon_was_started() -> None:
    """The first try of a reader of the engine, before any other page."""
    status, said = refused("kv_engine.py")
    assert status == 1
    assert said.startswith("the example did not finish: /nowhere does not exist. Is membrokerd running")


def test_nobody_is_there(tmp_path: Path) -> None:
    """The bare client has no library to tell it what is wrong."""
    status, said = refused("bare_client.py", str(tmp_path))
    assert (status, said) == (1, f"no broker at {tmp_path}: [Errno 2] No such file or directory\n")
