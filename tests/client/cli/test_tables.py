"""The tables of the command `membroker`: what a row says, that it fits, and that no text controls the terminal."""

from __future__ import annotations

import io
import os
import pty
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from membroker.cli import tables
from membroker.types import LocationBooks, ModelBooks, ModelStatus, SessionBooks, SessionStatus

GIB = 1 << 30
SHORT = "tenants/acme/models/llama-7b"
BEGAN = datetime(2026, 11, 23, 18, 40, 13, tzinfo=UTC)


def model(name: str, host_limit: int | None = None) -> ModelStatus:
    """A model that uses 12.3 GiB of the device."""
    none: dict[str, Any] = {f"{field}_bytes": 0 for field in ("used", "peak", "releasing", "declared", "segment")}
    used = none | {"used_bytes": 12_300 << 20, "peak_bytes": 12_300 << 20}
    books = {
        "device": ModelBooks(location="device", limit_bytes=None, extents=0, **used),
        "host": ModelBooks(location="host", limit_bytes=host_limit, extents=0, **none),
    }
    return ModelStatus(name, 64 * GIB, books, 2, 0, 0, {"MODEL_LIMIT": 3, "CAPACITY": 14})


def session(name: str, pid: int) -> SessionStatus:
    """A session of a vLLM engine, which has a segment as well."""
    segments = (f"{name}/segments/weights-1eb0",)
    return SessionStatus(
        name="sessions/1c0000000001",
        tenant=name.partition("/models/")[0],
        pid=pid,
        uid=1000,
        client="VLLM::EngineCore",
        observer=False,
        state="detached",
        models=(name,),
        segments=segments,
        books={"device": SessionBooks("device", 12_300 << 20, 1)},
        create_time=BEGAN,
    )


def device_books(where: str, lent: int) -> LocationBooks:
    return LocationBooks(where, 137 * GIB, lent, GIB, 0, 35 * GIB, 4 * GIB, 3 * GIB, 141 * GIB, lent, 16 * GIB, 7 * GIB)


def test_a_location_that_is_not_used_is_no_row() -> None:
    for limit, names in ((None, ["acme/llama-7b"]), (0, ["acme/llama-7b", "acme/llama-7b (host)"])):
        assert [row[0] for row in tables.models_table([model(SHORT, limit)]).rows] == names
    unused = LocationBooks("host", *[0] * 6, None, None, None)
    assert tables.locations_table([device_books("device", 0), unused]).columns == ("memory", ">device")


def test_tenants_and_models_have_the_pods_of_their_sessions() -> None:
    """Observers are not counted. Without a pod there is no column, as outside of Kubernetes."""
    name, plain = SHORT, session(SHORT, 7)
    rows = [
        plain,
        replace(plain, pod_uid="uid-2"),
        *(replace(plain, pod_uid=f"uid-{pod}", pod_name=f"web/api-{pod}") for pod in (1, 0, 1)),
        replace(plain, models=(), pod_uid="uid-3", pod_name="web/a-top", observer=True),
        replace(plain, models=(), pod_uid="uid-4", pod_name="web/api-4"),
    ]
    assert tables.pods_of(rows) == {
        "tenants/acme": ["uid-2", "web/api-0", "web/api-1", "web/api-4"],
        name: ["uid-2", "web/api-0", "web/api-1"],
    }
    models = [model(name), model("tenants/acme/models/other")]
    assert [row[-1] for row in tables.models_table(models, rows[2:]).rows] == ["web/api-0 +1", "-"]
    assert tables.models_table(models, [plain]) == tables.models_table(models)
    assert ["pods", "web/api-0 +1"] in [row[:2] for row in tables.model_table(models[0], rows[2:]).rows]


def test_a_terminal_gets_lines_and_colour() -> None:
    terminal, other = pty.openpty()
    with os.fdopen(terminal, "rb", buffering=0), os.fdopen(other, "w") as stream:
        shown = tables.render(tables.TextTable(("name", ">used"), [["a", "1"]]), stream)
    assert "─" in shown
    assert "\x1b[1m" in shown


def test_a_peers_text_cannot_paint_the_terminal() -> None:
    """What a process calls itself is shown, not obeyed."""
    shown = tables.render(tables.TextTable(("client",), [["\x1b[2J\r[bold]x\u202e"]]), io.StringIO())
    assert shown == "client\n\ufffd[2J\ufffd[bold]x\ufffd\n"
