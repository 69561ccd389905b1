"""The recorder: what it writes can be replayed, is bounded, and says nothing that identifies a program."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.recorded import recorded, replayed
from tests.support.sizes import MIB

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.core.machine import Broker
from membrokerd.core.names import ModelName, SegmentName
from membrokerd.replay import recorder, trace
from membrokerd.replay.reading import read
from membrokerd.replay.recorder import Recorder

NAME = ModelName("acme", "llama-7b")
SECRETS = {"process": "4711:99", "client": "python serve.py", "endpoint": "acme", "token_hash": "beef"}


class Core:
    """A core with one session, recorded."""

    def __init__(self, directory: Path, **more: Any) -> None:
        self.broker = Broker(policy.Rules(2 * MIB, {"device": 64 * MIB}), 1)
        self.now = 0
        self.calls = 0
        self.recorder = Recorder(self.broker, directory, lambda: self.now, **more)
        (answer,) = self.tell(lambda call: ev.OpenSession(call, "acme", 4711, 1000, observer=False, **SECRETS))
        self.session = answer.result.session
        self.tell(lambda call: ev.RegisterModel(call, self.session, call, NAME, None, {}, exclusive=False))

    def tell(self, make: Any) -> list[Any]:
        self.calls += 1
        self.now += 1_000
        event = make(self.calls)
        step = self.broker.step(event, self.now)
        self.recorder.take(event, step, self.now)
        for effect in step.effects:
            if isinstance(effect, fx.Make):
                self._take(effect)
        return step.effects

    def _take(self, make: fx.Make) -> None:
        whose = make.session, make.request_id, make.part
        self.tell(lambda _: ev.Made(*whose))
        self.tell(lambda _: ev.Acknowledge(*whose))

    def borrow(self, size: int = 2 * MIB, count: int = 1, **more: Any) -> range:
        made = self.tell(lambda call: ev.Allocate(call, self.session, call, NAME, "device", size, count, **more))
        return next((one.ids for one in made if isinstance(one, fx.Make)), range(0))

    def is_written(self) -> bool:
        return self.recorder._file.is_idle

    def release(self, ids: range) -> None:
        self.tell(lambda call: ev.Release(call, self.session, call, tuple(ids)))


def test_nothing_identifies_a_program(tmp_path: Path) -> None:
    """Tenants, models, sizes and ids are all that an operator needs, and may show to somebody else."""
    core = Core(tmp_path)
    core.tell(
        lambda call: ev.CreateSegment(
            call, core.session, call, SegmentName(*NAME, "top-secret-weights"), "device", 2 * MIB
        )
    )
    core.recorder.close()
    text = (tmp_path / "trace.jsonl").read_text()
    assert '["acme","llama-7b"]' in text
    for secret in (*SECRETS.values(), "4711", "top-secret"):
        assert secret not in text.replace('"acme"', "")
    assert (tmp_path / "trace.jsonl").stat().st_mode & 0o777 == 0o600


def test_two_files_are_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is full is kept until the next is, and each begins with the books of its moment."""
    most = 8_000
    monkeypatch.setattr(recorder, "FLUSH_SECONDS", 0.001)
    core = Core(tmp_path, max_bytes=most)
    kept = core.borrow(count=4)
    for _ in range(300):
        core.release(core.borrow())
        until(core.is_written)
    core.recorder.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["trace-old.jsonl", "trace.jsonl"]
    for name in names:
        path = tmp_path / name
        assert path.stat().st_size < most + 2_000
        assert read(path)[0].begin.why == "the file was full"
        happened, again = replayed(path)
        assert happened.rows.keys() == again.rows.keys() == {(NAME, "device")}
        assert happened.rows[NAME, "device"] == again.rows[NAME, "device"]
        assert happened.rows[NAME, "device"].granted > 10
        assert again.unfit_bytes == 0
    assert len(kept) == 4


def test_a_file_that_is_removed_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator makes room, or tidies up the whole directory. The rest of the day is recorded all the same."""
    monkeypatch.setattr(recorder, "FLUSH_SECONDS", 0.001)
    path = tmp_path / "state" / "trace.jsonl"
    core = Core(path.parent)
    core.borrow(count=3)
    for remove in (path.unlink, lambda: shutil.rmtree(path.parent), lambda: path.rename(tmp_path / "kept.jsonl")):
        until(core.is_written)
        remove()
        until(lambda: core.release(core.borrow()) or path.exists())
        until(core.is_written)
        assert read(path)[0].begin.why == "the file was removed"
    core.borrow()
    core.recorder.close()
    (part,) = read(path)
    assert sum(row.count for _, row in part.rows if isinstance(row, ft.Debited)) >= 4
    replayed(path)


def test_reloads_beside_a_disk_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reload begins a part, with a copy of the books. A few wait for the disk; the rest are not kept in memory."""
    hangs, write = threading.Event(), os.write

    def wait_and_write(descriptor: int, data: bytes) -> int:
        assert hangs.wait(DEADLINE_SECONDS)
        return write(descriptor, data)

    monkeypatch.setattr(recorder.os, "write", wait_and_write)
    core = Core(tmp_path)
    for _ in range(100):
        core.recorder.begin("the rules have changed")
    assert len(core.recorder._file._parts) <= recorder.QUEUE_PARTS + 1, "and the rows between them"
    hangs.set()
    until(core.is_written)
    core.borrow()
    core.borrow()
    core.recorder.close()
    last = read(tmp_path / "trace.jsonl")[-1]
    assert last.begin.why == "rows were lost"
    assert any(isinstance(row, ev.Allocate) for _, row in last.rows)


def test_a_torn_line_is_left_out(tmp_path: Path) -> None:
    """A daemon was killed in the middle of a line. The next one goes on behind it."""
    core = Core(tmp_path)
    core.borrow()
    core.recorder.close()
    path = tmp_path / "trace.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert len(read(path)) == 1
    core = Core(tmp_path)
    core.borrow()
    core.recorder.close()
    parts = read(path)
    assert [part.begin.why for part in parts] == ["the daemon started"] * 2
    assert len(parts[0].rows) == len(parts[1].rows) - 1


def test_a_request_that_no_rule_allows_is_left_out(tmp_path: Path) -> None:
    """A tenant sends numbers that a trace cannot have. They spoil nobody's trace."""
    core = Core(tmp_path)
    for size, count, wait in ((-1, 1, None), (2 * MIB, 0, None), (1 << 70, 1, None), (2 * MIB, 1, -5)):
        core.borrow(size, count, wait_ns=wait)
    core.borrow(wanted_bytes=-1)
    core.borrow()
    core.recorder.close()
    rows = [row for part in read(tmp_path / "trace.jsonl") for _, row in part.rows]
    assert sum(isinstance(row, ev.Allocate) for row in rows) == 1
    assert sum(isinstance(row, trace.Outcome) for row in rows) == 1


@pytest.mark.deep
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_any_world_is_replayed(tmp_path: Path, seed: int) -> None:
    """Deaths, lies, lost connections, reloads and segments: a trace of them can be read, and replayed to its end."""
    path = recorded(seed, 1_500, tmp_path)
    happened, again = replayed(path)
    assert sum(row.granted for row in happened.rows.values()) > 10
    for key, row in happened.rows.items():
        requests = row.as_json()["requests"]
        assert again.rows[key].as_json()["requests"] <= requests, "a request that was not counted then is counted"
