"""The log: one line per event, whatever a peer calls itself, and never a token."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import logging
import os
import threading
import typing
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import pytest
from grpc._cython import cygrpc
from tests.support.daemons import DEADLINE_SECONDS, until

from membrokerd.core import effects as fx
from membrokerd.core import facts as ft
from membrokerd.core.denied import Reason, deny
from membrokerd.core.names import ModelName
from membrokerd.system import log_writer, logs
from membrokerd.system.log_writer import LogWriter
from membrokerd.system.pods import Pod

NAME = ModelName("acme", "llama-7b")
FACTS: tuple[ft.Fact, ...] = (
    ft.SessionBegan(26, "acme", 4711, 1000, "pidfd:99", False, "vllm 0.9", 5),
    ft.SessionMoved(26, "connection lost", 6),
    ft.SessionEnded(26, 7),
    ft.ModelBegan(NAME, None, {"device": 1 << 30}),
    ft.ModelAsked(NAME, None, {"device": 1 << 30}),
    ft.ModelJoined(NAME, 26),
    ft.ModelLeft(NAME, 26, 8),
    ft.ModelEnded(NAME),
    ft.ModelCarried(NAME, {"device": 1 << 30}, 7, 5, 8),
    ft.Debited(26, NAME, "device", 2 << 20, 1, 4),
    ft.Credited(26, range(1, 5), "released"),
    ft.DeclarationSet(26, NAME, "device", 500),
    ft.GuestSet(26, NAME, "device", 8, 9),
    ft.TurnBegan("acme", "device", 8),
    ft.LocationSettled(26, "device", True),
    ft.SegmentBegan(40, NAME, "weights", "device", 1 << 30, 2 << 20, 41, 3, 26, 9),
    ft.SegmentBound(40),
    ft.SegmentMoved(40, "seal asked"),
    ft.SegmentEnded(40, None),
    ft.SegmentHeld(40, 26),
    ft.SegmentHeldAgain(40, 26, 3),
    ft.SegmentLeft(40, 26, 1, "detached"),
    ft.SegmentDoubted(40),
    ft.SegmentCredited(40, range(41, 44)),
    ft.StockChanged("device", 2 << 20, -3, "dropped"),
    ft.UnaccountedSeen("device", -4096),
    ft.QuotaSet("acme", None, "device", None),
)


class Lines:
    """What has been logged into a file."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w+b")

    def getvalue(self) -> str:
        """Return the text, once all of it is written."""
        logs.flush()
        self.file.seek(0)
        return self.file.read().decode()


Capture = Callable[..., Lines]


@pytest.fixture
def capture(tmp_path: Path) -> Iterator[Capture]:
    """Return a function that sets the log up into a text, and puts pytest's own handlers back afterwards.

    A flush waits for the writer's thread, however late that has a core.
    """
    root, own = logging.getLogger(), logging.getLogger("membrokerd")
    before = root.handlers, root.level, own.level

    made: list[Lines] = []

    def begin(format: str = "json", level: str = "debug") -> Lines:
        made.append(Lines(tmp_path / f"log-{len(made)}"))
        logs.configure(level, format, made[-1].file.fileno())
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_writer, "FLUSH_SECONDS", DEADLINE_SECONDS)
        yield begin
        logs.flush()
    if logs._writer is not None:
        logs._writer.close()
    logs._writer = None
    for each in made:
        each.file.close()
    root.handlers = before[0]
    root.setLevel(before[1])
    own.setLevel(before[2])


def _wait_for_the_writer(number: int) -> None:
    """Wait now and then, so that a slow file's queue never overflows: only what the allowance refuses is counted."""
    if not number % 500:
        logs.flush()


