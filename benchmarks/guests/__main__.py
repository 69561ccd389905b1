"""`python -m benchmarks.guests`: programs that know nothing of membroker, on a GPU that is too small for them.

`story`: an untouched `vllm serve`, four programs that make images and two that train are guests. A `vllm serve` over
membroker is their neighbor. Together they use twice the device. Callers come at random moments. Each answer is compared
with the answers of the same programs without membroker. `switches`: sixteen small guests, of which eight fit, wake one
another as often as they can. On a machine without a GPU, stand-ins take the place of all but vLLM, which is left out.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from membroker.arguments import bytes_of
from membroker.guest.door import is_listening
from membroker.vmm import Location, format_size, open_driver

from ..harness import command, machine
from ..harness.daemon import TENANT, Daemon, configuration, running
from ..harness.report import write_json
from ..harness.samples import quantile
from .demand import SEEDS, Ask, Demand, burst_at, completion_at, line_at, until_answered

GIB: Final = 1 << 30
CONTEXT: Final = GIB
"""What a program has on the GPU besides what it holds: a context, a module for each kernel, a library's workspace."""
END_SECONDS = 60.0
_SLEPT: Final = re.compile(
    r"it sleeps, because (?P<why>.*): (?P<size>[\d.]+) (?P<unit>\w+) after (?P<seconds>[\d.]+) s"
)
_WOKE: Final = re.compile(r"it is awake again after (?P<seconds>[\d.]+) s")
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


IMAGES: Final = ("images-1", "images-2", "images-3", "images-4")
TRAININGS: Final = ("training-1", "training-2")
SHARES: Final = {"server": 0.2, **dict.fromkeys(IMAGES + TRAININGS, 0.25), "neighbor": 0.42}
"""What each program holds, as parts of the device: together twice of it. The neighbor's is the most of its cache."""
SMALL: Final = 16
"""How many small guests there are. Half of them fit."""
HOST_CAPACITY: Final = 64 << 20
_reserved: list[socket.socket] = []


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit status."""
    parser = command.parser("benchmarks.guests", __doc__.splitlines()[0], outputs=["json"])
    parser.add_argument("scene", choices=("story", "switches"))
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--seconds", type=float, default=480.0, help="how long callers come")
    parser.add_argument("--slice-seconds", type=float, default=10.0)
    parser.add_argument(
        "--until", type=int, metavar="N", help="end when each program has answered, or any guests have woken, so often"
    )
    parser.add_argument("--plain-device", metavar="INDEX", help="run the programs without membroker there meanwhile")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep the programs' logs there")
    options = command.parse(parser, arguments)
    command.end_on_sigterm()
    facts = machine.facts()
    print(", ".join(f"{name} {value}" for name, value in facts.items()), file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="mb-guests-") as temporary:
        logs = options.logs or Path(temporary)
        logs.mkdir(parents=True, exist_ok=True)
        found = (_story if options.scene == "story" else _switches)(options, logs)
        if options.json is not None:
            write_json(options.json, facts=facts, **found)
    return int(bool(found["faults"]))


# --- programs ---


class Program:
    """One program in a process group of its own, with what it says in a file."""

    def __init__(self, name: str, words: Sequence[str], logs: Path, *, device: str | None = None) -> None:
        self.name, self.said, self.printed = name, logs / f"{name}.log", logs / f"{name}.out"
        environment = {**os.environ, **ENVIRONMENT, **({} if device is None else {"CUDA_VISIBLE_DEVICES": device})}
        with self.said.open("w") as said, self.printed.open("w") as printed:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=printed, stderr=said, env=environment, process_group=0
            )
        self.begun = time.monotonic()

    def is_alive(self) -> bool:
        """Say whether it still runs."""
        return self.process.poll() is None

    def lines(self) -> list[str]:
        """Return the whole lines that it has printed."""
        return [line for line in self.printed.read_text(errors="replace").splitlines(keepends=True) if line[-1] == "\n"]

    def terminate(self) -> None:
        """Ask it to end: a guest's command tells its program."""
        self.process.terminate()

    def close(self) -> None:
        """End it and all its processes."""
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Guest(Program):
    """A program that `membroker run --guest` has started."""

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        logs: Path,
        endpoint: Path,
        *,
        memory: int,
        ports: tuple[int, int] | None = None,
    ) -> None:
        door = [] if ports is None else ["--door", f"{ports[0]}:{ports[1]}"]
        asked = ["--endpoint", str(endpoint), "--model", name, "--memory", str(memory), *door]
        super().__init__(name, [*_membroker("run", "--guest", *asked), "--", *words], logs)

        self._door = ports[0] if ports else 0

    def until_open(self) -> None:
        """Wait until its door listens, if it has one: from then on no connection is refused."""
        while self._door and self.is_alive() and not is_listening(self._door):
            time.sleep(0.02)

    def sleeps(self) -> list[dict[str, Any]]:
        """Return each sleep: why, how large the image is, how long it took."""
        return [
            {
                "why": one["why"],
                "bytes": int(float(one["size"]) * bytes_of("unit", f"1 {one['unit']}")),
                "seconds": float(one["seconds"]),
            }
            for one in _SLEPT.finditer(self.said.read_text(errors="replace"))
        ]

    def wakes(self) -> list[float]:
        """Return how long each wake took, from the moment at which the broker had lent the memory."""
        return [float(one["seconds"]) for one in _WOKE.finditer(self.said.read_text(errors="replace"))]

    def other_words(self) -> list[str]:
        """Return what the command said besides: a refusal, a fault."""
        said = [line for line in self.said.read_text(errors="replace").splitlines() if line.startswith("membroker: ")]
        return [line for line in said if not _SLEPT.search(line) and not _WOKE.search(line) and " waits " not in line]


