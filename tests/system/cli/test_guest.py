"""`membroker run --guest` with a real daemon of the host driver: programs whose memory is a stand-in fall asleep."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.utils import floatToGoString
from tests.support.daemons import DEADLINE_SECONDS, Daemon, running, until
from tests.support.ports import reserved_port
from tests.support.sizes import MIB
from tests.support.template import PythonProcess
from tests.support.workers import is_gone

from membroker.cli import main as cli
from membroker.cli.books import open_admin
from membroker.guest.stand_in import StandInSuspender
from membroker.guest.tree import children
from membroker.types import SleepStatus
from membroker.v1 import resources_pb2

CONFIG: dict[str, Any] = {"capacity": 64 * MIB, "tenants": {"red": {}}, "slice_seconds": 1.0, "recall_seconds": 600.0}
PROGRAM = str(Path(__file__).parents[2] / "support" / "stand_in_guest.py")
SIZE = 40
"""MiB of a program: two do not fit."""


class Guest:
    """A `membroker run --guest` and its program."""

    def __init__(
        self,
        daemon: Daemon,
        model: str,
        *options: str,
        port: int = 0,
        program: list[str] | None = None,
        hears_errors: bool = True,
        is_job: bool = False,
    ) -> None:
        given = program or [sys.executable, PROGRAM, str(SIZE), str(port)]
        memory = [] if "--memory" in options else ["--memory", f"{SIZE}MiB"]
        command = ["run", "--guest", "--endpoint", str(daemon.endpoint()), "--model", model, *memory, *options]
        self.model, self.daemon = model, daemon
        self.said = daemon.root / f"said-by-{model}"
        with self.said.open("w") as errors:
            self.process = PythonProcess(
                ["-m", "membroker.cli.main", *command, "--", *given],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors if hears_errors else subprocess.PIPE,
                text=True,
                env={**os.environ, "XDG_STATE_HOME": str(daemon.root / "state-of-user")},
                **({"process_group": 0} if is_job else {}),  # SIGTSTP does nothing in a group whose parent is away
            )
        if self.process.stderr is not None:
            self.process.stderr.close()
            self.process.stderr = None

    def __enter__(self) -> Guest:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate(timeout=DEADLINE_SECONDS)

    def hears(self) -> str:
        """Return the next line of the program."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def ready(self) -> int:
        """Wait until the program has its memory, and return its pid."""
        line = self.hears()
        assert line.startswith("ready"), (line, self.said.read_text())
        return int(line.split()[1])

    def ask(self, line: str = "") -> None:
        """Send the program a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def is_right(self) -> None:
        """Wait until the program has found its memory as it was, which it cannot while it sleeps."""
        self.ask()
        assert self.hears() == "alive\n", self.said.read_text()

    def declared(self) -> int:
        """Return what is declared for it on the device, in MiB."""
        models = [model for model in self.daemon.models() if model.name.endswith(f"/{self.model}")]
        return sum(model.books[0].declared_bytes for model in models) // MIB

    def status(self) -> Any:
        """Return what the broker knows of its sleep."""
        with open_admin(str(self.daemon.admin)) as admin:
            (model,) = [one for one in admin.models() if one.name.endswith(f"/{self.model}")]
        return model.guests[0] if model.guests else SleepStatus("")

    def sleeps(self) -> None:
        """Have an operator put it to sleep."""
        assert cli.main(["sleep", self.model, "--endpoint", str(self.daemon.admin)]) == 0
        assert self.declared() == 0

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


def held(pid: int) -> int:
    """Return what a program holds, in MiB."""
    return StandInSuspender().usage([pid]).get(pid, 0) // MIB


# --- turns ---


def test_two_programs_that_do_not_fit_take_turns() -> None:
    with guests() as daemon, Guest(daemon, "one") as one:
        first = one.ready()
        with Guest(daemon, "two") as two:
            second = two.ready()
            for _ in range(2):
                one.is_right()
                two.is_right()
            assert 0 in (held(first), held(second))
            assert daemon.books().lent_bytes <= 64 * MIB
            assert (one.end(), two.end()) == (7, 7)


def test_a_killed_daemon_changes_nothing_for_them() -> None:
    with guests() as daemon, Guest(daemon, "one") as one:
        one.ready()
        with Guest(daemon, "two") as two:
            two.ready()
            daemon.kill()
            daemon.start_again()
            for _ in range(2):
                one.is_right()
                two.is_right()
            assert (one.end(), two.end()) == (7, 7)


def test_all_processes_of_a_program_sleep_also_one_that_its_parent_has_left() -> None:
    both = f"{sys.executable} {PROGRAM} 10 0 </dev/null & (sleep 1000 & exec {sys.executable} {PROGRAM} 10 0) & wait"
    script = both.replace("</dev/null", "<&3").replace("10 0) &", "10 0 <&3) &")
    with guests() as daemon, Guest(daemon, "one", program=["/bin/sh", "-c", f"exec 3<&0; {script}"]) as one:
        pids = [one.ready(), one.ready()]
        assert [held(pid) for pid in pids] == [10, 10]
        one.sleeps()
        assert [held(pid) for pid in pids] == [0, 0]
        assert cli.main(["wake", "one", "--endpoint", str(daemon.admin)]) == 0
        assert [held(pid) for pid in pids] == [10, 10]


# --- the start and the end ---


def test_a_program_that_finds_no_room_in_time_is_not_started() -> None:
    with guests(slice_seconds=600.0) as daemon, Guest(daemon, "one") as one:
        one.ready()
        with Guest(daemon, "two", "--timeout", "0.2") as two:
            assert two.process.wait(DEADLINE_SECONDS) == 1
            assert two.hears() == ""
            assert "the program was not started: the broker" in two.said.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_command_ends_as_its_program_ends(number: signal.Signals) -> None:
    """A signal for the command is one for the program. Nobody can hand on SIGKILL: here the program gets it."""
    with guests() as daemon, Guest(daemon, "one") as one:
        pid = one.ready()
        os.kill(pid if number == signal.SIGKILL else one.process.pid, number)
        assert one.process.wait(DEADLINE_SECONDS) == -number


def test_a_program_that_ignores_sigterm_runs_on() -> None:
    ignoring = f"import signal, runpy, sys; signal.signal(15, signal.SIG_IGN); sys.argv[:] = [{PROGRAM!r}, '8', '0']"
    program = [sys.executable, "-c", f"{ignoring}; runpy.run_path({PROGRAM!r})"]
    with guests() as daemon, Guest(daemon, "one", program=program) as one:
        one.ready()
        one.process.send_signal(signal.SIGTERM)
        one.is_right()
        assert one.end() == 7


@pytest.mark.parametrize("asleep", [False, True])
def test_a_killed_command_leaves_no_program_behind(asleep: bool) -> None:
    with guests() as daemon, Guest(daemon, "one") as one:
        pid = one.ready()
        if asleep:
            one.sleeps()
        one.process.kill()
        until(lambda: is_gone(pid))


def test_a_program_that_is_killed_asleep_ends_its_command() -> None:
    with guests() as daemon, Guest(daemon, "one") as one:
        pid = one.ready()
        one.sleeps()
        os.kill(pid, signal.SIGKILL)
        assert one.process.wait(DEADLINE_SECONDS) == -signal.SIGKILL


def test_a_program_that_does_not_exist_has_the_shells_status() -> None:
    with guests() as daemon, Guest(daemon, "one", program=["/no/such/program"]) as one:
        assert one.process.wait(DEADLINE_SECONDS) == 127
        assert "cannot start '/no/such/program'" in one.said.read_text()


# --- memory ---


def test_one_that_uses_more_sleeps_until_the_broker_lends_it() -> None:
    with guests(slice_seconds=600.0) as daemon, Guest(daemon, "one") as one:
        one.ready()
        with Guest(daemon, "two", "--memory", "8MiB") as two:  # it uses 40
            until(lambda: "it sleeps, because it uses 40.0 MiB" in two.said.read_text())
            assert two.declared() == 0
            assert one.end() == 7
            two.ready()
            until(lambda: two.declared() == SIZE)
            assert two.end() == 7


def test_one_that_uses_more_is_killed_if_so_ordered() -> None:
    with guests(slice_seconds=600.0) as daemon, Guest(daemon, "one") as one:
        one.ready()
        with Guest(daemon, "two", "--memory", "8MiB", "--on-excess", "kill") as two:
            assert two.process.wait(DEADLINE_SECONDS) == -signal.SIGTERM
            assert "the program is ended: it uses 40.0 MiB, and the broker lends it 8.0 MiB" in two.said.read_text()


def test_auto_is_what_it_used_the_last_time() -> None:
    with guests() as daemon:
        for declared in (0, SIZE):
            with Guest(daemon, "one", "--memory", "auto") as one:
                one.ready()
                until(lambda: one.declared() == SIZE)
                assert one.end() == 7
            (seen,) = (daemon.root / "state-of-user" / "membroker" / "guests").iterdir()
            assert int(seen.read_text()) == SIZE * MIB, declared


def test_one_that_must_not_sleep_is_charged_and_never_asked() -> None:
    with guests() as daemon, Guest(daemon, "one", "--no-sleep") as one:
        one.ready()
        with Guest(daemon, "two", "--timeout", "1") as two:
            assert two.process.wait(DEADLINE_SECONDS) == 1
        assert cli.main(["sleep", "one", "--endpoint", str(daemon.admin)]) == 1
        assert one.end() == 7


def test_a_program_that_uses_membroker_itself_is_never_suspended(capfd: pytest.CaptureFixture[str]) -> None:
    """CUDA's driver kills such a process."""
    with guests() as daemon:
        code = f"import membroker, runpy, sys; client = membroker.connect({str(daemon.endpoint())!r}); client.close()"
        code = f"{code}; client = membroker.connect({str(daemon.endpoint())!r}); sys.argv[:] = [{PROGRAM!r}, '40', '0']"
        program = [sys.executable, "-c", f"{code}; runpy.run_path({PROGRAM!r})"]
        with Guest(daemon, "one", program=program) as one:
            pid = one.ready()
            assert cli.main(["sleep", "one", "--timeout", "2", "--endpoint", str(daemon.admin)]) == 1
            assert f"process {pid} has used memory of a broker" in one.said.read_text()
            assert held(pid) == SIZE
            one.is_right()
            assert one.end() == 7


