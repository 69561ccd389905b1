"""A daemon for each of two GPUs under one configuration: they do not disturb each other, and segments outlive both."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.all_gpus import Parent, running_all
from tests.support.daemons import DEADLINE_SECONDS, Daemon, until
from tests.support.gpu import enter, run
from tests.support.keepers import end_keeper
from tests.support.sizes import GIB, MIB
from tests.support.workers import Worker, worker

from membroker.vmm import DriverUnavailable
from membroker.vmm.cuda.driver import CudaDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600), pytest.mark.usefixtures("gpu")]

SIZE = 256 * MIB
SIZES = [512 * MIB, 768 * MIB]


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
    for path in directory.glob("*/*/state/fdstore.sock"):
        end_keeper(path)
    shutil.rmtree(directory, ignore_errors=True)


def start(place: Path, number: int) -> Daemon:
    """Start the daemon of one GPU with the configuration of both."""
    directory = place / f"daemon-{number}"
    directory.mkdir()
    config = {"driver": "cuda", "capacity": 4 * GIB, "runtime_directory": str(place / "run")}
    daemon = Daemon(directory, {**config, "state_directory": str(place / "kept")}, device=number)
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


def test_segments_of_two_gpus_outlive_both_daemons(place: Path) -> None:
    """Each GPU has sealed segments, and each daemon is killed: every byte is still there, on its own GPU."""
    daemons: list[Daemon] = []
    try:
        for number in range(2):
            daemons.append(start(place, number))
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


@contextmanager
def both(place: Path) -> Iterator[tuple[Parent, Worker, dict[str, str]]]:
    """Run `membrokerd --all`, and a worker with a filled pool at each GPU. The dictionary is for commands."""
    runtime = place / "membroker"  # below XDG_RUNTIME_DIR the commands find it by themselves
    environment = {key: value for key, value in os.environ.items() if key != "MEMBROKER_ENDPOINT"}
    config = {"driver": "cuda", "capacity": 2 * GIB, "host_capacity": GIB, "runtime_directory": str(runtime)}
    with running_all(place, count=(), **config) as parent, worker() as one:
        parent.wait_until_ready()
        one.do("from concurrent.futures import ThreadPoolExecutor; from tests.support.gpu_offload import *")
        one.do("from tests.support.gpu_work import *; clients, models, pools = [], [], []")
        for number, size in enumerate(SIZES):
            one.do(f"client = membroker.connect({str(runtime / str(number) / 'tenants' / 'red')!r})")
            one.do("model = client.model('m', virtual_capacity='4GiB'); pool = model.pool(page_size='64MiB')")
            one.do(f"warm_up(model.driver); pool.allocate(0, {size})")
            one.do(f"fill_random(pool, model.driver, {size}, {number})")
            one.do("clients.append(client); models.append(model); pools.append(pool)")
        yield parent, one, {**environment, "XDG_RUNTIME_DIR": str(place)}
        one.do("[client.close() for client in clients]")


def test_one_command_serves_both_gpus(place: Path) -> None:
    """`status` shows both, both pools are offloaded at once, and a kill of one daemon disturbs nothing of the other."""
    with both(place) as (parent, one, environment):
        uuids = one.ask("[client.device_uuid for client in clients]")
        assert [parent.figure("membroker_daemon_up", uuid) for uuid in uuids] == [1, 1]
        shown = run("membroker.cli.main", "status", **environment).stdout
        print(shown)
        assert len(set(uuids)) == sum(uuid in shown for uuid in uuids) == 2
        sums = f"[sum_of(pool, model.driver, size) for pool, model, size in zip(pools, models, {SIZES}, strict=True)]"
        written = one.ask(sums)
        one.do("threads = ThreadPoolExecutor(2); slept = list(threads.map(lambda pool: pool.offload(), pools))")
        assert one.ask("slept") == SIZES
        killed, other = parent.pids(uuids)
        os.kill(killed, signal.SIGKILL)
        until(lambda: parent.pids(uuids)[0] != killed and parent.get("/readyz")[0] == 200)
        assert parent.pids(uuids)[1] == other
        one.do("woken = list(threads.map(lambda pool: pool.restore(), pools)); threads.shutdown()")
        assert one.ask("woken") == SIZES
        assert one.ask(sums) == written
