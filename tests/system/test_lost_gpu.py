"""A GPU falls off the bus under a daemon, and comes back: a fake CUDA and a fake NVML say so, call by call."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.command import good, run
from tests.support.daemons import Daemon, find_root, running, until
from tests.support.fake_cuda import say_faults, with_faults
from tests.support.sizes import GIB, MIB
from tests.support.workers import worker
from tests.system.test_observed import probe

if os.environ.get("MEMBROKER_REQUIRE_FAKE_CUDA") != "1":
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

OFF_THE_BUS = "nvmlDeviceGetMemoryInfo 15\ncuMemCreate 999\n"
LOST, BACK = "the device does not answer: nothing more is lent", "the device answers again"


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the fake libraries before all others; return the file that says what fails."""
    return with_faults(tmp_path, monkeypatch)


@pytest.fixture
def daemon(faults: Path) -> Iterator[Daemon]:
    with running({"driver": "cuda", "capacity": GIB, "stock": 64 * MIB, "audit_seconds": 0.1}) as one:
        yield find_root(one)


def lost(daemon: Daemon) -> float:
    return daemon.figure("membroker_device_lost")


def test_a_gpu_that_falls_off_the_bus_and_comes_back(daemon: Daemon, faults: Path) -> None:
    """One warning at the change and one line at the return; between them every view says it, and nothing is lent."""
    with worker() as one:
        one.connect(daemon).do("model = client.model('m'); buffer = model.allocate(PAGE)")
        lent, url = daemon.books().lent_bytes, daemon.device().metrics_url.removesuffix("/metrics")
        assert (lost(daemon), probe(f"{url}/readyz")) == (0, (200, "ok\n"))
        say_faults(faults, OFF_THE_BUS)
        until(lambda: daemon.device().device_lost)
        for _ in range(3):  # also of a page that lay in the stock
            refused = one.refused("model.allocate(PAGE)")
            assert (refused.error, refused.reason) == ("DeviceFailure", "DRIVER_FAILED")
            assert "NVML_ERROR_GPU_IS_LOST" in refused.message
        assert one.ask("model.available().now_bytes") == 0
        assert daemon.books().lent_bytes == lent
        assert lost(daemon) == 1
        status, sentence = probe(f"{url}/readyz")
        assert (status, "NVML_ERROR_GPU_IS_LOST" in sentence) == (503, True)
        assert probe(f"{url}/healthz") == (200, "ok\n")
        assert re.search(r"lending +no: the device does not answer", good("status", at=daemon.admin))
        told = run("doctor", at=daemon.admin)[1]
        assert re.search(r"^fail  broker: .* its device does not answer\n +`nvidia-smi` and", told, re.MULTILINE)
        one.do("buffer.close()")
        assert daemon.books().lent_bytes == 0
        say_faults(faults, "")
        until(lambda: not daemon.device().device_lost)
        one.do("model.allocate(PAGE).close()")
        assert (lost(daemon), probe(f"{url}/readyz")) == (0, (200, "ok\n"))
    until(lambda: BACK in daemon.log())
    log = daemon.log()
    assert (log.count(LOST), log.count(BACK)) == (1, 1)
    assert log.count("GPU_IS_LOST") < 10