# --- the door ---


def test_a_connection_wakes_it_and_waits() -> None:
    door, port = reserved_port(), reserved_port()
    with guests() as daemon, Guest(daemon, "one", "--door", f"{door}:{port}", port=port) as one:
        pid = one.ready()
        one.sleeps()
        assert held(pid) == 0
        with socket.create_connection(("127.0.0.1", door)) as connection, connection.makefile("rw") as lines:
            answers = []
            for _ in range(2):
                lines.write("sum\n")
                lines.flush()
                answers.append(lines.readline())
        assert len(set(answers)) == 1
        assert len(answers[0]) == 65
        assert held(pid) == SIZE
        assert one.end() == 7


def test_it_sleeps_when_nobody_has_come_for_a_while() -> None:
    door, port = reserved_port(), reserved_port()
    options = ("--door", f"{door}:{port}", "--sleep-after", "0.5")
    with guests() as daemon, Guest(daemon, "one", *options, port=port) as one:
        pid = one.ready()
        until(lambda: held(pid) == 0)
        with socket.create_connection(("127.0.0.1", door)) as connection, connection.makefile("rw") as lines:
            lines.write("sum\n")
            lines.flush()
            assert len(lines.readline()) == 65
        until(lambda: held(pid) == 0)
        assert "because it had no connection for" in one.said.read_text()


