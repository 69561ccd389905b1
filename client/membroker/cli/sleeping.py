"""`membroker sleep` and `membroker wake`: an idle engine releases its memory, and has it again.

Owns the waiting and what is printed. The daemon only passes the question on, and the engine does the work; so this asks
again until every engine of the model is there. A command that is interrupted leaves nothing behind.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence

from ..admin import Admin, SessionSleep
from ..errors import BrokerUnavailable, InvalidRequest, MembrokerError, ModelNotFound
from ..types import SleepStatus
from ..vmm.sizes import format_size
from . import commands, tables
from .books import open_admin

ASK_AGAIN_SECONDS = 0.2
WITHIN_SECONDS = 5.0
"""How long an engine goes by one question: when the command has ended, it does not begin to sleep any more."""
SILENT_SECONDS = 5.0
"""How long a session may leave questions unanswered. A daemon waits a second for each answer."""
TIMEOUT_SECONDS = 60.0

_SLEEP = """
Every engine of the model releases its memory when its requests have ended: the KV cache down to its floor, and borrowed
weights (for vLLM: "weights": "borrowed"), which it copies to host memory. The broker must lend that host memory
(host_capacity). The command says what the engine keeps, and why. The first request wakes the engine, and waits until it
is awake; `membroker wake` wakes it earlier. The command waits until the memory is released, or gives up after
--timeout: an engine that still has requests then does not sleep.

