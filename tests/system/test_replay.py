"""A recorded broker, replayed: the same numbers tell what happened, and other numbers tell what would have.

The workers are programs over the library. They borrow, wait, are refused, are recalled and die; the daemon records.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import COMMAND, good, refused, run
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.sizes import MIB
from tests.support.workers import PAGE, children, links, proc_of, worker, workers

import membroker

CONFIG: dict[str, Any] = {
    "record": True,
    "tenants": {"red": {"models": {"chat": {"guarantee": "96MiB"}}}, "blue": {}, "green": {}},
    "recall_seconds": 30.0,
    "guarantee_wait_seconds": 30.0,
}
COUNTED = ("requests", "granted", "refused", "given_up", "waited", "recalls", "late_recalls", "recalled_bytes")
Models = dict[str, dict[str, dict[str, Any]]]


def trace_of(daemon: Daemon) -> Path:
    return daemon.directory / "kept" / "host" / "trace.jsonl"


def replay(*arguments: object) -> Models:
    found = json.loads(good("replay", *arguments, "--json"))["models"]
    return {model["name"].split("/", 1)[1].replace("/models", ""): model for model in found}


def counted(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figures[name] for name in COUNTED}


def waiting(daemon: Daemon) -> int:
    return int(daemon.books().waiting_requests)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of three tenants that trade 256 MiB."""
    with running(CONFIG) as daemon:
        _trade(daemon)
        assert daemon.stop() == 0
        kept = tmp_path_factory.mktemp("trace") / "trace.jsonl"
        kept.write_bytes(trace_of(daemon).read_bytes())
    return kept


def _trade(daemon: Daemon) -> None:
    with workers(3) as (red, blue, green):
        for tenant, one in (("red", red), ("blue", blue), ("green", green)):
            one.connect(daemon, tenant)
        red.do("model = client.model('chat', virtual_capacity='1GiB')")
        green.do("model = client.model('batch', limit='192MiB', virtual_capacity='1GiB')")
        # Green has all that is not guaranteed to red, and lets red have some of it after a while.
        green.do("pool = model.pool(page_size=PAGE); pool.grow(160 * MIB)")
        assert green.refused("model.allocate(40 * MIB)").reason == "MODEL_LIMIT"
        assert green.refused("model.allocate(8 * MIB, timeout=0.2)").reason == "CAPACITY"
        red.do("held = model.allocate(96 * MIB)")
        assert red.refused("model.allocate(8 * MIB)").reason == "CAPACITY"
        red.begin("more = model.allocate(8 * MIB, timeout=600)")
        until(lambda: waiting(daemon) == 1)
        green.do("pool.shrink(160 * MIB)")
        red.result()
        red.do("more.close(); held.close()")
        # Blue has nearly all, also what red is guaranteed, and releases what it is asked for.
        blue.do("model = client.model('cache', virtual_capacity='1GiB'); pool = model.pool(page_size=PAGE)")
        blue.do("model.on_recall(lambda recall: pool.shrink(recall.remaining))")
        blue.do("pool.grow(240 * MIB)")
        red.do("held = model.allocate(64 * MIB)")  # 48 MiB and more are recalled for it
        red.do("held.close()")
        # A segment that does not fit, a quota below what is used, and a death.
        assert red.refused("model.create_segment('more', 200 * MIB)").reason == "CAPACITY"
        good("quota", "set", "blue", "--limit", "96MiB", at=daemon.admin)
        until(lambda: sum(one.books[0].used_bytes for one in daemon.models() if "blue" in one.name) <= 96 * MIB)
        red.do("kept = model.allocate(32 * MIB)")
        red.kill()
        until(lambda: not any("red" in one.tenant for one in daemon.sessions()))
        with worker() as again:  # what the dead worker had is lent once more
            again.connect(daemon, "red").do("model = client.model('chat'); held = model.allocate(160 * MIB)")


def test_the_same_numbers_tell_what_happened(recorded: Path) -> None:
    """The proof that a trace has enough: the core decides each request once more as it did."""
    models = replay(recorded)
    assert {name: counted(model["replayed"]) for name, model in models.items()} == {
        name: counted(model["happened"]) for name, model in models.items()
    }
    chat, cache, batch = (models[name]["happened"] for name in ("red/chat", "blue/cache", "green/batch"))
    assert (chat["refused"], chat["waited"]) == ({"CAPACITY": 2}, 2), "one of them is a segment"
    assert (batch["refused"], batch["waited"]) == ({"CAPACITY": 1, "MODEL_LIMIT": 1}, 1)
    assert cache["recalls"] >= 2
    assert cache["recalled_bytes"] >= 48 * MIB


