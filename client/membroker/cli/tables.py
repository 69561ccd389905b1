"""The books as aligned tables: with lines and colour on a terminal, plain text elsewhere.

Owns the names of columns and the format of numbers. Text from other users (a client's name) is shown without markup and
without control characters, which could control the operator's terminal.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ..admin import ProcessStatus, QuotaStatus, TenantBooks, TenantStatus
from ..ext import arguments
from ..safetensors import TensorInfo
from ..types import DeviceStatus, LocationBooks, ModelBooks, ModelStatus, SegmentStatus, SessionStatus, SleepStatus
from ..vmm.sizes import format_size

NONE = "-"
_SEE = ", see `membroker doctor`"
COLUMNS = 10_000
"""Numbers are never cut or folded to fit; a terminal that is too narrow wraps the line."""


@dataclass(frozen=True, slots=True)
class TextTable:
    """Column names (those that begin with `>` are numbers, to the right) and rows of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str = ""


Columns = Mapping[str, Callable[..., str]]
"""By the name of a column, the function that makes its cell."""


def _table(rows: Iterable[tuple[Any, ...]], columns: Columns, empty: str = "") -> TextTable:
    """Return a table with a row for each of `rows`: what the functions of the columns make of it."""
    return TextTable(list(columns), [[cell(*row) for cell in columns.values()] for row in rows], empty)


def models_table(models: Iterable[ModelStatus], sessions: Iterable[SessionStatus] = ()) -> TextTable:
    """Return a row for each model and location, except for locations that it never used and has no limit for.

    With its pods, if one of these sessions has one.
    """
    columns: Columns = {
        "model": lambda model, books: short_name(model.name) + marks(model, books.location),
        ">used": lambda _, books: format_size(books.used_bytes),
        ">guarantee": lambda _, books: _nonzero(books.guarantee_bytes),
        ">limit": lambda _, books: _size(books.limit_bytes),
        ">waiting": lambda _, books: _nonzero(books.waiting_bytes),
        ">recallable": lambda _, books: _nonzero(books.recallable_bytes),
        ">late": lambda _, books: _nonzero(books.late_bytes),
        ">refused": lambda model, _: str(sum(model.denials_total.values())),
        **_pods_by_name(sessions),
    }
    rows = [(model, books) for model in models for books in _worth_showing(model)]
    return _table(rows, columns, "no models are registered")


def model_table(model: ModelStatus, sessions: Iterable[SessionStatus] = ()) -> TextTable:
    """Return all that is known of one model, with a column for each location."""
    books, pods = _worth_showing(model), pods_of(sessions).get(model.name)
    refused = ", ".join(f"{count} {reason}" for reason, count in sorted(model.denials_total.items()))
    return _by_location(
        short_name(model.name),
        books,
        {
            "used": lambda memory: format_size(memory.used_bytes),
            "  in segments": lambda memory: format_size(memory.segment_bytes),
            "  declared": lambda memory: format_size(memory.declared_bytes),
            "  releasing": lambda memory: format_size(memory.releasing_bytes),
            "  recallable": lambda memory: format_size(memory.recallable_bytes),
            "  recalled": lambda memory: _nonzero(memory.recalled_bytes),
            "  late": lambda memory: _nonzero(memory.late_bytes),
            "peak": lambda memory: format_size(memory.peak_bytes),
            "extents": lambda memory: str(memory.extents),
            "guarantee": lambda memory: _nonzero(memory.guarantee_bytes),
            "limit": lambda memory: _size(memory.limit_bytes),
            "weight": lambda memory: str(memory.weight),
            "share": lambda memory: _size(memory.share_bytes),
            "waiting": _waiting,
        },
        [
            ["virtual", format_size(model.virtual_capacity_bytes)],
            ["sessions", str(model.sessions)],
            *([["pods", first_of(pods)]] if pods else []),
            ["refused", refused or NONE],
            *([["sleeps", sleeps(model)]] if model.idle_sleep_ms is not None else []),
            *(["guest", guest(status)] for status in model.guests),
        ],
    )


def sleeps(model: ModelStatus) -> str:
    """Return when the engines of a model sleep by themselves, and since when some do."""
    after = f"by itself, after {(model.idle_sleep_ms or 0) / 1000:g} s without a request"
    if not model.asleep_sessions or model.asleep_since is None:
        return f"{after}; awake now"
    how = "by itself" if model.asleep_by_itself else "by command"
    several = f", {model.asleep_sessions} engines" * (model.asleep_sessions > 1)
    return f"{after}; asleep since {_time(model.asleep_since)}, {how}{several}"


