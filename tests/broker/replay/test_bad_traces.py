"""Files that are no trace, or a hostile one: one sentence that says what is wrong, and bounded memory and time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS
from tests.support.recorded import recorded

pytestmark = pytest.mark.deep

ADDRESS_SPACE = 3 << 30


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A good trace of one part."""
    path = recorded(1, 300, tmp_path_factory.mktemp("trace"))
    first, *more = path.read_text().splitlines(keepends=True)
    return [first, *(one for one in more if one.startswith("["))]


def replay(path: Path, **asked: Any) -> tuple[int, str]:
    """Run the process behind the command, with a bound on its memory. Return its status and its sentence."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({ADDRESS_SPACE},) * 2)"
    run = f"{limit}; import runpy; runpy.run_module('membrokerd.replay', run_name='__main__')"
    request = {"files": [str(path)], "location": "device", "capacity": None, "quotas": [], **asked}
    done = subprocess.run(
        [sys.executable, "-c", run],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("\n") <= 1
    return done.returncode, done.stderr


def test_files_that_are_no_trace(tmp_path: Path, lines: list[str]) -> None:
    """What an operator may name by mistake."""
    path = tmp_path / "file"
    of_requests = (
        "is a trace of requests to a language model, which `python -m benchmarks.serving --requests` plays: give"
    )
    for data, sentence in (
        (b"", "is empty: nothing was recorded yet"),
        (b"capacity = '8GiB'\n" * 2, "is not a trace"),
        (os.urandom(100_000), "is not a trace"),
        (lines[0].replace('"membroker trace":2', '"membroker trace":1').encode(), "has the format 1"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-02-03 04:05:06,1,1\n", of_requests),
        (b'{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [0]}\n' * 2, of_requests),
    ):
        path.write_bytes(data)
        status, told = replay(path)
        assert (status, sentence in told) == (1, True), told
    for place, sentence in (("missing", "No such file"), (".", "it is a directory and must be a regular file")):
        status, told = replay(tmp_path / place)
        assert (status, sentence in told) == (1, True), told


def test_a_trace_that_is_cut_is_replayed_up_to_there(tmp_path: Path, lines: list[str]) -> None:
    """It was copied while the daemon wrote, or the disk was full."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(lines)[:-7])
    assert replay(path) == (0, "")


DAMAGED = (
    "garbage",
    "[1,[2]]",
    '[-1,["books told",true]]',
    '[1,["nonsense",1]]',
    '[1,["credited",1,[[1,-1]],"x"]]',
    '[1,["asked",1,1,1,["a","b"],"device",true,1,null,false,0]]',
    '[1,["cancelled",' + "9" * 5_000 + "]]",
    "[" * 10_000,
)


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_line_is_an_error_with_its_number(tmp_path: Path, lines: list[str], line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join([*lines[:10], line + "\n", *lines[10:]]))
    status, told = replay(path)
    assert status == 1
    assert "(line 11)" in told


def _head(lines: list[str], **rules: Any) -> str:
    head = json.loads(lines[0])
    head["rules"] |= rules
    return json.dumps(head, separators=(",", ":")) + "\n"


def test_a_hostile_trace_is_bounded(tmp_path: Path, lines: list[str]) -> None:
    """Small files that would be large in memory, or that would never end."""
    path = tmp_path / "trace.jsonl"
    session = '[0,["session",1,"acme",0,0,"",false,"",0,"",""]]\n[0,["model",["acme","m"],null,{}]]\n'
    session += '[0,["model joined",["acme","m"],1]]\n'
    many = '[1,["credited",1,[[1,4000000],[4000001,1]],"released"]]\n'
    big = _head(lines, granularity=1, capacities={"device": (1 << 63) - 1})
    for text, sentence in (
        (lines[0] + many * 100, "released extents, which no daemon writes"),
        (lines[0] + "\n" * 1_100_000, "more than 1,000,000 lines"),
        (lines[0] + lines[1] + " " * (5 << 20) + "1\n" + lines[2], "a line that is too long"),
        (lines[0] + "x" * (65 << 20), "longer than"),
        (big + session, "more than a replay holds"),
        (_head(lines, granularity=0), "is not a trace"),
        (_head(lines, capacities={"moon": 5}), "is not a trace"),
    ):
        path.write_text(text)
        status, told = replay(path)
        assert (status, sentence in told) == (1, True), told
