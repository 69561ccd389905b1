"""The command `membroker explain`: why requests were refused or waited, and why memory was recalled, in sentences.

Owns the sentences. What happened is in the broker's record of decisions; how things are now is in the books.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from ..admin import Admin
from ..errors import InvalidRequest, ModelNotFound
from ..ext import names
from ..types import Decision, ModelStatus
from ..vmm.sizes import format_exact
from . import commands, tables
from .books import open_books
from .commands import Commands
from .sleeping import find_model, unknown_model

_NOTES = """
REQUEST is `MembrokerError.request` of the exception, as in sessions/1c0000000001/requests/17. MODEL is a model's name,
or TENANT/MODEL. The broker remembers the last 8 decisions about each model, and forgets them when it restarts."""
_REQUEST = re.compile(r"sessions/[0-9a-f]{1,16}/requests/[0-9]{1,20}")
_ADVICE = {
    "MODEL_LIMIT": "If an operator has set the limit, `membroker quota set {model} --limit SIZE` changes it. If the "
    "program has set it (`Client.model`, `membroker run --limit`), change it there.",
    "TENANT_LIMIT": "An operator can raise the limit: `membroker quota set {tenant} --limit SIZE`.",
    "CAPACITY": "With `timeout=` a request gets memory when others release it. With a guarantee or a weight "
    "(`membroker quota set`) others have to release memory. `membroker models --admin` shows which models have it.",
    "DEVICE_FULL": "`membroker processes` names the processes that use more than they are charged.",
    "DRIVER_FAILED": "The daemon's log has what the driver said.",
    "DESCRIPTORS_EXHAUSTED": "Raise the daemon's limit of open files (LimitNOFILE in its unit).",
    "TOO_MANY_REQUESTS": "Ask for fewer at a time, or for more bytes in each request.",
}
_TOO_LARGE = (
    "It is more than this broker may lend in all, so waiting does not help: ask for less, or raise `capacity` in the "
    "daemon's configuration."
)
_WAITED = (
    "It waited, and nobody released enough. `membroker models --admin` shows which models have the memory, how much of "
    "it is recallable, and which are late. With a guarantee or a weight (`membroker quota set`) others have to release "
    "memory."
)
_WAITS = (
    "`membroker models --admin` shows which models have the memory, how much of it is recallable, and which are late "
    "(`membroker explain TENANT/MODEL --admin` names the session)."
)


def add_command(subparsers: Commands) -> None:
    """Add `explain`."""
    parser = commands.add(
        subparsers,
        "explain",
        run,
        "why requests were refused or waited, or why memory was recalled",
        "explain llama-7b\nexplain acme/llama-7b --admin\nexplain sessions/1c0000000001/requests/17",
        _NOTES,
        admin=True,
    )
    parser.add_argument("name", metavar="REQUEST|MODEL", help="a request, or a model")


def run(options: argparse.Namespace) -> int:
    """Show the decisions, and how the model stands now."""
    with open_books(options.endpoint, options.admin) as books:
        models = {model.name: model for model in books.models()}
        admin = isinstance(books, Admin)
        name = _resource_name(options.name, models, admin=admin)
        try:
            decisions = books.decisions(name)
        except ModelNotFound as error:
            raise unknown_model(options.name, models, admin=admin) from error
        capacities = {location: memory.capacity_bytes for location, memory in books.device().locations.items()}
    if not decisions and name.startswith("sessions/"):
        raise InvalidRequest(
            f"the broker remembers nothing about {name}: it was granted without a wait, is older than the last 8 "
            "decisions of its model, is another tenant's, or had a wrong argument, as its exception says"
        )
    wanted = name if not name.startswith("sessions/") else decisions[0].model
    found = [model for known, model in models.items() if known == wanted or known.endswith(f"/models/{wanted}")]
    lines = list(_story(decisions, capacities, models.values()))
    if not decisions:
        lines = [f"the broker remembers no refusal, wait or recall of {options.name}"]
        lines += [line for model in found for line in _counted(model)]
    lines += [line for model in found for line in _now(model)]
    return tables.answer(options.json, {"decisions": decisions, "models": found}, *lines)


def _resource_name(text: str, known: Collection[str], *, admin: bool) -> str:
    """Return what the broker calls it: a request, a model, or at a tenant's endpoint a model's own name.

    The broker remembers models that have ended, and they are not among those that are `known`.
    """
    if _REQUEST.fullmatch(text) or names.parse_model(text):
        return text
    tenant, _, model = text.partition("/")
    own = f"tenants/{tenant}/models/{model}"
    if not admin and own in known:
        return text if any(name.partition("/models/")[2] == text for name in known) else own
    ended = admin and names.valid_tenant(tenant) and names.valid_model(model)
    if not ended and not names.valid_model(text):
        what, kinds = ("TENANT/MODEL", ("TENANT", "MODEL")) if admin else ("a model", ("MODEL",))
        raise InvalidRequest(f"{text!r} is neither {what} nor a request: {names.grammar(*kinds)}")
    if not admin:
        return text
    try:
        return find_model(known, text)
    except ModelNotFound:
        if ended:
            return own
        raise


def _story(
    decisions: Iterable[Decision], capacities: Mapping[str, int], models: Collection[ModelStatus]
) -> Iterator[str]:
    """Yield the sentences about all decisions. Those that are alike are told once, and so is advice."""
    advised: set[str] = set()
    for _, alike in itertools.groupby(decisions, _kind):
        newest, *older = alike
        yield from _sentences(newest)
        if older:
            counted = "; `membroker models` counts all" if newest.kind == "refused" else ""
            yield f"    and {len(older)} more like it since {_at(older[-1])}, among the last decisions{counted}"
        if newest.kind == "refused":
            late = _late(models, newest.location) if newest.result == "CAPACITY" and newest.after_ms else ()
            advice = [*late, _advice(newest, capacities)]
        elif newest.kind == "waiting":
            advice = [*_late(models, newest.location), _WAITS]
        else:
            advice = []
        yield from (f"    {sentence}" for sentence in advice if sentence not in advised)
        advised.update(advice)


def _late(models: Iterable[ModelStatus], location: str) -> Iterator[str]:
    """Yield which models are late. A tenant sees its own models only, an operator all."""
    for model in models:
        if (books := model.books.get(location)) and books.late_bytes:
            name = tables.short_name(model.name)
            yield f"{name} was asked to release {format_exact(books.late_bytes)} and has not."


def _kind(decision: Decision) -> tuple[object, ...]:
    """Return what two decisions have in common that are alike. No recall is like another."""
    return (
        decision.kind,
        decision.result,
        decision.location,
        decision.size_bytes,
        decision.time if decision.kind == "recalled" else None,
    )


def _advice(decision: Decision, capacities: Mapping[str, int]) -> str:
    if decision.result == "CAPACITY" and decision.size_bytes > capacities.get(decision.location, 0):
        return _TOO_LARGE
    if decision.result == "CAPACITY" and decision.after_ms:
        return _WAITED
    model = tables.short_name(decision.model)
    advice = _ADVICE.get(decision.result, "docs/troubleshooting.md says what this reason means.")
    return advice.format(model=model, tenant=model.partition("/")[0])


def _at(decision: Decision) -> str:
    return f"{decision.time:%Y-%m-%d %H:%M:%S}Z"


def _sentences(decision: Decision) -> Iterator[str]:
    """Yield the sentences about one decision."""
    size, at = format_exact(decision.size_bytes), _at(decision)
    where = "" if decision.location == "device" else f" of {decision.location} memory"
    after = f"{decision.after_ms / 1000:.1f} s"
    if decision.kind == "refused":
        yield f"{at}  refused ({decision.result}): {size}{where}, {decision.request}"
        yield f"    {_sentence(decision.why)}"
    elif decision.kind in ("waited", "waiting"):
        outcome = {"granted": "and got it", "cancelled": "until its program gave up"}.get(decision.result, "")
        verb = f"waited {after} {outcome}" if decision.kind == "waited" else f"has waited {after} until now"
        yield f"{at}  {verb}: {size}{where}, {decision.request}"
        why = (
            _sentence(decision.why)
            if decision.why
            else "There was room when it came, but requests of others came first."
        )
        yield f"    {why}" + " It was within its guarantee, so it goes before others." * decision.guaranteed
    else:
        yield f"{at}  recalled: {decision.session} was asked to release {size}{where}"
        yield f"    {_cause(decision)} {_answer(decision, size, after)}"


def _cause(decision: Decision) -> str:
    if not decision.wanted_by:
        return "The model, or its tenant, had more than its limit, because a limit was lowered."
    wanted_by = "a model of another tenant" if "/-/" in decision.wanted_by else tables.short_name(decision.wanted_by)
    return (
        f"A request of {wanted_by} found no room. It is within its guarantee or share, and this model had more than "
        "its share."
    )


def _answer(decision: Decision, size: str, after: str) -> str:
    returned = format_exact(decision.returned_bytes)
    if decision.result == "late":
        return (
            f"The program has not answered after {after}, and had released {returned}. Until it answers, it borrows "
            "nothing beyond the model's guarantee. `membroker sessions --admin` shows its process, which is stopped or "
            f"hangs: let it run again, or end it (`membroker evict {decision.session}`)."
        )
    if decision.result == "kept" and not decision.returned_bytes:
        return (
            f"The program answered after {after} that it keeps all of it. Other tenants are asked before it, and the "
            "model borrows nothing beyond its guarantee for 2 seconds, or twice as long each time that it does so."
        )
    if decision.result == "kept":
        return f"The program released {returned} of it in {after}, and answered that it keeps the rest."
    return f"The program released all {size} in {after}."


def _counted(model: ModelStatus) -> Iterator[str]:
    """Yield what the broker has counted and does not remember, such as a `Client.model` with another limit."""
    counts = [f"{count} {reason}" for reason, count in sorted(model.denials_total.items()) if count]
    if counts:
        yield (
            f"refused since the model or the daemon began: {', '.join(counts)} (docs/troubleshooting.md says what a "
            "reason means)"
        )


def _now(model: ModelStatus) -> Iterator[str]:
    """Yield how a model stands now."""
    for books in model.books.values():
        if not (books.location == "device" or books.peak_bytes or books.waiting_requests):
            continue
        limit = "no limit" if books.limit_bytes is None else f"a limit of {format_exact(books.limit_bytes)}"
        parts = [f"uses {format_exact(books.used_bytes)} of {books.location} memory"]
        guarantee = f"a guarantee of {format_exact(books.guarantee_bytes)}" if books.guarantee_bytes else "no guarantee"
        parts += [f"has {limit} and {guarantee} of its own"]
        if books.waiting_requests:
            requests = f"{books.waiting_requests} request{'s' * (books.waiting_requests != 1)}"
            parts.append(f"waits for {format_exact(books.waiting_bytes)} in {requests}")
        if books.recalled_bytes:
            parts.append(f"is asked to release {format_exact(books.recalled_bytes)}")
        if books.late_bytes:
            parts.append(f"is late with {format_exact(books.late_bytes)}")
        yield f"now: {tables.short_name(model.name)} {', '.join(parts)}"
    if model.idle_sleep_ms is not None:
        yield f"now: {tables.short_name(model.name)} sleeps {tables.sleeps(model)}"
    for guest in model.guests:
        yield f"now: the guest of {tables.short_name(model.name)} is {tables.guest(guest)}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}" + "." * (not text.endswith("."))