def test_a_door_that_is_taken_is_said_before_anything_starts() -> None:
    with guests() as daemon, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with Guest(daemon, "one", "--door", f"{port}:{reserved_port()}") as one:
            assert one.process.wait(DEADLINE_SECONDS) == 1
            assert f"the door cannot listen at 127.0.0.1:{port}" in one.said.read_text()


def test_it_sleeps_for_others_when_it_is_idle_as_engines_do() -> None:
    """`idle_sleep_seconds`: the broker asks by itself, and does not let it sleep while somebody is there."""
    door, port = reserved_port(), reserved_port()
    config = {"idle_sleep_seconds": 0.5, "idle_sleep": "always"}
    with guests(**config) as daemon, Guest(daemon, "one", "--door", f"{door}:{port}", port=port) as one:
        pid = one.ready()
        until(lambda: held(pid) == 0)
        until(lambda: daemon.models()[0].asleep_by_itself)
        with Guest(daemon, "two") as two:  # it has no door, so it always wants to run
            two.ready()
            two.is_right()
            assert two.end() == 7


def test_the_image_is_charged_where_the_broker_lends_host_memory() -> None:
    def host(daemon: Daemon) -> int:
        (model,) = daemon.models()
        return sum(books.declared_bytes for books in model.books if books.location == resources_pb2.LOCATION_HOST)

    with guests(host_capacity=64 * MIB) as daemon, Guest(daemon, "one") as one:
        one.ready()
        one.sleeps()
        assert host(daemon) == SIZE * MIB
        assert cli.main(["wake", "one", "--endpoint", str(daemon.admin)]) == 0
        until(lambda: host(daemon) == 0)
        assert one.end() == 7


# --- what operators see ---


