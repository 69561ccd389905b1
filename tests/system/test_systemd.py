"""The daemon under a real systemd, by the unit that an installation gets: however it ends, its workers go on.

Each worker computes in its memory and calls the broker all the while. Neither may fail; a call may take longer, and how
long is stated.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.sizes import MIB
from tests.support.systemd_machine import PREFIX, UNIT, Machine, booted, machine_or_skip
from tests.support.workers import ANCHOR_BYTES, PAGE, Worker, children

# The first test on a machine makes a Debian.
pytestmark = [pytest.mark.root, pytest.mark.timeout(1_000)]

ALICE, BOB = 1_001, 1_002
CONFIGURED: Mapping[str, Any] = {"driver": "host", "capacity": "256MiB"}
TENANTS: Mapping[str, Any] = {"red": {"owner": ALICE}, "blue": {"owner": BOB}}
PRESERVES = 254
"""The first systemd that says how many descriptors it keeps, and that keeps them over stop and start."""
FDSTORE_MAX = 8_192
"""What the unit sets."""
ROUNDS = 2
"""Each end comes twice: what a daemon has taken over must outlive that daemon too."""
ENOUGH_CALLS = 20
ENOUGH_ROUNDS = 3
WATCHDOG_SECONDS = 2


@pytest.fixture(scope="session")
def debian() -> Path:
    return machine_or_skip()


@pytest.fixture
def machine(debian: Path) -> Iterator[Machine]:
    """A machine whose daemon is enabled and runs."""
    with booted(debian) as one:
        # As the annotated one has it: an older systemd does not say how many descriptors it keeps.
        kept = {} if one.version >= PRESERVES else {"systemd_descriptors": FDSTORE_MAX}
        one.configure({**CONFIGURED, **kept, "tenants": TENANTS})
        one.run("systemctl", "enable", "--quiet", "--now", UNIT)
        yield one
        one.run("systemctl", "stop", UNIT)
        for wrong in ("Traceback", "a fault of the broker", "some descriptors of a segment are missing"):
            assert wrong not in one.log(), one.log()


class Inside(Worker):
    """A worker in a machine, as one of its users, in none of its units."""

    def __init__(self, machine: Machine, user: int) -> None:
        super().__init__(command=machine.command([f"/{PREFIX}/bin/python", "-m", "tests.support.workers"], user))

    def borrow(self, tenant: str, transport: str = "handoff") -> Inside:
        self.do("from tests.support.busy_threads import Calling, Computing, pattern")
        self.do(f"client = membroker.connect('/run/membroker/host/tenants/{tenant}', transport={transport!r})")
        self.do("model = client.model('m')")
        return self

    def kill(self) -> None:
        """Send SIGKILL to the worker itself; the command that has brought it in ends with it."""
        for child in children(self.pid):
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        self.process.wait(DEADLINE_SECONDS)


class Operator(Inside):
    """Root in a machine, for commands; one process for all, because Python takes its time to start."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine, 0)
        self.do(_COMMAND)

    def tell(self, *command: str) -> Any:
        return self.ask(f"command({command!r})")

    def device(self) -> Any:
        return self.tell("status")["locations"]["device"]


_COMMAND = """
import contextlib, io, json
from membroker.cli.main import main
def command(words):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([*words, "--json"]) == 0
    return json.loads(said.getvalue())
"""


