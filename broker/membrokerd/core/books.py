"""The books that every part of the core shares: the ledger, the rules, ids, and what one step has led to.

Owns the ledger and changes it by facts alone; collects the effects of a step. Must never decide about a request, nor
know a part that stands above it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from . import effects as fx
from . import facts as ft
from . import policy
from .admission import Admission
from .denied import Denied, Reason, deny
from .ledger import replay
from .names import Location, ModelName
from .recallable import Borrower, Recallable

COUNTER_BITS = 40
"""The low bits of an id are a counter; those above it are the epoch."""
MOST_TENANTS = 4096
"""Where each user is a tenant, users come and go: this bounds what is kept about those that are gone."""
_OF_MODELS = frozenset((ft.ModelBegan, ft.ModelAsked, ft.ModelEnded))
"""The facts that can change a guarantee in force."""
_COUNTER_MAX = (1 << COUNTER_BITS) - 1


class Step(NamedTuple):
    """What one event led to: effects for the daemon to carry out, and the facts that changed the ledger.

    `deadline` is when the core wants to hear `Elapsed`, in nanoseconds of CLOCK_MONOTONIC; None: not at all.
    """

    effects: list[fx.Effect]
    facts: list[ft.Fact]
    deadline: int | None


class Books:
    """The ledger and the rules of one device, and what all parts of the core do with them.

    `epoch` is a number that no earlier daemon of this device had. Ids are (epoch, counter), so none is used twice.
    """

    def __init__(self, rules: policy.Rules, epoch: int, facts: Iterable[ft.Fact] = ()) -> None:
        assert 0 < epoch < 1 << 24
        self.ledger = replay(rules.capacities, facts)
        self.recallable = Recallable(self.ledger)
        self.limits_changed = False
        """Whether a model or a tenant may have more than its limit, and the excess has not been recalled yet."""
        self.denials: dict[ModelName, Counter[str]] = {}
        """How many calls about each model were refused, by reason: only of the models that there are."""
        self.tenant_denials: dict[str, Counter[str]] = {}
        """The same of each tenant since the start; of the last MOST_TENANTS that were refused for the first time."""
        self.device_denials: Counter[str] = Counter()
        """The same of all tenants since the start."""
        self.change_rules(rules)
        self.stopping = False
        self.draining = False
        self.cannot_write = ""
        """Why debits cannot be journalled at the moment, so that nothing is lent; set by the daemon."""
        self.device_lost = ""
        """What the driver says while the device does not answer, so that nothing is lent; set by the daemon."""
        self.making: dict[Location, int] = dict.fromkeys(rules.capacities, 0)
        """Bytes that are debited but may not exist on the device yet."""
        self._next_id = epoch << COUNTER_BITS
        self.begin_step()

    def change_rules(self, rules: policy.Rules) -> None:
        """Decide by these rules from now on."""
        self.rules = rules
        self.admission = Admission(self.ledger, rules, self.recallable)
        self.recallable.hold_without = self.admission.hold_without
        self.recallable.count_guests()
        self.limits_changed = True

    def begin_step(self) -> tuple[list[fx.Effect], list[ft.Fact]]:
        """Return the lists to which the effects and facts of this step are added from now on."""
        effects: list[fx.Effect] = []
        self._facts: list[ft.Fact] = []
        self.emit: Callable[[fx.Effect], None] = effects.append
        """Ask the daemon to carry out an effect."""
        return effects, self._facts

    def record(self, fact: ft.Fact) -> None:
        """Change the ledger."""
        self.ledger.apply(fact)
        if (follow := _FOLLOWED.get(type(fact))) is not None:
            follow(self, fact)
        elif self.recallable.is_possible and type(fact) is ft.Debited:
            self.recallable.count(Borrower(fact.session, fact.name, fact.location))
        if self.recallable.guests:
            self.recallable.count_guests(all_again=type(fact) in _OF_MODELS)
        self._facts.append(fact)

    def model_ended(self, name: ModelName) -> None:
        """Forget what is kept about a model beside the ledger."""
        self.admission.refresh_model(name)
        self.recallable.model_ended(name)

    def take_ids(self, count: int) -> range:
        """Return `count` ids that were never used."""
        first = self._next_id
        self._next_id += count
        assert self._next_id & _COUNTER_MAX >= first & _COUNTER_MAX, "the counter of this epoch is used up"
        return range(first, first + count)

    def answer(self, call: int, result: fx.Result | Denied) -> None:
        """Answer a call."""
        self.emit(fx.Answer(call, result))

    def refuse(self, call: int, denied: Denied, session: int, name: ModelName) -> None:
        """Refuse a call about a model, and count the refusal there, unless the model belongs to another tenant."""
        row = self.ledger.sessions.get(session)
        own = row is not None and row.tenant == name.tenant and denied.reason is not Reason.MODEL_NOT_FOUND
        if own and name in self.ledger.models:
            self._count_refusal(name, denied.reason)
        self.answer(call, denied)

    def _count_refusal(self, name: ModelName, reason: Reason) -> None:
        self.denials.setdefault(name, Counter())[reason] += 1
        if name.tenant not in self.tenant_denials and len(self.tenant_denials) >= MOST_TENANTS:
            del self.tenant_denials[next(iter(self.tenant_denials))]
        self.tenant_denials.setdefault(name.tenant, Counter())[reason] += 1
        self.device_denials[reason] += 1

    def refuse_debit(self) -> Denied | None:
        """Return why nothing at all is lent now, or None."""
        if self.cannot_write:
            return deny(Reason.JOURNAL_FULL, driver_says=self.cannot_write)
        if self.device_lost:
            says = f"the device does not answer, and nothing is lent until it does ({self.device_lost})"
            return deny(Reason.DRIVER_FAILED, driver_says=says)
        return deny(Reason.DRAINING) if self.draining else None


_FOLLOWED: dict[type, Callable[[Books, Any], None]] = {
    ft.QuotaSet: lambda books, _: books.change_rules(books.rules),
    ft.ModelBegan: lambda books, fact: books.admission.refresh_model(fact.name),
    ft.ModelAsked: lambda books, fact: books.admission.refresh_model(fact.name),
    ft.ModelEnded: lambda books, fact: books.model_ended(fact.name),
    ft.ModelLeft: lambda books, fact: books.recallable.leave(fact.session, fact.name),
    ft.SessionMoved: lambda books, fact: books.recallable.session_moved(books.ledger.sessions[fact.session]),
    ft.Credited: lambda books, fact: books.recallable.credited(fact.session),
}
"""How the sums that are kept beside the ledger follow a fact, after the ledger has applied it."""
