"""`membroker sleep` and `wake`, as an operator uses them: on a real daemon, beside real workers that answer as told.

The engine that really sleeps is in test_sleeping_engine.py, and vLLM in tests/engines.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest
from tests.support.daemons import Daemon, until
from tests.support.sleeping import command, done, refused, refused_with
from tests.support.workers import Worker, worker

_ENGINE = """
state, detail, told = 'busy', 'its engine has requests', []
def tell(request):
    told.append(request.wake)
    return membroker.types.SleepStatus(state, 64 * MIB, 32 * MIB, detail)
model = client.model('chat')
model.on_sleep(tell)
"""


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Worker]:
    """A worker of red whose answer the test sets."""
    with worker() as one:
        one.connect(daemon).do(_ENGINE)
        yield one


@pytest.mark.deep
def test_it_asks_until_the_engine_sleeps(daemon: Daemon, engine: Worker) -> None:
    """The model has requests for a while, and then falls asleep. Then it is told to wake."""
    sleeping = command(daemon, "sleep", "chat")
    until(lambda: engine.ask("len(told)") > 2)
    engine.do("state, detail = 'falling_asleep', ''")
    asked = engine.ask("len(told)")
    until(lambda: engine.ask("len(told)") > asked)
    assert sleeping.poll() is None
    engine.do("state, detail = 'asleep', 'weights kept: as asked'")
    said = done(sleeping)
    assert said.startswith("red/chat: released 96.0 MiB (KV cache 64.0 MiB, weights 32.0 MiB) after ")
    assert said.endswith(" s; weights kept: as asked\n")
    (answer,) = json.loads(done(command(daemon, "sleep", "red/chat", "--json")))
    status = answer["status"]
    assert (status["state"], status["cache_bytes"], status["weight_bytes"]) == ("asleep", 64 << 20, 32 << 20)
    waking = command(daemon, "wake", "chat")
    until(lambda: engine.ask("told[-1]"))
    engine.do("state, detail = 'awake', ''")
    assert done(waking).startswith("red/chat: awake after ")


def test_it_goes_on_over_a_restart_of_the_daemon(daemon: Daemon, engine: Worker) -> None:
    """The daemon is killed while the command waits."""
    sleeping = command(daemon, "sleep", "chat")
    until(lambda: engine.ask("len(told)") > 1)
    daemon.kill()
    daemon.start_again()
    engine.do("state = 'asleep'")
    assert "released" in done(sleeping)


@pytest.mark.deep
def test_what_it_says_of_a_model_that_cannot(daemon: Daemon, engine: Worker) -> None:
    """Busy, unknown, in two tenants, without a session, of a program that cannot sleep, and of one that is stopped."""
    refused_with("red/chat is busy: its engine has requests", daemon, "sleep", "chat", "--timeout", "0.5")
    engine.do("state, detail = 'waking', 'waits for memory: a\\x1b[2Jb'")
    says = "red/chat is not done after 0.5 s, and goes on: waking, 96.0 MiB released, waits for memory: a"
    late = refused_with(says, daemon, "wake", "chat", "--timeout", "0.5")
    assert "\x1b" not in late, "an engine's text cannot paint the terminal"
    assert "there is no model 'none' now" in refused(command(daemon, "sleep", "none"))
    with worker() as other:
        other.connect(daemon, "blue").do("model = client.model('chat')")
        assert "give blue/chat or red/chat" in refused(command(daemon, "sleep", "chat"))
        cannot = refused(command(daemon, "sleep", "blue/chat"))
        assert "blue/chat cannot sleep: this program has no engine that can sleep" in cannot
    refused_with("blue/chat has no session", daemon, "sleep", "blue/chat", "--timeout", "0.1")
    engine.send(signal.SIGSTOP)
    says = "does not answer: its membroker library is too old to sleep, or the process is stopped"
    refused_with(says, daemon, "sleep", "red/chat", "--timeout", "2")
    engine.send(signal.SIGCONT)
