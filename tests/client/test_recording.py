"""The timeline of what a process maps: the numbers of a run that is known, its bounds, and a page that opens alone."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_lender import PAGE, Lender

import membroker
from membroker import record, recording
from membroker.errors import InvalidRequest, OutOfMemory
from membroker.memory.buffer import Buffer
from membroker.pool.pool import VirtualMemoryPool
from membroker.recording import State


@pytest.fixture
def source() -> Iterator[membroker.LocalSource]:
    with membroker.LocalSource("host") as one:
        yield one


@pytest.fixture
def pool(source: membroker.LocalSource) -> VirtualMemoryPool:
    return VirtualMemoryPool(source, 64 * PAGE, PAGE)


def test_each_change_has_its_bytes_and_its_lines(pool: VirtualMemoryPool, source: membroker.LocalSource) -> None:
    pool.allocate(0, PAGE)
    with record() as one:
        made = pool.grow(2 * PAGE)
        with Buffer(source, PAGE):
            pass
        made.free()
    pool.shrink(PAGE)
    seen = [(event.what, event.size // PAGE, event.total // PAGE, event.stack[0]) for event in one.events()]
    assert seen == [
        ("pool", 2, 2, "VirtualMemoryPool.grow"),
        ("buffer", 1, 3, "Buffer.__init__"),
        ("buffer", -1, 2, "Closing.__exit__"),
        ("pool", -2, 0, "PoolRange.free"),
    ]
    assert one.peak_bytes == 3 * PAGE
    here = {re.sub(r":\d+$", "", event.stack[1]) for event in one.events()}
    assert here == {f"test_each_change_has_its_bytes_and_its_lines {__file__}"}


def test_what_failed_half_way_counts_nothing(lender: Lender) -> None:
    """Of four pages in parts of one, the third cannot be mapped."""
    lender.part, lender.driver.maps_left = 1, 2
    lender.driver.map_failure = OutOfMemory("no more")
    with VirtualMemoryPool(lender, 64 * PAGE, PAGE) as pool, record() as one, pytest.raises(OutOfMemory):
        pool.allocate(0, 4 * PAGE)
    assert one.events()[-1].total == 0
    assert one.peak_bytes == 3 * PAGE


def test_it_forgets_the_oldest(pool: VirtualMemoryPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A server may be recorded for days. The totals stay right."""
    monkeypatch.setattr(recording, "MOST_EVENTS", 3)
    with record(tmp_path / "page.html") as one:
        for page in range(5):
            pool.allocate(page * PAGE, PAGE)
    assert [event.total // PAGE for event in one.events()] == [3, 4, 5]
    assert data_of(tmp_path / "page.html")["leftOut"] == 2


def test_no_text_ends_the_script(pool: VirtualMemoryPool, tmp_path: Path) -> None:
    """A file may be called as it likes, and the page loads nothing."""
    program = compile("pool.grow(1)", "/tmp/</script><b>.py", "exec")
    with record(tmp_path / "page.html"):
        exec(program, {"pool": pool, "__name__": "__main__"})
    page = (tmp_path / "page.html").read_text()
    assert page.count("</script>") == 1
    assert "http" not in page
    found = data_of(tmp_path / "page.html")
    assert found["stacks"][0][1] == "<module> /tmp/</script><b>.py:1"
    assert found["rows"][0][1:4] == [PAGE, PAGE, "pool"]


def test_one_at_a_time(pool: VirtualMemoryPool) -> None:
    with record() as one:
        with pytest.raises(InvalidRequest, match="another recording is on"), record():
            pass
        assert State.recording is one
        child = os.fork()
        if not child:
            os._exit(State.recording is not None)
        assert os.waitpid(child, 0)[1] == 0, "a child has none of the memory, and may have inherited a held lock"
    assert State.recording is None
    pool.grow(1)
    assert one.events() == []


def data_of(path: Path) -> dict[str, list[list[object]]]:
    """Return what the page's script has."""
    found = re.search(r"const d=(\{.*\}),r=", path.read_text())
    data: dict[str, list[list[object]]] = json.loads(found[1])
    return data
