"""`membroker.testing.broker`, as the tests of a program use it: each of them is one that a user would write."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.sizes import MIB

import membroker
import membroker.testing
from membroker.testing import LocalBroker

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def running() -> Iterator[LocalBroker]:
    with membroker.testing.broker("64MiB") as one:
        yield one


@pytest.fixture
def broker(running: LocalBroker) -> LocalBroker:
    assert running.refusals_left == 0
    until(lambda: running.device().locations["device"].lent_bytes == 0)
    return running


def test_a_program_connects_as_always(broker: LocalBroker) -> None:
    with membroker.connect() as client, client.model("chat").allocate("2MiB") as buffer:
        assert client.endpoint == broker.endpoint
        buffer.view()[:5] = b"hello"
        assert broker.device().locations["device"].lent_bytes == 2 * MIB


def test_exactly_so_many_requests_are_refused(broker: LocalBroker) -> None:
    """Pools, buffers and segments alike; the error is the broker's own, with its numbers."""
    with membroker.connect() as client:
        model = client.model("chat")
        pool = model.pool(virtual_capacity="8MiB", page_size="2MiB")
        borrow = [lambda: pool.allocate(0, "2MiB"), lambda: model.allocate(1), lambda: model.create_segment("s", 1)]
        broker.refuse_next(3)
        for left, call in enumerate(reversed(borrow)):
            with pytest.raises(membroker.OutOfMemory) as refused:
                call()
            assert (refused.value.level, refused.value.available_bytes) == ("capacity", 0)
            assert broker.refusals_left == 2 - left
        for call in borrow:
            call()
        pool.close()


def test_a_recall_comes_and_is_answered(broker: LocalBroker) -> None:
    recalls: list[membroker.Recall] = []
    with membroker.connect() as client:
        model = client.model("chat")
        with model.pool(virtual_capacity="64MiB", page_size="2MiB") as pool:
            pool.allocate(0, "32MiB")

            def release(recall: membroker.Recall) -> None:
                recalls.append(recall)
                pool.free(pool.physical_usage_bytes - recall.size, recall.size)

            model.on_recall(release)
            for left in (24, 16):
                broker.recall_now(8 * MIB).result(DEADLINE_SECONDS)
                assert pool.physical_usage_bytes == left * MIB
            assert [recall.size for recall in recalls] == [8 * MIB, 8 * MIB]
            assert broker.device().locations["device"].lent_bytes == 16 * MIB, "the other tenant has left all"


def test_it_dies_and_the_program_goes_on() -> None:
    """Mapped memory stays valid, a call waits, and the next daemon takes over what the last one had lent."""
    with membroker.testing.broker("64MiB") as broker, membroker.connect() as client:
        model = client.model("chat")
        with model.allocate("2MiB") as buffer:
            buffer.view()[:5] = b"hello"
            broker.die()
            assert bytes(buffer.view()[:5]) == b"hello"
            starting = threading.Thread(target=broker.start)
            starting.start()
            model.allocate("2MiB").close()
            starting.join()
            assert broker.device().locations["device"].lent_bytes == 2 * MIB


def test_it_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process, no directory, no variable, also after an error in its block."""
    monkeypatch.setenv("MEMBROKER_ENDPOINT", "/before")

    def fail() -> Iterator[LocalBroker]:
        with membroker.testing.broker() as broker:
            assert os.environ["MEMBROKER_ENDPOINT"] == str(broker.endpoint)
            yield broker
            raise ZeroDivisionError

    failing = fail()
    broker = next(failing)
    with pytest.raises(ZeroDivisionError):
        next(failing)
    assert os.environ["MEMBROKER_ENDPOINT"] == "/before"
    assert not broker.endpoint.exists()
    assert not broker.endpoint.parents[3].exists()


def test_it_ends_with_its_process() -> None:
    """A test that is killed leaves no daemon, no keeper of what it has sealed, and no file."""
    code = (
        "import membroker.testing, os, signal\n"
        "with membroker.testing.broker() as broker:\n"
        "    print(broker.endpoint, flush=True)\n"
        "    membroker.connect().model('m').create_segment('weights', 1).seal()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    directory = Path(done.stdout.strip()).parents[3]
    until(lambda: not any(membroker_is_alive(path, directory) for path in Path("/proc").iterdir()))
    assert not directory.exists()


def membroker_is_alive(process: Path, directory: Path) -> bool:
    try:
        return process.name.isdecimal() and str(directory) in (process / "cmdline").read_text().replace("\0", " ")
    except OSError:
        return False


def test_what_does_not_start_says_why() -> None:
    with (
        pytest.raises(membroker.MembrokerError, match=r"(?s)did not start:.*capacity"),
        membroker.testing.broker("much"),
    ):
        raise AssertionError
    with membroker.testing.broker(config="idle_sleep = 'always'\nidle_sleep_seconds = 60"):
        pass


@pytest.mark.deep
def test_the_page_has_tests_that_pass(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "api" / "testing.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "test_page.py").write_text(block)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_page.py"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert "2 passed" in done.stdout