def _membroker(*words: str) -> list[str]:
    return [sys.executable, "-m", "membroker.cli.main", *words]


def _program(kind: str, device: str, size: int, port: int = 0) -> list[str]:
    size = size if device == "host" else max(0, size - CONTEXT)
    words = ["--device", device, "--bytes", str(size), "--port", str(port)]
    return [sys.executable, "-m", "benchmarks.guests.programs", kind, *words]


def _vllm(checkpoint: Path, port: int, *words: str) -> list[str]:
    begin = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    common = ["--served-model-name", "m", "--max-model-len", "4096", "--no-enable-prefix-caching"]
    return [*begin, str(checkpoint), "--host", "127.0.0.1", "--port", str(port), *common, *words]


def _port() -> int:
    """Return a port that only a program gets that is told it: it stays bound here, and nobody listens at it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers set it, too
    held.bind(("127.0.0.1", 0))
    _reserved.append(held)
    return int(held.getsockname()[1])


# --- without membroker ---


class Plain(threading.Thread):
    """Runs each program without membroker, with little memory: its answers, and how long its start takes."""

    def __init__(self, options: Any, checkpoint: Path | None, logs: Path) -> None:
        super().__init__(name="plain")
        self._options, self._checkpoint, self._logs = options, checkpoint, logs / "plain"
        self.expected: dict[str, dict[int, str]] = {}
        self.start_seconds: dict[str, float] = {}
        self.bus: dict[str, float] = {}
        self.lines: list[str] = []
        self.wanted_lines = threading.Event()
        """Set as soon as `lines_needed` is known."""
        self.lines_needed = 0
        self.failure = ""

    def run(self) -> None:
        """Do it all, and note a failure."""
        try:
            self._logs.mkdir(exist_ok=True)
            self._run()
        except Exception as error:  # noqa: BLE001 - what the guests did is worth having all the same
            self.failure = f"{type(error).__name__}: {error}"

    def _run(self) -> None:
        on, device = self._options.device, self._options.plain_device
        if on == "cuda":
            words = [sys.executable, "-m", "benchmarks.guests.programs", "bus"]
            environment = {**os.environ, **({} if device is None else {"CUDA_VISIBLE_DEVICES": device})}
            self.bus = json.loads(subprocess.run(words, env=environment, check=True, stdout=subprocess.PIPE).stdout)
        small, ports = 4 * GIB if on == "cuda" else 8 << 20, (_port(), _port())
        programs: dict[str, tuple[list[str], Ask]] = {
            "images": (_program("images", on, small, ports[0]), line_at(ports[0]))
        }
        if self._checkpoint is not None:
            words = _vllm(
                self._checkpoint, ports[1], "--kv-cache-memory-bytes", str(small), "--gpu-memory-utilization", "0.1"
            )
            programs["server"] = (words, completion_at(ports[1]))
        with ExitStack() as ending:
            training = Program("training", _program("training", on, small), self._logs, device=device)
            ending.callback(training.close)
            for name, (words, ask) in programs.items():
                program = Program(name, words, self._logs, device=device)
                ending.callback(program.close)
                until_answered(ask, program.is_alive)
                self.start_seconds[name] = time.monotonic() - program.begun
                self.expected[name] = {seed: ask(seed) for seed in range(SEEDS)}
            self.wanted_lines.wait()
            end = time.monotonic() + self._options.seconds
            while len(training.lines()) < self.lines_needed and training.is_alive() and time.monotonic() < end:
                time.sleep(0.1)
            self.lines = training.lines()


# --- the story ---


@contextmanager
def _daemon(options: Any, capacity: int) -> Iterator[Daemon]:
    keys = {"slice_seconds": options.slice_seconds, "recall_seconds": 120.0}
    with running(configuration(options.device, capacity=capacity, **keys)) as daemon:
        yield daemon


def _capacity(options: Any, host: int) -> tuple[int, int]:
    """Return what a broker lends, and what the device has."""
    if options.device == "host":
        return host, host
    with closing(open_driver("cuda")) as driver:
        memory = driver.memory(Location.DEVICE)
        assert memory is not None
        return (memory.free - 6 * GIB) // GIB * GIB, memory.total


def _story(options: Any, logs: Path) -> dict[str, Any]:
    capacity, total = _capacity(options, HOST_CAPACITY)
    has_vllm = options.device == "cuda"
    names = [name for name in SHARES if has_vllm or name not in ("server", "neighbor")]
    held = {name: int(SHARES[name] * total) >> 20 << 20 for name in names}
    checkpoint = None
    if has_vllm:
        checkpoint = logs / "checkpoint"
        words = [sys.executable, "-m", "benchmarks.guests.programs", "weights", "--to", str(checkpoint)]
        subprocess.run(words, check=True, stdout=sys.stderr)
    plain = Plain(options, checkpoint, logs)
    if options.plain_device is not None:
        plain.start()
    with _daemon(options, capacity) as daemon:
        found = _with_demand(options, held, checkpoint, daemon, logs)
    plain.lines_needed = max(map(len, found["lines"].values()))
    plain.wanted_lines.set()
    if not plain.ident:
        plain.start()
    plain.join()
    return _tell(found, plain, capacity, total)


def _with_demand(
    options: Any, held: Mapping[str, int], checkpoint: Path | None, daemon: Daemon, logs: Path
) -> dict[str, Any]:
    on, endpoint = options.device, daemon.endpoint(TENANT)
    guests: dict[str, Guest] = {}
    demands: dict[str, Demand] = {}
    programs: dict[str, Program] = {}
    stop = threading.Event()
    with ExitStack() as ending:

        def begin(program: Program) -> None:
            programs[program.name] = program
            ending.callback(program.close)
            if isinstance(program, Guest):
                guests[program.name] = program

        def guest(name: str, words: list[str], ports: tuple[int, int] | None = None) -> None:
            begin(Guest(name, words, logs, endpoint, memory=held[name], ports=ports))

        if checkpoint is not None:
            port = _port()
            kv = str(held["neighbor"])
            engine = _vllm(checkpoint, port, "--kv-cache-memory-bytes", kv, "--gpu-memory-utilization", "0.05")
            run = _membroker("run", "--endpoint", str(endpoint), "--model", "neighbor", "--engine", "vllm", "--")
            begin(Program("neighbor", [*run, *engine], logs))
            burst, is_alive = burst_at(port, 100), programs["neighbor"].is_alive

            def ask_neighbor(seed: int) -> str:
                until_answered(completion_at(port), is_alive)  # it has no door, so at first it refuses connections
                return burst(seed)

            demands["neighbor"] = Demand(ask_neighbor, 20.0)
            door, inner = _port(), _port()
            kv = str(held["server"] - 5 * GIB)
            words = _vllm(checkpoint, inner, "--kv-cache-memory-bytes", kv, "--gpu-memory-utilization", "0.1")
            guest("server", words, (door, inner))
            demands["server"] = Demand(completion_at(door), options.seconds / 24)
        for name in IMAGES:
            door, inner = _port(), _port()
            guest(name, _program("images", on, held[name], inner), (door, inner))
            demands[name] = Demand(line_at(door), options.seconds / 24)
        for name in TRAININGS:
            guest(name, _program("training", on, held[name]))
        callers = [
            threading.Thread(target=demand.run, args=(stop, number), daemon=True)
            for number, demand in enumerate(demands.values())
        ]
        for one in guests.values():
            one.until_open()
        for caller in callers:
            caller.start()
        most = 0
        end = time.monotonic() + options.seconds
        while time.monotonic() < end and all(program.is_alive() for program in programs.values()):
            most = max(most, daemon.device().locations[0].lent_bytes)
            if options.until and min(one.count for one in demands.values()) >= options.until:
                break
            time.sleep(0.5)
        ended = [name for name, program in programs.items() if not program.is_alive()]
        stop.set()
        lines = {name: programs[name].lines() for name in TRAININGS}
        seen = {
            name: {"sleeps": one.sleeps(), "wakes": one.wakes(), "said": one.other_words()}
            for name, one in guests.items()
        }
        for program in programs.values():
            program.terminate()
    return {
        "demands": demands,
        "lines": lines,
        "ended": ended,
        "most_lent": most,
        "held": held,
        "guests": seen,
    }


def _tell(found: Mapping[str, Any], plain: Plain, capacity: int, total: int) -> dict[str, Any]:
    """Print what was seen, and return it."""
    faults = [f"{name} ended" for name in found["ended"]]
    if plain.failure:
        faults.append(f"without membroker: {plain.failure}")
    held: Mapping[str, int] = found["held"]
    print(
        f"{format_size(sum(held.values()))} on a device of {format_size(total)}, of which {format_size(capacity)} are "
        f"lent; at most {format_size(found['most_lent'])} were lent"
    )
    if plain.bus:
        print("the bus: " + ", ".join(f"{format_size(int(rate))} a second {name}" for name, rate in plain.bus.items()))
    rows: dict[str, Any] = {}
    for name, one in found["guests"].items():
        wakes, sleeps = one["wakes"], one["sleeps"]
        rate = [each["seconds"] / each["bytes"] * GIB for each in sleeps if each["bytes"]]
        start = plain.start_seconds.get("images" if name in IMAGES else name)
        rows[name] = {**one, "start_seconds": start}
        print(
            f"{name}: asleep {len(sleeps)} times, {quantile(rate, 0.5):.2f} s a GiB; awake again {len(wakes)} times, "
            f"p50 {quantile(wakes, 0.5):.2f} s, p99 {quantile(wakes, 0.99):.2f} s"
            + (f"; its start alone takes {start:.1f} s" if start is not None else "")
        )
        faults += [f"{name} said: {text}" for text in one["said"]]
    for name, demand in found["demands"].items():
        expected = plain.expected.get("images" if name in IMAGES else "server")
        wrong = demand.wrong(expected) if expected else None
        rows.setdefault(name, {}).update(seconds=demand.seconds, failures=demand.failures, wrong=wrong)
        print(
            f"{name}: {len(demand.seconds)} answers after the first, {wrong} wrong, {len(demand.failures)} failed; p50 "
            f"{quantile(demand.seconds, 0.5):.2f} s, p99 {quantile(demand.seconds, 0.99):.2f} s"
        )
        faults += [f"{name}: {text}" for text in demand.failures] + ([f"{name}: {wrong} wrong"] if wrong else [])
    for name, lines in found["lines"].items():
        wanted = plain.lines[: len(lines)]
        print(f"{name}: {len(lines)} lines, {sum(map(str.__ne__, lines, wanted))} wrong of {len(wanted)} compared")
        if lines[: len(wanted)] != wanted or not wanted:
            faults.append(f"{name}: its lines differ")
    for fault in faults:
        print(f"FAULT: {fault}")
    return {"capacity": capacity, "total": total, "held": held, "bus": plain.bus, "programs": rows, "faults": faults}


# --- switches of small guests ---


def _switches(options: Any, logs: Path) -> dict[str, Any]:
    """Let small guests wake one another."""
    each = GIB if options.device == "cuda" else 8 << 20
    held = each if options.device == "host" else each + (64 << 20)
    stop, guests, demands = threading.Event(), list[Guest](), list[Demand]()
    with ExitStack() as ending:
        daemon = ending.enter_context(_daemon(options, SMALL // 2 * each))
        for number in range(SMALL):
            door, inner = _port(), _port()
            words = _program("images", options.device, held, inner)
            guests.append(Guest(f"g{number}", words, logs, daemon.endpoint(TENANT), memory=each, ports=(door, inner)))
            ending.callback(guests[-1].close)
            demands.append(Demand(line_at(door), 0.0))
        callers = [
            threading.Thread(target=demand.run, args=(stop, number), daemon=True)
            for number, demand in enumerate(demands)
        ]
        for guest in guests:
            guest.until_open()
        for caller in callers:
            caller.start()
        begun = time.monotonic()
        while time.monotonic() < begun + options.seconds and all(guest.is_alive() for guest in guests):
            if options.until and sum(len(guest.wakes()) for guest in guests) >= options.until:
                break
            time.sleep(0.5)
        seconds = time.monotonic() - begun
        ended = [guest.name for guest in guests if not guest.is_alive()]
        said = [f"{guest.name} said: {text}" for guest in guests for text in guest.other_words()]
        stop.set()
        for guest in guests:
            guest.terminate()
    wakes = [one for guest in guests for one in guest.wakes()]
    sleeps = [one["seconds"] for guest in guests for one in guest.sleeps()]
    answers = {answer for demand in demands for some in demand.answers.values() for answer in some}
    faults = [f"{name} ended" for name in ended] + [text for demand in demands for text in demand.failures]
    faults += said
    if len(answers) != len({seed for demand in demands for seed in demand.answers}):
        faults.append("an answer differs")
    spread = [f"p50 {quantile(some, 0.5):.2f} s, p99 {quantile(some, 0.99):.2f} s" for some in (sleeps, wakes)]
    print(
        f"{len(wakes)} switches in {seconds:.0f} s, {sum(len(one.seconds) for one in demands)} answers; "
        f"asleep after {spread[0]}; awake after {spread[1]}"
    )
    for fault in faults:
        print(f"FAULT: {fault}")
    return {"seconds": seconds, "wakes": wakes, "sleeps": sleeps, "faults": faults}


if __name__ == "__main__":
    sys.exit(main())
