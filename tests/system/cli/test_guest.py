"""`membroker run --guest` with a real daemon of the host driver: programs whose memory is a stand-in fall asleep."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, Daemon, hold_still, running, until
from tests.support.fake_broker import Caller
from tests.support.ports import reserved_port
from tests.support.sizes import MIB
from tests.support.template import PythonProcess
from tests.support.workers import is_gone, state_of

from membroker.cli import main as cli
from membroker.cli.books import open_admin
from membroker.cli.readers import Snapshot, rows_of
from membroker.guest.stand_in import StandInSuspender
from membroker.guest.tree import children
from membroker.types import SleepStatus

CONFIG: dict[str, Any] = {"capacity": 16 * MIB, "tenants": {"red": {}}, "slice_seconds": 0.1, "recall_seconds": 600.0}
PROGRAM = str(Path(__file__).parents[2] / "support" / "stand_in_guest.py")
SIZE = 10
"""MiB of a program: two do not fit."""
WITH_FEW_DESCRIPTORS = (
    "-c",
    "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (160, 160))\n"
    "from membroker.cli.main import main; sys.exit(main())",
)
"""How the command is started with a limit that it has from the beginning."""


class Guest:
    """A `membroker run --guest` and its program."""

    def __init__(
        self,
        daemon: Daemon,
        model: str,
        *options: str,
        has_door: bool = False,
        program: list[str] | None = None,
        is_job: bool = False,
        starts: tuple[str, ...] = ("-m", "membroker.cli.main"),
    ) -> None:
        self.door, port = (reserved_port(), reserved_port()) if has_door else (0, 0)
        given = program or [sys.executable, PROGRAM, str(SIZE), str(port)]
        memory = [] if "--memory" in options else ["--memory", f"{SIZE}MiB"]
        door = ["--door", f"{self.door}:{port}"] if has_door else []
        command = ["run", "--guest", "--endpoint", str(daemon.endpoint()), "--model", model, *memory, *door, *options]
        self.model, self.daemon, self.pid = model, daemon, 0
        self.said = daemon.root / f"said-by-{model}"
        with self.said.open("w") as errors:
            self.process = PythonProcess(
                [*starts, *command, "--", *given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "XDG_STATE_HOME": str(daemon.root / "state-of-user")},
                **({"process_group": 0} if is_job else {}),  # SIGTSTP does nothing in a group whose parent is away
            )

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate(timeout=DEADLINE_SECONDS)

    def hears(self) -> str:
        """Return the next line of the program."""
        return self.process.stdout.readline()

    def ready(self) -> int:
        """Wait until the program has its memory, and return its pid."""
        line = self.hears()
        assert line.startswith("ready"), (line, self.said.read_text())
        self.pid = int(line.split()[1])
        return self.pid

    def ask(self, line: str = "") -> None:
        """Send the program a line."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def is_right(self) -> None:
        """Wait until the program has found its memory as it was, which it cannot while it sleeps."""
        self.ask()
        assert self.hears() == "alive\n", self.said.read_text()

    def answers(self) -> None:
        """Ask for the checksum of its memory through the door: it wakes, and answers."""
        with socket.create_connection(("127.0.0.1", self.door)) as connection, connection.makefile("rw") as lines:
            found = set()
            for _ in range(2):
                lines.write("sum\n")
                lines.flush()
                found.add(lines.readline())
        (line,) = found
        assert len(line) == 65

    def held(self) -> int:
        """Return what the program holds, in MiB."""
        return held(self.pid)

    def declared(self) -> int:
        """Return what is declared for it on the device, in MiB."""
        models = [model for model in self.daemon.models() if model.name.endswith(f"/{self.model}")]
        return sum(model.books[0].declared_bytes for model in models) // MIB

    def status(self) -> Any:
        """Return what the broker knows of its sleep."""
        with open_admin(str(self.daemon.admin)) as admin:
            (model,) = [one for one in admin.models() if one.name.endswith(f"/{self.model}")]
        return model.guests[0] if model.guests else SleepStatus("")

    def order(self, *command: str) -> int:
        """Have an operator order something, and return the command's exit status."""
        return cli.main([*command, "--endpoint", str(self.daemon.admin)])

    def sleeps(self) -> None:
        """Have an operator put it to sleep."""
        assert self.order("sleep", self.model) == 0
        assert (self.declared(), held(self.pid)) == (0, 0)

    def wakes(self) -> None:
        """Have an operator wake it."""
        assert self.order("wake", self.model) == 0

    def end(self) -> int:
        """Let the program end, and return the command's exit status."""
        self.ask("exit 7")
        return self.process.wait(DEADLINE_SECONDS)