class Scene:
    """Three workers of two tenants at work: a writer of segments, a reader of one of them, and a stranger."""

    HELD: Mapping[str, int] = {"writer": 4 * PAGE, "reader": 2 * PAGE, "stranger": 3 * PAGE}
    WEIGHTS, SHELF = 2 * PAGE, PAGE

    def __init__(self, machine: Machine, stack: ExitStack) -> None:
        self.machine = machine
        self.stack = stack
        self.operator = stack.enter_context(closing(Operator(machine)))
        self.writer = self.enter(ALICE).borrow("red")
        reader, stranger = self.enter(ALICE).borrow("red", "grpc"), self.enter(BOB).borrow("blue")
        self.workers = {"writer": self.writer, "reader": reader, "stranger": stranger}
        for name, size in (("weights", self.WEIGHTS), ("shelf", self.SHELF)):
            self.writer.do(f"{name} = model.create_segment('{name}', {size})")
            self.writer.do(f"{name}.write(0, pattern('{name}', {size})); {name}.seal()")
        self.writer.do("shelf.close()")
        reader.do("weights = client.attach('m/weights')")
        for name, one in self.workers.items():
            one.do(f"kept = [model.allocate(PAGE) for _ in range({self.HELD[name] // PAGE})]")
            sealed = "" if one is stranger else f"weights: pattern('weights', {self.WEIGHTS})"
            one.do(f"computing = Computing(kept, {{{sealed}}})")

    def enter(self, user: int) -> Inside:
        """Return a process that ends with the scene."""
        return self.stack.enter_context(closing(Inside(self.machine, user)))

    def call(self) -> None:
        """Let each worker call the broker all the while, from now on."""
        for one in self.workers.values():
            one.do("calling = Calling(model, PAGE)")
        self.until_calls_succeed()

    def until_calls_succeed(self) -> None:
        """Wait until each has called, and computed, some times more."""
        wanted = {
            (one, work): one.ask(f"{work}.lives()") + more
            for one in self.workers.values()
            for work, more in (("calling", ENOUGH_CALLS), ("computing", ENOUGH_ROUNDS))
        }
        until(lambda: all(one.ask(f"{work}.lives()") >= steps for (one, work), steps in wanted.items()))

    def longest_calls(self) -> str:
        """Return how long the longest call of each has taken."""
        longest = {name: one.ask("calling.longest") for name, one in self.workers.items()}
        return ", ".join(f"{name} {seconds * 1e3:,.0f} ms" for name, seconds in longest.items())

    def end_calls(self) -> None:
        """Let nobody call any more: the books stand still."""
        for one in self.workers.values():
            one.do("calling.end()")

    def attach_what_nobody_holds(self) -> None:
        """The daemon alone keeps that segment: a process that comes now finds in it what was sealed."""
        comer = self.enter(ALICE).borrow("red")
        for name, size in (("shelf", self.SHELF), ("weights", self.WEIGHTS)):
            assert comer.ask(f"client.attach('m/{name}').read(0, {size}) == pattern('{name}', {size})")
        comer.do("client.close()")
        assert comer.finish() == 0

    def check_books(self) -> None:
        """The books, as an operator reads them, are what the workers hold, and the device shows no byte more."""
        tell = self.operator.tell
        lent = {name: one.ask("sum(buffer.size for buffer in kept)") for name, one in self.workers.items()}
        assert lent == self.HELD
        segments = self.WEIGHTS + self.SHELF
        until(lambda: self.operator.device()["device_used_bytes"] == sum(lent.values()) + segments + ANCHOR_BYTES)
        until(lambda: self.operator.device()["unaccounted_bytes"] == 0)
        books = self.operator.device()
        assert (books["lent_bytes"], books["releasing_bytes"]) == (sum(lent.values()) + segments, 0)
        assert tell("status")["detached_sessions"] == 0
        held = {row["name"].rpartition("/")[2]: (row["state"], row["sessions"]) for row in tell("segments")}
        assert held == {"weights": ("sealed", 2), "shelf": ("sealed", 0)}
        used = {row["name"]: row["books"]["device"]["used_bytes"] for row in tell("models")}
        assert used["tenants/red/models/m"] == lent["writer"] + lent["reader"] + segments
        assert used["tenants/blue/models/m"] == lent["stranger"]

    def give_back(self) -> None:
        """Everything that was borrowed can be released, and then no process keeps any of it."""
        for one in self.workers.values():
            one.do("computing.end()")
            one.do("while kept: kept.pop().close()")
        self.writer.do("client.delete_segment('m/weights'); client.delete_segment('m/shelf')")
        for one in self.workers.values():
            one.do("client.close()")

        until(lambda: self.operator.device()["lent_bytes"] + self.operator.device()["releasing_bytes"] == 0)
        until(lambda: self.operator.device()["device_used_bytes"] == ANCHOR_BYTES)


def kept_by_systemd(machine: Machine) -> int:
    return int(machine.show("NFileDescriptorStore")[0])


# --- Ends of a daemon ---


def kill(machine: Machine) -> None:
    """It is killed, as the kernel does for want of memory."""
    machine.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", UNIT)


def restart(machine: Machine) -> None:
    machine.run("systemctl", "restart", UNIT)


def stop_and_start(machine: Machine) -> None:
    """For a while there is no daemon at all."""
    if machine.version < PRESERVES:
        pytest.skip(f"systemd {machine.version} keeps no descriptors of a service that is stopped; {PRESERVES} does")
    machine.run("systemctl", "stop", UNIT)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", UNIT)


def hang(machine: Machine) -> None:
    """It stands still, and nobody but the watchdog notices."""
    machine.run("systemctl", "kill", "--kill-whom=main", "--signal=STOP", UNIT)


def upgrade(machine: Machine) -> None:
    """Another build stands beside the first, and the unit leads to that one; where it does already, back again."""
    other = machine.path("/opt/next")
    upgraded = not other.is_dir()
    if upgraded:
        other.mkdir()
        machine.run("sh", "-c", f"cp -a /{PREFIX}/lib/python3.*/site-packages/membroker* /opt/next")
        (other / "membrokerd/__init__.py").write_text('__version__ = "next"\n')
    machine.override("Environment=PYTHONPATH=/opt/next" if upgraded else "")
    restart(machine)
    told = json.loads(machine.run("membroker", "status", "--json"))
    assert (told["version"] == "next") == upgraded