_CAUSES = {
    "recall": "because others needed the memory",
    "idle": "because nobody used it",
    "operator": "by command",
    "excess": "because it used more than the broker lent",
}


def guest(status: SleepStatus) -> str:
    """Return how a guest is: since when it sleeps and why, what it needs to wake, and how long both took last."""
    took = [
        f"the last {word} took {milliseconds / 1000:.1f} s"
        for word, milliseconds in (("sleep", status.sleep_took_ms), ("wake", status.wake_took_ms))
        if milliseconds is not None
    ]
    if status.state in ("awake", "busy"):
        return "; ".join(["awake", *took])
    words = status.state.replace("_", " ")
    if status.asleep_ms is not None:
        since = datetime.now(UTC) - timedelta(milliseconds=status.asleep_ms)
        words += f" since {_time(since)}, {_CAUSES.get(status.cause, 'for a reason that it does not say')}"
    needs = f"it needs {format_size(status.needed_bytes)} to wake"
    image = [f"its image takes {format_size(status.weight_bytes)} of host memory"] if status.weight_bytes else []
    return "; ".join([words, needs, *image, *took])


def is_asleep(model: ModelStatus) -> bool:
    """Say whether an engine or a guest of a model sleeps, as far as that is known."""
    return model.asleep_sessions > 0 or any(status.state not in ("awake", "busy") for status in model.guests)


def _worth_showing(model: ModelStatus) -> list[ModelBooks]:
    """Return the books of a model without locations that it never used, and has no guarantee and no limit for."""
    return [
        books
        for books in model.books.values()
        if books.location == "device" or books.peak_bytes or books.guarantee_bytes or books.limit_bytes is not None
    ]


def _by_location(title: str, books: Sequence[Any], rows: Columns, more: Sequence[Sequence[str]] = ()) -> TextTable:
    """Return a table with a row for each figure and a column for each location; `more` rows have one value."""
    figures = [[name, *map(cell, books)] for name, cell in rows.items()]
    others = [[*row, *[""] * (len(books) - 1)] for row in more]
    return TextTable((title, *(f">{memory.location}" for memory in books)), [*figures, *others])


def sessions_table(sessions: Iterable[SessionStatus]) -> TextTable:
    """Return a row for each session, with its pod if one has any."""
    now, sessions = datetime.now(UTC), list(sessions)
    columns: Columns = {
        "session": lambda session: session.name.removeprefix("sessions/"),
        "tenant": lambda session: session.tenant.removeprefix("tenants/"),
        "state": lambda session: "observer" if session.observer and session.state == "open" else session.state,
        ">pid": lambda session: str(session.pid or NONE),
        ">age": lambda session: _age(session.create_time, now),
        ">used": lambda session: format_size(sum(books.used_bytes for books in session.books.values())),
        "models": lambda session: first_of(
            [arguments.parts_of(name)[1] for name in session.models], session.more_models
        ),
        ">segments": lambda session: str(len(session.segments) + session.more_segments or NONE),
        "client": lambda session: session.client,
        **_pods(sessions),
    }
    return _table(zip(sessions, strict=True), columns, "no sessions are open")


def _pods(rows: Sequence[SessionStatus] | Sequence[ProcessStatus]) -> Columns:
    """Return the column with the Kubernetes pods, if there are any."""
    return {"pod": lambda row: _pod(row) or NONE} if any(map(_pod, rows)) else {}


def _pod(row: SessionStatus | ProcessStatus) -> str:
    return row.pod_name or row.pod_uid


def pods_of(sessions: Iterable[SessionStatus]) -> dict[str, list[str]]:
    """Return the pods of each tenant and each model by its resource name: those of its sessions, but for observers."""
    found: dict[str, set[str]] = {}
    for session in sessions:
        if (pod := _pod(session)) and not session.observer:
            for name in (session.tenant, *session.models):
                found.setdefault(name, set()).add(pod)
    return {name: sorted(pods) for name, pods in found.items()}


def _pods_by_name(sessions: Iterable[SessionStatus]) -> Columns:
    """Return the column with the pods of a tenant or a model, if there are any."""
    pods = pods_of(sessions)
    return {"pod": lambda row, _: first_of(pods.get(row.name, []))} if pods else {}