@contextmanager
def guests(**config: Any) -> Iterator[Daemon]:
    with running({**CONFIG, **config}) as daemon:
        yield daemon
        if daemon.process.poll() is None:
            until(lambda: daemon.books().lent_bytes == 0)


@pytest.fixture
def daemon(request: pytest.FixtureRequest) -> Iterator[Daemon]:
    """A daemon in which a program soon sleeps when another one wants its memory, or with these keys."""
    with guests(**getattr(request, "param", {})) as one:
        yield one


@pytest.fixture
def one(daemon: Daemon) -> Iterator[Guest]:
    """A guest that is awake."""
    with Guest(daemon, "one") as guest:
        guest.ready()
        yield guest


@pytest.fixture
def behind_a_door(daemon: Daemon) -> Iterator[Guest]:
    """A guest that is awake, behind a door."""
    with Guest(daemon, "one", has_door=True) as guest:
        guest.ready()
        yield guest


def held(pid: int) -> int:
    """Return what a program holds, in MiB."""
    return StandInSuspender().usage([pid]).get(pid, 0) // MIB


# --- turns ---


def test_programs_that_do_not_fit_take_turns_also_after_the_daemon_was_killed(daemon: Daemon, one: Guest) -> None:
    with Guest(daemon, "two") as two:
        two.ready()
        for turn in range(4):
            if turn == 2:
                daemon.kill()
                daemon.start_again()
            one.is_right()
            two.is_right()
            if turn == 1:
                assert daemon.books().lent_bytes <= CONFIG["capacity"]
                with hold_still(daemon):  # no turn begins between the two looks
                    until(lambda: 0 in (one.held(), two.held()))
        assert (one.end(), two.end()) == (7, 7)


def test_all_processes_of_a_program_sleep_also_one_that_its_parent_has_left(daemon: Daemon) -> None:
    both = f"{sys.executable} {PROGRAM} 4 0 </dev/null & (sleep 1000 & exec {sys.executable} {PROGRAM} 4 0) & wait"
    script = both.replace("</dev/null", "<&3").replace("4 0) &", "4 0 <&3) &")
    with Guest(daemon, "one", program=["/bin/sh", "-c", f"exec 3<&0; {script}"]) as one:
        pids = [one.ready(), one.ready()]
        assert [held(pid) for pid in pids] == [4, 4]
        one.sleeps()
        assert [held(pid) for pid in pids] == [0, 0]
        one.wakes()
        assert [held(pid) for pid in pids] == [4, 4]


# --- the start and the end ---


def test_a_program_that_finds_no_room_in_time_is_not_started(daemon: Daemon) -> None:
    """The other one must not sleep: it is charged, and never asked."""
    with Guest(daemon, "one", "--no-sleep") as one:
        one.ready()
        with Guest(daemon, "two", "--timeout", "0.2") as two:
            assert two.process.wait(DEADLINE_SECONDS) == 1
            assert two.hears() == ""
            assert "the program was not started: the broker" in two.said.read_text()
        assert one.order("sleep", "one") == 1
        assert one.end() == 7


@pytest.mark.parametrize(
    ("number", "asleep"),
    [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGKILL, False), (signal.SIGKILL, True)],
)
def test_the_command_ends_as_its_program_ends(one: Guest, number: signal.Signals, asleep: bool) -> None:
    """A signal for the command is one for the program. Nobody can hand on SIGKILL: here the program gets it."""
    if asleep:
        one.sleeps()
    os.kill(one.pid if number == signal.SIGKILL else one.process.pid, number)
    assert one.process.wait(DEADLINE_SECONDS) == -number


@pytest.mark.parametrize("asleep", [False, True])
def test_a_killed_command_leaves_no_program_behind(one: Guest, asleep: bool) -> None:
    if asleep:
        one.sleeps()
    one.process.kill()
    until(lambda: is_gone(one.pid))


def test_a_broker_that_refuses_the_guest_and_a_program_that_is_not_there() -> None:
    """AccessDenied is an OSError, too, and is not a program that cannot start. That has the shell's status."""
    with guests(tenants={"red": {"uids": [os.geteuid() + 1]}}) as daemon, Guest(daemon, "one") as one:
        assert one.process.wait(DEADLINE_SECONDS) == 1
        assert f"uid {os.geteuid()} may not use this endpoint" in one.said.read_text()
        assert "cannot start" not in one.said.read_text()
    with guests() as daemon, Guest(daemon, "one", program=["/no/such/program"]) as one:
        assert one.process.wait(DEADLINE_SECONDS) == 127
        assert "cannot start '/no/such/program'" in one.said.read_text()


