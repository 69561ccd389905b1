"""The status page at `/` of the metrics port: the device's memory in pictures and tables, by tenant and model.

Owns the page. It tells nothing that /metrics does not tell, needs no script and no other file, and escapes every text
that it did not write. The browser loads it again every few seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape

from membroker.vmm import format_size

from ..ext import snapshot
from . import catalog
from .html_document import document
from .metrics import MetricsView, PodView
from .pictures import (
    COLOURS,
    DEFINITIONS,
    FREE,
    GUARANTEE,
    LIMIT,
    NOT_LENT,
    OTHERS,
    REFUSED,
    UNACCOUNTED,
    WAITING,
    BarPart,
    bar,
    bar_scale,
    chart,
    refusals,
    waits,
)

MOST_TENANTS, MOST_MODELS, MOST_PODS, MOST_PARTS = 64, 200, 200, 20
"""Shown on the page: those that use the most; as parts, the models in a tenant's bar. /metrics has all."""


def page(view: MetricsView, ended: Mapping[str, int]) -> str:
    """Return the page as HTML. `ended` says how many waits ended so far, by their result."""
    device = view.device
    place = f"GPU {device.index}" if device.driver == "cuda" else device.uuid
    used = {tenant.tenant: sum(books.used for books in tenant.locations) for tenant in view.tenants}
    shown = sorted(used, key=lambda tenant: (-used[tenant], tenant))[:MOST_TENANTS]
    colours = dict(zip(sorted(shown[: len(COLOURS)]), COLOURS, strict=False))
    sessions = sum(view.sessions.values())
    parts = [
        f"<h1>{escape(view.host)}, {escape(place)}: {escape(device.name)}</h1>",
        f"<p>{escape(device.uuid)}, membrokerd {escape(view.version)}, {_at(view.figures[catalog.SCRAPE_TIME])}, "
        f"{sessions} session{'s' * (sessions != 1)} of at most {view.figures[catalog.SESSIONS_LIMIT]}</p>",
        *_troubles(view),
    ]
    for books in view.locations:
        if books.capacity:
            parts += _location(view, books, shown, colours)
    parts += ["<h2>The last minutes</h2>", chart(view.history, _scale(view, view.locations[0]), colours)]
    parts += ["<h2>Refusals and waits</h2>", _key([(REFUSED, "requests refused, in each two seconds")])]
    parts += [refusals(view.history), _key([(WAITING, "bytes that waiting requests wanted")]), waits(view.history)]
    parts += _waits_and_refusals(view, ended)
    parts += ["<h2>Models</h2>", _models(view)]
    if view.pods:
        parts += ["<h2>Pods</h2>", _pods(view.pods)]
    parts.append('<p><a href="/metrics">/metrics</a> has all numbers.</p>')
    return document(f"{view.host}, {place}: membroker", DEFINITIONS + "".join(parts))


def _at(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}Z"


def _troubles(view: MetricsView) -> Iterator[str]:
    """Yield a line for each state in which something is wrong."""
    shortfall = sum(books.shortfall for books in view.locations)
    late = sum(books.late for model in view.models for books in model.locations)
    detached = view.sessions.get("detached", 0)
    lost = (
        "1 session has lost its connection." if detached == 1 else f"{detached} sessions have lost their connections."
    )
    for is_so, sentence in (
        (view.figures[catalog.DRAINING], "An operator drains this device: nothing more is lent."),
        (view.figures[catalog.JOURNAL_FULL], "The journal cannot be written: nothing more is lent."),
        (view.figures[catalog.DEVICE_LOST], "The device does not answer: nothing more is lent."),
        (view.figures[catalog.DRIVER_FALLBACK], "No usable GPU was found: this broker lends host memory instead."),
        (not view.figures[catalog.RELOADED], "The last reload of the configuration was refused: see the log."),
        (shortfall, f"{format_size(shortfall)} of the guarantees cannot be kept now."),
        (late, f"{format_size(late)} were recalled from workers that do not answer, or keep it all."),
        (detached, lost),
    ):
        if is_so:
            yield f'<p class="bad">{sentence}</p>'


# --- Pictures ---


def _scale(view: MetricsView, books: snapshot.LocationView) -> int:
    memory = view.memory.get(books.location)
    return max(books.capacity, memory.total if memory is not None else 0)


