"""The books as aligned tables: with lines and colour on a terminal, plain text elsewhere.

Owns the names of columns and the format of numbers. Text from other users (a client's name) is shown without markup and
without control characters, which could control the operator's terminal.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from ..arguments import parts_of
from ..deprecated import old_spellings
from ..safetensors import TensorInfo
from ..types import DeviceStatus, LocationBooks, ModelBooks, ModelStatus, SegmentStatus, SessionStatus
from ..vmm.sizes import format_size
from .admin import ProcessStatus, Quota, TenantStatus

NONE = "-"
COLUMNS = 10_000
"""Numbers are never cut or folded to fit; a terminal that is too narrow wraps the line."""


@dataclass(frozen=True, slots=True)
class Table:
    """Column names (those that begin with `>` are numbers, to the right) and rows of text."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str = ""


def models_table(models: Iterable[ModelStatus]) -> Table:
    """Return a row for each model and location, except for locations that it never used and has no limit for."""
    columns = (
        *("tenant", "model", "where", ">virtual", ">used", ">in segments", ">peak", ">guarantee", ">limit", ">weight"),
        *(">waiting", ">recallable", ">extents", ">sessions"),
        ">refusals",
    )
    rows = [_model_row(model, books) for model in models for books in model.books.values() if _worth_showing(books)]
    return Table(columns, rows, "no models are registered")


def _worth_showing(books: ModelBooks) -> bool:
    numbers = books.peak_bytes, books.guarantee_bytes, books.limit_bytes is not None
    return books.location == "device" or any(numbers)


def _model_row(model: ModelStatus, books: ModelBooks) -> list[str]:
    tenant, name = parts_of(model.name)
    return [
        tenant,
        name,
        books.location,
        format_size(model.virtual_capacity_bytes),
        format_size(books.used_bytes),
        format_size(books.segment_bytes),
        format_size(books.peak_bytes),
        _size(books.guarantee_bytes or None),
        _size(books.limit_bytes),
        str(books.weight),
        _waiting(books),
        _recallable(books),
        str(books.extents),
        str(model.sessions),
        str(sum(model.denials_total.values())),
    ]


def sessions_table(sessions: Iterable[SessionStatus]) -> Table:
    """Return a row for each session."""
    columns = (
        *("session", "tenant", "state", ">pid", ">uid", ">used", ">extents", "since", "models", "segments", "client"),
    )
    return Table(columns, [_session_row(session) for session in sessions], "no sessions are open")


def _session_row(session: SessionStatus) -> list[str]:
    return [
        session.name.removeprefix("sessions/"),
        session.tenant.removeprefix("tenants/"),
        session.state + (" (observer)" if session.observer else ""),
        str(session.pid or NONE),
        str(session.uid),
        format_size(sum(books.used_bytes for books in session.books.values())),
        str(sum(books.extents for books in session.books.values())),
        _time(session.create_time),
        " ".join(parts_of(name)[1] for name in session.models) or NONE,
        " ".join(short_name(name).partition("/")[2] for name in session.segments) or NONE,
        session.client,
    ]


def segments_table(segments: Iterable[SegmentStatus]) -> Table:
    """Return a row for each segment."""
    columns = ("tenant", "model", "segment", "where", "state", ">size", ">extents", ">sessions", "since")
    return Table(columns, [_segment_row(segment) for segment in segments], "there are no segments")


def _segment_row(segment: SegmentStatus) -> list[str]:
    return [
        *parts_of(segment.name),
        segment.location,
        segment.state,
        format_size(segment.size_bytes),
        str(segment.extents),
        str(segment.sessions),
        _time(segment.create_time),
    ]


def tensors_table(tensors: Iterable[TensorInfo]) -> Table:
    """Return a row for each tensor of a segment, in the order of their offsets."""
    rows = [
        [each.name, each.dtype, str(list(each.shape)), format_size(each.size), str(each.offset)] for each in tensors
    ]
    return Table(("tensor", "dtype", "shape", ">size", ">offset"), rows, "it has no tensors")


def metadata_table(metadata: Mapping[str, str]) -> Table:
    """Return the metadata of a segment, by name."""
    return Table(("metadata", ""), [[key, value] for key, value in sorted(metadata.items())])


def device_table(device: DeviceStatus) -> Table:
    """Return the properties of the device, one in each row."""
    sessions = str(device.sessions) + (f", {device.detached_sessions} detached" if device.detached_sessions else "")
    return Table(
        ("device", ""),
        [
            ["uuid", device.uuid],
            ["product", device.product],
            ["driver", device.driver],
            ["granularity", format_size(device.granularity_bytes)],
            ["membrokerd", f"{device.version}, pid {device.pid}, since {_time(device.start_time)}"],
            ["sessions", sessions],
            *([["lending", "no: it is drained"]] if device.draining else []),
            ["metrics", device.metrics_url or "off"],
        ],
    )