def test_a_guest_in_a_guest_is_refused(daemon: Daemon) -> None:
    """Both would suspend the same processes, and the inner one would take them for awake."""
    inner = ["-m", "membroker.cli.main", "run", "--guest", "--endpoint", str(daemon.endpoint()), "--model", "inner"]
    with Guest(daemon, "one", program=[sys.executable, *inner, "--memory", "1MiB", "--", "true"]) as one:
        assert one.process.wait(DEADLINE_SECONDS) == 1
        assert "this is part of a guest, which sleeps as a whole" in one.said.read_text()


# --- memory ---


@pytest.mark.parametrize("daemon", [{"slice_seconds": 600.0}], indirect=True, ids=["slow"])
def test_one_that_uses_more_sleeps_until_the_broker_lends_it(daemon: Daemon, one: Guest) -> None:
    """Or it is killed, if so ordered."""
    killed = Guest(daemon, "three", "--memory", "2MiB", "--on-excess", "kill")
    with killed, Guest(daemon, "two", "--memory", "2MiB") as two:  # they use 10
        assert killed.process.wait(DEADLINE_SECONDS) == -signal.SIGTERM
        assert "the program is ended: it uses 10.0 MiB, and the broker lends it 2.0 MiB" in killed.said.read_text()
        until(lambda: "it sleeps, because it uses 10.0 MiB" in two.said.read_text())
        until(lambda: two.declared() == 0)
        assert one.end() == 7
        two.ready()
        until(lambda: two.declared() == SIZE)
        assert two.end() == 7


def test_auto_is_what_it_used_the_last_time(daemon: Daemon) -> None:
    for declared in (0, SIZE):
        with Guest(daemon, "one", "--memory", "auto") as one:
            one.ready()
            until(lambda one=one: one.declared() == SIZE)
            assert one.end() == 7
        (seen,) = (daemon.root / "state-of-user" / "membroker" / "guests").iterdir()
        assert int(seen.read_text()) == SIZE * MIB, declared


# --- the door ---


def test_it_sleeps_when_nobody_has_come_for_a_while(daemon: Daemon) -> None:
    with Guest(daemon, "one", "--sleep-after", "0.1", has_door=True) as one:
        one.ready()
        until(lambda: one.held() == 0)
        one.answers()
        until(lambda: one.held() == 0)
        until(lambda: "because it had no connection for" in one.said.read_text())


def test_it_sleeps_for_others_when_it_is_idle_as_engines_do() -> None:
    """`idle_sleep_seconds`: the broker asks by itself."""
    with guests(idle_sleep_seconds=0.1, idle_sleep="always") as daemon, Guest(daemon, "one", has_door=True) as one:
        one.ready()
        until(lambda: one.held() == 0)
        until(lambda: daemon.models()[0].asleep_by_itself)


# --- what operators see ---


def test_all_commands_and_the_metrics_know_guests(
    daemon: Daemon, one: Guest, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*command: str) -> str:
        assert one.order(*command) == 0
        return capsys.readouterr().out

    until(lambda: shown("status").count("1, 0 asleep") == 1)
    assert "(asleep)" not in shown("models")
    with Guest(daemon, "two") as two:
        two.ready()
        until(lambda: one.status().cause == "recall")
        assert two.end() == 7
    until(lambda: one.status().state == "awake")
    (answer,) = json.loads(shown("sleep", "one", "--json"))
    until(lambda: one.status().state == "asleep")
    assert "1, 1 asleep" in shown("status")
    assert "one (asleep)" in shown("models")
    for command in ("models", "explain"):
        said = shown(command, "one")
        assert "by command; it needs 10.0 MiB to wake; its image takes 10.0 MiB of host memory" in said
        assert "the last wake took" in said
    (model,) = json.loads(shown("models", "one", "--json"))
    for row in (answer["status"], *model["guests"]):
        assert (row["state"], row["cause"], row["needed_bytes"]) == ("asleep", "operator", SIZE * MIB)
    with open_admin(str(daemon.admin)) as admin:  # as `membroker top` does
        rows = rows_of([Snapshot("host", models=admin.models())], by_tenant=False)
        assert {row.name: row.is_asleep for row in rows} == {"red/one": True, "red/two": False}
    assert daemon.figure("membroker_model_guest_sessions", model="one", state="asleep", cause="operator") == 1
    for name in ("image", "needed"):
        assert daemon.figure(f"membroker_model_guest_{name}_bytes", model="one") == SIZE * MIB
    assert one.end() == 7


