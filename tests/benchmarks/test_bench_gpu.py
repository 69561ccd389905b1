"""`make bench-gpu` in small, on the host driver and on the fake GPU: every row is there, with a plausible number.

No time is tested, and a missed target does not fail.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from array import array
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.figures import IN_PROCESS, brokered, hits, share, total
from benchmarks.gpu.scenes import PAGE_BY_PAGE, PAIR, PAIR_AHEAD
from benchmarks.harness.daemon import difference, parsed
from benchmarks.harness.samples import Samples
from tests.benchmarks.commands import ROOT, SECONDS, bench
from tests.support.fake_cuda import build_fake_cuda

pytestmark = pytest.mark.deep

BY = {brokered(transport, stock) for transport in ("handoff", "grpc") for stock in (False, True)}
WITHOUT_STOCK = {brokered(transport, stock=False) for transport in ("handoff", "grpc")}
ROWS = {
    "extents": (
        {"2.0 MiB", "64.0 MiB", "1.0 GiB"},
        {0.0, 2.0},
        {IN_PROCESS, "import and map alone", PAIR, PAIR_AHEAD, *BY},
    ),
    "pages": (
        {"1.0 GiB by 2.0 MiB", "1.0 GiB by 64.0 MiB"},
        {0.0, 2.0},
        {IN_PROCESS, PAGE_BY_PAGE, PAIR, *BY},
    ),
    "pool": (
        {"one page of 2.0 MiB", "grow by a page of 2.0 MiB", "1.0 GiB by 2.0 MiB"},
        {0.0, 2.0},
        {IN_PROCESS, "pool"},
    ),
    "attach": ({"1.0 GiB", "16.0 GiB", "64.0 GiB"}, {0.0, 2.0}, {IN_PROCESS, *WITHOUT_STOCK}),
    "offload": (
        {"64.0 MiB by 2.0 MiB", "64.0 MiB by 64.0 MiB"},
        {0.0, 2.0},
        {IN_PROCESS, "pool, kept pinned"},
    ),
    "workers": ({"1 process", "2 processes"}, {0.0}, {IN_PROCESS, PAIR, *BY}),
}
ONCE = {"driver in process, pinned each time", "pool, pinned each time"}
"""Rows of the largest pages alone."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """All of it on the host driver: the document, and what was printed."""
    path = tmp_path_factory.mktemp("bench") / "gpu.json"
    done = bench("gpu", "--driver", "host", "--quick", "--json", str(path))
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), done.stdout


def test_every_row_is_there(quick: tuple[Any, str]) -> None:
    """Each work by each way, with and without a gap, in the file and in the table."""
    document, printed = quick
    assert "\x1b" not in printed
    assert [section["key"] for section in document["sections"]] == list(ROWS)
    for section in document["sections"]:
        works, gaps, ways = ROWS[section["key"]]
        found = [(row["work"], row["gap_ms"], row["by"]) for row in section["rows"] if row["by"] not in ONCE]
        assert sorted(found) == sorted((work, gap, by) for work in works for gap in gaps for by in ways)
        assert not section["failure"]
        for row in section["rows"]:
            assert any(line.startswith(row["work"]) and row["by"] in line for line in printed.splitlines()), row
    (offload,) = (section for section in document["sections"] if section["key"] == "offload")
    assert {(row["work"], row["by"]) for row in offload["rows"]} >= {("64.0 MiB by 64.0 MiB", by) for by in ONCE}
    assert offload["moved_bytes"] == 64 << 20


def test_the_numbers_can_be_true(quick: tuple[Any, str]) -> None:
    """Times are positive and in order, ratios are those of the medians, and a broker's share is part of the whole."""
    for section in quick[0]["sections"]:
        bare = {(row["work"], row["gap_ms"]): row for row in section["rows"] if row["by"] == IN_PROCESS}
        for row in section["rows"]:
            assert row["count"] > 0
            for part in ("take", "give"):
                assert 0 < row[part]["p50_ns"] <= row[part]["p99_ns"], row
            beside = bare[row["work"], row["gap_ms"]]
            if row is not beside:
                assert row["take_ratio"] == pytest.approx(row["take"]["p50_ns"] / beside["take"]["p50_ns"])
            if section["key"] in ("extents", "pages", "attach") and row["by"] in BY:
                assert row["share"]["broker"] > 0, row
            else:
                assert not row["share"], row
        if section["key"] == "workers":
            assert all(row["per_second"] > 0 for row in section["rows"])