The exit status is 1 if the model is unknown or has no session, if its program cannot sleep, or after --timeout."""

_WAKE = """
Every engine of the model gets its weights and the first part of its KV cache back before a request needs them. If the
broker cannot lend the memory at once, the command waits for up to --timeout; the engine goes on waiting after that. A
guarantee makes sure that the model gets its memory."""


def add_commands(subparsers: commands.Commands) -> None:
    """Add both commands."""
    sleep = commands.add(
        subparsers,
        "sleep",
        run_sleep,
        "let an idle model release its memory until it is used",
        "sleep chat                            its KV cache, and its weights if they are borrowed\n"
        "sleep acme/chat --timeout 300         wait five minutes for its requests to end\n"
        "sleep chat --keep-weights             the KV cache alone: it wakes at once",
        _SLEEP + commands.OPERATOR,
    )
    sleep.add_argument("--keep-weights", action="store_true", help="release the KV cache alone")
    wake = commands.add(
        subparsers,
        "wake",
        run_wake,
        "give a sleeping model its memory back before it is used",
        "wake chat\nwake acme/chat --timeout 10",
        _WAKE + commands.OPERATOR,
    )
    wake.set_defaults(keep_weights=False)
    for command in (sleep, wake):
        command.add_argument(
            "name", metavar="MODEL", help="MODEL or TENANT/MODEL, as `membroker models --admin` shows it"
        )
        command.add_argument(
            "--timeout",
            metavar="SECONDS",
            type=commands.seconds,
            default=TIMEOUT_SECONDS,
            help=f"how long to wait ({TIMEOUT_SECONDS:g})",
        )


def run_sleep(options: argparse.Namespace) -> int:
    """Let a model sleep."""
    return _run(options, wake=False)


def run_wake(options: argparse.Namespace) -> int:
    """Let a model wake."""
    return _run(options, wake=True)


def _run(options: argparse.Namespace, *, wake: bool) -> int:
    begun = time.monotonic()
    with open_admin(options.endpoint) as admin:
        name = find_model((model.name for model in admin.models()), options.name)
        answers = _Waiting(admin, name, options, wake=wake).wait()
    shown = tables.short_name(name)
    took = f"after {time.monotonic() - begun:.1f} s"
    lines = [
        f"{_subject(shown, answer, answers)}: {_result(answer.status, took, wake=wake)}"
        for answer in answers
        if _can(answer)
    ]
    lines += [f"{shown}: {_place(answer)} cannot sleep, and keeps its memory" for answer in _others(answers)]
    return tables.answer(options.json, answers, *lines)


def find_model(known: Iterable[str], text: str, *, admin: bool = True) -> str:
    """Return the resource name of the model that is meant by MODEL or TENANT/MODEL.

    Raises `ModelNotFound`, and `InvalidRequest` if several tenants have a model of this name.
    """
    known = list(known)
    tenant, _, model = text.partition("/")
    found = [name for name in known if name in (text, f"tenants/{tenant}/models/{model}")]
    found = found or [name for name in known if name.partition("/models/")[2] == text]
    if not found:
        raise unknown_model(text, known, admin=admin)
    if len(found) > 1:
        raise InvalidRequest(
            f"several tenants have a model {text!r}: give {' or '.join(map(tables.short_name, found))}"
        )
    return found[0]


def unknown_model(text: str, known: Iterable[str], *, admin: bool) -> ModelNotFound:
    """Return the error for a model that there is not, with the command that lists those that there are."""
    listing = "membroker models" + " --admin" * admin
    names = list(map(tables.short_name, known))
    near = commands.did_you_mean(text, names + [name.partition("/")[2] for name in names])
    return ModelNotFound(f"there is no model {text!r} now{near or ':'} `{listing}` lists all")


class _Waiting:
    """Asks the engines of a model again and again, until all of them are there."""

    def __init__(self, admin: Admin, name: str, options: argparse.Namespace, *, wake: bool) -> None:
        self._admin, self._name, self._wake = admin, name, wake
        self._shown = tables.short_name(name)
        self._keep_weights, self._timeout = options.keep_weights, options.timeout
        self._begun = time.monotonic()
        self._heard: dict[str, float] = {}
        self._tells = not options.json and sys.stderr.isatty()
        self._last_progress = ""

    def wait(self) -> list[SessionSleep]:
        """Return the last answers. Raises a `MembrokerError` that says why it is not done."""
        while True:
            left = self._begun + self._timeout - time.monotonic()
            answers = self._ask(max(0.0, left))
            if answers is not None:
                self._check(answers)
                if all(
                    answer.status is not None and (not _can(answer) or self._is_there(answer.status))
                    for answer in answers
                ):
                    return answers
                self._tell([answer for answer in answers if _can(answer)])
            if left <= 0:
                raise MembrokerError(self._why_not(answers))
            time.sleep(ASK_AGAIN_SECONDS)

    def _ask(self, left: float) -> list[SessionSleep] | None:
        """Return the answers, or None if the daemon is away for the moment."""
        try:
            return self._admin.sleep_model(
                self._name, wake=self._wake, keep_weights=self._keep_weights, within=min(left, WITHIN_SECONDS)
            )
        except BrokerUnavailable:
            if not self._heard or left <= 0:
                raise
            return None

    def _check(self, answers: Sequence[SessionSleep]) -> None:
        """Raise for what will not change by waiting."""
        now = time.monotonic()
        if not answers:
            raise MembrokerError(f"{self._shown} has no session: no engine serves it now")
        for answer in answers:
            heard = self._heard.setdefault(answer.session, now)
            if answer.status is not None or answer.detached:
                self._heard[answer.session] = now
            elif now - heard >= min(SILENT_SECONDS, self._timeout):
                raise MembrokerError(
                    f"{self._shown}: {_place(answer)} does not answer: its membroker library is too old to sleep, or "
                    "the process is stopped"
                )
        if all(answer.status is not None and not _can(answer) for answer in answers):
            detail = next((answer.status.detail for answer in answers if answer.status is not None), "")
            raise MembrokerError(f"{self._shown} cannot sleep: {tables.printable(detail)} ({_place(answers[0])})")

    def _is_there(self, status: SleepStatus) -> bool:
        return status.state == ("awake" if self._wake else "asleep")

    def _tell(self, able: Sequence[SessionSleep]) -> None:
        """Show how far it is, on a terminal."""
        text = "; ".join(_progress(answer) for answer in able)
        if self._tells and text and text != self._last_progress:
            print(f"{self._shown}: {text}", file=sys.stderr)
            self._last_progress = text

    def _why_not(self, answers: Sequence[SessionSleep] | None) -> str:
        late = f"after {self._timeout:g} s"
        for answer in answers or ():
            if answer.detached:
                return f"{self._shown}: {_place(answer)} has no connection to the broker {late}, and could not be asked"
            if answer.status is None:
                return f"{self._shown}: {_place(answer)} did not answer {late}"
            if answer.status.state == "busy":
                detail = tables.printable(answer.status.detail) or "it has requests"
                return (
                    f"{self._shown} is busy: {detail} {late}. It stays awake: try again with a longer --timeout, or "
                    "send its requests elsewhere first"
                )
        states = "; ".join(_progress(answer) for answer in answers or () if _can(answer))
        return f"{self._shown} is not done {late}, and goes on: {states or 'the broker is away'}"


def _can(answer: SessionSleep) -> bool:
    return answer.status is not None and answer.status.state != "unsupported"


def _others(answers: Sequence[SessionSleep]) -> list[SessionSleep]:
    """Return sessions of processes that cannot sleep. An engine answers for all sessions of its process."""
    pids = {answer.pid for answer in answers if _can(answer)}
    return [answer for answer in answers if answer.status is not None and not _can(answer) and answer.pid not in pids]


def _place(answer: SessionSleep) -> str:
    return f"process {answer.pid or '(in another pid namespace)'}, {answer.session}"


def _progress(answer: SessionSleep) -> str:
    assert answer.status is not None
    words = [answer.status.state.replace("_", " ")]
    if released := answer.status.cache_bytes + answer.status.weight_bytes:
        words.append(f"{format_size(released)} released")
    return ", ".join([*words, *filter(None, [tables.printable(answer.status.detail)])])


def _subject(shown: str, answer: SessionSleep, answers: Sequence[SessionSleep]) -> str:
    return f"{shown} (process {answer.pid})" if sum(map(_can, answers)) > 1 else shown


def _result(status: SleepStatus | None, took: str, *, wake: bool) -> str:
    assert status is not None
    detail = f"; {tables.printable(status.detail)}" if status.detail else ""
    if wake:
        return f"awake {took}{detail}"
    cache, weights = format_size(status.cache_bytes), format_size(status.weight_bytes)
    released = format_size(status.cache_bytes + status.weight_bytes)
    parts = f" (KV cache {cache}, weights {weights})" if status.cache_bytes else ""
    return f"released {released}{parts} {took}{detail}"
