"""CUDA's checkpoint calls by the real cuda-bindings over a fake driver: names, arguments, states and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from membroker.errors import MembrokerError
from membroker.guest import cuda
from membroker.guest.command import suspender_for
from membroker.guest.cuda import check_namespace, why_not
from membroker.guest.settings import Settings
from membroker.vmm import DriverError

_STORY = """
import pytest
from membroker.guest.cuda import CudaSuspender
from membroker.vmm import DriverError
suspender = CudaSuspender("66616b65-2d63-7564-612d-636172642d30", needs_suspend=False)
assert suspender.free_bytes() > 0
assert suspender.usage([1]) == {}
pid = 4711
steps = [("lock", 1.5), ("suspend",), ("restore",), ("unlock",)]
states = ["running"]
for name, *more in steps:
    getattr(suspender, name)(pid, *more)
    states.append(suspender.state(pid))
assert states == ["running", "locked", "suspended", "locked", "running"], states
for name, *more in steps[1:]:
    with pytest.raises(DriverError) as error:
        getattr(suspender, name)(pid, *more)
    assert error.value.code == 401
with pytest.raises(DriverError) as error:
    suspender.lock(-1, 1.5)
assert error.value.code == 304
suspender.close()

import os
from membroker.vmm import Location, imports, open_driver
driver = open_driver("cuda")
size = driver.device.granularity
(descriptor,) = driver.lend(size, 1, Location.DEVICE)
assert not imports.is_marked(os.getpid())
driver.map_descriptors(driver.reserve(size), [descriptor], size)
assert imports.is_marked(os.getpid())
print("done")
"""


def test_each_call_by_the_real_bindings(beside_fake_cuda: Callable[..., str]) -> None:
    assert beside_fake_cuda(_STORY).strip().endswith("done")


def test_a_container_in_which_no_listed_pid_means_anything_is_told(tmp_path: Path) -> None:
    """The program would seem to use nothing, and its memory would be lent while it has it."""
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to("pid:[4026532000]")
    (tmp_path / "17").mkdir()
    assert not check_namespace([], tmp_path)
    assert check_namespace([17, 4711], tmp_path)
    with pytest.raises(DriverError, match="--pid=host"):
        check_namespace([4711], tmp_path)


def test_a_driver_that_cannot_is_a_sentence_at_the_start_and_no_hindrance_without_sleep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    can = SimpleNamespace(cuCheckpointProcessLock=None)
    assert why_not(can, "580.159.04", "x86_64") == ""
    assert "on x86-64 only" in why_not(can, "580.159.04", "aarch64")
    assert "cuda-bindings is too old" in why_not(SimpleNamespace(), "580.159.04", "x86_64")
    monkeypatch.setattr(cuda, "Gpu", lambda uuid: SimpleNamespace(cuda=can, uuid=lambda: uuid))
    nvml = SimpleNamespace(driver_version="565.57.01", close=lambda: None)
    monkeypatch.setattr(cuda, "NvmlDevice", lambda uuid: nvml)
    client: Any = SimpleNamespace(driver_kind="cuda", device_uuid="1")
    with pytest.raises(MembrokerError, match="driver 570 or later"):
        suspender_for(client, Settings(memory=0, is_auto=False, can_sleep=True))
    is_kept_awake = Settings(memory=0, is_auto=False, can_sleep=False)
    assert isinstance(suspender_for(client, is_kept_awake), cuda.CudaSuspender)