def process_of(session: SessionStatus) -> str:
    """Return which process a session is of, for a sentence; with its pod, if it is in one."""
    pod = _pod(session)
    return f"process {session.pid or '(in another pid namespace)'}" + f" in the pod {pod}" * bool(pod)


def pods_table(sessions: Iterable[SessionStatus]) -> TextTable:
    """Return a row for each pod with sessions of a tenant: what they are charged, without segments."""
    found: dict[tuple[str, str], list[SessionStatus]] = {}
    for session in sessions:
        if pod := _pod(session):
            found.setdefault((pod, short_name(session.tenant)), []).append(session)
    columns: Columns = {
        "pod": lambda key, _: key[0],
        "tenant": lambda key, _: key[1],
        ">sessions": lambda _, rows: str(len(rows)),
        ">used": lambda _, rows: format_size(sum(books.used_bytes for row in rows for books in row.books.values())),
    }
    return _table(sorted(found.items(), key=lambda row: row[0]), columns)


def segments_table(segments: Iterable[SegmentStatus]) -> TextTable:
    """Return a row for each segment."""
    now = datetime.now(UTC)
    columns: Columns = {
        "segment": lambda segment: short_name(segment.name) + _elsewhere(segment.location),
        "state": lambda segment: segment.state,
        ">size": lambda segment: format_size(segment.size_bytes),
        ">sessions": lambda segment: str(segment.sessions),
        ">age": lambda segment: _age(segment.create_time, now),
    }
    return _table(zip(segments, strict=True), columns, "there are no segments")


def tensors_table(tensors: Iterable[TensorInfo]) -> TextTable:
    """Return a row for each tensor of a segment, in the order of their offsets."""
    columns: Columns = {
        "tensor": lambda tensor: tensor.name,
        "dtype": lambda tensor: tensor.dtype,
        "shape": lambda tensor: str(list(tensor.shape)),
        ">size": lambda tensor: format_size(tensor.size),
        ">offset": lambda tensor: str(tensor.offset),
    }
    return _table(zip(tensors, strict=True), columns, "it has no tensors")


def metadata_table(metadata: Mapping[str, str]) -> TextTable:
    """Return the metadata of a segment, by name."""
    return TextTable(("metadata", ""), sorted(metadata.items()))


def devices_table(devices: Mapping[str, DeviceStatus | None]) -> TextTable:
    """Return a row for each device of a machine, by its name. None: its broker does not answer."""
    columns: Columns = {
        "device": lambda name, _: name,
        ">lent": lambda _, device: format_size(device.locations["device"].lent_bytes) if device else NONE,
        ">capacity": lambda _, device: format_size(device.locations["device"].capacity_bytes) if device else NONE,
        ">waiting": lambda _, device: _nonzero(device.locations["device"].waiting_bytes) if device else NONE,
        ">sessions": lambda _, device: str(device.sessions) if device else NONE,
        "version": lambda _, device: device.version if device else NONE,
        "state": lambda _, device: _state(device) if device else "does not answer",
    }
    return _table(devices.items(), columns)


def _state(device: DeviceStatus) -> str:
    """Return in a few words whether a broker lends."""
    wrong = {
        "the GPU does not answer": device.device_lost,
        "its journal is full": device.journal_full,
        "drained": device.draining,
        "no GPU was found": device.driver_fallback,
    }
    return next((words for words, is_so in wrong.items() if is_so), "lends")


def device_table(device: DeviceStatus, endpoint: str) -> TextTable:
    """Return the properties of the device, one in each row. `endpoint` is where it is entered."""
    driver = device.driver + f", as no usable GPU was found{_SEE}" * device.driver_fallback
    sessions = str(device.sessions) + (f", {device.detached_sessions} detached" if device.detached_sessions else "")
    return TextTable(
        ("device", device.uuid),
        [
            ["product", device.product],
            ["driver", driver],
            ["granularity", format_size(device.granularity_bytes)],
            ["membrokerd", f"{device.version}, pid {device.pid}, since {_time(device.start_time)}"],
            ["endpoint", endpoint],
            ["metrics", device.metrics_url or "off"],
            ["sessions", sessions],
            *([["asleep", f"{device.asleep_sessions} of its engines"]] if device.asleep_sessions else []),
            *([["guests", f"{device.guests}, {device.asleep_guests} asleep"]] if device.guests else []),
            *([["lending", "no: it is drained, until `membroker undrain`"]] if device.draining else []),
            *([["lending", f"no: its journal cannot be written{_SEE}"]] if device.journal_full else []),
            *([["lending", f"no: the device does not answer{_SEE}"]] if device.device_lost else []),
            *([["reload", f"refused: {problem}"] for problem in device.reload_problems]),
            *([["not in force", ", ".join(device.pending_keys)]] if device.pending_keys else []),
        ],
    )