def test_other_numbers_tell_what_would_have_happened(recorded: Path) -> None:
    """With 1 GiB nobody waits or is refused for want of it. Without its guarantee red asks for no memory back."""
    larger = replay(recorded, "--capacity", "1GiB")
    assert {name: model["replayed"]["refused"] for name, model in larger.items()} == {
        "red/chat": {},
        "blue/cache": {},
        "green/batch": {"MODEL_LIMIT": 1},  # what the program itself asked for
    }
    assert not any(model["replayed"]["waited"] for model in larger.values())
    assert larger["blue/cache"]["replayed"]["recalls"] == 1, "the quota below what it used"
    limited = replay(recorded, "--limit", "blue/cache=96MiB")
    assert limited["blue/cache"]["replayed"]["refused"] == {"MODEL_LIMIT": 1}
    unguarded = replay(recorded, "--guarantee", "red/chat=none", "--weight", "red=0")
    assert unguarded["red/chat"]["replayed"]["refused"]["CAPACITY"] > 2
    unlimited = replay(recorded, "--limit", "blue=none", "--capacity", "1GiB")
    assert unlimited["blue/cache"]["replayed"]["recalls"] == 0, "the command's limit is replaced, too"


def test_what_a_person_is_shown_and_told(recorded: Path) -> None:
    """A misspelled name changes no figure, and "nothing changes" would be the wrong answer."""
    status, out, err = run("replay", recorded, "--capacity", "128MiB", "--weight", "red/chta=2")
    assert status == 0
    assert [row.split()[0] for row in out.splitlines()[:3]] == ["model", "blue/cache", "replayed"]
    assert "red/chta asked for no device memory in this recording: check the name (blue/cache, " in err
    refused("replay", recorded, "--capacity", "64MiB")


def test_a_replay_that_is_ended_takes_its_process_along(recorded: Path) -> None:
    """Ctrl-C, or a scheduler's timeout, of a long replay: no traceback, and no process goes on alone."""
    command = [sys.executable, *COMMAND, "replay", *[str(recorded)] * 400]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        child = until(lambda: children(process.pid))[0]
        until(lambda: "membrokerd.replay" in proc_of(child, "cmdline"))
        until(lambda: os.readlink(f"/proc/{child}/fd/0") not in links(process.pid))  # it has been told what to do
        end = os.pidfd_open(child)
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, out, err) == (143, "", "")
    assert select.select([end], [], [], DEADLINE_SECONDS)[0], "it has ended, too"
    os.close(end)


def test_a_journal_shows_which_loans_fit(daemon: Daemon, red: membroker.Client) -> None:
    """Nothing was recorded. The journal of the day still says which loans a smaller device would have refused."""
    for size in (16, 64, 16):
        red.model("chat").allocate(size * MIB).close()
    assert not trace_of(daemon).exists(), "nobody has asked for it"
    journal = daemon.root / "state" / "journal"
    (model,) = replay(journal, "--capacity", "32MiB").values()
    assert (model["happened"]["granted"], model["replayed"]["refused"]) == (3, {"CAPACITY": 1})
    assert refused("replay", journal).endswith("give one with --capacity")


def test_a_full_disk_stops_the_recording_and_nothing_else() -> None:
    """The disk has room for the journal, and not for the trace. The log says so once, and lending goes on."""
    with running({"record": True}) as daemon, membroker.connect(daemon.endpoint("red")) as client:
        model = client.model("chat")
        trace = trace_of(daemon)
        until(lambda: f"requests and decisions are recorded path={trace}" in daemon.log())
        until(lambda: '["model joined"' in trace.read_text())
        with trace.open("ab") as file:  # a blank line says nothing
            file.write(b" " * (PAGE - trace.stat().st_size - 4_000) + b"\n")
        pid, (_, hard) = daemon.process.pid, resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (PAGE, hard))  # an extent is a file, too
        for _ in range(50):
            model.allocate(PAGE).close()
        until(lambda: "the trace cannot be written" in daemon.log())
        for _ in range(50):
            model.allocate(PAGE).close()
        assert trace.stat().st_size <= PAGE
        assert daemon.log().count("the trace cannot be written") == 1
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
        (model_,) = replay(trace).values()
        assert counted(model_["happened"]) == counted(model_["replayed"])
