"""What the examples say where no broker is, or one that does not lend: a sentence, never a traceback."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from tests.examples.conftest import EXAMPLES
from tests.support.daemons import Daemon
from tests.support.template import run as run_python

from membroker.v1 import admin_pb2

pytestmark = [pytest.mark.deep, pytest.mark.shared_daemon]

NEEDS = {"growable_numpy.py": "numpy", "sparse_numpy.py": "numpy"}


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


@pytest.mark.parametrize("name", ["segments.py", "torch_turns.py"])
def test_no_daemon(name: str) -> None:
    status, said = refused(name)
    assert status == 1
    assert "/nowhere does not exist. Is membrokerd running" in said


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
