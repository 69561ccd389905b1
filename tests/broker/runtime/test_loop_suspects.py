"""When unaccounted memory rises, the loop asks the driver for processes and logs the suspects."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from tests.broker.coroutines import played_by
from tests.support.loop_world import World, play
from tests.support.sizes import MIB

from membroker.v1 import admin_pb2
from membroker.vmm import DriverError
from membrokerd.core.denied import Reason
from membrokerd.edge.convert import Refused
from membrokerd.edge.rpc.admin_service import AdminService


def named(story: Callable[[World], Awaitable[None]], caplog: pytest.LogCaptureFixture, context_bytes: int) -> list[Any]:
    """Tell a story and return the warnings that came of it, as (event, fields)."""
    with caplog.at_level(logging.WARNING, logger="membrokerd"):
        play(story, context_bytes=context_bytes)
    return [(record.getMessage(), getattr(record, "fields", {})) for record in caplog.records]


async def rise(world: World) -> None:
    """Somebody takes 32 MiB of the device, and the driver is asked who."""
    await world.audit()
    await world.audit()
    world.driver.stranger_bytes = 32 * MIB
    await world.until(lambda: bool(world.driver.asked_on))
    await world.look()


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's log comes to pytest's."""
    monkeypatch.setattr(logging.getLogger("membrokerd"), "propagate", True)


@pytest.mark.parametrize(("uses", "lines"), [([20], 1), ([], 1), ([20, 20], 0), ([600], 0)])
def test_a_rise_that_nobody_shows_is_said_and_one_of_contexts_is_not(
    caplog: pytest.LogCaptureFixture, uses: list[int], lines: int
) -> None:
    """32 MiB more are in use. A process with only a context is not a suspect, but its context may be the reason."""

    async def story(world: World) -> None:
        world.driver.shown = [(1 << 22 | number, size * MIB) for number, size in enumerate(uses)]
        await rise(world)

    said = named(story, caplog, context_bytes=600 * MIB)
    assert len(said) == lines
    for event, fields in said:
        assert "the driver names no process that uses it" in event
        assert fields == {"risen": "32.0 MiB", "unaccounted": "32.0 MiB"}


def ask_who(world: World) -> asyncio.Task[Any]:
    """Ask as an operator does."""
    unused = cast(Any, None)
    service = AdminService(world.loop, unused, unused, unused, unused, unused)
    return asyncio.create_task(service.ListProcesses(admin_pb2.ListProcessesRequest(), None))


def test_a_driver_that_cannot_list_processes_is_told_and_serves_on(caplog: pytest.LogCaptureFixture) -> None:
    """An operator that asks is told, too: no processes and no answer are two things."""
    failure = DriverError("nvmlDeviceGetComputeRunningProcesses", "NVML_ERROR_NOT_SUPPORTED", 3)

    async def story(world: World) -> None:
        assert not (await ask_who(world)).processes
        world.driver.asked_on.clear()
        world.driver.shown = failure
        await rise(world)
        with pytest.raises(Refused) as refused:
            await ask_who(world)
        assert refused.value.denied.reason is Reason.DRIVER_FAILED
        assert str(refused.value.denied.numbers["driver_says"]) == str(failure)
        session = await world.open()
        assert (await world.allocate(session, count=8)).count == 8
        await world.give_back(session)

    told = named(story, caplog, context_bytes=0)
    assert len(told) == 2, "one line each time"
    for said, fields in told:
        assert said.startswith("the driver does not say")
        assert str(failure) in fields["error"]


@played_by(play)
async def test_an_operator_that_leaves_before_the_driver_answers_harms_nothing(world: World) -> None:
    """Ctrl-C while the driver is asked: its answer comes and is nobody's."""
    faults: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
    world.driver.go_on.clear()
    asked = ask_who(world)
    await world.until(lambda: bool(world.driver.asked_on))
    asked.cancel()
    await asyncio.wait([asked])
    world.driver.go_on.set()
    await world.look()
    assert faults == []