def test_every_fact_is_one_line_and_lifecycles_are_info(capture: Capture) -> None:
    """An operator follows sessions and models at INFO, and adds the single debits with DEBUG."""
    assert {type(fact) for fact in FACTS} == set(typing.get_args(ft.Fact))
    out = capture("json", "info")
    for fact in FACTS:
        logs.log_fact(fact)
    events = [json.loads(line)["event"] for line in out.getvalue().splitlines()]
    assert ", ".join(events) == (
        "session began, session moved, session ended, model began, model asked, model joined, model left, model ended, "
        "location settled, segment began, segment moved, segment ended, quota set"
    )
    out = capture("json", "debug")
    for fact in FACTS:
        logs.log_fact(fact)
    assert len(out.getvalue().splitlines()) == len(FACTS)


def test_a_session_ends_in_one_plain_line(capture: Capture) -> None:
    """It says whose it was, why it ended and how long it lasted, also of a session that an earlier daemon began."""
    out = capture("json", "info")
    logs.log_fact(ft.SessionBegan(26, "acme", 4711, 1000, "pidfd:99", False, "vllm 0.9", 5_000_000_000))
    logs.know_session(27, "acme", 4712, "old", 1_000_000_000)
    for fact in (
        ft.SessionMoved(26, "goodbye", 6_000_000_000),
        ft.SessionMoved(26, "last packet", 6_500_000_000),
        ft.SessionEnded(26, 7_250_000_000),
        ft.SessionMoved(27, "connection lost", 8_000_000_000),
        ft.SessionMoved(27, "process died", 8_000_000_000),
        ft.SessionMoved(27, "settled", 9_000_000_000),
        ft.SessionEnded(27, 9_000_000_000),
    ):
        logs.log_fact(fact)
    _, first, lost, died, second = map(json.loads, out.getvalue().splitlines())
    assert {name: first[name] for name in first if name not in ("time", "level")} == {
        "event": "session ended",
        "session": "sessions/1a",
        "tenant": "acme",
        "pid": 4711,
        "client": "vllm 0.9",
        "why": "closed in order",
        "seconds": 2.2,
    }
    assert (lost["cause"], died["cause"]) == ("connection lost", "process died")
    assert (second["pid"], second["why"], second["seconds"]) == (4712, "its process died", 8.0)


