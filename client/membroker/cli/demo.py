"""`membroker demo`: the main job on this machine in under a minute, with no GPU: sharing, trade, refusal, death.

Starts a real daemon on the host driver and real workers of two tenants, and checks all that it claims: what does not
hold ends it with status 1. It must never touch a daemon that it did not start.
"""

from __future__ import annotations

import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.live import Live
from rich.table import Table

from membroker.v1 import admin_pb2_grpc, broker_pb2
from membroker.vmm.sizes import MIB, format_size

CAPACITY = 256 * MIB
PAGE = 2 * MIB
WEIGHTS = 64 * MIB
START_SECONDS = 30.0
SOON_SECONDS = 5.0
STEPS = 60
SEED = 7

_CONFIG = """\
driver = "host"
capacity = "256MiB"
runtime_directory = "{directory}/run"
[metrics]
port = 0
[tenants.red]
[tenants.blue]
"""


class Disproved(Exception):
    """Something that the demo claims does not hold."""


def claim(holds: bool, what: str) -> None:
    """Go on only if it holds."""
    if not holds:
        raise Disproved(what)


def claim_soon(holds: Callable[[], bool], what: str, show: Callable[[], None] = lambda: None) -> None:
    """Go on as soon as it holds; the device's own figure is read now and then."""
    begun = time.monotonic()
    while not holds():
        claim(time.monotonic() - begun < SOON_SECONDS, what)
        show()


