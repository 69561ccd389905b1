"""The tables of the command `membroker`: what a row says, that it fits, and that no text controls the terminal."""

from __future__ import annotations

import io
import os
import pty
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from membroker.admin import ProcessStatus, QuotaStatus, TenantBooks, TenantSettings, TenantStatus
from membroker.cli import tables
from membroker.safetensors import TensorInfo
from membroker.types import (
    DeviceStatus,
    LocationBooks,
    ModelBooks,
    ModelStatus,
    SegmentStatus,
    SessionBooks,
    SessionStatus,
)

GIB = 1 << 30
LONG = "tenants/serving/models/Qwen/Qwen2.5-Coder-32B-Instruct-AWQ"
TENSOR = "model.layers.63.post_attention_layernorm.weight_scale_inv"
SHORT = "tenants/acme/models/llama-7b"
BEGAN = datetime(2026, 11, 23, 18, 40, 13, tzinfo=UTC)


def rendered(table: tables.TextTable) -> list[str]:
    return tables.render(table, io.StringIO()).splitlines()


def width(table: tables.TextTable) -> int:
    return max(map(len, rendered(table)))


def model(name: str, where: str = "device", **more: Any) -> ModelStatus:
    """A model that uses 12.3 GiB; `more` are its other figures at `where`."""
    none = {f"{field}_bytes": 0 for field in ("used", "peak", "releasing", "declared", "segment")}
    empty: dict[str, Any] = {**none, "limit_bytes": None, "extents": 0}
    used = {"device": {"used_bytes": 12_300 << 20, "peak_bytes": 12_300 << 20}, "host": {}}
    used[where] |= more
    books = {location: ModelBooks(location=location, **{**empty, **used[location]}) for location in used}
    return ModelStatus(name, 64 * GIB, books, 2, 0, 0, {"MODEL_LIMIT": 3, "CAPACITY": 14})


BUSY = {
    "limit_bytes": 100 * GIB,
    "guarantee_bytes": 16 * GIB,
    "waiting_bytes": 1536 << 20,
    "waiting_requests": 3,
    "recallable_bytes": 9 * GIB,
    "recalled_bytes": 2 * GIB,
    "late_bytes": 512 << 20,
    "share_bytes": 40 * GIB,
}


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


def every_table(name: str) -> dict[str, tables.TextTable]:
    """Return each table with one busy row, for a model of this name."""
    tenant = name.partition("/models/")[0]
    sizes = (12_300 << 20, 12_300 << 20, 0, 600 << 20)
    process = ProcessStatus(123_456, "VLLM::EngineCor", *sizes, ("sessions/1c0000000001",), (name,))
    segment = SegmentStatus(f"{name}/segments/weights-1eb0", 1, "sealed", "device", 15 * GIB, 1, 4, "", BEGAN)
    tenant_books = {"device": TenantBooks("device", 12_300 << 20, 100 * GIB, 16 * GIB, 2, GIB)}
    books = [device_books("device", 101 * GIB), device_books("host", 0)]
    device = DeviceStatus(
        "GPU-12345678-1234-1234-1234-123456789abc",
        "NVIDIA H200",
        "cuda 13.0",
        2 << 20,
        {one.location: one for one in books},
        1,
        "0.1.0",
        123_456,
        BEGAN,
        12,
        1,
        "http://127.0.0.1:9710/metrics",
        True,
        True,
        True,
    )
    return {
        "models": tables.models_table([model(name, **BUSY)]),
        "model": tables.model_table(model(name, "host", **BUSY)),
        "sessions": tables.sessions_table([session(name, 123_456)]),
        "segments": tables.segments_table([segment]),
        "device": tables.device_table(device, "/run/membroker/gpu-12345678/tenants/NAME"),
        "locations": tables.locations_table(books),
        "tenants": tables.tenants_table([TenantStatus(tenant, tenant_books, 3, 12)]),
        "quotas": tables.quotas_table([QuotaStatus(name, "device", 100 * GIB, 12 * GIB, 16 * GIB, 0, 2)]),
        "processes": tables.processes_table([process]),
        "tensors": tables.tensors_table([TensorInfo(TENSOR, "BF16", (152_064, 5_120), 15 * GIB, 1485 << 20)]),
    }


def test_a_table_fits_120_columns_with_names_as_on_hugging_face() -> None:
    for what in list(every_table(LONG)):
        assert width(every_table(LONG)[what]) <= 120


def test_a_table_fits_80_columns_with_short_names() -> None:
    for what in ["model", "segments", "device", "locations", "tenants", "quotas"]:
        assert width(every_table(SHORT)[what]) <= 80