def test_an_operator_sees_why_it_sleeps_and_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with guests() as daemon, Guest(daemon, "one") as one:
        one.ready()
        assert cli.main(["sleep", "one", "--json", "--endpoint", str(daemon.admin)]) == 0
        (answer,) = json.loads(capsys.readouterr().out)
        assert answer["status"]["state"] == "asleep"
        assert answer["status"]["weight_bytes"] == SIZE * MIB
        assert "because an operator has asked for it" in answer["status"]["detail"]
        assert (answer["status"]["cause"], answer["status"]["needed_bytes"]) == ("operator", SIZE * MIB)
        (session,) = [each for each in daemon.sessions() if "run --guest" in each.client]
        assert session.client.startswith("membroker run --guest: python")


def shown(daemon: Daemon, capsys: pytest.CaptureFixture[str], *command: str) -> str:
    assert cli.main([*command, "--endpoint", str(daemon.admin)]) == 0
    return capsys.readouterr().out


def test_all_commands_and_the_metrics_know_guests(capsys: pytest.CaptureFixture[str]) -> None:
    with guests() as daemon, Guest(daemon, "one") as one:
        one.ready()
        until(lambda: shown(daemon, capsys, "status").count("1, 0 asleep") == 1)
        assert "(asleep)" not in shown(daemon, capsys, "models")
        for cause in ("recall", "operator"):
            if cause == "recall":
                with Guest(daemon, "two") as two:
                    two.ready()
                    until(lambda: one.status().cause == "recall")
                    assert two.end() == 7
                until(lambda: one.status().state == "awake")
            else:
                one.sleeps()
                until(lambda: one.status().state == "asleep")
        assert "2, 1 asleep" not in shown(daemon, capsys, "status")
        assert "1, 1 asleep" in shown(daemon, capsys, "status")
        assert "one (asleep)" in shown(daemon, capsys, "models")
        for command in ("models", "explain"):
            said = shown(daemon, capsys, command, "one")
            assert "asleep since" in said
            assert "by command; it needs 40.0 MiB to wake; its image takes 40.0 MiB of host memory" in said
            assert "the last sleep took" in said
            assert "the last wake took" in said
        (model,) = json.loads(shown(daemon, capsys, "models", "one", "--json"))
        (row,) = model["guests"]
        assert (row["state"], row["cause"], row["needed_bytes"]) == ("asleep", "operator", SIZE * MIB)
        labels = 'gpu_uuid="host",model="one"'
        metrics = daemon.metrics()
        assert f'membroker_model_guest_sessions{{cause="operator",{labels},state="asleep",tenant="red"}} 1.0' in metrics
        assert f'membroker_model_guest_image_bytes{{{labels},tenant="red"}} {floatToGoString(SIZE * MIB)}' in metrics
        assert f'membroker_model_guest_needed_bytes{{{labels},tenant="red"}} {floatToGoString(SIZE * MIB)}' in metrics
        assert f'membroker_model_guest_step_seconds{{{labels},step="wake",tenant="red"}}' in metrics
        daemon.kill()
        daemon.start_again()
        until(lambda: one.status().cause == "operator")
        assert one.end() == 7


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "--guest needs --model and --memory"),
        (["--model", "m", "--memory", "1GiB", "--limit", "1GiB"], "--limit is for programs that use membroker"),
        (["--model", "m", "--memory", "1GiB", "--sleep-after", "3"], "--sleep-after counts from the last connection"),
        (["--model", "m", "--memory", "1GiB", "--door", "80"], "does not name two ports"),
    ],
)
def test_what_makes_no_sense_is_refused(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--guest", *options, "--", "true"])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_an_option_of_a_guest_alone_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--door", "1:2", "--", "true"])
    assert "--door is for a guest: give --guest, too" in capsys.readouterr().err


# --- what a stranger would try ---


def waits(daemon: Daemon) -> bool:
    return any(books.waiting_bytes for model in daemon.models() for books in model.books)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_process_that_a_program_leaves_behind_at_its_very_end_is_ended() -> None:
    """It has a session of its own, and was begun since the last look."""
    with guests() as daemon:
        script = "read line; setsid sleep 1000 & echo ready $!; exit 3"
        with Guest(daemon, "one", program=["/bin/sh", "-c", script]) as one:
            one.ask()
            assert one.process.wait(DEADLINE_SECONDS) == 3
            assert is_gone(one.ready())


def test_one_whose_warden_is_killed_wakes_and_stays_awake() -> None:
    with guests() as daemon, Guest(daemon, "one") as one:
        pid = one.ready()
        one.sleeps()
        wardens = [each for each in children(one.process.pid) if each != pid]
        os.kill(wardens[0], signal.SIGKILL)
        until(lambda: held(pid) == SIZE)
        assert "it does not sleep any more: the process was killed that would end the program" in one.said.read_text()
        assert cli.main(["sleep", "one", "--timeout", "1", "--endpoint", str(daemon.admin)]) == 1
        assert one.end() == 7


