"""Weights and waits with real daemons, as an operator sets and sees them; the waiting client is a bare one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.support.daemons import Daemon, running, until
from tests.support.raw import Session, allocation, info
from tests.support.sizes import MIB
from tests.system.test_reload import reload

from membroker.admin import Admin, QuotaStatus
from membroker.cli import main as cli
from membroker.v1 import handoff_pb2 as pb
from membroker.vmm import Location

DEVICE = Location.DEVICE
TENANTS: dict[str, Any] = {
    "red": {"weight": 2, "host_weight": 3, "models": {"chat": {"weight": 4}}},
    "blue": {},
    "green": {},
}
HOURS = 7_200.0


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running({"tenants": TENANTS}) as one:  # of 256 MiB
        yield one


def waiting(admin: Admin) -> tuple[int, int]:
    """Return the bytes that all requests wait for at the device, and how many wait."""
    books = admin.device().locations["device"]
    return books.waiting_bytes, books.waiting_requests


def weights(admin: Admin) -> dict[str, int]:
    return {one.name.removeprefix("tenants/"): one.books["device"].weight for one in admin.tenants()}


def test_weights_are_configured_commanded_and_kept(daemon: Daemon, admin: Admin) -> None:
    """A command stands before the configuration, also after a restart, until `none` ends it. A reload changes that."""
    assert weights(admin) == {"red": 2, "blue": 1, "green": 1}
    assert {(one.name, one.location, one.weight) for one in admin.quotas(configured=True)} == {
        ("tenants/red", "device", 2),
        ("tenants/red", "host", 3),
        ("tenants/red/models/chat", "device", 4),
    }
    assert admin.quotas() == []
    assert admin.set_quota("tenants/red", DEVICE, {"weight": 5}) == QuotaStatus(
        "tenants/red", "device", None, 0, weight=5
    )
    admin.set_quota("tenants/blue", DEVICE, {"weight": 0, "limit_bytes": 64 * MIB})
    admin.set_quota("tenants/blue/models/chat", DEVICE, {"weight": 1_000})
    admin.close()
    assert daemon.stop() == 0
    text = (daemon.directory / "kept" / "host" / "quotas.toml").read_text()
    assert '[tenants.blue]\nlimit = "64MiB"\nweight = 0\n' in text
    daemon.start_again()
    again = Admin(daemon.admin / "grpc.sock")
    assert weights(again) == {"red": 5, "blue": 0, "green": 1}
    assert {(one.name, one.weight) for one in again.quotas()} == {
        ("tenants/red", 5),
        ("tenants/blue", 0),
        ("tenants/blue/models/chat", 1_000),
    }
    for name in ("red", "blue", "blue/models/chat"):
        again.set_quota(f"tenants/{name}", DEVICE, {"weight": None})
    assert again.quotas() == [QuotaStatus("tenants/blue", "device", 64 * MIB, 0)]
    assert weights(again) == {"red": 2, "blue": 1, "green": 1}
    reload(daemon, tenants={**TENANTS, "red": {"weight": 7}, "blue": {"weight": 0}})
    assert weights(again) == {"red": 7, "blue": 0, "green": 1}
    again.close()


def test_a_guaranteed_request_waits_as_configured(daemon: Daemon, admin: Admin) -> None:
    """Nothing is said about a wait by the worker: the operator decides, and a reload changes it."""
    with Session(daemon.endpoint("red")) as red, Session(daemon.endpoint("green")) as green:
        held, model = green.borrow(green.register("chat"), 250 * MIB), red.register("chat")

        def refused(size: int) -> dict[str, str]:
            return dict(info(red.call(allocate=allocation(model, size))).metadata)

        admin.set_quota("tenants/red/models/chat", DEVICE, {"guarantee_bytes": 64 * MIB})
        reload(daemon, guarantee_wait_seconds=0.02)
        assert int(refused(64 * MIB)["waited_ms"]) >= 20
        reload(daemon, guarantee_wait_seconds=0)
        assert "waited_ms" not in refused(64 * MIB)
        reload(daemon, guarantee_wait_seconds=HOURS)
        assert "waited_ms" not in refused(66 * MIB), "not guaranteed"
        red.send(pb.Frame(request_id=1_000, allocate=allocation(model, 64 * MIB)))
        until(lambda: waiting(admin) == (64 * MIB, 1))
        green.release(held)
        assert len(red.answer(1_000)[1]) == 1


def test_the_command_sets_and_shows_weights_and_waits(
    daemon: Daemon, admin: Admin, stack: ExitStack, capsys: pytest.CaptureFixture[str]
) -> None:
    def say(*arguments: str) -> list[str]:
        assert cli.main([*arguments, "--endpoint", str(daemon.admin)]) == 0
        return capsys.readouterr().out.splitlines()

    red, blue, green = (stack.enter_context(Session(daemon.endpoint(name))) for name in TENANTS)
    models = [session.register("chat") for session in (red, blue, green)]
    assert say("quota", "set", "blue/chat", "--weight", "2") == [
        "blue/chat, device memory: limit as configured, guarantee as configured, weight 2, used 0 B"
    ]
    assert "the quota takes effect when there is" in say("quota", "set", "blue/batch", "--weight", "0")[1]
    table = [re.split(r"\s{2,}", line) for line in say("quota", "list", "--all")]
    assert table[0] == ["name", "guarantee", "limit", "weight", "used"]
    assert [(row[0], row[3]) for row in table[1:]] == [
        ("blue/batch", "0"),
        ("blue/chat", "2"),
        ("red", "2"),
        ("red (host)", "3"),
        ("red/chat", "4"),
    ]
    say("quota", "set", "blue/batch", "--weight", "none")
    assert [(one["name"], one["weight"]) for one in json.loads(say("quota", "list", "--json")[0])] == [
        ("tenants/blue/models/chat", 2)
    ]
    held = green.borrow(models[2], 250 * MIB)
    request = allocation(models[1], 32 * MIB)
    request.wait.FromSeconds(int(HOURS))
    blue.send(pb.Frame(request_id=1_000, allocate=request))
    until(lambda: waiting(admin) == (32 * MIB, 1))
    assert any("32.0 MiB (1 request)" in line for line in say("status"))
    assert say("tenants")[1].split() == ["blue", "0", "B", "-", "-", "1", "32.0", "MiB", "1", "1"]
    (header, *rows) = (re.split(r"\s{2,}", line) for line in say("models"))
    waits = header.index("waiting")
    assert {(row[0], row[waits]) for row in rows} == {
        ("red/chat", "-"),
        ("blue/chat", "32.0 MiB"),
        ("green/chat", "-"),
    }
    for name, weight, waits_for in (("red/chat", "4", "-"), ("blue/chat", "2", "32.0 MiB (1 request)")):
        figures = [re.split(r"\s{2,}", line.strip()) for line in say("models", name)]
        assert [["weight", weight], ["waiting", waits_for]] == [
            row for row in figures if row[0] in ("weight", "waiting")
        ]
    green.release(held)
    assert len(blue.answer(1_000)[1]) == 1
