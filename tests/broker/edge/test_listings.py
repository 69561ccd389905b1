"""Pages of listings: their length, and that the next one begins where the last one ends."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.sizes import GIB, MIB

from membroker.v1 import broker_pb2 as pb
from membroker.v1 import handoff_pb2 as hpb
from membroker.v1 import resources_pb2 as rpb
from membroker.wire import frames as handoff
from membroker.wire import names
from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import snapshot
from membrokerd.core.machine import Broker
from membrokerd.core.names import Location, ModelName, SegmentName
from membrokerd.core.policy import Rules
from membrokerd.edge import listings as views
from membrokerd.edge import messages
from membrokerd.runtime.decisions import Decisions


@pytest.mark.parametrize("long", [10, views.MAX_PAGE_BYTES // 8, views.MAX_PAGE_BYTES * 2])
@pytest.mark.parametrize("size", [0, 1, 7, 1_000])
def test_every_row_is_on_one_page(long: int, size: int) -> None:
    """Also rows that are longer than a page on their own."""
    rows, found, token, pages = list(range(150)), [], "", 0
    while token or not pages:
        page, token = views._page(
            rows,
            lambda row: f"{row:016x}",
            re.compile(r"[0-9a-f]{16}").fullmatch,
            pb.ListSessionsRequest(page_size=size, page_token=token),
            lambda row: rpb.Session(name=str(row), client="x" * long),
        )
        pages += 1
        assert 0 < len(page) <= (size or views.DEFAULT_PAGE)
        assert len(page) == 1 or sum(row.ByteSize() for row in page) <= views.MAX_PAGE_BYTES
        found += [int(row.name) for row in page]
    assert found == rows


def test_the_longest_row_fits_into_a_frame() -> None:
    """A session with more models and segments than a frame has room for is shown, and how many are left out."""
    tenant, long = "t" * names.MAX_TENANT_CHARACTERS, "m" * (names.MAX_NAME_CHARACTERS - 4)
    models = [ModelName(tenant, f"{long}{number:04}") for number in range(1_000)]
    segments = [
        SegmentName(*name, f"{'s' * (names.MAX_NAME_CHARACTERS - 4)}{number:04}") for number, name in enumerate(models)
    ]
    view = snapshot.SessionView(
        session=(1 << 60) - 1,
        tenant=tenant,
        state="detached",
        pid=(1 << 31) - 1,
        uid=(1 << 32) - 1,
        observer=True,
        client="\U0001f600" * names.MAX_CLIENT_CHARACTERS,
        models=tuple(models),
        locations=(("device", names.MAX_BYTES, names.MAX_BYTES), ("host", names.MAX_BYTES, names.MAX_BYTES)),
        began_at=0,
        segments=tuple(segments),
    )
    shown = messages.from_session(view, 0)
    assert (len(shown.models) + shown.more_models, len(shown.segments) + shown.more_segments) == (1_000, 1_000)
    assert shown.ByteSize() < views.MAX_PAGE_BYTES
    page = pb.ListSessionsResponse(sessions=[shown], next_page_token="f" * 16)
    handoff.encode(hpb.Frame(request_id=(1 << 64) - 1, reply=hpb.Reply(sessions=page)))


def shown_of(broker: Broker) -> views.BookMessages:
    """Return what lists the books of a core, with no engine that sleeps and no guest."""
    sleep, guests = SimpleNamespace(of_model=lambda name: None), SimpleNamespace(of_model=lambda name, now: [])
    loop: Any = SimpleNamespace(broker=broker, idle_sleep=sleep, guests=guests)
    return views.BookMessages(loop, cast(Any, None), Decisions())


def test_the_memory_is_divided_once_for_all_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """`membroker top` reads a hundred models page by page while one waits: every page shows the same division.

    To divide the memory of a large machine takes a slow turn, and any tenant may ask for as many pages as it likes.
    """
    calls, now = itertools.count(1), [0]
    broker = Broker(Rules(granularity=2 * MIB, capacities={"device": 4 * GIB, "host": 0}), 1)

    def step(make: Any, *values: Any) -> Any:
        call = next(calls)
        found = [one.result for one in broker.step(make(call, *values), now[0]).effects if isinstance(one, fx.Answer)]
        return found[0] if found else None

    session = step(ev.OpenSession, "red", 1, 1, "one", False, "test").session
    models = [ModelName("red", f"m{number:03}") for number in range(100)]
    for request_id, name in enumerate(models, 2):
        step(ev.RegisterModel, session, request_id, name, None, {}, False)
    step(ev.Allocate, session, 500, models[0], "device", 3 * GIB, 1)
    divided: list[str] = []
    divide = broker.waiting.shares

    def counted(where: Location) -> dict[ModelName, int]:
        divided.append(where)
        return divide(where)

    monkeypatch.setattr(broker.waiting, "shares", counted)
    monkeypatch.setattr(views, "clock", lambda: now[0])
    shown = shown_of(broker)

    def shares() -> list[int | None]:
        found: list[rpb.Model] = []
        token = ""
        while token or not found:
            page = shown.list_models(pb.ListModelsRequest(page_size=7, page_token=token))
            found, token = [*found, *page.models], page.next_page_token
        books = [model.books[0] for model in found]
        return [one.share_bytes if one.HasField("share_bytes") else None for one in books]

    assert shares() == [None] * 100
    step(ev.Allocate, session, 501, models[1], "device", 3 * GIB, 1, 60_000_000_000)
    assert shares() == [3 * GIB, GIB, *[0] * 98]
    assert divided == ["device"]
    now[0] += views.SHARES_NS
    shares()
    assert divided == ["device"] * 2
