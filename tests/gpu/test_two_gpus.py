"""A daemon for each of two GPUs under one configuration: they do not disturb each other, and segments outlive both."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon
from tests.support.gpu import enter, run
from tests.support.keepers import end_keeper
from tests.support.sizes import GIB, MIB
from tests.support.workers import worker

from membroker.vmm import DriverUnavailable
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("gpu")]

SIZE = 256 * MIB
KEEPERS = {"default": None, "by the device's name": "keepers/{device}/fdstore.sock"}


@pytest.fixture(scope="module", autouse=True)
def _two_gpus() -> None:
    try:
        CudaDriver(1).close()
    except DriverUnavailable as error:
        pytest.skip(f"this needs two GPUs: {error}")


@pytest.fixture
def place() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="mb-"))
    yield directory
    for path in (*directory.glob("run/*/state/fdstore.sock"), *directory.glob("keepers/*/fdstore.sock")):
        end_keeper(path)
    shutil.rmtree(directory, ignore_errors=True)


def start(place: Path, number: int, keeper: str | None) -> Daemon:
    """Start the daemon of one GPU with the configuration of both."""
    directory = place / f"daemon-{number}"
    directory.mkdir()
    config = {"driver": "cuda", "capacity": 4 * GIB, "runtime_directory": str(place / "run")}
    where = {"keeper_socket": str(place / keeper)} if keeper else {}
    daemon = Daemon(directory, {**config, **where, "state_directory": str(place / "kept")}, device=number)
    (daemon.root,) = [
        root for root in (place / "run").glob("gpu-*") if (root / "index").read_text().strip() == str(number)
    ]
    return daemon


def publish(daemon: Daemon, seed: int) -> str:
    """Have a worker write and seal a segment, and end; return the digest of its bytes."""
    with worker() as one:
        enter(one, daemon)
        one.do(f"segment = model.create_segment('weights', {SIZE}); write_blocks(segment, {seed})")
        written = str(one.ask("digest(segment, driver)"))
        one.do("segment.seal(); segment.close(); client.close()")
    return written


def published(daemon: Daemon) -> str:
    """Return the digest of the segment as a later process reads it."""
    with worker() as one:
        enter(one, daemon)
        one.do("segment = client.attach('m/weights', timeout=60)")
        read = str(one.ask("digest(segment, driver)"))
        one.do("segment.close(); client.close()")
    return read


@pytest.mark.parametrize("keeper", KEEPERS.values(), ids=KEEPERS.keys())
def test_segments_of_two_gpus_outlive_both_daemons(place: Path, keeper: str | None) -> None:
    """Each GPU has sealed segments, and each daemon is killed: every byte is still there, on its own GPU."""
    daemons: list[Daemon] = []
    try:
        for number in range(2):
            daemons.append(start(place, number, keeper))
        uuids = [daemon.device().uuid for daemon in daemons]
        assert len(set(uuids)) == 2
        written = [publish(daemon, seed) for seed, daemon in enumerate(daemons)]
        assert written[0] != written[1]
        for daemon in daemons:
            daemon.kill()
            daemon.start_again()
            assert [published(one) for one in daemons] == written
        for uuid, daemon in zip(uuids, daemons, strict=True):
            assert daemon.device().uuid == uuid
            assert daemon.books().lent_bytes == SIZE
            shown = json.loads(run("membroker.cli.main", "status", "--json", "--endpoint", str(daemon.root)).stdout)
            assert shown["uuid"] == uuid
            assert daemon.stop() == 0, daemon.log()
            assert "Traceback" not in daemon.log(), daemon.log()
    finally:
        for daemon in daemons:
            daemon.process.kill()
            daemon.process.wait(DEADLINE_SECONDS)