def _location(
    view: MetricsView, books: snapshot.LocationView, shown: Sequence[str], colours: Mapping[str, str]
) -> Iterator[str]:
    """Yield the bar of one location, its legend, and a bar for each tenant."""
    where, scale = books.location, _scale(view, books)
    used = books.lent + books.releasing
    unaccounted = max(0, books.unaccounted or 0)
    free = max(0, min(books.free, scale - used - unaccounted))
    rest = max(0, scale - used - unaccounted - free)
    books_of = {row.tenant: found for row in view.tenants for found in row.locations if found.location == where}
    models: dict[str, list[snapshot.ModelView]] = {}
    for model in view.models:
        models.setdefault(model.name.tenant, []).append(model)
    parts = [part for tenant in colours for part in _parts_of(models.get(tenant, ()), tenant, where, colours[tenant])]
    others = max(0, used - sum(part.size for part in parts))
    parts.append(BarPart("other tenants", others, OTHERS))
    parts += [
        BarPart("unaccounted", unaccounted, UNACCOUNTED),
        BarPart("free", free, FREE),
        BarPart("not lent", rest, NOT_LENT),
    ]
    yield f"<h2>{where.capitalize()} memory: {format_size(used)} used of {format_size(books.capacity)}</h2>"
    yield bar(parts, scale, label=f"{where} memory by tenant and model") + bar_scale(scale)
    yield _key(
        [
            *((colour, f"{tenant} {format_size(books_of[tenant].used)}") for tenant, colour in colours.items()),
            *([(OTHERS, f"other tenants {format_size(others)}")] if others or len(books_of) > len(colours) else []),
            ("releasing", f"releasing {format_size(books.releasing)}"),
            (UNACCOUNTED, "unaccounted " + (format_size(unaccounted) if books.unaccounted is not None else "unknown")),
            (FREE, f"free {format_size(books.free)}"),
            (NOT_LENT, f"not lent {format_size(rest)}"),
            (GUARANTEE, "line: guarantee"),
            (LIMIT, "line: limit"),
        ]
    )
    for tenant in shown:
        of_tenant = books_of[tenant]
        if of_tenant.used or of_tenant.guarantee or of_tenant.limit is not None or of_tenant.waiting:
            yield from _tenant(models.get(tenant, ()), tenant, of_tenant, scale, colours.get(tenant, OTHERS))
    yield bar_scale(scale) * bool(shown)
    if len(view.tenants) > len(shown):
        yield f"<p>{len(view.tenants) - len(shown)} tenants that use less are not shown.</p>"


def _tenant(
    models: Sequence[snapshot.ModelView], tenant: str, books: snapshot.TenantLocationView, scale: int, colour: str
) -> Iterator[str]:
    marks = {"guarantee": books.guarantee} if books.guarantee else {}
    if books.limit is not None:
        marks["limit"] = books.limit
    borrowed = max(0, books.used - books.guarantee)
    words = [f"{format_size(books.used)} used", *(f"{what} {format_size(size)}" for what, size in marks.items())]
    words += [f"{format_size(borrowed)} above its guarantee"] * bool(books.guarantee and borrowed)
    words += [f"waits for {format_size(books.waiting)}"] * bool(books.waiting)
    yield f"<p><b>{escape(tenant)}</b> {', '.join(words)}</p>"
    yield bar(_parts_of(models, tenant, books.location, colour), scale, marks, f"{books.location} memory of {tenant}")


def _parts_of(models: Sequence[snapshot.ModelView], tenant: str, where: str, colour: str) -> list[BarPart]:
    """Return the parts of a tenant's bar: of each model what is within its guarantee, beyond it, and releasing.

    The models that use the least are one part.
    """
    rows = [(books, model.name.model) for model in models for books in model.locations if books.location == where]
    rows.sort(key=lambda row: (-row[0].used, row[1]))
    found: list[BarPart] = []
    for number, (books, model) in enumerate(rows[:MOST_PARTS]):
        name, opacity = f"{tenant}/{model}", 1.0 - 0.25 * (number % 3)
        lent = books.used - books.releasing
        within = min(lent, books.guarantee)
        found.append(BarPart(f"{name}, within its guarantee", within, colour, opacity))
        found.append(BarPart(name, lent - within, colour, opacity))
        found.append(BarPart(f"{name}, releasing", books.releasing, colour, opacity, releasing=True))
    rest = sum(books.used for books, _ in rows[MOST_PARTS:])
    return [*found, BarPart(f"{tenant}, {len(rows) - MOST_PARTS} other models", rest, colour, 0.4)]