def test_markdown_of_one_scene_on_the_fake_card(tmp_path: Path) -> None:
    """With the calls of cuda-bindings; the tables are Markdown. On a real GPU, `make bench-gpu` runs all scenes."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    libraries = build_fake_cuda(tmp_path / "fake")
    if libraries is None:
        pytest.skip("no C compiler (gcc or cc) to build the fake libcuda with")
    own = {"LD_LIBRARY_PATH": str(libraries), "FAKE_CUDA_CARD": uuid.uuid4().hex[:12]}
    done = bench("gpu", "--quick", "--markdown", "--only", "attach", **own)
    assert done.returncode == 0, done.stderr
    assert "| device | Fake GPU |" in done.stdout
    assert "64.0 GiB did not fit here" in done.stdout.replace("\n", " ")
    assert "\n| 1.0 GiB | 2 ms | driver in process |" in done.stdout


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_all_that_was_started(number: int, status: int) -> None:
    """It is stopped halfway, by `timeout` or Ctrl-C: neither a daemon nor its directory is left."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--driver", "host", "--only", "workers", "--quick"]
    with (
        tempfile.TemporaryDirectory(prefix="mb-") as directory,  # short, for sockets
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": directory},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as started,
    ):
        assert "starting 2 processes" in started.stderr.readline()
        os.killpg(started.pid, number)
        started.stderr.read()
        assert started.wait(SECONDS) == status
        end = time.monotonic() + SECONDS
        while _lives(started.pid):  # a process of the crew ends with its pipe
            assert time.monotonic() < end
            time.sleep(0.01)
        assert not list(Path(directory).glob("membroker-bench-*"))


def _lives(session: int) -> bool:
    """Say whether a process of this session (setsid) is left."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            return True
    return False


def test_a_machine_without_a_card_is_told_what_to_do() -> None:
    done = bench("gpu", "--quick", FAKE_CUDA_INIT="100", CUDA_VISIBLE_DEVICES="")
    if done.returncode == 0:
        pytest.skip("this machine has a GPU that cannot be hidden")
    assert done.returncode == 1
    assert "--driver host needs no GPU" in done.stderr


# --- the arithmetic ---

BEFORE = """
membroker_request_seconds_count{gpu_uuid="host",method="AllocateExtents",transport="handoff"} 5.0
membroker_request_seconds_sum{gpu_uuid="host",method="AllocateExtents",transport="handoff"} 1.0
membroker_driver_call_seconds_sum{gpu_uuid="host",call="lend"} 2.0
"""
AFTER = """
membroker_request_seconds_count{gpu_uuid="host",method="AllocateExtents",transport="handoff"} 15.0
membroker_request_seconds_sum{gpu_uuid="host",method="AllocateExtents",transport="handoff"} 1.001
membroker_request_seconds_sum{gpu_uuid="host",method="ListModels",transport="grpc"} 9.0
membroker_request_seconds_bucket{gpu_uuid="host",le="5e-06",method="AllocateExtents",transport="handoff"} 15.0
membroker_driver_call_seconds_sum{gpu_uuid="host",call="lend"} 2.0004
membroker_driver_call_seconds_sum{gpu_uuid="host",call="memory"} 0.0001
"""
MORE = """
membroker_core_step_seconds_sum{gpu_uuid="host"} 0.0002
membroker_stock_extents_total{gpu_uuid="host",change="used"} 8.0
membroker_stock_extents_total{gpu_uuid="host",change="made"} 8.0
"""


def _ten(after: str) -> Samples:
    times = {"take": array("Q", [300_000] * 10), "give": array("Q", [100_000] * 10)}
    return Samples(times, 1, difference(parsed(BEFORE), parsed(after)))


def test_a_share_is_what_came_between_two_scrapes() -> None:
    """Ten works: 100 us of the broker in each, 50 of them its driver's."""
    ten = _ten(AFTER)
    assert total(ten.counts, "membroker_request_seconds_count", transport="handoff") == 10
    found = share(ten, "handoff", extents=10, stock=False)
    assert (found.caller, found.core, found.for_stock) == (400_000, None, 0)
    assert found.broker == pytest.approx(100_000)
    assert found.driver == pytest.approx(50_000)
    assert found.transport == pytest.approx(50_000)
    assert found.outside == pytest.approx(300_000)


def test_driver_calls_for_the_stock_are_nobodys() -> None:
    """Of ten extents 8 came from the stock, and 8 were made for it: 2 of 10 creates were the requests'."""
    ten = _ten(AFTER + MORE)
    assert hits(ten.counts, 10) == 80
    found = share(ten, "handoff", extents=10, stock=True)
    assert found.driver == pytest.approx(10_000)
    assert found.for_stock == pytest.approx(40_000)
    assert found.core == pytest.approx(20_000)
    assert found.transport == pytest.approx(70_000)
