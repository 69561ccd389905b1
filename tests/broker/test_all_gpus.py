"""When the parent of `membrokerd --all` kills a daemon that says nothing. It counts its looks, and reads no clock."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.broker.coroutines import played_by
from tests.support.fake_cuda import build_fake_cuda, run_beside_fake_cuda

from membrokerd import all_gpus

LOOKS = int(all_gpus.SILENT_SECONDS / all_gpus.WATCH_SECONDS)


class OneDaemon(all_gpus._Child):
    """The daemon of one device, whose process is the test's to play."""

    def __init__(self, directory: Path) -> None:
        place = SimpleNamespace(private=lambda kind: directory / kind)
        super().__init__("host", ["no such program"], place, asyncio.Event(), lambda: None)  # type: ignore[arg-type]
        self.sent: list[signal.Signals] = []

    def send(self, number: signal.Signals) -> None:
        self.sent.append(number)

    def say(self, text: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as its:
            its.sendto(text.encode(), str(self._address))
        self._read_notice()

    def look(self, times: int) -> None:
        for _ in range(times):
            self.kill_if_silent()


def play(story: Callable[[OneDaemon], None]) -> None:
    async def run() -> None:
        with tempfile.TemporaryDirectory(prefix="mb-") as directory:
            one = OneDaemon(Path(directory))
            try:
                story(one)
            finally:
                one.close()

    asyncio.run(run())


@played_by(play)
def test_a_daemon_that_says_nothing_is_killed_once(one: OneDaemon) -> None:
    """A word of it begins the count again. It is killed again only after the same silence.

    While it starts it may take as long as it needs.
    """
    one.look(10 * LOOKS)
    one.say("READY=1")
    one.look(LOOKS)
    one.say("WATCHDOG=1")
    one.look(LOOKS)
    assert one.sent == []
    one.look(1)
    assert one.sent == [signal.SIGKILL]
    one.look(LOOKS)
    assert one.sent == [signal.SIGKILL]


@played_by(play)
def test_a_machine_that_was_frozen_loses_no_daemon(one: OneDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker pause`: no look was made meanwhile, whatever the clock says."""
    one.say("READY=1")
    one.look(1)
    monkeypatch.setattr(all_gpus.time, "monotonic", lambda: 1e9)
    one.look(1)
    assert one.sent == []


@played_by(play)
def test_a_daemon_is_not_blamed_for_a_socket_that_was_removed(one: OneDaemon) -> None:
    """Somebody tidies up the runtime directory. A daemon whose word does not arrive is not a daemon that hangs."""
    one.say("READY=1")
    one.look(LOOKS)
    one._address.unlink()
    one.look(1 + LOOKS)
    assert one.sent == []
    one.say("WATCHDOG=1")
    assert one._silent_seconds == 0.0


def test_a_gpu_that_cannot_be_used_does_not_stop_the_others(tmp_path: Path) -> None:
    """The first GPU of three is an old one for the display, and NVML has lost the last one (XID 79).

    The UUIDs are NVML's, which `--device` takes.
    """
    libraries = build_fake_cuda(tmp_path)
    if libraries is None:
        pytest.skip("there is no C compiler for the stand-in of CUDA")
    code = """
        import json
        from membroker.vmm import DriverError, open_driver
        from membroker.vmm.cuda import nvml
        from membrokerd.all_gpus import find
        from membrokerd.config.config import Config
        name = nvml.NvmlDevice._index
        def index(self):
            if self.uuid.endswith("2"):
                raise DriverError("nvmlDeviceGetIndex", "NVML_ERROR_GPU_IS_LOST", 15, "GPU is lost")
            return name(self)
        nvml.NvmlDevice._index = index
        driver, found = find(Config(driver="auto"), 0)
        opened = open_driver("cuda", found[0])
        assert opened.device.uuid == found[0]
        opened.close()
        print(json.dumps([driver, found]))
    """
    said = run_beside_fake_cuda(libraries, code, FAKE_CUDA_DEVICES="3", FAKE_CUDA_LACKS="102@0")
    driver, uuids = json.loads(said.splitlines()[-1])
    assert (driver, [uuid[-2:] for uuid in uuids]) == ("cuda", ["31", "32"])
    assert all(uuid.startswith("GPU-") for uuid in uuids)