def test_nobody_fills_the_log_by_coming_and_going(capture: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of sessions a second: some are logged, the others counted, and those of another tenant logged still.

    At DEBUG all are logged.
    """
    seconds = 0.0
    monkeypatch.setattr(logs, "_allowance", logs.Allowance(lambda: seconds))
    out = capture("json", "info")
    most = logs.BURST_LINES - logs.KEPT_LINES + logs.LINES_OF_TENANT
    for number in range(most + 2_000):
        logs.log_fact(FACTS[0])
        _wait_for_the_writer(number)
    assert len(out.getvalue().splitlines()) == most
    out = capture("json", "info")
    for number in range(2 * logs.LINES_OF_TENANT):
        other = ft.SessionBegan(1_000 + number, "other", 1, 1, "pid:1", False, "", 0)
        logs.log_fact(other)
    told, *others = map(json.loads, out.getvalue().splitlines())
    assert (told["level"], told["lines"]) == ("warning", 2_000)
    assert {line["tenant"] for line in others} == {"other"}, "one tenant hides what happens to another"
    assert len(others) == logs.LINES_OF_TENANT
    seconds = 0.5
    out = capture("json", "info")
    for _ in range(1_000):
        logs.log_fact(FACTS[0])
    told, *others = map(json.loads, out.getvalue().splitlines())
    assert (told["level"], told["lines"]) == ("warning", logs.LINES_OF_TENANT)
    assert {line["event"] for line in others} == {"session began"}
    assert len(others) == logs.LINES_A_SECOND // 20
    out = capture("json", "debug")
    logs.log_fact(FACTS[0])
    assert len(out.getvalue().splitlines()) == 1


def test_a_recall_that_is_late_or_brings_nothing_is_a_warning(capture: Capture) -> None:
    """An operator reads which worker is late, of which model and in which pod, and how much is missing."""
    out = capture("json", "debug")
    logs.know_session(98, "acme", 4711, "vllm", 0, Pod("uid-1", "web/a-0"))
    for result in typing.get_args(fx.RecallResult):
        logs.log_recall(fx.Recalled(98, NAME, "device", 6 << 20, 2 << 20, 1_500_000_000, result))
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    levels = {line["result"]: line["level"] for line in lines}
    assert levels == {"returned": "debug", "kept": "debug", "late": "warning"}
    logs.log_recall(fx.Recalled(98, NAME, "device", 6 << 20, 0, 1_500_000_000, "kept"))
    kept = json.loads(out.getvalue().splitlines()[-1])
    assert (kept["level"], kept["event"]) == ("warning", "a worker keeps all that was recalled")
    (late,) = (line for line in lines if line["result"] == "late")
    del late["time"], late["level"], late["result"]
    assert late == {
        "event": "a worker is late for a recall of memory",
        "session": "sessions/62",
        "model": "tenants/acme/models/llama-7b",
        "location": "device",
        "asked_bytes": 6 << 20,
        "returned_bytes": 2 << 20,
        "after_ms": 1_500,
        "pid": 4711,
        "pod": "uid-1",
        "pod_name": "web/a-0",
    }


def test_in_the_journal_each_line_has_its_priority(
    tmp_path: Path, capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """systemd names the stream in the environment, also to children whose stderr is another one."""
    file = (tmp_path / "log-0").open("wb")
    found = os.fstat(file.fileno())
    for stream, begins in ((f"{found.st_dev}:{found.st_ino}", "<4>2"), (f"{found.st_dev}:1", "2")):
        monkeypatch.setenv("JOURNAL_STREAM", stream)
        logs.configure("info", "text", file.fileno())
        logs.warn("something is wrong")
        logs.flush()
        assert (tmp_path / "log-0").read_text().splitlines()[-1].startswith(begins)
    file.close()


def test_why_a_daemon_does_not_start_is_an_error_in_the_journal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`journalctl -p err` left out the one line that says it."""
    found = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{found.st_dev}:{found.st_ino}")
    log_writer.complain("membrokerd.toml: 2 mistakes\n  driver: is not known")
    assert capfd.readouterr().err == "<3>membrokerd.toml: 2 mistakes\n<3>  driver: is not known\n"


@pytest.mark.parametrize("format", ["text", "json"])
@pytest.mark.parametrize("client", ["a\nERROR forged", 'q"uote', "\x1b[31mred", "a\u2028b", "k=v"])
def test_a_client_cannot_forge_a_line(capture: Capture, format: str, client: str) -> None:
    """A process's name comes from a tenant: it is quoted, stays on its line, and has no terminal codes."""
    out = capture(format)
    logs.log_fact(dataclasses.replace(typing.cast("ft.SessionBegan", FACTS[0]), client=client))
    text = out.getvalue().rstrip("\n")
    assert len(text.splitlines()) == 1
    assert text.isprintable()


def test_no_token_can_be_logged(capture: Capture) -> None:
    """No fact has a token, a refusal's numbers lose it, and a log field with that name is a bug."""
    capture()
    for kind in typing.get_args(ft.Fact):
        assert {field.name for field in dataclasses.fields(kind) if "token" in field.name} <= {"token_hash"}
    for say in (logs.log, logs.debug, logs.warn):
        with pytest.raises(AssertionError, match="secret"):
            say("session began", token="s3cret")
    out = capture("json", "debug")
    logs.log_denied(26, "Allocate", deny(Reason.TOKEN_REJECTED, token="s3cret"))
    assert "s3cret" not in out.getvalue()
    assert json.loads(out.getvalue())["reason"] == "TOKEN_REJECTED"


def test_other_libraries_records_are_lines_too(capture: Capture) -> None:
    """asyncio and gRPC log through the same handler, from WARNING on; their tracebacks are a field.

    A call whose answer finds nobody is no error: a stop cancelled it, or its peer is gone. gRPC logs it as one.
    """
    out = capture("json", "debug")
    logging.getLogger("asyncio").debug("not this")
    gone = cygrpc.ExecuteBatchError("execute_batch", ())
    for error in (asyncio.CancelledError(), gone, ValueError("a fault of gRPC")):
        try:
            raise error
        except BaseException:
            logging.getLogger("grpc._cython.cygrpc").exception("not handled %s", "twice")
    (line,) = [json.loads(each) for each in out.getvalue().splitlines()]
    assert (line["event"], line["logger"], line["level"]) == ("not handled twice", "grpc._cython.cygrpc", "error")
    assert "ValueError: a fault of gRPC" in line["traceback"]


# --- The writer ---

Open = Callable[[int], LogWriter]


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe of one page that nobody reads, full but for some bytes."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writer, b"\n" * 4000)
    yield reader, writer
    os.close(writer)
    with suppress(OSError):
        os.close(reader)


@pytest.fixture
def opened() -> Iterator[Open]:
    """Return a function that makes a writer, which is closed in the end."""
    made: list[LogWriter] = []

    def open_writer(descriptor: int) -> LogWriter:
        made.append(LogWriter(descriptor))
        return made[-1]

    yield open_writer
    for each in made:
        each.close()


def say(writer: LogWriter, lines: int, text: str = "a line") -> None:
    for number in range(lines):
        writer.handle(logging.LogRecord("test", logging.INFO, "", 0, f"{text} {number}", (), None))


def test_a_pipe_that_nobody_reads_stops_nobody_and_the_gap_is_told(
    pipe: tuple[int, int], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines wait up to the bound, the rest is dropped and counted. Once it is read again, the log goes on and reports
    the gap.
    """
    monkeypatch.setattr(log_writer, "QUEUE_BYTES", 20_000)
    monkeypatch.setattr(log_writer, "FLUSH_SECONDS", 0.1)
    reader, descriptor = pipe
    writer = opened(descriptor)
    say(writer, 5_000)
    dropped = writer.dropped
    assert 2_000 < dropped < 4_000
    writer.flush()  # and returns, though nothing is written
    with open(reader, encoding="utf-8", closefd=False) as text:
        lines = (line.strip() for line in text if line.strip())
        kept = [int(line.split()[2]) for line in takewhile(lambda line: not line.startswith("log lines were"), lines)]
    assert kept == sorted(kept)
    assert len(kept) == 5_000 - dropped
    say(writer, 1, "afterwards")
    assert os.read(reader, 4096) == b"afterwards 0\n"
    assert writer.dropped == dropped


def test_lines_that_cannot_be_written_are_counted(pipe: tuple[int, int], opened: Open) -> None:
    """The reader is gone for good: each line is dropped, and reporting that drops no more."""
    reader, descriptor = pipe
    os.close(reader)
    writer = opened(descriptor)
    say(writer, 10)
    until(lambda: writer.dropped == 10)
    writer.flush()
    assert writer.dropped == 10


def test_a_line_has_a_bound(tmp_path: Path, opened: Open) -> None:
    with (tmp_path / "log").open("wb") as file:
        writer = opened(file.fileno())
        say(writer, 1, "x" * 1_000_000)
        writer.flush()
        until(lambda: (tmp_path / "log").stat().st_size == log_writer.LINE_BYTES)
    assert (tmp_path / "log").read_bytes().endswith(b"x...\n")


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: tuple[int, int], opened: Open) -> None:
    """Another process that has the same terminal or pipe can set O_NONBLOCK: no line is lost, or written in part."""
    reader, descriptor = pipe
    os.set_blocking(descriptor, False)
    writer = opened(descriptor)
    say(writer, 1_000)
    with open(reader, encoding="utf-8", closefd=False) as text:
        lines = (line.strip() for line in text if line.strip())
        assert [next(lines) for _ in range(1_000)] == [f"a line {number}" for number in range(1_000)]
    assert writer.dropped == 0


def test_setting_the_log_up_again_leaves_no_thread(capture: Capture) -> None:
    """A reload may do so often; earlier lines are still written."""
    out = [capture() for _ in range(5)]
    logs.log("the last")
    until(lambda: [thread.name for thread in threading.enumerate()].count("log") == 1)
    assert [bool(each.getvalue()) for each in out] == [False] * 4 + [True]
