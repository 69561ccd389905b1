"""The core as stories: each file in transcripts/ is a script, and after every command what followed from it.

A line has one command, or several with `; ` between them. What followed is indented: of each command the effects, the
facts (+), then how many requests wait and until when the core wants to be called (~), if that has changed; and at
the end of a block and of its set-up the books (=), if they have changed; of a set-up that lends nothing they are not
shown. Nor is what the command has said: that it did what it says, where that is certain at once (a request for memory
may wait, and a seal takes time), or that what is made was lent, what is released credited, and what is detached not
held any more. `shown=all` shows all of that. A line that begins with `given` is set-up: commands that must not be
refused, of which only the books are shown; some do several steps (`join`, `lend`, `write`, `publish`, `hold`). Sizes
are in MiB, ids count from the epoch's first (#1; 2#1 in the second), times are seconds. Where no location stands it is
the device, and a fact without a time is of now. With MEMBROKER_REWRITE=1 the test writes the outcomes into the files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from tests.support.sizes import MIB

from membrokerd.core import effects as fx
from membrokerd.core import events as ev
from membrokerd.core import facts as ft
from membrokerd.core import policy
from membrokerd.core.denied import Denied
from membrokerd.core.ledger import replay
from membrokerd.core.machine import Broker
from membrokerd.core.names import LOCATIONS, Location, ModelName, QuotaKey, SegmentName
from membrokerd.core.recount import recount
from membrokerd.core.rows import Quota
from membrokerd.core.snapshot import take_tenants

SECOND = 1_000_000_000
START = 1_000 * SECOND
"""When a script begins. Its times count from here, so a wrong sum of two times is noticed."""
EPOCH_BITS = 40
GIVEN = "given "
LINE = 114
COUNTS = ("count", "max_count", "request_id", "extents", "sessions", "times", "change", "weight", "waited_ms")
IDS = ("ids", "unknown_extents", "unknown_segments")
FILES = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))


class Script:
    """One transcript in play: a broker, its clock, and the names that the script gave."""

    def __init__(self, books: Callable[[Any], Any]) -> None:
        self.books = books
        self.now = START
        self.rules = policy.Rules(granularity=2 * MIB, capacities={"device": 64 * MIB, "host": 0})
        self.epoch = 1
        self.broker = Broker(self.rules, self.epoch)
        self.sessions: dict[str, int] = {}
        self.tenants: dict[str, str] = {}
        self.processes: dict[str, str] = {}
        self.names: dict[int, str] = {}
        self.calls: dict[int, str] = {}
        self.parts: dict[tuple[int, int], int] = {}
        """How many packets a request of a session takes."""
        self.facts: list[ft.Fact] = []
        """What a daemon that begins now would be told."""
        self.waits: tuple[int, int | None] = (0, None)
        """How many requests wait, and the core's deadline, as they were told last."""
        self.others = "at once"
        """When the others are heard before a request is refused for want of room; `later`: by the script's word."""
        self.shown = "new"
        """What is shown of a step: what nothing else says, or `all`."""

    # --- commands: each is named by the first word of its line ---

    def do(self, line: str) -> list[str]:
        """Carry the commands of a line out and return their outcome; of a line that begins with `given`, nothing."""
        outcome: list[str] = []
        for command in line.removeprefix(GIVEN).split("; "):
            told, waits = self.do_one(command), self.changed_waits()
            if waits and told and len(told[-1]) + len(waits) < LINE:
                told[-1] += f" {waits}"
            elif waits:
                told.append(waits)
            outcome += told
        if not line.startswith(GIVEN):
            return outcome
        assert not any("refuse " in said for said in outcome), f"refused: {line}"
        return []

    def do_one(self, line: str) -> list[str]:
        """Carry one command out and return its outcome."""
        words = line.split()
        options = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        rest = [word for word in words[1:] if "=" not in word]
        outcome = getattr(self, f"do_{words[0]}")(*rest, **options)
        if outcome is None:
            return []
        return outcome if isinstance(outcome, list) else self.play(outcome)

    def changed_waits(self) -> str:
        """Return how many wait and until when, if that has changed."""
        requests = len(self.broker.waiting.waiters())
        assert requests == sum(self.broker.waiting.of_location(where)[1] for where in self.broker.ledger.totals)
        until = self.broker.deadline
        before, self.waits = self.waits, (requests, until)
        if self.waits == before:
            return ""
        said = [f"{requests} waiting"] * bool(requests) + (
            [f"until {seconds_text(until)}"] if until is not None else []
        )
        return "~ " + (", ".join(said) or "no deadline")

    def do_rules(self, **options: str) -> None:
        """Begin anew: device= host= settle= grace= sessions= per_process= models= calls= limits=tenant[/model]:MiB.

        models_in_all= of all tenants.
        guarantees=tenant[/model]:MiB. weights=tenant[/model]:weight. default= is each tenant's limit at the device
        where it has none of its own (MiB). guarantee_wait= recall= slice= (s). waiting= of a tenant.
        unlent=tenant,tenant.
        For segments: segment_extent= (MiB), segments= of a tenant, segment_extents= of all.
        For the stock: stock_extents= and stock= (MiB). others=later: `heard` says when the others were heard.
        shown=all: all answers and facts are shown.
        """
        self.shown = options.pop("shown", "new")
        self.others = options.pop("others", "at once")
        capacities: dict[Location, int] = {
            "device": mib(options.pop("device", "64")),
            "host": mib(options.pop("host", "0")),
        }
        limits = limits_of(options)
        fields = {
            "settle": ("settle_ns", SECOND),
            "grace": ("model_grace_ns", SECOND),
            "sessions": ("max_sessions", 1),
            "per_process": ("max_sessions_per_process", 1),
            "per_tenant": ("max_sessions_per_tenant", 1),
            "models": ("max_models_per_tenant", 1),
            "models_in_all": ("max_models", 1),
            "calls": ("max_calls_per_session", 1),
            "segment_extent": ("segment_extent_bytes", MIB),
            "segments": ("max_segments_per_tenant", 1),
            "segment_extents": ("max_segment_extents", 1),
            "stock_extents": ("stock_extents", 1),
            "stock": ("stock_bytes", MIB),
            "guarantee_wait": ("guarantee_wait_ns", SECOND),
            "recall": ("recall_ns", SECOND),
            "slice": ("slice_ns", SECOND),
            "waiting": ("max_waiting_per_tenant", 1),
        }
        unlent = frozenset(filter(None, options.pop("unlent", "").split(",")))
        numbers = {fields[key][0]: int(value) * fields[key][1] for key, value in options.items()}
        self.rules = policy.Rules(granularity=2 * MIB, capacities=capacities, unlent=unlent, **limits, **numbers)
        self.broker = Broker(self.rules, self.epoch)

    def do_reload(self, **options: str) -> None:
        """Have other limits: limits= guarantees= weights= default= unlent= recall=, as of `rules`.

        What is left out is not set, and recall= stays as it is.
        """
        unlent = frozenset(filter(None, options.pop("unlent", "").split(",")))
        recall_ns = nanoseconds(options.pop("recall", "")) or self.rules.recall_ns
        self.rules = dataclasses.replace(self.rules, unlent=unlent, recall_ns=recall_ns, **limits_of(options))
        self.broker.change_rules(self.rules)

    def do_at(self, seconds: str) -> None:
        """Let the clock show this."""
        now = START + int(float(seconds) * SECOND)
        assert now >= self.now, "time goes forward"
        self.now = now

    def do_heard(self, name: str, request: str) -> ev.Event:
        """What others had said before this request of a session has been told."""
        asked = [number for number, what in self.calls.items() if what == f"{request} of {name}"]
        return ev.InputsDrained(asked[-1])

    def do_stop(self) -> None:
        """The daemon begins to stop."""
        self.broker.books.stopping = True

    def do_cannot_write(self, why: str = "") -> None:
        """The daemon cannot write down what it lends, or can again."""
        self.broker.books.cannot_write = why

    def do_device_lost(self, says: str = "") -> None:
        """The device does not answer any more, or answers again."""
        self.broker.books.device_lost = says

    def do_restart(self, torn: str = "0", lost: str = "", **seen: str) -> list[str]:
        """A daemon dies and another one begins; `torn` facts are missing at the end of the story that it reads."""
        story = self.facts[: len(self.facts) - int(torn)]
        self.facts = [fact for fact in story if not isinstance(fact, ft.StockChanged)]
        self.epoch += 1
        self.broker = Broker(self.rules, self.epoch, self.facts)
        return self.play(ev.Restarted(frozenset(map(self.generation, filter(None, lost.split(",")))), self.seen(seen)))

    def do_resume(self, name: str, process: str = "") -> ev.Event:
        return ev.ResumeSession(self.call(f"resume {name}"), self.session(name), process or self.processes[name])

    def do_holds(
        self,
        name: str,
        extents: str = "none",
        segments: str = "",
        declared: str = "",
        answers: str = "",
        guests: str = "",
    ) -> ev.Event:
        """State all that is held: extents=#1..4,#9 segments=label:times,label declared=[tenant/]model:MiB[:where],…

        answers=model,…: recalls of these are answered. guests=model,…: what is declared of these can be recalled.
        """
        held = (item.partition(":") for item in filter(None, segments.split(",")))
        declarations: dict[tuple[ModelName, Any], int] = {}
        for item in filter(None, declared.split(",")):
            model, size, *where = item.split(":")
            declarations[self.model(name, model), where[0] if where else "device"] = mib(size)
        return ev.StateHolds(
            self.call(f"holds of {name}"),
            self.session(name),
            frozenset(parse_ids(extents)),
            {self.generation(segment): int(times or 1) for segment, _, times in held},
            declarations,
            frozenset(self.model(name, model) for model in filter(None, answers.split(","))),
            frozenset((self.model(name, model), "device") for model in filter(None, guests.split(","))),
        )

    def do_forget(self, name: str) -> ev.Event:
        return ev.ForgetSession(self.call(f"forget {name}"), self.session(name))

    def do_drain(self) -> ev.Event:
        return ev.SetDraining(self.call("drain"), draining=True)

    def do_undrain(self) -> ev.Event:
        return ev.SetDraining(self.call("undrain"), draining=False)

    def do_open(self, name: str, observer: str = "", tenant: str = "t", process: str = "") -> ev.Event:
        self.tenants[name], self.processes[name] = tenant, process or name
        pid = 100 + len(self.sessions)
        return ev.OpenSession(
            self.call(f"open {name}"), tenant, pid, 1000, self.processes[name], bool(observer), "transcript"
        )

    def do_join(self, name: str, model: str, **options: str) -> list[str]:
        """Open a session and register a model, its request 1. Options are those of `open` and of `register`."""
        opening = {key: options.pop(key) for key in ("tenant", "process", "observer") if key in options}
        told = self.play(self.do_open(name, **opening))
        return [*told, *self.play(self.do_register(name, "1", model, **options))]

    def do_lend(
        self, name: str, request: str, model: str, count: str, times: str, size: str, **options: str
    ) -> list[str]:
        """Allocate, and take what is made."""
        return self.taken(self.do_allocate(name, request, model, count, times, size, **options))

    def do_write(self, name: str, request: str, segment: str, size: str, **options: str) -> list[str]:
        """Create a segment, and take what is made."""
        return self.taken(self.do_create(name, request, segment, size, **options))

    def do_publish(self, name: str, request: str, segment: str, size: str, **options: str) -> list[str]:
        """Create a segment, and seal it by the next request."""
        told, label = self.do_write(name, request, segment, size, **options), segment.rpartition("/")[2]
        told += self.play(self.do_seal(name, str(int(request) + 1), label))
        return [*told, *self.play(self.do_sealed(label))]

    def do_hold(self, name: str, request: str, segment: str, **options: str) -> list[str]:
        """Attach, and take what is sent."""
        return self.taken(self.do_attach(name, request, segment, **options))

    def taken(self, event: Any) -> list[str]:
        """Play a request whose packets are made and taken at once."""
        told = self.play(event)
        for part in range(self.parts[event.session, event.request_id]):
            told += self.play(ev.Made(event.session, event.request_id, part))
            told += self.play(ev.Acknowledge(event.session, event.request_id, part))
        return told

    def do_lost(self, name: str) -> ev.Event:
        return ev.ConnectionLost(self.sessions[name])

    def do_died(self, name: str, **seen: str) -> ev.Event:
        return ev.ProcessDied(self.sessions[name], self.seen(seen))

    def do_audit(self, **seen: str) -> ev.Event:
        return ev.Audit(self.seen(seen))

    def do_bye(self, name: str, request: str) -> ev.Event:
        return ev.Goodbye(self.call(f"{request} of {name}"), self.session(name), int(request))

    def do_register(
        self,
        name: str,
        request: str,
        model: str,
        exclusive: str = "",
        limit: str = "",
        virtual: str = "",
        answers: str = "",
        replaces: str = "",
    ) -> ev.Event:
        """Register a model. `answers` is whether the session answers its recalls. `limit=none` takes the limit away."""
        where, _, size = limit.partition(":")
        limits: Any = {where: policy.MAX_BYTES if size == "none" else mib(size)} if limit else {}
        return ev.RegisterModel(
            self.call(f"{request} of {name}"),
            self.session(name),
            int(request),
            self.model(name, model),
            mib(virtual) if virtual else None,
            limits,
            bool(exclusive),
            {"": None, "yes": True, "no": False}[answers],
            bool(replaces),
        )

    def do_unregister(self, name: str, request: str, model: str) -> ev.Event:
        call = self.call(f"{request} of {name}")
        return ev.UnregisterModel(call, self.session(name), int(request), self.model(name, model))

    def do_answer(self, name: str, recall: str, heard: str = "0") -> ev.Event:
        """A session answers a recall: what it has not released, it keeps. heard= is the most it was asked for (MiB)."""
        return ev.AnswerRecall(self.session(name), parse_id(recall), mib(heard))

    def do_allocate(
        self,
        name: str,
        request: str,
        model: str,
        count: str,
        times: str,
        size: str,
        where: Any = "device",
        wait: str = "",
        ahead: str = "",
        wanted: str = "0",
    ) -> ev.Event:
        """Borrow; `wait` in seconds."""
        call, own, wait_ns = self.call(f"{request} of {name}"), self.model(name, model), nanoseconds(wait)
        session, number = self.session(name), int(request)
        return ev.Allocate(call, session, number, own, where, mib(size), int(count), wait_ns, bool(ahead), mib(wanted))

    def do_release(self, name: str, request: str, ids: str) -> ev.Event:
        call = self.call(f"{request} of {name}")
        return ev.Release(call, self.session(name), int(request), tuple(parse_ids(ids)))

    def do_declare(
        self, name: str, request: str, model: str, size: str, where: Any = "device", guest: str = "", wait: str = ""
    ) -> ev.Event:
        """Declare; with guest=yes it can be recalled. `wait` in seconds."""
        call, own = self.call(f"{request} of {name}"), self.model(name, model)
        wait_ns = nanoseconds(wait)
        return ev.Declare(call, self.session(name), int(request), own, where, mib(size), guest == "yes", wait_ns)

    def do_ack(self, name: str, request: str, part: str) -> ev.Event:
        return ev.Acknowledge(self.session(name), int(request), int(part))

    def do_taken(self, name: str, count: str) -> ev.Event:
        """The session has taken so many packets of this connection: the next frame says so."""
        return ev.AcknowledgeUpTo(self.session(name), int(count))

    def do_made(self, name: str, request: str, part: str) -> ev.Event:
        return ev.Made(self.sessions[name], int(request), int(part))

    def do_notmade(self, name: str, request: str, part: str, reason: str, **numbers: str) -> ev.Event:
        sizes: dict[str, int | str] = {key: mib(value) for key, value in numbers.items()}
        return ev.NotMade(self.sessions[name], int(request), int(part), reason, sizes)

    def do_notdelivered(self, name: str, request: str, part: str) -> ev.Event:
        return ev.NotDelivered(self.sessions[name], int(request), int(part))

    def do_quota(
        self, who: str, size: str, where: Any = "device", guarantee: str = "none", weight: str = "none"
    ) -> ev.Event:
        tenant, _, model = who.partition("/")
        sizes = [None if text == "none" else mib(text) for text in (size, guarantee)]
        number = None if weight == "none" else int(weight)
        return ev.SetQuota(self.call(f"quota {who}"), tenant, model or None, where, *sizes, weight=number)

    def do_create(
        self, name: str, request: str, segment: str, size: str, where: Any = "device", wait: str = "", bound: str = ""
    ) -> ev.Event:
        """Create; `wait` in seconds. `bound=yes`: it is deleted when it is left."""
        call, own, until = self.call(f"{request} of {name}"), self.segment(name, segment), nanoseconds(wait)
        return ev.CreateSegment(call, self.session(name), int(request), own, where, mib(size), until, bound == "yes")

    def do_cancel(self, name: str, request: str) -> ev.Event:
        """The caller of a request does not want its answer any more."""
        return ev.CancelWait([number for number, what in self.calls.items() if what == f"{request} of {name}"][-1])

    def do_seal(self, name: str, request: str, segment: str) -> ev.Event:
        call = self.call(f"{request} of {name}")
        return ev.SealSegment(call, self.session(name), int(request), self.generation(segment))

    def do_attach(self, name: str, request: str, segment: str, wait: str = "0") -> ev.Event:
        """Attach; `wait` in seconds."""
        call = self.call(f"{request} of {name}")
        wait_ns = int(float(wait) * SECOND)
        return ev.AttachSegment(call, self.session(name), int(request), self.segment(name, segment), wait_ns)

    def do_detach(self, name: str, request: str, segment: str) -> ev.Event:
        call = self.call(f"{request} of {name}")
        return ev.DetachSegment(call, self.session(name), int(request), self.generation(segment))

    def do_delete(self, name: str, request: str, segment: str, number: str = "", only: str = "") -> ev.Event:
        """Delete by name, and by generation where one is given; `only=left`: if left. `operator` has no session."""
        call = self.call(f"{request} of {name}")
        session = None if name == "operator" else self.session(name)
        chosen = self.generation(number) if number else 0
        return ev.DeleteSegment(call, session, int(request), self.segment(name, segment), chosen, only == "left")

    def do_sealed(self, segment: str) -> ev.Event:
        return ev.Sealed(self.generation(segment))

    def do_notsealed(self, segment: str, reason: str) -> ev.Event:
        return ev.NotSealed(self.generation(segment), reason, {})

    def do_dropped(self, segment: str) -> ev.Event:
        return ev.Dropped(self.generation(segment))

    def do_elapsed(self) -> ev.Event:
        return ev.Elapsed()

    def do_stocked(self, size: str, where: Any = "device") -> ev.Event:
        return ev.Stocked(where, mib(size), made=True)

    def do_notstocked(self, size: str, where: Any = "device") -> ev.Event:
        return ev.Stocked(where, mib(size), made=False)

    # --- one step ---

    def play(self, event: ev.Event) -> list[str]:
        """Take one step and hold it to what every step must keep."""
        before = self.books(self.broker.ledger)
        waiting = {one.event.call for one in self.broker.waiting.waiters()}
        good = self.good_answer(event)
        step = self.broker.step(event, self.now)
        if self.others == "at once" and step.effects and isinstance(step.effects[0], fx.DrainInputs):
            step = self.broker.step(ev.InputsDrained(step.effects[0].call), self.now)
        self.facts += step.facts
        for effect in step.effects:
            if isinstance(effect, fx.Answer) and isinstance(effect.result, fx.SessionOpened):
                self.name(effect)
            if isinstance(effect, fx.Make):
                whole = effect.parts == 1 and not effect.segment
                answer = fx.Allocated(len(effect.ids), effect.extent_bytes) if whole else None
                assert effect.answer == answer, "only what a packet brings whole may be answered with it"
                lent = self.broker.ledger.sessions[effect.session].extents
                assert effect.segment or lent.keys() >= set(effect.ids), "a packet is made of what is not lent"
            if isinstance(effect, fx.Forget):
                assert effect.session not in self.broker.ledger.sessions, "a session is forgotten that is there"
            if isinstance(effect, fx.Make | fx.Send):
                self.parts[effect.session, effect.request_id] = effect.parts
            if isinstance(effect, fx.Make | fx.Send) and effect.segment:
                holders = self.broker.ledger.segments[effect.segment].holders
                assert effect.session in holders, "a segment is sent to who does not hold it"
        recount(self.broker.ledger)
        recallable = self.broker.books.recallable
        for name, where in product(self.broker.ledger.models, self.broker.ledger.totals):
            counted = sum(map(recallable.bytes_of, recallable.borrowers(name, where)))
            assert recallable.of_model(name, where) == counted, f"what can be recalled of {name}"
        waiters = self.broker.waiting.waiters()
        for tenant, at in ((row.tenant, at) for row in take_tenants(self.broker, ()) for at in row.locations):
            sizes = [one.size for one in waiters if (one.name.tenant, one.location) == (tenant, at.location)]
            assert at.waiting == sum(sizes), f"what {tenant} waits for"
        changes = [fact for fact in step.facts if not isinstance(fact, ft.UnaccountedSeen)]
        assert self.broker.ledger.revision == before[0] + len(changes)
        answers = {effect.call: effect.result for effect in step.effects if isinstance(effect, fx.Answer)}
        others = waiting - {one.event.call for one in self.broker.waiting.waiters()}  # a hold has ended, for example
        if isinstance(answers.get(getattr(event, "call", -1)), Denied) and not others:
            assert not step.facts, "a refusal changed something"
            assert self.books(self.broker.ledger) == before, "a refusal changed the ledger"
        row: Any = self.broker.ledger.sessions.get(getattr(event, "session", 0))
        mine = answers.get(getattr(event, "call", -1))
        if mine is None and good is not None:
            assert isinstance(event, ev.Declare), "it is not answered at once"
            heard_later = any(isinstance(one, fx.DrainInputs) for one in step.effects)
            assert heard_later or event in [one.event for one in waiters], "it is neither answered nor waits"
        match event, mine:
            case ev.Release(), fx.Released():
                assert row.extents.keys().isdisjoint(event.ids), "what is released is not credited"
            case ev.Declare(), fx.Declared(size):
                charge = row.charges.get((event.name, event.location))
                assert (charge.declared if charge else 0) == size, "what is declared is not in the books"
            case ev.ConnectionLost(), _:
                assert row is None or row.state != "open", "its connection is lost, and it is open"
            case ev.ProcessDied(), _:
                assert row is None or row.state == "releasing", "its process has died, and it is not releasing"
            case ev.OpenSession(tenant=tenant, process=process), fx.SessionOpened(session):
                opened = self.broker.ledger.sessions[session]
                assert (opened.tenant, opened.process) == (tenant, process), "another session has begun"
            case ev.Goodbye(), fx.Done():
                assert row is None or row.state == "leaving", "it said Goodbye, and has not left"
            case ev.DetachSegment(segment=segment), fx.Detached():
                assert ft.SegmentLeft(segment, event.session, 1, "detached") in step.facts, (
                    "it is detached, and holds it"
                )
            case ev.SetQuota(), fx.Done():
                found = self.broker.ledger.quotas.get((event.tenant, event.model, event.location), Quota())
                assert found == Quota(event.limit, event.guarantee, event.weight), "another quota is set"
            case ev.Restarted(), _:
                assert all(one.state != "open" for one in self.broker.ledger.sessions.values()), "one is still open"
            case ev.StateHolds(), fx.Reconciled():
                assert row.state == "open", "it is taken up again, and not open"
            case ev.Dropped(segment), _:
                dropped = self.broker.ledger.segments.get(segment)
                assert dropped is None or dropped.state == "releasing", "a segment is dropped, and goes on"
            case ev.Stocked(made=True), _:
                is_dropped = any(isinstance(one, fx.DropStock) for one in step.effects)
                assert step.facts or is_dropped, "what was made ahead is not in the books"
        ends = isinstance(event, ev.Goodbye | ev.ForgetSession) and fx.Forget(event.session) in step.effects
        if isinstance(event, ev.ProcessDied) or ends:
            held = [one.segment for one in self.broker.ledger.segments.values() if event.session in one.holders]
            assert not held, "it has ended, and holds a segment"
        for row in self.broker.ledger.segments.values():
            busy = row.holders or self.broker.lending.making_segment(row.writer, row.segment)
            assert row.state not in ("ending", "retired") or busy, f"segment {row.segment} ends when nobody holds it"
        effects, facts = step.effects, step.facts
        if self.shown != "all":
            if mine == good or isinstance(mine, fx.SessionOpened):
                effects = [one for one in effects if not isinstance(one, fx.Answer) or one.result is not mine]
            facts = [one for one in facts if not is_said(one, event, step.effects)]
        return [*in_lines("", map(self.effect, effects)), *in_lines("+ ", map(self.plain, facts))]

    def good_answer(self, event: ev.Event) -> fx.Result | None:
        """Return the answer of a request that has done what it says; None if there are several."""
        match event:
            case ev.ResumeSession(session=session) if row := self.broker.ledger.sessions.get(session):
                return fx.SessionResumed(session, row.tenant, row.observer)
            case ev.RegisterModel(name=name):
                return fx.Registered(name)
            case ev.Declare(declared_bytes=size):
                return fx.Declared(size)
            case ev.Release(session=session, ids=ids) if row := self.broker.ledger.sessions.get(session):
                return fx.Released(sum(row.extents[extent].extent_bytes for extent in ids if extent in row.extents))
            case ev.DetachSegment():
                return fx.Detached()
            case ev.UnregisterModel() | ev.SetDraining() | ev.SetQuota() | ev.Goodbye() | ev.ForgetSession():
                return fx.Done()
        return None

    def name(self, opened: fx.Answer) -> None:
        name = self.calls[opened.call].removeprefix("open ")
        self.sessions[name] = opened.result.session
        self.names[opened.result.session] = name

    def call(self, what: str) -> int:
        self.calls[len(self.calls) + 1] = what
        return len(self.calls)

    def session(self, name: str) -> int:
        """Return a session's id; `nobody` has one that is unknown to the broker."""
        return -1 if name == "nobody" else self.sessions[name]

    def model(self, session: str, model: str) -> ModelName:
        tenant, slash, own = model.rpartition("/")
        return ModelName(tenant if slash else self.tenants.get(session, "t"), own)

    def segment(self, session: str, segment: str) -> SegmentName:
        """Return a segment's name from `model/label` or `tenant/model/label`."""
        *tenant, model, label = segment.split("/")
        return SegmentName(tenant[0] if tenant else self.tenants.get(session, "t"), model, label)

    def generation(self, text: str) -> int:
        """Return the id of a segment: `#3`, or the last one that began under this label."""
        if "#" in text:
            return parse_id(text)
        begun = [fact.segment for fact in self.facts if isinstance(fact, ft.SegmentBegan) and fact.label == text]
        return begun[-1]

    def seen(self, shown: Mapping[str, str]) -> ev.Seen:
        return {where: mib(shown[where]) if where in shown else None for where in LOCATIONS}

    # --- in plain text ---

    def effect(self, effect: fx.Effect) -> str:
        if isinstance(effect, fx.Make):
            part = f"part {effect.part} of {effect.parts}"
            what = f"{ids_text(effect.ids)} x {size_text(effect.extent_bytes)} at {effect.location}"
            what += f", kept for {ids_text([effect.segment])}" if effect.segment else ""
            how = "take from the stock" if effect.stocked else "make"
            return f"{how} for {effect.request_id} of {self.names[effect.session]}, {part}: {what}"
        if isinstance(effect, fx.Send):
            part = f"part {effect.part} of {effect.parts}"
            what = f"{ids_text(effect.ids)} x {size_text(effect.extent_bytes)} of {ids_text([effect.segment])}"
            return f"send for {effect.request_id} of {self.names[effect.session]}, {part}: {what}"
        if isinstance(effect, fx.Waited):
            return f"{self.calls[effect.call]} waited {effect.waited_ns / SECOND:g}s and was {effect.result}"
        if isinstance(effect, fx.SendRecall):
            asked = f"{size_text(effect.size)} of {effect.name.tenant}/{effect.name.model} at {effect.location}"
            if effect.within_ns != self.rules.recall_ns:
                asked += f", within {effect.within_ns / SECOND:g}s"
            asked += ", for a guarantee" * effect.is_guaranteed
            return f"recall {ids_text([effect.recall])} from {self.names[effect.session]}: {asked}"
        if isinstance(effect, fx.Recalled):
            end = f"{size_text(effect.returned)} of {size_text(effect.size)}, after {effect.after_ns / SECOND:g}s"
            return f"a recall from {self.names[effect.session]} is {effect.result}: {end}"
        if isinstance(effect, fx.DrainInputs):
            return f"drain inputs before {self.calls[effect.call]} is refused"
        if isinstance(effect, fx.Answer):
            call = self.calls[effect.call]
            if isinstance(effect.result, Denied):
                return f"refuse {call}: {effect.result.reason} {self.fields(effect.result.numbers.items())}".rstrip()
            return f"answer {call}: {self.plain(effect.result)}"
        return self.plain(effect)

    def plain(self, value: Any) -> str:
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        pairs = (pair for pair in pairs if pair not in (("location", "device"), ("at", self.now)))
        return f"{type(value).__name__} {self.fields(pairs)}".rstrip()

    def fields(self, pairs: Iterable[tuple[str, Any]]) -> str:
        return " ".join(
            f"{key}={self.text(key, value)}"
            for key, value in pairs
            if key not in ("pid", "uid", "client") and value != ""
        )

    def text(self, key: str, value: Any) -> str:
        if key in ("session", "writer"):
            return self.names.get(value, str(value))
        if key in ("extent", "first") or (key == "segment" and isinstance(value, int)):
            return ids_text([value])
        if key in IDS:
            return ids_text(value)
        if key == "models" and not isinstance(value, str):
            return ",".join(f"{name.tenant}/{name.model}" for name in value) or "none"
        if key in ("at", "began_at", "used_at", "slice_until") and value is not None:
            return seconds_text(value)
        if key == "name" and isinstance(value, ModelName):
            return f"{value.tenant}/{value.model}"
        if key == "limits":
            return ",".join(f"{where}:{size_text(size)}" for where, size in value.items()) or "none"
        if key == "limit" and isinstance(value, int) and 0 < value < MIB:
            return str(value)
        if isinstance(value, int) and not isinstance(value, bool) and key not in COUNTS:
            return size_text(value)
        return repr(value) if isinstance(value, str) and " " in value else str(value)

    def lends(self) -> bool:
        return any(total.charged or total.stock for total in self.broker.ledger.totals.values())

    def summary(self) -> str:
        """The books in one line: totals, models, sessions with what they are charged, segments with who holds them.

        A segment of which a holder died is `uncertain`.
        """
        ledger = self.broker.ledger
        totals = [
            f"{where} {size_text(t.lent)} lent {size_text(t.releasing)} releasing {size_text(t.free)} free"
            f" {size_text(self.broker.books.making[where])} making" + f" {size_text(t.stock)} stock" * bool(t.stock)
            for where, t in ledger.totals.items()
            if t.capacity
        ]
        models = [f"{name.tenant}/{name.model} {size_text(row.used())}" for name, row in ledger.models.items()]
        sessions = [
            f"{self.names[row.session]} {row.state} {size_text(sum(map(row.charged, ledger.totals)))}"
            for row in ledger.sessions.values()
        ]
        segments = [
            f"{ids_text([row.segment])} {row.name.model}/{row.label} {row.state} {size_text(row.bytes)}"
            + " uncertain" * row.uncertain
            + (" held by " if row.holders else "")
            + "+".join(
                self.names[session] + (f" x{times}" if times > 1 else "") for session, times in row.holders.items()
            )
            for row in ledger.segments.values()
        ]
        whole = [*totals, ", ".join(models) or "no models", ", ".join(sessions) or "nobody", ", ".join(segments)]
        return "= " + " | ".join(filter(None, whole))