def locations_table(locations: Iterable[LocationBooks]) -> TextTable:
    """Return the books and the device's own figures, with a column for each location of which anything is lent."""
    rows: Columns = {
        "capacity": lambda books: format_size(books.capacity_bytes),
        "  lent": lambda books: format_size(books.lent_bytes),
        "  releasing": lambda books: format_size(books.releasing_bytes),
        "  free": lambda books: format_size(books.free_bytes),
        "reserved": _reserved,
        "waiting": _waiting,
        "headroom": lambda books: format_size(books.headroom_bytes),
        "in use": _used_of_total,
        "  unaccounted": lambda books: _size(books.unaccounted_bytes),
    }
    return _by_location(
        "memory", [location for location in locations if location.location == "device" or location.capacity_bytes], rows
    )


def _reserved(books: LocationBooks) -> str:
    missing = books.guarantee_shortfall_bytes
    return format_size(books.reserved_bytes) + (f" ({format_size(missing)} missing)" if missing else "")


def _used_of_total(books: LocationBooks) -> str:
    if books.device_total_bytes is None or books.device_used_bytes is None:
        return NONE
    return f"{format_size(books.device_used_bytes)} of {format_size(books.device_total_bytes)}"


def _waiting(books: LocationBooks | ModelBooks) -> str:
    count = books.waiting_requests
    return f"{format_size(books.waiting_bytes)} ({count} request{'s' * (count != 1)})" if count else NONE


def tenants_table(tenants: Iterable[TenantStatus], sessions: Iterable[SessionStatus] = ()) -> TextTable:
    """Return a row for each tenant and location, with its pods if one of these sessions has one."""
    columns: Columns = {
        "tenant": lambda tenant, books: short_name(tenant.name) + _elsewhere(books.location),
        ">used": lambda _, books: format_size(books.used_bytes),
        ">guarantee": lambda _, books: _nonzero(books.guarantee_bytes),
        ">limit": lambda _, books: _size(books.limit_bytes),
        ">weight": lambda _, books: str(books.weight),
        ">waiting": lambda _, books: _nonzero(books.waiting_bytes),
        ">models": lambda tenant, _: str(tenant.models),
        ">sessions": lambda tenant, _: str(tenant.sessions),
        **_pods_by_name(sessions),
    }
    rows = [(tenant, books) for tenant in tenants for books in tenant.books.values() if _concerns(books)]
    return _table(rows, columns, "no tenant is configured, and no user has a session")


def made_tenants_table(tenants: Iterable[TenantStatus], sessions: Iterable[SessionStatus] = ()) -> TextTable:
    """Return a row for each tenant that was made by command, with its pods if one of these sessions has one."""
    columns: Columns = {
        "tenant": lambda tenant, _: short_name(tenant.name) + " (being deleted)" * tenant.deleting,
        ">guarantee": lambda tenant, _: _nonzero(tenant.books["device"].guarantee_bytes),
        ">limit": lambda tenant, _: _size(tenant.books["device"].limit_bytes),
        ">used": lambda tenant, _: format_size(tenant.books["device"].used_bytes),
        ">sessions": lambda tenant, _: str(tenant.sessions),
        "users": lambda _, made: " ".join(map(str, made.uids)) or NONE,
        "owner": lambda _, made: NONE if made.owner is None else str(made.owner),
        "group": lambda _, made: NONE if made.group is None else str(made.group),
        "mode": lambda _, made: NONE if made.mode is None else f"{made.mode:04o}",
        **_pods_by_name(sessions),
    }
    rows = [(tenant, tenant.settings) for tenant in tenants]
    return _table(rows, columns, "no tenant was made by command; `membroker tenants` shows all")


