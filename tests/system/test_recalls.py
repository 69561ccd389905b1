"""Recalls with a real daemon: what is guaranteed and not used is lent to sessions that answer, and comes back.

The workers are bare ones, so that each can answer, lie, fall silent or die between any two frames.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.daemons import Daemon, running, until
from tests.support.honest_worker import State
from tests.support.raw import Session, admin_call, allocation, info, is_readable, reason
from tests.support.sizes import MIB
from tests.support.workers import Worker, worker
from tests.system.test_reload import reload

from membroker.cli import doctor
from membroker.cli import main as cli
from membroker.v1 import admin_pb2
from membroker.v1 import handoff_pb2 as pb

UNIT = 16 * MIB
ALL = 16
"""Units that the daemon has to lend."""
HALF = 8
"""Units that are guaranteed to red's model."""
TENANTS: dict[str, Any] = {"red": {"models": {"m": {"guarantee": "128MiB"}}}, "blue": {}, "green": {}}
HOUR = 3_600.0
_ids = itertools.count(1_000)


@contextmanager
def lending(**config: Any) -> Iterator[Daemon]:
    """A daemon of 256 MiB. Recalls and waits end by an answer, unless `config` says how long they take."""
    given = {"recall_seconds": HOUR, "guarantee_wait_seconds": HOUR, "tenants": TENANTS, "settle_seconds": 1.0}
    with running({**given, **config}) as daemon:
        yield daemon


class Borrower:
    """A session with the model `m`, and the extents that it has: `units` of UNIT."""

    def __init__(self, stack: ExitStack, daemon: Daemon, tenant: str, units: int = 0, *, answers: bool = True) -> None:
        self.session = stack.enter_context(Session(daemon.endpoint(tenant)))
        self.model = self.session.register("m", answers_recalls=answers)
        self.ids = self.session.borrow(self.model, UNIT, units) if units else []
        self._asked = 0

    def ask(self, units: int) -> None:
        """Send a request. It waits as long as the daemon's configuration says, if it is within the guarantee."""
        self._asked = next(_ids)
        self.session.send(pb.Frame(request_id=self._asked, allocate=allocation(self.model, UNIT, units)))

    def get(self) -> int:
        """Return how many units the request was granted."""
        answer, ids = self.session.answer(self._asked)
        assert len(ids) == answer.count, answer
        self.ids += ids
        return len(ids)

    def recalled(self) -> pb.Recall:
        """Return the next recall, which must be of this model."""
        recall = self.session.recall()
        assert recall.model == self.model
        return recall

    def release(self, units: int) -> None:
        """Give so many units back."""
        self.session.release(self.ids[:units])
        del self.ids[:units]

    def books(self, daemon: Daemon) -> Any:
        """Return the model's books at the device."""
        (model,) = (model for model in daemon.models() if model.name == self.model)
        return model.books[0]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as one:
        yield one


def numbers(daemon: Daemon) -> dict[tuple[str, str], float]:
    """Return the series about recalls: by name, and by result or tenant."""
    return {
        (one.name.removeprefix("membroker_"), one.labels.get("result") or one.labels.get("tenant", "")): one.value
        for family in text_string_to_metric_families(daemon.metrics())
        for one in family.samples
        if one.labels.get("location", "device") == "device" and "le" not in one.labels
    }


def ended(daemon: Daemon) -> dict[str, float]:
    """Return how many recalls have ended, by their result."""
    found = numbers(daemon)
    return {result: found["recall_seconds_count", result] for result in ("returned", "kept", "late")}


# --- Borrowers that answer ---


def test_a_guaranteed_request_is_granted_after_one_recall(stack: ExitStack, state: State) -> None:
    """All is lent, also what is guaranteed to red. Red asks for half of that, and one answer later it has it."""
    with lending() as daemon, stack:
        blue, red = Borrower(stack, daemon, "blue", ALL), Borrower(stack, daemon, "red", answers=False)
        assert blue.books(daemon).recallable_bytes == ALL * UNIT
        books = daemon.books()
        assert (books.free_bytes, books.reserved_bytes, books.guarantee_shortfall_bytes) == (0, HALF * UNIT, 0)
        assert numbers(daemon)["model_recallable_bytes", "blue"] == ALL * UNIT

        began = time.perf_counter()
        red.ask(4)
        recall = blue.recalled()
        assert (recall.bytes, recall.within.seconds) == (4 * UNIT, HOUR)
        until(lambda: blue.books(daemon).recalled_bytes == 4 * UNIT)
        blue.release(4)
        blue.session.answer_recall(recall.recall_id)
        assert red.get() == 4
        state("a guaranteed request beside a borrower that answers", f"{(time.perf_counter() - began) * 1e3:.1f} ms")
        assert ended(daemon) == {"returned": 1, "kept": 0, "late": 0}
        assert not is_readable(blue.session.notices)
        assert (blue.books(daemon).recalled_bytes, blue.books(daemon).late_bytes) == (0, 0)


