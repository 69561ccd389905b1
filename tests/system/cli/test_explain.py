"""`membroker explain`: why a request was refused or waited, and why memory was recalled, against a real daemon."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import good
from tests.support.daemons import Daemon, running, until
from tests.support.raw import Session
from tests.support.sizes import MIB

import membroker


def explain(endpoint: Path, *arguments: str) -> str:
    return good("explain", *arguments, at=endpoint)


def test_a_refused_request_is_explained_by_its_name(daemon: Daemon, transport: str) -> None:
    """A worker logs its exception. The operator pastes the request, and reads the numbers of that moment."""
    with membroker.connect(daemon.endpoint("red"), transport=transport) as client:
        model = client.model("Qwen/Qwen3-8B", limit="8MiB")
        with pytest.raises(membroker.OutOfMemory) as caught:
            model.allocate("10MiB")
        error = caught.value
        assert error.request.startswith(f"{client.session}/requests/")
        for name, endpoint in (
            (error.request, daemon.endpoint("red")),
            ("Qwen/Qwen3-8B", daemon.endpoint("red")),
            (error.request, daemon.admin),
            ("red/Qwen/Qwen3-8B", daemon.admin.parent),  # it enters the admin endpoint by itself
        ):
            out = explain(endpoint, name)
            assert f"refused (MODEL_LIMIT): 10.0 MiB, {error.request}" in out
            assert str(error)[1:] in out, "the sentence that the program got"
            assert "`membroker quota set red/Qwen/Qwen3-8B --limit SIZE`" in out
            assert "now: red/Qwen/Qwen3-8B uses 0 B of device memory, has a limit of 8.0 MiB" in out
        (told,) = json.loads(explain(daemon.admin, "red/Qwen/Qwen3-8B", "--json"))["decisions"]
        assert (told["kind"], told["result"], told["size_bytes"]) == ("refused", "MODEL_LIMIT", 10 * MIB)


def test_a_wait_is_explained_while_it_lasts_and_after(
    daemon: Daemon, red: membroker.Client, blue: membroker.Client
) -> None:
    """Blue waits for what red has. What the request would have been told without the wait is why it waited."""
    held = red.model("big").allocate("250MiB")
    model = blue.model("small")
    waiter = threading.Thread(target=lambda: model.allocate("16MiB", timeout=600).close())
    waiter.start()
    (now,) = until(lambda: blue.decisions("small") if waiter.is_alive() else [])
    assert (now.kind, now.size_bytes, now.guaranteed) == ("waiting", 16 * MIB, False)
    out = explain(daemon.endpoint("blue"), now.request)
    assert "until now: 16.0 MiB" in out
    assert "may lend 256.0 MiB of device memory and has lent 250.0 MiB" in out
    held.close()
    waiter.join()
    (after,) = blue.decisions("small")
    assert (after.kind, after.result, after.request) == ("waited", "granted", now.request)
    out = explain(daemon.endpoint("blue"), "small")
    assert "s and got it: 16.0 MiB" in out
    assert "The broker may lend 256.0 MiB of device memory and has lent 250.0 MiB" in out


GUARANTEED = {
    "tenants": {"red": {"guarantee": "128MiB"}, "blue": {}},
    # However busy this machine is, no answer is late, and no request is refused meanwhile.
    "recall_seconds": 600.0,
    "guarantee_wait_seconds": 3_600.0,
}


def waited(model: membroker.Model) -> bool:
    """Make a call that is refused, and return whether it waited: on a busy machine its time may be over before."""
    with pytest.raises(membroker.OutOfMemory) as refused:
        model.allocate("64MiB", timeout=0.1)
    return refused.value.waited_seconds > 0


def test_a_wait_for_a_program_that_is_late_names_it_to_the_operator() -> None:
    """Blue's worker does not answer a recall, and red waits. Red is told what to ask for, and the operator the name."""
    config = {**GUARANTEED, "recall_seconds": 0.3}
    with running(config) as daemon, membroker.connect(daemon.endpoint("red")) as red:
        chat = red.model("chat")
        waiter = threading.Thread(target=lambda: chat.allocate("64MiB", timeout=600).close())
        with Session(daemon.endpoint("blue")) as blue:
            blue.borrow(blue.register("batch", answers_recalls=True), 64 * MIB, 4)
            late = "blue/batch was asked to release 64.0 MiB and has not."
            until(lambda: waited(chat))
            until(lambda: any(model.books[0].late_bytes for model in daemon.models()))
            assert late in explain(daemon.admin, "red/chat"), "also after a wait in vain"
            waiter.start()
            until(lambda: daemon.books().waiting_bytes)
            assert "batch" not in explain(daemon.endpoint("red"), "chat")
            assert late in explain(daemon.admin, "red/chat")
            assert f"`membroker evict {blue.welcome.session}`" in explain(daemon.admin, "blue/batch")
        waiter.join()


def test_a_recall_is_explained_by_what_wanted_the_memory() -> None:
    """Blue had borrowed what is guaranteed to red. Blue is not told which model of red's wanted it back."""
    with (
        running(GUARANTEED) as daemon,
        membroker.connect(daemon.endpoint("red")) as red,
        membroker.connect(daemon.endpoint("blue")) as blue,
    ):
        batch = blue.model("batch")
        buffers = [batch.allocate("32MiB") for _ in range(3)]

        def give(_: Any) -> None:
            while buffers:
                buffers.pop().close()

        batch.on_recall(give)
        buffers += [batch.allocate("32MiB") for _ in range(5)]
        red.model("chat").allocate("64MiB").close()
        (told,) = until(lambda: [one for one in blue.decisions("batch") if one.kind == "recalled"])
        assert (told.result, told.wanted_by) == ("returned", "tenants/-/models/-")
        out = explain(daemon.endpoint("blue"), "batch")
        assert "A request of a model of another tenant found no room." in out
        assert "chat" not in out
        assert f"{blue.session} was asked to release" in out
        assert "A request of red/chat found no room." in explain(daemon.admin, "blue/batch")
