"""`membroker demo`: the main job in under a minute, without a GPU: sharing, trade, a burst, refusal, death, sleep.

Starts a real daemon on the host driver and real workers of two tenants, and checks all that it claims: a claim that is
not true ends it with status 1. Its processes are in `processes`.
"""

from __future__ import annotations

import random
import re
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from ...errors import MembrokerError
from ...types import SegmentStatus
from ...vmm.sizes import MIB, format_size
from .processes import DemoBroker, DemoGuest, DemoWorker, Disproved, claim, claim_soon, make_directory

CAPACITY = 256 * MIB
PAGE = 2 * MIB
WEIGHTS = 64 * MIB
GUARANTEE = 64 * MIB
GUEST = 96 * MIB
"""What a guest takes: with what blue has then, the rest is less than red asks for."""
BURST_SECONDS = 5.0
"""The longest that a burst of requests may take to get the memory that it is guaranteed."""
COMPUTED_PAGES = 8
STEPS = 60
SEED = 7


class Stage:
    """Prints the demo's text and its table: live on a terminal, once in each scene elsewhere."""

    def __init__(self, broker: DemoBroker) -> None:
        self.console: Console = Console(highlight=False)
        self.broker = broker

    def say(self, text: str) -> None:
        """Narrate."""
        self.console.print(text)

    def show_moment(self) -> None:
        """Print the table now if it is not live: the end of the scene does not show this moment."""
        if not self.console.is_terminal:
            self.console.print(self.table())

    @contextmanager
    def scene(self, title: str) -> Iterator[Callable[[], None]]:
        """Show the table while a scene runs; yields a function that refreshes it."""
        self.console.print(f"\n[bold]{title}[/bold]")
        live = self.console.is_terminal
        with Live(self.table(), console=self.console, auto_refresh=False, transient=not live) as display:
            yield lambda: display.update(self.table(), refresh=live)
            display.update(self.table(), refresh=live)
        if not live:
            self.console.print(self.table())

    def table(self) -> Table:
        """Return the books of the models as a table."""
        table = Table("tenant", "model", "used", "segments", "peak", "limit", "refusals")
        for name, row in self.broker.models().items():
            books = row.books["device"]
            limit = "-" if books.limit_bytes is None else format_size(books.limit_bytes)
            sizes = [format_size(size) for size in (books.used_bytes, books.segment_bytes, books.peak_bytes)]
            table.add_row(row.name.split("/")[1], name, *sizes, limit, str(sum(row.denials_total.values())))
        return table