# --- what a stranger would try ---


def waits(daemon: Daemon) -> bool:
    return any(books.waiting_bytes for model in daemon.models() for books in model.books)


def test_a_process_that_a_program_leaves_behind_at_its_very_end_is_ended(daemon: Daemon) -> None:
    """It has a session of its own, and was begun since the last look."""
    script = "read line; setsid sleep 1000 & echo ready $!; exit 3"
    with Guest(daemon, "one", program=["/bin/sh", "-c", script]) as one:
        one.ask()
        assert one.process.wait(DEADLINE_SECONDS) == 3
        assert is_gone(one.ready())


def test_one_whose_warden_is_killed_wakes_and_stays_awake(one: Guest) -> None:
    """One that is stopped goes on at once, and so does the guest."""
    wardens = [each for each in children(one.process.pid) if each != one.pid]
    os.kill(wardens[0], signal.SIGSTOP)
    until(lambda: state_of(wardens[0]) != "T")
    one.sleeps()
    os.kill(wardens[0], signal.SIGKILL)
    until(lambda: one.held() == SIZE)
    said = "it does not sleep any more: the process was killed that would end the program"
    until(lambda: said in one.said.read_text())
    assert one.order("sleep", "one", "--timeout", "0.3") == 1
    assert one.end() == 7


def test_a_job_that_a_shell_stops_is_stopped_as_a_whole_and_goes_on(daemon: Daemon) -> None:
    with Guest(daemon, "one", is_job=True) as one:
        pid = one.ready()
        one.process.send_signal(signal.SIGTSTP)
        until(lambda: state_of(pid) == "T" == state_of(one.process.pid))
        one.process.send_signal(signal.SIGCONT)
        one.is_right()
        one.sleeps()
        one.wakes()
        assert one.end() == 7


def test_a_stopped_program_is_not_suspended_and_goes_on(one: Guest) -> None:
    os.kill(one.pid, signal.SIGSTOP)
    until(lambda: state_of(one.pid) == "T")
    assert one.order("sleep", "one", "--timeout", "0.5") == 1
    one.wakes()  # an attempt that had begun has failed, and no other begins
    os.kill(one.pid, signal.SIGCONT)
    one.is_right()
    assert one.held() == SIZE
    assert one.end() == 7


def test_one_whose_session_an_operator_has_forgotten_begins_a_new_one(daemon: Daemon, behind_a_door: Guest) -> None:
    one = behind_a_door
    one.sleeps()
    (session,) = daemon.sessions()
    one.process.send_signal(signal.SIGSTOP)
    daemon.kill()
    daemon.start_again()
    assert one.order("forget", session.name) == 0
    one.process.send_signal(signal.SIGCONT)
    until(lambda: [each.name for each in daemon.sessions() if each.name != session.name] != [])
    one.answers()
    until(lambda: (one.held(), one.declared()) == (SIZE, SIZE))
    one.sleeps()
    assert one.end() == 7


def test_a_flood_at_the_door_takes_no_descriptor_that_the_guest_needs(daemon: Daemon) -> None:
    with Guest(daemon, "one", has_door=True, starts=WITH_FEW_DESCRIPTORS) as one, ExitStack() as clients:
        one.ready()
        for _ in range(200):
            clients.enter_context(socket.create_connection(("127.0.0.1", one.door)))
        with Guest(daemon, "two") as two:
            two.ready()  # so the first one has fallen asleep amid the flood; soon it has its turn again
            assert two.end() == 7
        clients.close()
        one.sleeps()
        one.answers()
        assert one.end() == 7


def test_one_that_waits_to_wake_asks_the_next_daemon(daemon: Daemon, behind_a_door: Guest) -> None:
    one = behind_a_door
    one.sleeps()
    with Guest(daemon, "two", "--no-sleep") as two:  # the next daemon knows no slice, and would ask it at once to sleep
        two.ready()
        asking = Caller(one.answers)
        until(lambda: waits(daemon))
        daemon.kill()
        daemon.start_again()
        until(lambda: waits(daemon))
        assert one.held() == 0
        assert two.end() == 7
        asking.value()
    assert one.end() == 7