def _concerns(books: TenantBooks) -> bool:
    """Say whether a tenant uses a location, waits for memory there, or has a number of its own for it."""
    used = books.used_bytes or books.waiting_bytes or books.guarantee_bytes or books.limit_bytes is not None
    return books.location == "device" or bool(used)


def quotas_table(quotas: Iterable[QuotaStatus]) -> TextTable:
    """Return a row for each quota that was set."""
    columns: Columns = {
        "name": lambda quota: short_name(quota.name) + _elsewhere(quota.location),
        ">guarantee": lambda quota: _size(quota.guarantee_bytes),
        ">limit": lambda quota: _size(quota.limit_bytes),
        ">weight": lambda quota: NONE if quota.weight is None else str(quota.weight),
        ">used": lambda quota: format_size(quota.used_bytes),
    }
    return _table(zip(quotas, strict=True), columns, "no quota was set by command; the configured ones are in force")


def processes_table(processes: Iterable[ProcessStatus]) -> TextTable:
    """Return a row for each process that uses the device, with its pod if one has any."""
    processes = list(processes)
    columns: Columns = {
        ">pid": lambda process: str(process.pid),
        "command": lambda process: process.command or NONE,
        ">used": lambda process: format_size(process.used_bytes),
        ">charged": lambda process: format_size(process.charged_bytes),
        ">in segments": lambda process: format_size(process.segment_bytes),
        ">excess": lambda process: format_size(process.excess_bytes),
        "models": lambda process: first_of(list(map(short_name, process.models))),
        **_pods(processes),
    }
    return _table(zip(processes, strict=True), columns, "the driver sees no process")


def short_name(name: str) -> str:
    """Return `acme` for `tenants/acme`, `acme/llama` and `acme/llama/weights` for a model's and a segment's name."""
    return "/".join(arguments.parts_of(name))


def marks(model: ModelStatus, location: str) -> str:
    """Return what stands behind a model's name: a location that is not the device, or that its program sleeps."""
    return _elsewhere(location) or " (asleep)" * is_asleep(model)


def _elsewhere(location: str) -> str:
    return "" if location == "device" else f" ({location})"


def first_of(names: Sequence[str], more: int = 0) -> str:
    """Return the first name, and how many others there are, `more` of which are not in the list.

    A row must not become as long as it likes.
    """
    others = len(names) - 1 + more
    return names[0] + f" +{others}" * (others > 0) if names else NONE


def _nonzero(size: int) -> str:
    return _size(size or None)


def _size(value: int | None) -> str:
    return NONE if value is None else format_size(value)


def _time(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _age(begin: datetime, now: datetime) -> str:
    """Return how long something exists, in one unit: `59s`, `59m`, `47h`, `12d`."""
    seconds = max(0, int((now - begin).total_seconds()))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3_600:
        return f"{seconds // 60}m"
    return f"{seconds // 3_600}h" if seconds < 48 * 3_600 else f"{seconds // 86_400}d"


# --- Printing ---


def answer(as_json: bool, value: Any, *parts: TextTable | str) -> int:
    """Print the answer of a command, as JSON or as tables and lines, and return its exit status.

    A table has an empty line before and after it.
    """
    if as_json:
        print_json(value, sys.stdout)
        return 0
    for before, part in zip((None, *parts), parts, strict=False):
        if before is not None and (isinstance(before, TextTable) or isinstance(part, TextTable)):
            print()
        sys.stdout.write(render(part, sys.stdout) if isinstance(part, TextTable) else f"{part}\n")
    sys.stdout.flush()
    return 0


def render(table: TextTable, stream: TextIO) -> str:
    """Return a table as text for `stream`, each line ended."""
    if not table.rows and table.empty:
        return table.empty + "\n"
    terminal = stream.isatty()
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=COLUMNS, emoji=False)
    console.print(_rich(table, terminal))
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def _rich(table: TextTable, terminal: bool) -> RichTable:
    made = RichTable(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns:
        number = column.startswith(">")
        made.add_column(Text(column.lstrip(">")), justify="right" if number else "left", no_wrap=True)
    for row in table.rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def printable(text: str) -> str:
    """Return the text without control characters."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def print_json(value: Any, stream: TextIO) -> None:
    """Write one JSON document on a line: the library's values by their own names, sizes in bytes, times in UTC."""
    stream.write(json.dumps(value, default=_json_value) + "\n")
    stream.flush()


def _json_value(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"no JSON for {type(value).__name__}")