def test_a_job_that_a_shell_stops_is_stopped_as_a_whole_and_goes_on() -> None:
    with guests() as daemon, Guest(daemon, "one", is_job=True) as one:
        pid = one.ready()
        one.process.send_signal(signal.SIGTSTP)
        until(lambda: state_of(pid) == "T" == state_of(one.process.pid))
        one.process.send_signal(signal.SIGCONT)
        one.is_right()
        one.sleeps()
        assert held(pid) == 0
        assert cli.main(["wake", "one", "--endpoint", str(daemon.admin)]) == 0
        assert one.end() == 7


def test_a_stopped_program_is_not_suspended_and_goes_on() -> None:
    with guests() as daemon, Guest(daemon, "one") as one:
        pid = one.ready()
        os.kill(pid, signal.SIGSTOP)
        assert cli.main(["sleep", "one", "--timeout", "2", "--endpoint", str(daemon.admin)]) == 1
        os.kill(pid, signal.SIGCONT)
        one.is_right()
        assert held(pid) == SIZE
        assert one.end() == 7


@pytest.mark.parametrize("asleep", [False, True])
def test_one_whose_session_an_operator_has_forgotten_begins_a_new_one(asleep: bool) -> None:
    door, port = reserved_port(), reserved_port()
    with guests() as daemon, Guest(daemon, "one", "--door", f"{door}:{port}", port=port) as one:
        pid = one.ready()
        if asleep:
            one.sleeps()
        (session,) = daemon.sessions()
        one.process.send_signal(signal.SIGSTOP)
        daemon.kill()
        daemon.start_again()
        assert cli.main(["forget", session.name, "--endpoint", str(daemon.admin)]) == 0
        one.process.send_signal(signal.SIGCONT)
        until(lambda: [each.name for each in daemon.sessions() if each.name != session.name] != [])
        with socket.create_connection(("127.0.0.1", door)) as connection, connection.makefile("rw") as lines:
            lines.write("sum\n")
            lines.flush()
            assert len(lines.readline()) == 65
        until(lambda: (held(pid), one.declared()) == (SIZE, SIZE))
        one.sleeps()
        assert held(pid) == 0
        assert one.end() == 7


def test_one_whose_words_nobody_reads_falls_asleep_and_wakes() -> None:
    with guests() as daemon, Guest(daemon, "one", hears_errors=False) as one:
        pid = one.ready()
        for _ in range(2):
            one.sleeps()
            assert held(pid) == 0
            assert cli.main(["wake", "one", "--endpoint", str(daemon.admin)]) == 0
            assert held(pid) == SIZE
        assert one.end() == 7


def test_a_flood_at_the_door_takes_no_descriptor_that_the_guest_needs() -> None:
    door, port = reserved_port(), reserved_port()
    with guests() as daemon, Guest(daemon, "one", "--door", f"{door}:{port}", port=port) as one:
        resource.prlimit(one.process.pid, resource.RLIMIT_NOFILE, (160, 160))  # long before it opens its door
        pid = one.ready()
        with ExitStack() as clients:
            for _ in range(200):
                clients.enter_context(socket.create_connection(("127.0.0.1", door)))
            with Guest(daemon, "two") as two:  # the first one falls asleep amid the flood
                two.ready()
                assert held(pid) == 0
                assert two.end() == 7
        one.sleeps()
        assert held(pid) == 0
        with socket.create_connection(("127.0.0.1", door)) as connection, connection.makefile("rw") as lines:
            lines.write("sum\n")
            lines.flush()
            assert len(lines.readline()) == 65
        assert one.end() == 7


def test_one_that_waits_to_wake_asks_the_next_daemon() -> None:
    door, port = reserved_port(), reserved_port()
    with guests(slice_seconds=600.0) as daemon, Guest(daemon, "one", "--door", f"{door}:{port}", port=port) as one:
        pid = one.ready()
        one.sleeps()
        with Guest(daemon, "two") as two, socket.create_connection(("127.0.0.1", door)) as connection:
            two.ready()
            connection.sendall(b"sum\n")
            until(lambda: waits(daemon))
            daemon.kill()
            daemon.start_again()
            until(lambda: waits(daemon))
            assert held(pid) == 0
            assert two.end() == 7
            with connection.makefile("r") as lines:
                assert len(lines.readline()) == 65
        assert one.end() == 7
