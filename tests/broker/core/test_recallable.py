"""What a step costs beside many sessions that answer recalls, counted in lines: times say little on a busy machine."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from benchmarks.load import core
from tests.support.calls import lines_of

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core.denied import Denied, Reason
from membrokerd.core.names import ModelName

MODELS = 16


class Crowd(core.Core):
    """A tenant with many sessions that answer recalls of all its models, and have a page of each: the memory is full.

    Beside it stands a session of another tenant that has nothing.
    """

    def __init__(self, sessions: int) -> None:
        self.pages = sessions * MODELS
        super().__init__(self.pages, max_sessions=sessions + 1)
        self.lines, self.calls = Counter[str](), itertools.count(1 << 40)
        self.extents: dict[tuple[int, ModelName], tuple[int, ...]] = {}
        for _ in range(sessions):
            session, first = self.open("many", "m0", answers=True)
            for number in range(MODELS):
                name, call = ModelName("many", f"m{number}"), next(self.calls)
                if name != first:
                    self.step(ev.RegisterModel(call, session, call, name, None, {}, False, True))
                self.extents[session, name] = self.allocate(session, name)
        self.pairs = list(self.extents)
        self.other = self.open("other", "m")

    def counted(self, event: ev.Event) -> list[Any]:
        """Return the effects of a step, whose lines are counted."""
        effects = list[Any]()
        self.lines += lines_of(lambda: effects.extend(self.step(event)))
        return effects

    def want(self, pages: int) -> list[fx.SendRecall]:
        """Return what is asked for when the other tenant wants some pages, and waits for them."""
        session, name = self.other
        call = next(self.calls)
        wanted = ev.Allocate(call, session, call, name, "device", core.GRANULE, pages, 10**10)
        return [one for one in self.counted(wanted) if isinstance(one, fx.SendRecall)]


def _refusal(sessions: int) -> Counter[str]:
    crowd = Crowd(sessions)
    (session, name), call = crowd.pairs[0], next(crowd.calls)
    crowd.counted(ev.Allocate(call, session, call, name, "device", core.GRANULE, crowd.pages))
    (answer,) = crowd.counted(ev.InputsDrained(call))
    assert isinstance(answer.result, Denied)
    assert answer.result.reason is Reason.CAPACITY
    return crowd.lines


def test_a_refusal_costs_the_same_however_many_sessions_answer() -> None:
    """A tenant opens session after session, each for all its models, and asks for more than there is."""
    few, many = _refusal(2), _refusal(64)
    assert many.total() <= few.total() + 100, (many - few).most_common(10)


def _recalled(sessions: int) -> tuple[Crowd, list[fx.SendRecall]]:
    crowd = Crowd(sessions)
    asked = crowd.want(crowd.pages // 2)
    assert len(asked) == crowd.pages // 2
    return crowd, asked


def _of_recalls(lines: Counter[str], *but: str) -> int:
    return sum(count for name, count in lines.items() if name.startswith("Recalls.") and not name.startswith(but))


def test_a_recall_costs_the_same_for_each_session_that_is_asked() -> None:
    """A tenant wants half of the memory, and each page is of another session: to ask 256 is no more work for each."""
    (few, some), (many, others) = _recalled(4), _recalled(32)
    assert _of_recalls(many.lines) / len(others) <= _of_recalls(few.lines) / len(some)


def test_one_answer_costs_the_same_beside_many_open_recalls() -> None:
    """A session that is asked for a page releases it, and one says that it keeps it, beside 256 open recalls."""
    lines = []
    for sessions in (4, 32):
        crowd, asked = _recalled(sessions)
        crowd.lines.clear()
        first, second, call = asked[0], asked[1], next(crowd.calls)
        crowd.counted(ev.Release(call, first.session, call, crowd.extents[first.session, first.name]))
        crowd.counted(ev.AnswerRecall(second.session, second.recall, second.size))
        crowd.counted(ev.ConnectionLost(crowd.pairs[-1][0]))
        lines.append(crowd.lines.copy())
    few, many = lines
    asks = "Recalls.ask"  # another session of the same model is asked instead: the one that has the most
    assert _of_recalls(many, asks) <= _of_recalls(few, asks), (many - few).most_common(10)


def test_many_sessions_are_asked_in_portions() -> None:
    """A tenant wants 500 pages, each of another session: a step asks 256, and the next one, at once, the others.

    Nobody answers. A second later all of these are late, and asked again, in portions as well.
    """
    crowd, portions = Crowd(64), []
    asked = crowd.want(500)
    while crowd.broker.deadline == 0:
        portions.append(len(asked))
        asked = [one for one in crowd.step(ev.Elapsed()) if isinstance(one, fx.SendRecall)]
    assert [*portions, len(asked)] == [256, 244]
    assert crowd.broker.deadline is not None
    crowd.now, late = crowd.broker.recalls.deadline or 0, Counter[int]()
    while (crowd.broker.deadline or 0) <= crowd.now:
        effects = crowd.step(ev.Elapsed())
        late.update(one.session for one in effects if isinstance(one, fx.Recalled))
        assert sum(isinstance(one, fx.Recalled) for one in effects) <= 256
        assert sum(isinstance(one, fx.SendRecall) for one in effects) <= 512
    assert late.total() >= 500


def test_a_limit_is_recalled_in_portions() -> None:
    """An operator takes half of its memory from a tenant with a page in each of 600 parts: three steps ask for it."""
    crowd = Crowd(64)
    limit = ev.SetQuota(next(crowd.calls), "many", None, "device", 424 * core.GRANULE)
    asked, portions = crowd.step(limit), []
    while crowd.broker.deadline == 0:
        portions.append(sum(isinstance(one, fx.SendRecall) for one in asked))
        asked = crowd.step(ev.Elapsed())
    assert [*portions, sum(isinstance(one, fx.SendRecall) for one in asked)] == [256, 256, 88]
