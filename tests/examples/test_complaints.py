"""What the examples say where a broker does not lend: a sentence, never a traceback."""

from __future__ import annotations

import os

import pytest
from tests.examples.conftest import EXAMPLES
from tests.support.daemons import Daemon
from tests.support.template import run as run_python

from membroker.v1 import admin_pb2

pytestmark = [pytest.mark.deep, pytest.mark.shared_daemon]


@pytest.mark.parametrize(
    "name",
    ["growable_numpy.py", "sparse_numpy.py", "segments.py", "growable_torch.py", "sparse_torch.py", "torch_turns.py"],
)
def test_a_broker_that_is_drained(daemon: Daemon, name: str) -> None:
    """An operator wants the device back: the example ends with the broker's sentence."""
    imports = ["torch"] if "torch" in name else []
    if imports:
        pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    environment = {**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint())}
    with daemon.admin_stub() as stub:
        stub.Drain(admin_pb2.DrainRequest())
        done = run_python([str(EXAMPLES / name)], imports=imports, env=environment)
        stub.Undrain(admin_pb2.UndrainRequest())
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "an operator is draining this device" in done.stderr