def test_one_that_keeps_everything_is_left_in_peace(stack: ExitStack, state: State) -> None:
    """A liar answers at once and releases nothing. It is not asked again for 2 s."""
    with lending() as daemon, stack:
        blue, red = Borrower(stack, daemon, "blue", ALL), Borrower(stack, daemon, "red", answers=False)
        red.ask(1)
        recall = blue.recalled()
        answered = time.monotonic()
        blue.session.answer_recall(recall.recall_id)
        until(lambda: not blue.books(daemon).recallable_bytes)
        assert ended(daemon) == {"returned": 0, "kept": 1, "late": 0}
        assert daemon.books().guarantee_shortfall_bytes == HALF * UNIT, "what is kept cannot be recalled"
        blue.recalled()
        waited = time.monotonic() - answered
        state("a borrower that keeps all it is asked for", f"asked again after {waited:.1f} s")
        assert waited > 1.9
        blue.release(1)
        assert red.get() == 1


def test_a_guarantee_is_kept_by_those_who_release(stack: ExitStack) -> None:
    """Blue answers each recall and releases nothing. Green, which has less, is asked, and blue borrows no more."""
    with lending() as daemon, stack:
        blue = [Borrower(stack, daemon, "blue", 3) for _ in range(3)]
        green = Borrower(stack, daemon, "green", ALL - 9 - 1)
        red = Borrower(stack, daemon, "red", answers=False)
        red.ask(3)
        blue[0].session.answer_recall(blue[0].recalled().recall_id)
        recall = green.recalled()
        green.release(recall.bytes // UNIT)
        green.session.answer_recall(recall.recall_id)
        assert red.get() == 3

        newcomer = Borrower(stack, daemon, "blue")
        refused = newcomer.session.call(allocate=allocation(newcomer.model, UNIT))
        assert reason(refused) == "CAPACITY"
        assert numbers(daemon)["model_late_bytes", "blue"] > 0
        assert len(re.findall("WARNING a worker keeps all that was recalled", daemon.log())) == 1


def test_a_lower_limit_is_recalled(stack: ExitStack) -> None:
    """An operator lowers the limit of a tenant below what it has, by command. Nobody waits for it."""
    with lending() as daemon, stack:
        blue = Borrower(stack, daemon, "blue", ALL)
        assert cli.main(["quota", "set", "blue", "--limit", "64MiB", "--endpoint", str(daemon.admin)]) == 0
        recall = blue.recalled()
        assert recall.bytes == (ALL - 4) * UNIT
        blue.release(ALL - 4)
        blue.session.answer_recall(recall.recall_id)
        until(lambda: ended(daemon)["returned"] == 1)
        assert blue.books(daemon).used_bytes == 64 * MIB
        assert not is_readable(blue.session.notices)


# --- Memory that nobody can ask for ---


def test_a_tenant_whose_guarantee_is_never_lent(stack: ExitStack) -> None:
    """`lend_unused = false` keeps memory idle, so that nobody needs to be asked. A reload changes it."""
    unlent = {**TENANTS, "red": {**TENANTS["red"], "lend_unused": False}}
    with lending(tenants=unlent) as daemon, stack:
        blue, red = Borrower(stack, daemon, "blue", ALL - HALF), Borrower(stack, daemon, "red", answers=False)
        assert reason(blue.session.call(allocate=allocation(blue.model, UNIT))) == "CAPACITY"
        red.ask(2)
        assert red.get() == 2
        assert not is_readable(blue.session.notices), "nobody was asked"
        reload(daemon, tenants=TENANTS, recall_seconds=1_800)
        blue.ids += blue.session.borrow(blue.model, UNIT, HALF - 2)
        red.ask(2)
        recall = blue.recalled()
        assert (recall.bytes, recall.within.seconds) == (2 * UNIT, 1_800)
        blue.release(2)
        assert red.get() == 2


# --- Borrowers that do not answer ---


def test_a_silent_borrower_is_late_until_it_answers(stack: ExitStack, capsys: pytest.CaptureFixture[str]) -> None:
    """Another borrower is asked in its place. An operator sees in three places which session is late."""
    with lending(recall_seconds=0.3) as daemon, stack:
        blue, green = Borrower(stack, daemon, "blue", HALF), Borrower(stack, daemon, "green", HALF)
        red = Borrower(stack, daemon, "red", answers=False)
        red.ask(HALF)
        silent, first = blue.recalled(), green.recalled()
        assert (silent.bytes, first.bytes) == (4 * UNIT, 4 * UNIT)
        green.release(4)
        green.session.answer_recall(first.recall_id)
        second = green.recalled()
        assert second.bytes == 4 * UNIT
        green.release(4)
        green.session.answer_recall(second.recall_id)
        assert red.get() == HALF

        assert ended(daemon)["late"] == 1
        late = re.findall("WARNING a worker does not answer a recall of memory (.*)", daemon.log())
        (line,) = late
        fields = f"session={blue.session.welcome.session} model={blue.model} location=device"
        assert line.startswith(f"{fields} asked_bytes=67108864 returned_bytes=0 result=late after_ms=")
        assert numbers(daemon)["model_late_bytes", "blue"] == 4 * UNIT
        assert cli.main(["models", "--admin", "--endpoint", str(daemon.admin)]) == 0
        rows = [re.split(r"\s{2,}", row) for row in capsys.readouterr().out.splitlines()]
        shown = {row[0]: tuple(row[rows[0].index(name)] for name in ("recallable", "late")) for row in rows[1:]}
        assert shown == {"blue/m": ("-", "64.0 MiB"), "red/m": ("-", "-"), "green/m": ("-", "-")}

        doctors = doctor.check_guarantees(str(daemon.admin), {})
        assert (doctors.status, doctors.found) == ("warn", "blue/m owes 64.0 MiB that the broker has recalled")

        refused = blue.session.call(allocate=allocation(blue.model, UNIT))
        assert info(refused).metadata["recalled_bytes"] == str(4 * UNIT)
        assert "has not yet answered a recall of 64.0 MiB" in refused.message
        again = blue.recalled()
        assert (again.recall_id, again.bytes) == (silent.recall_id, 4 * UNIT), "it is asked again and again"
        blue.release(4)
        books = blue.books(daemon)
        assert (books.late_bytes, books.recallable_bytes) == (0, 0), "a release is no answer"
        assert len(blue.session.borrow(blue.model, UNIT)) == 1
        blue.session.answer_recall(silent.recall_id)
        until(lambda: blue.books(daemon).recallable_bytes == 5 * UNIT)
        assert numbers(daemon)["model_late_bytes", "blue"] == 0
        assert len(re.findall("does not answer a recall", daemon.log())) == 1


@contextmanager
def borrowing(daemon: Daemon, units: int) -> Iterator[Worker]:
    """A process of blue that has so many units and answers recalls, as far as it is told to."""
    with worker() as one:
        one.do("from tests.support.raw import *; from pathlib import Path")
        one.do(f"session = Session(Path({str(daemon.endpoint('blue'))!r}))")
        one.do("model = session.register('m', answers_recalls=True)")
        one.do(f"ids = session.borrow(model, {UNIT}, {units})")
        yield one


def test_a_borrower_that_is_killed_amid_a_recall(stack: ExitStack) -> None:
    """Its memory is free once the device shows it free, and goes to the request that waits."""
    with lending() as daemon, borrowing(daemon, ALL) as blue, stack:
        red = Borrower(stack, daemon, "red", answers=False)
        red.ask(HALF)
        assert blue.ask("session.recall().bytes") == HALF * UNIT
        blue.kill()
        assert red.get() == HALF
        assert ended(daemon) == {"returned": 0, "kept": 0, "late": 0}


def test_a_daemon_that_is_killed_amid_a_recall_and_a_wait(stack: ExitStack) -> None:
    """Its successor knows nothing of either. Both sessions resume, red asks once more, and blue is asked again."""
    with lending() as daemon, stack:
        blue, red = Borrower(stack, daemon, "blue", ALL), Borrower(stack, daemon, "red", answers=False)
        red.ask(HALF)
        lost = blue.recalled()
        daemon.kill()
        daemon.start_again()
        red.session.resume()
        red.ask(HALF)
        until(lambda: daemon.books().waiting_requests == 1)
        assert daemon.books().guarantee_shortfall_bytes == HALF * UNIT, "nobody answers yet for what is lent"
        blue.session.resume(blue.ids, [blue.model])
        recall = blue.recalled()
        assert recall.bytes == HALF * UNIT
        assert recall.recall_id != lost.recall_id
        blue.session.answer_recall(lost.recall_id)
        blue.release(HALF)
        assert red.get() == HALF
        assert ended(daemon) == {"returned": 1, "kept": 0, "late": 0}


@pytest.mark.deep
def test_a_recall_that_the_notices_had_no_room_for_comes_again(stack: ExitStack) -> None:
    """A worker has not read its notices for long. It misses the recall, is late, and then reads all of them."""
    with lending(recall_seconds=0.2) as daemon, stack:
        blue, red = Borrower(stack, daemon, "blue", ALL), Borrower(stack, daemon, "red", answers=False)
        while not re.search(r"^membroker_notices_dropped_total\S* [1-9]", daemon.metrics(), re.MULTILINE):
            for _ in range(100):
                admin_call(daemon.admin, "Drain", admin_pb2.DrainRequest())
                admin_call(daemon.admin, "Undrain", admin_pb2.UndrainRequest())
        red.ask(HALF)
        until(lambda: blue.books(daemon).late_bytes == HALF * UNIT)
        recall = blue.recalled()
        blue.release(HALF)
        blue.session.answer_recall(recall.recall_id)
        assert red.get() == HALF
        until(lambda: blue.books(daemon).late_bytes == 0)