def systemd_too(machine: Machine) -> None:
    """systemd itself is started again, as in an upgrade, and then the daemon dies."""
    machine.run("systemctl", "daemon-reexec")
    kill(machine)


@pytest.mark.parametrize("end", [kill, restart, stop_and_start, hang, upgrade, systemd_too])
def test_workers_notice_nothing_but_a_call_that_took_longer(
    machine: Machine, end: Callable[[Machine], None], state: Callable[[str, str], None]
) -> None:
    """Each byte stays what it was, and the books go on where they stood; at the end all can be released."""
    if end is hang:
        machine.override(f"WatchdogSec={WATCHDOG_SECONDS}s")
        restart(machine)
    idle = kept_by_systemd(machine)
    with ExitStack() as stack:
        scene = Scene(machine, stack)
        for _ in range(ROUNDS):
            scene.call()
            otherwise = scene.longest_calls()
            before = machine.daemon()
            end(machine)
            until(lambda: machine.daemon() not in (0, before))  # noqa: B023 - it is over when the round is
            scene.until_calls_succeed()
            scene.end_calls()
            what = f"systemd {machine.version}, longest call over {end.__name__}"
            state(what, f"{scene.longest_calls()} (before: {otherwise})")
            scene.attach_what_nobody_holds()
            scene.check_books()
        scene.give_back()
    assert ("Watchdog timeout" in machine.log()) == (end is hang)
    # What is left of the store is what it began with: nothing of a session or a segment stays behind.
    until(lambda: kept_by_systemd(machine) == idle)


def test_systemctl_reload_changes_limits_of_the_running_daemon(machine: Machine) -> None:
    """The same process goes on. A limit by command outlives it, in the only place to which the unit lets it write."""
    with closing(Operator(machine)) as operator, closing(Inside(machine, ALICE)) as worker:
        operator.tell("quota", "set", "red/m", "--limit", "64MiB")
        machine.run("systemctl", "stop", UNIT)
        machine.run("rm", "-r", "/run/membroker")
        machine.run("systemctl", "start", UNIT)
        (row,) = operator.tell("quota", "list")
        assert (row["name"], row["limit_bytes"]) == ("tenants/red/models/m", 64 * MIB)
        operator.tell("quota", "set", "red/m", "--limit", "none")
        worker.borrow("red").do("kept = model.allocate(PAGE)")
        daemon = machine.daemon()

        def limits() -> dict[str, int | None]:
            return {row["name"]: row["books"]["device"]["limit_bytes"] for row in operator.tell("tenants")}

        machine.configure({**CONFIGURED, "tenants": {**TENANTS, "red": {"owner": ALICE, "limit": "64MiB"}, "new": {}}})
        machine.run("systemctl", "reload", UNIT)
        until(lambda: limits() == {"tenants/red": 64 * MIB, "tenants/blue": None, "tenants/new": None})
        machine.configure({**CONFIGURED, "tenants": {**TENANTS, "red": {"limt": "32MiB"}}})
        machine.run("sh", "-c", f"! systemctl reload {UNIT}")
        until(lambda: "tenants.red.limt: is not a known key; did you mean 'limit'?" in machine.log())
        assert limits()["tenants/red"] == 64 * MIB
        assert machine.daemon() == daemon
        worker.do("model.allocate(PAGE).close(); kept.close()")


@pytest.mark.parametrize("kind", ["User=alice", "DynamicUser=yes\nRuntimeDirectoryPreserve=no"])
def test_the_unit_of_another_user(machine: Machine, kind: str) -> None:
    """Its directories are those that systemd has made for it; a limit by command is kept, and a reload answers."""
    machine.run("systemctl", "stop", UNIT)
    machine.run("sh", "-c", f"id alice || useradd --uid {ALICE} alice; rm -rf /run/membroker /var/lib/membroker")
    open_to_all = {"red": {"mode": "0666"}, "blue": {"mode": "0666"}}
    machine.configure({**CONFIGURED, "tenants": open_to_all})
    machine.override(f"{kind}\nAmbientCapabilities=CAP_CHOWN CAP_FOWNER CAP_SYS_RESOURCE")
    machine.run("systemctl", "start", UNIT)
    with closing(Operator(machine)) as operator, closing(Inside(machine, BOB)) as worker:
        worker.borrow("red").do("model.allocate(PAGE).close()")
        operator.tell("quota", "set", "red/m", "--limit", "64MiB")
        assert "[tenants.red.models.m]" in machine.run("cat", "/var/lib/membroker/host/quotas.toml")
        machine.configure({**CONFIGURED, "tenants": {**open_to_all, "new": {}}})
        machine.run("systemctl", "reload", UNIT)
        assert "tenants/new" in [row["name"] for row in operator.tell("tenants")]
        worker.do("client.close()")
    assert machine.run("stat", "-c", "%U", f"/proc/{machine.daemon()}").strip() != "root"