def is_said(fact: ft.Fact, event: ev.Event, effects: Sequence[fx.Effect]) -> bool:
    """Say whether a fact says what the command or its effects say."""
    made = [one for one in effects if isinstance(one, fx.Make)]
    match fact:
        case ft.Debited(session, _, where, size, first, count):
            mine = [one.ids for one in made if (one.session, one.location, one.extent_bytes) == (session, where, size)]
            return {extent for ids in mine for extent in ids}.issuperset(range(first, first + count))
        case ft.Credited(session, ids, "released"):
            return isinstance(event, ev.Release) and (event.session, set(event.ids)) == (session, set(ids))
        case ft.DeclarationSet(declared_bytes=size):
            return any(isinstance(one, fx.Answer) and one.result == fx.Declared(size) for one in effects)
        case ft.StockChanged(where, size, 1, "made"):
            return event == ev.Stocked(where, size, made=True)
        case ft.StockChanged(where, size, change, "used"):
            taken = [one.ids for one in made if one.stocked and (one.location, one.extent_bytes) == (where, size)]
            return sum(map(len, taken)) == -change
        case ft.StockChanged(where, size, change, "dropped"):
            return fx.DropStock(where, size, -change) in effects
        case ft.SessionBegan():
            return isinstance(event, ev.OpenSession)
        case ft.SessionMoved(session, "connection lost"):
            return isinstance(event, ev.Restarted) or event == ev.ConnectionLost(session)
        case ft.SessionMoved(session, "goodbye"):
            return isinstance(event, ev.Goodbye) and event.session == session
        case ft.SessionMoved(session, "last packet" | "settled" | "forgotten"):
            return fx.Forget(session) in effects
        case ft.ModelLeft(session=session):
            return isinstance(event, ev.UnregisterModel) and event.session == session
        case ft.QuotaSet(tenant, model, where):
            return isinstance(event, ev.SetQuota) and (event.tenant, event.model, event.location) == (
                tenant,
                model,
                where,
            )
        case ft.SessionMoved(session, "process died"):
            return isinstance(event, ev.ProcessDied) and event.session == session
        case ft.SessionMoved(session, "resumed"):
            reconciled = any(isinstance(one, fx.Answer) and isinstance(one.result, fx.Reconciled) for one in effects)
            return reconciled and isinstance(event, ev.StateHolds) and event.session == session
        case ft.SegmentBegan() if isinstance(event, ev.CreateSegment):
            size = fact.extent_bytes * (fact.count - 1) + fact.last_bytes
            asked = SegmentName(*fact.name, fact.label), size, fact.writer
            count = sum(len(one.ids) for one in made if one.segment == fact.segment)
            return (*asked, fact.count) == (event.name, event.size, event.session, count)
        case ft.SegmentEnded(segment, None):
            return event == ev.Dropped(segment)
        case ft.SegmentMoved(segment, "seal asked"):
            return fx.Seal(segment) in effects
        case ft.SegmentMoved(segment, "sealed"):
            return event == ev.Sealed(segment)
        case ft.SegmentMoved(cause="deleted"):
            return isinstance(event, ev.DeleteSegment)
        case ft.SegmentLeft(segment, session, 1, "detached"):
            return isinstance(event, ev.DetachSegment) and (event.segment, event.session) == (segment, session)
        case ft.SegmentLeft(session=session, cause="holder died" | "goodbye" | "forgotten"):
            return isinstance(event, ev.ProcessDied | ev.Goodbye | ev.ForgetSession) and event.session == session
        case ft.SegmentMoved(segment, "last session left"):
            return fx.Drop(segment) in effects
        case ft.SessionEnded(session):
            return fx.Forget(session) in effects
        case ft.SegmentHeld(segment, session):
            sent = [one for one in effects if isinstance(one, fx.Make | fx.Send)]
            return (session, segment) in [(one.session, one.segment) for one in sent]
    return False