def locations_table(locations: Iterable[LocationBooks]) -> Table:
    """Return the books of each location, and the device's own figures."""
    columns = (
        *("where", ">capacity", ">lent", ">releasing", ">free", ">reserved", ">waiting", ">unaccounted", ">headroom"),
        ">used of total",
    )
    return Table(columns, [_location_row(books) for books in locations])


def _location_row(books: LocationBooks) -> list[str]:
    seen = books.device_total_bytes is not None and books.device_used_bytes is not None
    return [
        books.location,
        format_size(books.capacity_bytes),
        format_size(books.lent_bytes),
        format_size(books.releasing_bytes),
        format_size(books.free_bytes),
        _reserved(books),
        _waiting(books),
        _size(books.unaccounted_bytes),
        format_size(books.headroom_bytes),
        f"{_size(books.device_used_bytes)} of {_size(books.device_total_bytes)}" if seen else NONE,
    ]


def _reserved(books: LocationBooks) -> str:
    missing = books.guarantee_shortfall_bytes
    return format_size(books.reserved_bytes) + (f" ({format_size(missing)} missing)" if missing else "")


def _waiting(books: LocationBooks | ModelBooks) -> str:
    count = books.waiting_requests
    return f"{format_size(books.waiting_bytes)} ({count} request{'s' * (count != 1)})" if count else NONE


def _recallable(books: ModelBooks) -> str:
    if not (books.recallable_bytes or books.recalled_bytes or books.late_bytes):
        return NONE
    notes = [(books.recalled_bytes, "asked for"), (books.late_bytes, "late")]
    told = ", ".join(f"{format_size(size)} {what}" for size, what in notes if size)
    return format_size(books.recallable_bytes) + (f" ({told})" if told else "")


def tenants_table(tenants: Iterable[TenantStatus]) -> Table:
    """Return a row for each tenant and location."""
    columns = ("tenant", "where", ">used", ">guarantee", ">limit", ">weight", ">waiting", ">models", ">sessions")
    rows = [
        [
            short_name(tenant.name),
            books.location,
            format_size(books.used_bytes),
            _size(books.guarantee_bytes or None),
            _size(books.limit_bytes),
            str(books.weight),
            _size(books.waiting_bytes or None),
            str(tenant.models),
            str(tenant.sessions),
        ]
        for tenant in tenants
        for books in tenant.books.values()
    ]
    return Table(columns, rows, "no tenant is configured, and no user has a session")


def quotas_table(quotas: Iterable[Quota]) -> Table:
    """Return a row for each quota that was set."""
    rows = [
        [
            short_name(quota.name),
            quota.location,
            _size(quota.guarantee_bytes),
            _size(quota.limit_bytes),
            NONE if quota.weight is None else str(quota.weight),
            format_size(quota.used_bytes),
        ]
        for quota in quotas
    ]
    empty = "no quota was set by command; the configured ones are in force"
    return Table(("name", "where", ">guarantee", ">limit", ">weight", ">used"), rows, empty)


def processes_table(processes: Iterable[ProcessStatus]) -> Table:
    """Return a row for each process that uses the device."""
    columns = (">pid", "command", ">used", ">charged", ">in segments", ">excess", "models", "sessions")
    return Table(columns, [_process_row(process) for process in processes], "the driver sees no process")


def _process_row(process: ProcessStatus) -> list[str]:
    return [
        str(process.pid),
        process.command or NONE,
        format_size(process.used_bytes),
        format_size(process.charged_bytes),
        format_size(process.segment_bytes),
        format_size(process.excess_bytes),
        " ".join(map(short_name, process.models)) or NONE,
        " ".join(name.removeprefix("sessions/") for name in process.sessions) or NONE,
    ]


def short_name(name: str) -> str:
    """Return `acme` for `tenants/acme`, `acme/llama` and `acme/llama/weights` for a model's and a segment's name."""
    return "/".join(parts_of(name))


def _size(value: int | None) -> str:
    return NONE if value is None else format_size(value)


def _time(value: datetime) -> str:
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")


# --- Printing ---


def print_tables(tables: Iterable[Table], stream: TextIO) -> None:
    """Write tables with an empty line between them."""
    stream.write("\n".join(render(table, stream) for table in tables))
    stream.flush()


def answer(as_json: bool, value: Any, *parts: Table | str) -> int:
    """Print the answer of a command, as JSON or as tables and lines, and return its exit status.

    A table has an empty line before and after it.
    """
    if as_json:
        print_json(value, sys.stdout)
        return 0
    for before, part in zip((None, *parts), parts, strict=False):
        if before is not None and (isinstance(before, Table) or isinstance(part, Table)):
            print()
        sys.stdout.write(render(part, sys.stdout) if isinstance(part, Table) else f"{part}\n")
    sys.stdout.flush()
    return 0


def render(table: Table, stream: TextIO) -> str:
    """Return a table as text for `stream`, each line ended."""
    if not table.rows and table.empty:
        return table.empty + "\n"
    terminal = stream.isatty()
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=COLUMNS, emoji=False)
    console.print(_rich(table, terminal))
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def _rich(table: Table, terminal: bool) -> RichTable:
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
        return old_spellings(value) | {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"no JSON for {type(value).__name__}")