def main() -> int:
    """Play the scenes; returns 0 when everything held."""
    begun = time.monotonic()
    directory = make_directory()
    try:
        with ExitStack() as stack:
            broker = DemoBroker(directory)
            stack.callback(broker.close)
            broker.start()
            with ExitStack() as workers:
                # The workers end before the broker stops: otherwise they would wait for the next one.
                proof = _play(broker, workers)
            claim(broker.starts == 2, "a daemon ended by itself")
            claim(broker.stop() == 0, "the daemon did not stop cleanly")
    except (Disproved, MembrokerError, OSError) as error:
        print(f"\nthe demo failed: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    Console(highlight=False).print(f"\n{proof} ({time.monotonic() - begun:.0f} s)")
    return 0


def _play(broker: DemoBroker, stack: ExitStack) -> str:
    stage = Stage(broker)
    stage.say(
        f"One broker lends {format_size(CAPACITY)} of one device in pages of {format_size(PAGE)}. There are two "
        "tenants, red and blue. Each has its own endpoint directory, and runs one model in its own processes. (The "
        "device is the host driver's: real processes, real descriptors, no GPU.)"
    )
    red = DemoWorker(broker.endpoint("red"), "chat", "64GiB")
    stack.callback(red.close)
    blue = DemoWorker(broker.endpoint("blue"), "search", "64GiB", "192MiB")
    stack.callback(blue.close)
    second = DemoWorker(broker.endpoint("red"), "chat", "64GiB")
    stack.callback(second.close)
    for worker in (red, blue, second):
        worker.hear()
    _sharing(stage, red, second)
    second.close()
    traded = _trade(stage, red, blue)
    burst = _burst(stage, red)
    _refusal(stage, red, blue)
    rounds, away = _death_of_the_broker(stage, red, blue)
    back = _death(stage, red, blue)
    woke = _sleep(stage)
    _scrape(stage)
    return (
        f"Proved: {format_size(WEIGHTS)} of weights were mapped by two workers and charged once. Peaks of "
        f"{format_size(traded)} together fit in {format_size(CAPACITY)}, and no byte was lent twice. A lent guarantee "
        f"of {format_size(GUARANTEE)} came back in {burst:.0f} ms without a refusal. Two refusals had their numbers. "
        f"While the broker was dead, the workers computed {rounds} rounds, and borrowing waited for {away:.0f} ms. The "
        f"memory of a killed worker was free after {back:.0f} ms. A program that knows nothing of membroker slept "
        f"while others needed its memory, and answered {woke:.0f} ms after a connection. The metrics add up."
    )


# --- the scenes ---


def _sharing(stage: Stage, writer: DemoWorker, reader: DemoWorker) -> None:
    """Map the same weights in two workers of a model, charge them once, and get their bytes back."""
    with stage.scene("Sharing: weights are written once, mapped by all, charged once") as show:
        writer.tell("publish", size=WEIGHTS)
        reader.tell("attach")
        show()
        stage.show_moment()
        (segment,), chat = stage.broker.segments(), stage.broker.models()["chat"]
        claim((segment.size_bytes, segment.sessions) == (WEIGHTS, 2), "the two workers do not hold one segment")
        used = chat.books["device"].used_bytes
        claim(used == WEIGHTS, f"weights of {format_size(WEIGHTS)} are charged {format_size(used)}")
        claim(stage.broker.memory().lent_bytes == WEIGHTS, "the weights are lent more than once")
        in_use = "the device holds the weights more than once"
        claim_soon(lambda: stage.broker.memory().device_used_bytes == WEIGHTS + PAGE, in_use)
        written = writer.tell("sum")["sum"]
        claim(reader.tell("sum")["sum"] == written, "the two workers read different weights")
        time.sleep(0.5)  # so that a person can read the table
        writer.tell("let go")
        claim(reader.tell("sum")["sum"] == written, "the weights ended with their writer")
        stage.say(
            f"One worker of red wrote {format_size(WEIGHTS)} as a segment and sealed it. Another attached it by name. "
            f"The two have mapped {format_size(2 * WEIGHTS)}, but only {format_size(used)} are charged and in use on "
            f"the device. Both find the tensor in it by name, and get the same sum, {written:08x}. The segment stays "
            "when its writer closes it. After it is deleted, its bytes become free when the last reader closes it."
        )
        reader.tell("delete")
        claim(reader.tell("sum")["sum"] == written, "a deleted segment ended under its reader")
        reader.tell("let go")
        claim_soon(lambda: not stage.broker.segments(), "a deleted segment's bytes did not become free")
    location = stage.broker.memory()
    claim(location.lent_bytes == 0 == location.releasing_bytes, "a deleted segment is still charged")
    claim_soon(lambda: stage.broker.memory().device_used_bytes == PAGE, "the device still holds a deleted segment")


def _trade(stage: Stage, red: DemoWorker, blue: DemoWorker) -> int:
    """Replay two bursts of requests with their peaks one after the other; returns the sum of both peaks in bytes."""
    numbers = random.Random(SEED)
    with stage.scene("Trade: one model borrows what the other releases") as show:
        stage.say(
            "Each model reserves 64 GiB of addresses. Requests come in bursts. Each request borrows pages of the "
            "cache, writes a pattern into every page, and checks it before it releases the page."
        )
        running: dict[DemoWorker, list[tuple[int, int]]] = {red: [], blue: []}
        for step in range(STEPS):
            for worker, phase in ((red, 0.0), (blue, 0.5)):
                _serve(worker, running[worker], _load(step / STEPS + phase), step, numbers)
            show()
            if step in (STEPS // 4, 3 * STEPS // 4):
                stage.show_moment()
            time.sleep(0.02)  # so that a person can follow the table
        checked = sum(worker.tell("finish all")["checked"] for worker in (red, blue))
    # A worker does not wait for the broker to read its release.
    claim_soon(lambda: not stage.broker.memory().lent_bytes, "something was not released")
    peaks: int = sum(row.books["device"].peak_bytes for row in stage.broker.models().values())
    claim(peaks > CAPACITY, f"the peaks add up to {format_size(peaks)}, which proves no trade")
    stage.say(
        f"{checked} pages were checked. The models' peaks add up to {format_size(peaks)}, on {format_size(CAPACITY)}."
    )
    return peaks


def _load(moment: float) -> int:
    """Return how many pages a model wants: a burst in one half of the time, a trickle in the other."""
    position = moment % 1.0
    return round(10 + 160 * max(0.0, 0.5 - abs(position - 0.25) * 2))


def _serve(worker: DemoWorker, running: list[tuple[int, int]], wanted: int, step: int, numbers: random.Random) -> None:
    """Begin and finish requests until the worker holds about as many pages as it wants."""
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


def _burst(stage: Stage, red: DemoWorker) -> float:
    """Lend red's unused guarantee to a batch model, then use it; returns how many milliseconds red waited."""
    broker = stage.broker
    with stage.scene("Burst: an unused guarantee is lent, and comes back when it is needed"):
        broker.guarantee("red", GUARANTEE)
        batch = DemoWorker(broker.endpoint("blue"), "batch", "64GiB")
        try:
            batch.hear()
            batch.tell("answer recalls")
            for request in range(CAPACITY // PAGE):
                answer = batch.tell("admit", request=request, pages=1)
                claim("refused" not in answer, f"an unused guarantee is not lent: {answer.get('refused')}")
            stage.show_moment()
            refusals = _refusals(broker)
            answer = red.tell("admit", request=1, pages=GUARANTEE // PAGE)
            claim("refused" not in answer, f"a burst within the guarantee was refused: {answer.get('refused')}")
            took: float = answer["waited"] * 1000
            claim(took <= BURST_SECONDS * 1000, f"the memory was back only after {took:.0f} ms")
            claim_soon(lambda: not broker.recalled(batch.model), "the batch model did not answer a recall")
            _claim_agreement(broker, red.model, GUARANTEE)
            left = batch.tell("held")["held"]
            _claim_agreement(broker, batch.model, left)
            claim(left > 0, "the batch model lost all of its memory")
            finished = batch.tell("check")["checked"]
            red.tell("finish", request=1)
            claim(_refusals(broker) == refusals, "something was refused")
        finally:
            batch.close()
        stage.say(
            f"The operator guarantees red {format_size(GUARANTEE)}. red uses none of it, so a batch model of blue has "
            f"borrowed all {format_size(CAPACITY)}. It may do that because it answers recalls. Now requests come to "
            "red. The broker recalls memory, the batch model ends its youngest requests, and red gets "
            f"{format_size(GUARANTEE)} after {took:.0f} ms. No request was refused. All pages held what was written "
            f"into them: the {finished} that were released, and the {format_size(left)} that the batch model still has."
        )
        claim_soon(lambda: not broker.memory().lent_bytes, "something was not released")
        broker.guarantee("red", 0)
    return took


def _refusals(broker: DemoBroker) -> int:
    """Return how many requests of all models were refused so far."""
    return sum(sum(row.denials_total.values()) for row in broker.models().values())


def _refusal(stage: Stage, red: DemoWorker, blue: DemoWorker) -> None:
    """Let one model reach its limit, and the other the capacity of the device."""
    with stage.scene("Refusal: a limit is a sentence with numbers, not a crash"):
        answer = blue.tell("admit", request=1, pages=100)
        claim(answer.get("level") == "model" and answer["limit"] == 192 * MIB, f"no refusal at the limit: {answer}")
        stage.say(f"blue:  {answer['refused']}")
        blue.tell("admit", request=2, pages=64)
        answer = red.tell("admit", request=1, pages=100)
        claim(answer.get("level") == "capacity" and answer["limit"] == CAPACITY, f"no refusal at capacity: {answer}")
        stage.say(f"red:   {answer['refused']}")
        claim(stage.broker.memory().lent_bytes == 64 * PAGE, "a refused request changed the books")


def _death_of_the_broker(stage: Stage, red: DemoWorker, blue: DemoWorker) -> tuple[int, float]:
    """Kill the broker under two workers; return the rounds computed without it, and the milliseconds to a borrowing."""
    broker = stage.broker
    with stage.scene("Death: a broker that is killed costs its workers a short wait, and nothing else"):
        red.tell("publish", size=WEIGHTS)
        written = red.tell("sum")["sum"]
        (segment,) = broker.segments()
        for worker in (red, blue):
            worker.tell("begin work", pages=COMPUTED_PAGES)
        # On a busy machine the next broker may be ready before a worker has computed one round.
        dead, ready = broker.crash(lambda dead: [worker.tell("go on working", dead=dead) for worker in (red, blue)])
        did = [worker.tell("end work", dead=dead, ready=ready) for worker in (red, blue)]
        rounds, away = [figures["rounds"] for figures in did], max(figures["away"] for figures in did) * 1000
        claim(all(rounds), f"a worker stood still while no broker ran: {rounds} rounds")
        held = [worker.tell("held")["held"] for worker in (red, blue)]
        for worker, size in zip((red, blue), held, strict=True):
            _claim_agreement(broker, worker.model, size)
        in_use = sum(held) + PAGE  # the broker's own, its anchor
        claim_soon(lambda: broker.memory().device_used_bytes == in_use, "the device and the workers' memory differ")
        stage.say(
            f"red and blue compute on {COMPUTED_PAGES} pages each, and borrow and release another page, over and over. "
            f"Meanwhile the broker got a SIGKILL. For {(ready - dead) * 1000:.0f} ms no broker ran: in that time red "
            f"computed {rounds[0]} rounds, blue {rounds[1]}. A new broker started, and {away:.0f} ms after the death "
            "both could borrow again. No call failed: the calls waited."
        )
        stage.show_moment()
        _claim_segment_survived(broker, red, segment, written)
        for worker in (red, blue):
            worker.tell("finish work")
        stage.say(
            f"The new broker's books are right to the byte: red holds {format_size(held[0])}, blue "
            f"{format_size(held[1])}, and the device shows these and the broker's own {format_size(PAGE)} in use. The "
            "segment with the weights is still there: a worker that started later attached it by name, and got the "
            f"same sum as red, {written:08x}. Then red and blue finished: every page held what was written into it "
            "last."
        )
        claim_soon(lambda: not broker.segments(), "a deleted segment's bytes did not become free")
        claim_soon(
            lambda: not broker.used("chat"), "memory that red released after the broker's death is still charged"
        )
    return sum(rounds), away


def _claim_agreement(broker: DemoBroker, model: str, held: int) -> None:
    """Compare what a model is charged with what its worker has mapped; its last release may still be on its way."""
    claim_soon(lambda: broker.used(model) == held, f"{model} holds {held} bytes, and is not charged just that")


def _claim_segment_survived(broker: DemoBroker, red: DemoWorker, segment: SegmentStatus, written: int) -> None:
    """Attach the weights in a worker that knows only the new broker; then end them."""
    claim([held.generation for held in broker.segments()] == [segment.generation], "the weights are another segment")
    claim(red.tell("sum")["sum"] == written, "the weights changed with their broker")
    later = DemoWorker(broker.endpoint("red"), "chat", "64GiB")
    try:
        later.hear()
        later.tell("attach")
        claim(later.tell("sum")["sum"] == written, "the new broker has other weights")
        red.tell("let go")
        later.tell("delete")
        later.tell("let go")
    finally:
        later.close()


def _death(stage: Stage, red: DemoWorker, blue: DemoWorker) -> float:
    """Kill one worker in mid-flight; returns the milliseconds until its bytes may be lent again."""
    with stage.scene("Death: a worker that is killed costs the others nothing") as show:
        red.order("churn", pages=40)
        claim(bool(red.hear().get("churning")), "the worker does not churn")
        show()
        killed = time.monotonic()
        red.kill()
        claim_soon(lambda: not stage.broker.used("chat"), "a dead worker's bytes did not become free", show)
        back = (time.monotonic() - killed) * 1000
    location = stage.broker.memory()
    claim(location.unaccounted_bytes == 0, "the device holds memory that the books do not know")
    claim(location.device_used_bytes == location.lent_bytes + PAGE, "the device and the books differ")
    blue.tell("check")
    stage.say(
        f"red was killed while it borrowed and released. Its session had begun with the first broker. {back:.0f} ms "
        "later the device showed its memory free, and the broker could lend it again. blue noticed nothing: all of "
        "its pages hold what was written into them."
    )
    return back


def _sleep(stage: Stage) -> float:
    """Put a program to sleep for an engine, and wake it by a connection; returns the milliseconds to its answer."""
    broker = stage.broker
    with (
        stage.scene("Sleep: a program that knows nothing of membroker makes room, and wakes by a connection"),
        ExitStack() as stack,
    ):
        guest = DemoGuest(broker.endpoint("blue"), "paint", GUEST)
        stack.callback(guest.close)
        guest.hear()
        before = guest.checksum()
        claim(broker.used(guest.model) == GUEST, "the guest is not charged what it may use")
        broker.guarantee("red", GUEST)
        engine = DemoWorker(broker.endpoint("red"), "engine", "64GiB")
        stack.callback(engine.close)
        engine.hear()
        answer = engine.tell("admit", request=1, pages=GUEST // PAGE)
        claim("refused" not in answer, f"a guest did not make room: {answer.get('refused')}")
        claim_soon(lambda: broker.sleep_of(guest.model) == ("asleep", "recall"), "the guest does not say why it sleeps")
        claim(broker.used(guest.model) == 0, "a guest is charged while it sleeps")
        stage.show_moment()
        engine.tell("finish", request=1)
        broker.guarantee("red", 0)
        begun = time.monotonic()
        claim(guest.checksum() == before, "the guest's memory is not what it was")
        woke = (time.monotonic() - begun) * 1000
        claim(broker.used(guest.model) == GUEST, "the guest is not charged again")
        stage.say(
            f"paint is a program that took {format_size(GUEST)} and cannot release a part of it. `membroker run "
            "--guest` runs it. An engine of red needed the memory, so the program was suspended as a whole, as "
            "NVIDIA's driver does it (here a stand-in does). Then somebody connected to it, and its answer was the "
            f"same as before, after {woke:.0f} ms. docs/guests.md has more."
        )
    claim_soon(lambda: not broker.used("paint"), "something was not released")
    return woke


def _scrape(stage: Stage) -> None:
    """Compare what Prometheus would see with itself: the models' sum is the device's figure."""
    url = stage.broker.device().metrics_url
    with urllib.request.urlopen(url, timeout=10) as answer:  # our own daemon, on loopback
        text = answer.read().decode()
    used = _sum(text, "membroker_model_used_bytes")
    charged = _sum(text, "membroker_device_lent_bytes") + _sum(text, "membroker_device_releasing_bytes")
    claim(used == charged > 0, f"the models' sum is {used}, the device's figure {charged}")
    stage.say(f"\n{url}: the sum over the models equals the device's figure, {format_size(int(used))}.")


def _sum(text: str, name: str) -> float:
    return sum(float(value) for value in re.findall(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE))


if __name__ == "__main__":
    sys.exit(main())