def limits_of(options: dict[str, str]) -> dict[str, Any]:
    """Take limits=, guarantees=, weights= and default= out of a command's options, for the rules."""
    found: dict[str, dict[QuotaKey, int]] = {"limits": {}, "guarantees": {}, "weights": {}}
    for what, sizes in found.items():
        for item in filter(None, options.pop(what, "").split(",")):
            who, size = item.split(":")
            tenant, _, model = who.partition("/")
            sizes[tenant, model or None, "device"] = int(size) if what == "weights" else mib(size)
    default = options.pop("default", "")
    return {**found, "default_limits": {"device": mib(default)} if default else {}}


def nanoseconds(text: str) -> int | None:
    """Return a time that is given in seconds; None for ""."""
    return int(float(text) * SECOND) if text else None


def mib(text: str) -> int:
    """Return bytes: MiB unless the text ends with B."""
    return int(text[:-1]) if text.endswith("B") else int(text) * MIB


def size_text(size: int) -> str:
    return str(size // MIB) if size % MIB == 0 else f"{size}B"


def seconds_text(time: int) -> str:
    return f"{(time - START if time else 0) / SECOND:g}s"


def parse_id(text: str) -> int:
    epoch, _, number = text.partition("#")
    return (int(epoch or 1) << EPOCH_BITS) + int(number)


def parse_ids(text: str) -> Iterator[int]:
    for item in text.split(",") if text != "none" else ():
        first, _, last = item.partition("..")
        start = parse_id(first)
        stop = parse_id(f"{first.partition('#')[0]}#{last}") if last else start
        yield from range(start, stop + 1)


def ids_text(ids: Iterable[int]) -> str:
    """Return ids as runs, in their order; those of a later epoch begin with its number."""
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(_run_text(first, last) for first, last in runs) or "none"


def _run_text(first: int, last: int) -> str:
    epoch, number = divmod(first, 1 << EPOCH_BITS)
    return f"{'' if epoch == 1 else epoch}#{number}" + (f"..{number + last - first}" if last > first else "")


def in_lines(mark: str, items: Iterable[str]) -> list[str]:
    """Return effects or facts, as many in a line as it has room for."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) <= LINE:
            lines[-1] += f"; {item}"
        else:
            lines.append(mark + item)
    return lines


def retell(text: str, script: Script) -> str:
    """Return the transcript with every outcome as it is now."""
    out: list[str] = []
    books, begins = "", True
    commands = [line for line in text.splitlines() if line and not line.startswith(" ")]
    for line, following in pairwise([*commands, "#"]):
        if line.startswith("#"):
            out += [""] * bool(out and not out[-1].startswith("#")) + [line]
            begins = True
            continue
        out += [line, *(f"    {said}" for said in script.do(line))]
        if line.startswith("rules "):
            books = script.summary()
        begins = begins and line.startswith(("rules ", GIVEN))
        set_up = begins and not following.startswith(GIVEN)
        if (set_up or following.startswith("#")) and script.summary() != books:
            books = script.summary()
            if not set_up or script.lends():
                out.append(f"    {books}")
    return "\n".join(out) + "\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path, golden: Callable[[Path, str], None], books: Callable[[Any], Any]) -> None:
    """A script gives what stands in its file, to the letter, and its facts alone give the same ledger."""
    script = Script(books)
    golden(path, retell(path.read_text(), script))
    assert books(replay(script.rules.capacities, script.facts)) == books(script.broker.ledger)


def test_every_reason_of_the_core_is_told() -> None:
    """Every reason that the core's own code refuses with stands in a transcript."""
    core = Path(policy.__file__).parent
    used = {name for file in core.glob("*.py") for name in re.findall(r"Reason\.([A-Z_]+)", file.read_text())}
    told = {word for path in FILES for word in re.findall(r"(?:^ +|; )refuse [^:]*: ([A-Z_]+)", path.read_text(), re.M)}
    assert used
    assert used <= told, f"no transcript shows {sorted(used - told)}"