class Worker:
    """A worker process, told what to do by lines and answering by lines."""

    def __init__(self, endpoint: Path, model: str, virtual: str, limit: str = "") -> None:
        self.model = model
        self.process = subprocess.Popen(
            [sys.executable, "-m", "membroker.cli.demo_worker", model, virtual, limit],
            env={**os.environ, "MEMBROKER_ENDPOINT": str(endpoint)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self) -> dict[str, Any]:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        claim(bool(line), f"the worker of {self.model} ended")
        answer: dict[str, Any] = json.loads(line)
        claim("lost" not in answer, f"{self.model}: {answer.get('lost')}")
        return answer

    def tell(self, do: str, **more: Any) -> dict[str, Any]:
        """Give an order and return its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def close(self) -> None:
        """Let the worker end by itself, or end it."""
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Broker:
    """The demo's own daemon, asked at its admin endpoint."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / "run" / "host"
        config, self._log = directory / "membrokerd.toml", directory / "log"
        config.write_text(_CONFIG.format(directory=directory))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready, self._log.open("w") as log:
            ready.bind(str(directory / "notify"))
            self.process = subprocess.Popen(
                [sys.executable, "-m", "membrokerd.cli", "--config", str(config)],
                env={**os.environ, "NOTIFY_SOCKET": str(directory / "notify")},
                stderr=log,
            )
            self._wait(ready)
        self._channel = grpc.insecure_channel(f"unix:{self._root}/admin/grpc.sock")
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def _wait(self, ready: socket.socket) -> None:
        end = time.monotonic() + START_SECONDS
        while not select.select([ready], [], [], 0.05)[0]:
            if self.process.poll() is not None or time.monotonic() > end:
                raise Disproved(f"membrokerd did not start: {self._log.read_text()}")

    def endpoint(self, tenant: str) -> Path:
        """Return the directory through which a tenant enters."""
        return self._root / "tenants" / tenant

    def device(self) -> Any:
        """Return the device and its books."""
        return self._admin.GetDevice(broker_pb2.GetDeviceRequest())

    def memory(self) -> Any:
        """Return the books of the device's memory, and what the device shows of it."""
        return self.device().locations[0]

    def models(self) -> dict[str, Any]:
        """Return every model by its own name."""
        listed = self._admin.ListModels(broker_pb2.ListModelsRequest()).models
        return {row.name.rpartition("/")[2]: row for row in listed}

    def segments(self) -> list[Any]:
        """Return every segment."""
        return list(self._admin.ListSegments(broker_pb2.ListSegmentsRequest()).segments)

    def table(self) -> Table:
        """Return the books of the models as a table."""
        table = Table("tenant", "model", "used", "segments", "peak", "limit", "refusals")
        for name, row in self.models().items():
            books = row.books[0]
            limit = format_size(books.limit_bytes) if books.HasField("limit_bytes") else "-"
            sizes = [format_size(size) for size in (books.used_bytes, books.segment_bytes, books.peak_bytes)]
            table.add_row(row.name.split("/")[1], name, *sizes, limit, str(sum(row.denials_total.values())))
        return table

    def stop(self) -> int:
        """Ask the daemon to stop; return its exit status."""
        self._channel.close()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(10)

    def kill(self) -> None:
        """End the daemon whatever happened."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


class Stage:
    """Where the demo speaks, and shows the table: live on a terminal, once a scene elsewhere."""

    def __init__(self, broker: Broker) -> None:
        self.console = Console(highlight=False)
        self.broker = broker

    def say(self, text: str) -> None:
        """Narrate."""
        self.console.print(text)

    def show_moment(self) -> None:
        """Print the table where it cannot be live: a moment of a scene that its end does not show."""
        if not self.console.is_terminal:
            self.console.print(self.broker.table())

    @contextmanager
    def scene(self, title: str) -> Iterator[Callable[[], None]]:
        """Show the table while a scene runs; yields what to call for a fresh one."""
        self.console.print(f"\n[bold]{title}[/bold]")
        live = self.console.is_terminal
        with Live(self.broker.table(), console=self.console, auto_refresh=False, transient=not live) as display:
            yield lambda: display.update(self.broker.table(), refresh=live)
            display.update(self.broker.table(), refresh=live)
        if not live:
            self.console.print(self.broker.table())


def main() -> int:
    """Play the four scenes; returns 0 when everything held."""
    begun = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="membroker-demo-"))
    try:
        with ExitStack() as stack:
            broker = Broker(directory)
            stack.callback(broker.kill)
            with ExitStack() as workers:
                # They leave before it stops: afterwards they would wait for another one.
                proof = _play(broker, workers)
            claim(broker.stop() == 0, "the daemon did not stop cleanly")
    except (Disproved, grpc.RpcError, OSError) as error:
        print(f"\nthe demo failed: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"\n{proof} ({time.monotonic() - begun:.0f} s)")
    return 0


def _play(broker: Broker, stack: ExitStack) -> str:
    stage = Stage(broker)
    stage.say(
        f"One broker lends {format_size(CAPACITY)} of one device in pages of {format_size(PAGE)}. Two tenants, red and "
        "blue, enter by a directory each, and run one model each, in processes of their own. (The device is the host "
        "twin: real processes, real descriptors, no GPU.)"
    )
    red = Worker(broker.endpoint("red"), "chat", "64GiB")
    stack.callback(red.close)
    blue = Worker(broker.endpoint("blue"), "search", "64GiB", "192MiB")
    stack.callback(blue.close)
    second = Worker(broker.endpoint("red"), "chat", "64GiB")
    stack.callback(second.close)
    for worker in (red, blue, second):
        worker.hear()
    _sharing(stage, red, second)
    second.close()
    traded = _trade(stage, red, blue)
    _refusal(stage, red, blue)
    back = _death(stage, red, blue)
    _scrape(stage)
    return (
        f"Proved: {format_size(WEIGHTS)} of weights mapped by two workers and charged once, {format_size(traded)} of "
        f"peaks shared {format_size(CAPACITY)} without a byte lent twice, two refusals with their numbers, a SIGKILL "
        f"settled in {back:.0f} ms, and metrics that add up."
    )


# --- the scenes ---


def _sharing(stage: Stage, writer: Worker, reader: Worker) -> None:
    """Map the same weights in two workers of a model, charge them once, and get their bytes back."""
    with stage.scene("Sharing: weights are written once, mapped by all, charged once") as show:
        writer.tell("publish", size=WEIGHTS)
        reader.tell("attach")
        show()
        stage.show_moment()
        (segment,), chat = stage.broker.segments(), stage.broker.models()["chat"]
        claim((segment.size_bytes, segment.sessions) == (WEIGHTS, 2), "the two workers do not hold one segment")
        used = chat.books[0].used_bytes
        claim(used == WEIGHTS, f"weights of {format_size(WEIGHTS)} are charged {format_size(used)}")
        claim(stage.broker.memory().lent_bytes == WEIGHTS, "the weights are lent more than once")
        in_use = "the device holds the weights more than once"
        claim_soon(lambda: stage.broker.memory().device_used_bytes == WEIGHTS + PAGE, in_use)
        written = writer.tell("sum")["sum"]
        claim(reader.tell("sum")["sum"] == written, "the two workers read different weights")
        time.sleep(0.5)  # for the eye
        writer.tell("let go")
        claim(reader.tell("sum")["sum"] == written, "the weights went with their writer")
        stage.say(
            f"One worker of red wrote {format_size(WEIGHTS)} as a segment and sealed it, another attached it by name. "
            f"Mapped, that is {format_size(2 * WEIGHTS)}; charged, and in use on the device: {format_size(used)}. Both "
            f"find the tensor in it by name and sum it up to {written:08x}. It stays when its writer lets go; deleted, "
            "its bytes come back with its last reader."
        )
        reader.tell("delete")
        claim(reader.tell("sum")["sum"] == written, "a deleted segment went from under its reader")
        reader.tell("let go")
        claim_soon(lambda: not stage.broker.segments(), "a deleted segment's bytes did not come back")
    location = stage.broker.memory()
    claim(location.lent_bytes == 0 == location.releasing_bytes, "a deleted segment is still charged")
    claim_soon(lambda: stage.broker.memory().device_used_bytes == PAGE, "the device still holds a deleted segment")


def _trade(stage: Stage, red: Worker, blue: Worker) -> int:
    """Replay two bursts of requests, one after the other's peak; returns the sum of both peaks in bytes."""
    numbers = random.Random(SEED)
    with stage.scene("Trade: what one gives back, the other takes") as show:
        stage.say(
            "Each reserves 64 GiB of addresses. Requests come in bursts; each holds pages of the cache, writes a "
            "pattern into every page, and checks it before the page goes back."
        )
        running: dict[Worker, list[tuple[int, int]]] = {red: [], blue: []}
        for step in range(STEPS):
            for worker, phase in ((red, 0.0), (blue, 0.5)):
                _serve(worker, running[worker], _load(step / STEPS + phase), step, numbers)
            show()
            if step in (STEPS // 4, 3 * STEPS // 4):
                stage.show_moment()
            time.sleep(0.02)  # for the eye: so that a person can follow the table
        checked = sum(worker.tell("finish all")["checked"] for worker in (red, blue))
    books = [row.books[0] for row in stage.broker.models().values()]
    peaks: int = sum(one.peak_bytes for one in books)
    claim(peaks > CAPACITY, f"the peaks add up to {format_size(peaks)}, which proves no trade")
    claim(not any(one.used_bytes for one in books), "something was not given back")
    stage.say(f"{checked} pages were checked. Their peaks add up to {format_size(peaks)}, on {format_size(CAPACITY)}.")
    return peaks


def _load(moment: float) -> int:
    """Return how many pages a model wants: a burst in one half of the time, a trickle in the other."""
    position = moment % 1.0
    return round(10 + 160 * max(0.0, 0.5 - abs(position - 0.25) * 2))


def _serve(worker: Worker, running: list[tuple[int, int]], wanted: int, step: int, numbers: random.Random) -> None:
    """Let requests come and go until the worker holds about the pages that it wants."""
    request = step * 100
    while sum(pages for _, pages in running) + 8 <= wanted:
        request += 1
        pages = numbers.randint(1, 8)
        answer = worker.tell("admit", request=request, pages=pages)
        claim("refused" not in answer, f"{worker.model}: {answer.get('refused')}")
        running.append((request, pages))
    while sum(pages for _, pages in running) > wanted:
        finished, _ = running.pop(numbers.randrange(len(running)))
        worker.tell("finish", request=finished)


def _refusal(stage: Stage, red: Worker, blue: Worker) -> None:
    """Run one model into its limit, and the other into what is left of the device."""
    with stage.scene("Refusal: a limit is a sentence with numbers, not a crash"):
        answer = blue.tell("admit", request=1, pages=100)
        claim(answer.get("level") == "model" and answer["limit"] == 192 * MIB, f"no refusal at the limit: {answer}")
        stage.say(f"blue:  {answer['refused']}")
        blue.tell("admit", request=2, pages=64)
        answer = red.tell("admit", request=1, pages=100)
        claim(answer.get("level") == "capacity" and answer["limit"] == CAPACITY, f"no refusal at capacity: {answer}")
        stage.say(f"red:   {answer['refused']}")
        claim(stage.broker.memory().lent_bytes == 64 * PAGE, "a refused request changed the books")


def _death(stage: Stage, red: Worker, blue: Worker) -> float:
    """Kill one worker in mid-flight; returns the milliseconds until its bytes may be lent again."""
    with stage.scene("Death: a SIGKILL in mid-flight costs nobody else anything") as show:
        assert red.process.stdin is not None
        red.process.stdin.write(json.dumps({"do": "churn", "pages": 40}) + "\n")
        red.process.stdin.flush()
        claim(bool(red.hear().get("churning")), "the worker does not churn")
        show()
        killed = time.monotonic()
        red.process.kill()
        red.process.wait()
        claim_soon(
            lambda: not stage.broker.models()["chat"].books[0].used_bytes,
            "a dead worker's bytes did not come back",
            show,
        )
        back = (time.monotonic() - killed) * 1000
    location = stage.broker.memory()
    claim(location.unaccounted_bytes == 0, "the device holds memory that the books do not know")
    claim(location.device_used_bytes == location.lent_bytes + PAGE, "the device and the books differ")
    blue.tell("check")
    stage.say(
        f"red was killed while it grew and shrank. The device showed its memory gone, and it could be lent again, "
        f"{back:.0f} ms later. blue noticed nothing: all of its pages hold what was written into them."
    )
    return back


def _scrape(stage: Stage) -> None:
    """Compare what Prometheus would see with itself: the models' sum is the device's figure."""
    url = stage.broker.device().metrics_url
    with urllib.request.urlopen(url, timeout=10) as answer:  # our own daemon, on loopback
        text = answer.read().decode()
    used = _sum(text, "membroker_model_used_bytes")
    charged = _sum(text, "membroker_device_lent_bytes") + _sum(text, "membroker_device_releasing_bytes")
    claim(used == charged > 0, f"the models' sum is {used}, the device's figure {charged}")
    stage.say(f"\n{url}: the models' sum is the device's figure, {format_size(int(used))}.")


def _sum(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


if __name__ == "__main__":
    sys.exit(main())