def _key(rows: Iterable[tuple[str, str]]) -> str:
    """Return a legend: a colour and a text in each entry."""
    hatched = '<svg viewBox="0 0 11 11"><rect width="11" height="11" fill="#888"/><rect width="11" height="11" '
    hatched += 'fill="url(#releasing)"/></svg>'
    entries = []
    for colour, text in rows:
        sign = hatched if colour == "releasing" else f'<i style="background:{colour}"></i>'
        entries.append(f"<li>{sign}{escape(text)}</li>")
    return f'<ul class="key">{"".join(entries)}</ul>'


# --- Numbers ---


def _waits_and_refusals(view: MetricsView, ended: Mapping[str, int]) -> Iterator[str]:
    """Yield what waits now, and how waits and refusals were so far."""
    now = [
        f"{books.waiting_requests} for {format_size(books.waiting)} of {books.location} memory"
        for books in view.locations
        if books.waiting_requests
    ]
    yield f"<p>Requests that wait now: {', '.join(now) or 'none'}.</p>"
    results = ", ".join(f"{count} {result}" for result, count in ended.items())
    yield f"<p>Waits that have ended since this daemon started: {results}.</p>"
    counted = ", ".join(f"{escape(reason)} {count}" for reason, count in Counter(view.denials).most_common())
    yield f"<p>Requests refused since this daemon started: {counted or 'none'}.</p>"


def _models(view: MetricsView) -> str:
    rows = [(model, books) for model in view.models for books in model.locations if _worth_showing(books)]
    rows.sort(key=lambda row: (-row[1].used, row[0].name))
    heads = ("used", "guarantee", "borrowed above it", "limit", "releasing", "waiting", "recallable", "late")
    head = "".join(f"<th>{text}</th>" for text in (*heads, "sessions", "refused"))
    body = "".join(_row(*row) for row in rows[:MOST_MODELS]) or '<tr><td class="name">no models</td></tr>'
    more = f"<p>{len(rows) - MOST_MODELS} that use less are not shown.</p>" * (len(rows) > MOST_MODELS)
    table = f'<table><thead><tr><th class="name">model</th>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="wide">{table}</div>{more}'


def _pods(pods: Sequence[PodView]) -> str:
    """Return a table of the pods with sessions, those that use the most first."""
    rows = sorted(pods, key=lambda pod: (-sum(pod.used.values()), pod.name, pod.uid, pod.tenant))
    cells = [
        (escape(pod.name or pod.uid), escape(pod.tenant), pod.sessions, format_size(sum(pod.used.values())))
        for pod in rows[:MOST_PODS]
    ]
    body = "".join(
        f'<tr><td class="name">{pod}</td><td class="name">{tenant}</td><td>{sessions}</td><td>{used}</td></tr>'
        for pod, tenant, sessions, used in cells
    )
    more = f"<p>{len(rows) - MOST_PODS} that use less are not shown.</p>" * (len(rows) > MOST_PODS)
    head = '<th class="name">pod</th><th class="name">tenant</th><th>sessions</th><th>used</th>'
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'


def _worth_showing(books: snapshot.ModelLocationView) -> bool:
    return books.location == "device" or any((books.peak, books.guarantee, books.limit is not None))


def _row(model: snapshot.ModelView, books: snapshot.ModelLocationView) -> str:
    borrowed = max(0, books.used - books.releasing - books.guarantee)
    numbers = [
        format_size(books.used),
        _size(books.guarantee),
        _size(borrowed if books.guarantee else 0),
        "none" if books.limit is None else format_size(books.limit),
        *map(_size, (books.releasing, books.waiting, books.recallable, books.late)),
        str(model.sessions),
        str(sum(model.denials.values())),
    ]
    where = "" if books.location == "device" else f" ({books.location})"
    name = escape(f"{model.name.tenant}/{model.name.model}{where}")
    return f'<tr><td class="name">{name}</td>{"".join(f"<td>{number}</td>" for number in numbers)}</tr>'


def _size(size: int) -> str:
    return format_size(size) if size else "-"