def test_models_that_wait_for_nothing_fit_80_columns() -> None:
    assert width(tables.models_table([model(SHORT, guarantee_bytes=GIB, limit_bytes=16 * GIB)])) <= 80


def test_a_row_with_many_names_has_the_first_and_a_count() -> None:
    """A process of 200 sessions would otherwise make one row of a kilobyte."""
    names = tuple(f"tenants/acme/models/m{number}" for number in range(200))
    process = ProcessStatus(7, "python", 0, 0, 0, 0, tuple(f"sessions/{number:x}" for number in range(1, 201)), names)
    assert rendered(tables.processes_table([process]))[1].split()[-2:] == ["acme/m0", "+199"]


def test_a_pod_is_named_and_else_has_its_uid() -> None:
    """Its sessions are one row for each tenant; a process of no pod is in none."""
    rows = [
        replace(session("tenants/red/models/m", 7), pod_uid="uid-1", pod_name="web/a-0"),
        replace(session("tenants/red/models/m", 7), pod_uid="uid-1", pod_name="web/a-0"),
        replace(session("tenants/blue/models/m", 8), pod_uid="uid-2"),
        session("tenants/blue/models/m", 8),
    ]
    table = tables.pods_table(rows)
    assert [list(row[:3]) for row in table.rows] == [["uid-2", "blue", "1"], ["web/a-0", "red", "2"]]
    assert [tables.process_of(row).partition(" in ")[2] for row in rows[1:]] == ["the pod web/a-0", "the pod uid-2", ""]


def test_tenants_and_models_have_the_pods_of_their_sessions() -> None:
    """Observers are not counted. Without a pod there is no column, as outside of Kubernetes."""
    name, books = "tenants/acme/models/llama-7b", {"device": TenantBooks("device", 5, None)}
    tenants = [
        TenantStatus(f"tenants/{one}", books, 1, 2, settings=TenantSettings((), None, None, None, True, None))
        for one in ("acme", "umbra")
    ]
    plain = session(name, 7)
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
    for shown in (tables.tenants_table, tables.made_tenants_table):
        table = shown(tenants, rows[2:])
        assert [(row[0], row[-1]) for row in table.rows] == [("acme", "web/api-0 +2"), ("umbra", "-")]
        assert table.columns[-1] == "pod"
        assert shown(tenants, [plain]) == shown(tenants)
    models = [model(name), model("tenants/acme/models/other")]
    assert [row[-1] for row in tables.models_table(models, rows[2:]).rows] == ["web/api-0 +1", "-"]
    assert tables.models_table(models, [plain]) == tables.models_table(models)
    assert ["pods", "web/api-0 +1"] in [row[:2] for row in tables.model_table(models[0], rows[2:]).rows]
    assert tables.model_table(models[1], rows) == tables.model_table(models[1])


def test_a_location_that_is_not_used_is_no_row() -> None:
    """A model's, a tenant's and the device's own host memory are shown where there is anything to say."""

    def shown(**host: Any) -> list[str]:
        return [row[0] for row in tables.models_table([model(SHORT, "host", **host)]).rows]

    assert shown() == ["acme/llama-7b"]
    assert shown(peak_bytes=5) == ["acme/llama-7b", "acme/llama-7b (host)"]
    assert shown(limit_bytes=0) == ["acme/llama-7b", "acme/llama-7b (host)"]

    def tenant(**host: Any) -> list[str]:
        numbers = {"used_bytes": 0, "limit_bytes": None, **host}
        books = {"device": TenantBooks("device", 0, None), "host": TenantBooks("host", **numbers)}
        return [row[0] for row in tables.tenants_table([TenantStatus("tenants/acme", books, 0, 0)]).rows]

    assert tenant() == ["acme"]
    for number in ({"used_bytes": 1}, {"limit_bytes": 0}, {"guarantee_bytes": 1}, {"waiting_bytes": 1}):
        assert tenant(**number) == ["acme", "acme (host)"]

    unused = LocationBooks("host", *[0] * 6, None, None, None)
    assert tables.locations_table([device_books("device", 0), unused]).columns == ("memory", ">device")


def test_an_age_is_one_number() -> None:
    """Clocks may be set back, too."""
    for seconds, age in [
        (0, "0s"),
        (59, "59s"),
        (60, "1m"),
        (3_599, "59m"),
        (3_600, "1h"),
        (172_799, "47h"),
        (172_800, "2d"),
        (-5, "0s"),
    ]:
        assert tables._age(BEGAN, BEGAN + timedelta(seconds=seconds)) == age


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
