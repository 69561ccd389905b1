"""From a seed that fails to a story that a person can read, and that can be added to the transcripts as it is.

Turns are left out as long as the same thing goes wrong at the same place: first all but the last ones, then ever
smaller pieces. What is left is told in the format of tests/broker/core/transcripts.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.broker.core.test_transcripts import Script, ids_text
from tests.simulation.world import SECOND, World
from tests.support.sizes import MIB

from membrokerd.core import events as ev
from membrokerd.core.names import SegmentName

BUDGET = 400_000
"""Turns that may be played to shrink one failure."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong: where in the code, what was said, and in which world."""

    place: tuple[str, str, int]
    said: str
    world: World
    turns: tuple[int, ...]


class Failed(AssertionError):
    """A world failed. Says its seed, what went wrong, and the shrunk transcript."""


def try_world(seed: int, turns: Iterable[int]) -> Failure | None:
    """Play a world of these turns, and return what went wrong."""
    world, taken = World(seed), []
    try:
        for number in turns:
            taken.append(number)
            world.turn(number)
        world.end()
    except Exception as error:  # noqa: BLE001 - whatever the core or the referee raises is what is looked for
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {error}"
        return Failure((type(error).__name__, frame.filename, frame.lineno or 0), said, world, tuple(taken))
    return None


def shrink(failure: Failure, budget: int = BUDGET) -> Failure:
    """Return the same failure with as few turns as could be found."""
    seed = failure.world.seed

    def again(turns: Sequence[int]) -> Failure | None:
        nonlocal budget
        budget -= len(turns)
        found = try_world(seed, turns) if budget >= 0 else None
        return found if found and found.place == failure.place else None

    for last in (30, 100, 300, 1_000, 3_000, 10_000):
        found = again(failure.turns[-last:]) if last < len(failure.turns) else None
        if found:
            failure = found
            break
    size = len(failure.turns) // 2
    while size and budget > 0:
        start = 0
        before = len(failure.turns)
        while start < len(failure.turns) and budget > 0:
            found = again(failure.turns[:start] + failure.turns[start + size :])
            if found:
                failure = found
            else:
                start += size
        size = size // 2 if size > 1 or len(failure.turns) == before else 1
    return failure


def run(seed: int, steps: int, *, show: bool = False) -> World:
    """Play a world from a seed for so many steps; a failure is raised with its shrunk transcript."""
    print(f"seed {seed}: `make sim STEPS={steps} SEED={seed}` plays it again")
    world = World(seed)
    try:
        world.play_steps(steps)
    except Exception as error:
        first = try_world(seed, range(world.turn_number + 1))
        if first is None:
            raise
        small = shrink(first)
        text = (
            f"seed {seed}, after {world.referee.judged:,} steps: {first.said}\n"
            f"shrunk to {len(small.world.events)} events of {len(small.turns)} turns: {small.said}\n\n{tell(small)}"
        )
        raise Failed(text) from error
    if show:
        print(world.referee.report())
    return world


# --- in the format of the transcripts ---


def tell(failure: Failure) -> str:
    """Return the failure as a transcript: its commands, and what followed from each as far as it goes."""
    script = Script(lambda ledger: (ledger.revision,))
    lines = [f"# Shrunk from seed {failure.world.seed}: {failure.said.splitlines()[0]}"]
    for line in commands(failure.world):
        lines.append(line)
        try:
            outcome = script.do(line)
        except Exception as error:  # noqa: BLE001 - the transcript shows where it goes wrong, whatever that is
            lines.append(f"    ! {type(error).__name__}: {error}")
            continue
        lines += [f"    {said}" for said in [*outcome, script.summary()]]
    return "\n".join(lines)


def commands(world: World) -> list[str]:
    """Return the commands that tell a world's events."""
    rules = world.rules
    limits = ",".join(
        f"{tenant}{'/' + model if model else ''}:{size // MIB}" for (tenant, model, _), size in rules.limits.items()
    )
    lines = [
        f"rules device={rules.capacities['device'] // MIB} host={rules.capacities['host'] // MIB}"
        f" settle={rules.settle_ns // SECOND} grace={rules.model_grace_ns // SECOND} sessions={rules.max_sessions}"
        f" per_process={rules.max_sessions_per_process} models={rules.max_models_per_tenant}"
        f" calls={rules.max_calls_per_session} limits={limits} guarantee_wait={rules.guarantee_wait_ns // SECOND}"
        f" segment_extent={rules.segment_extent_bytes // MIB} segments={rules.max_segments_per_tenant}"
        f" segment_extents={rules.max_segment_extents}"
        f" stock_extents={rules.stock_extents} stock={rules.stock_bytes // MIB}"
        f" slice={rules.slice_ns // SECOND} others=later"
    ]
    names = {session: f"s{number}" for number, session in enumerate(world.opened.values(), 1)}
    now = 0
    torn = iter(world.daemons.all_torn)
    asked: dict[int, ev.Event] = {}
    for at, event in world.events:
        if at > now:
            now = at
            lines.append(f"at {now / SECOND:.3f}")
        if isinstance(event, ev.Restarted):
            lost = f" lost={ids_text(sorted(event.lost))}" if event.lost else ""
            lines.append(f"restart torn={next(torn)}{lost}{_seen(event.seen)}")
        elif isinstance(event, ev.InputsDrained):
            lines.append(f"heard {' '.join(_command(asked[event.call], world.opened, names).split()[1:3])}")
        else:
            if isinstance(event, ev.CancelWait):
                if event.call in asked:
                    lines.append(f"cancel {' '.join(_command(asked[event.call], world.opened, names).split()[1:3])}")
                continue
            lines.append(event if isinstance(event, str) else _command(event, world.opened, names))
            if isinstance(event, ev.Allocate | ev.Declare | ev.CreateSegment):
                asked[event.call] = event
    return lines


def _command(event: ev.Event, opened: Mapping[int, int], names: Mapping[int, str]) -> str:
    match event:
        case ev.OpenSession():
            name = names.get(opened.get(event.call, 0), f"x{event.call}")
            observer = " observer=1" if event.observer else ""
            return f"open {name} tenant={event.tenant} process={event.process}{observer}"
        case ev.Audit(seen):
            return f"audit{_seen(seen)}"
        case ev.SetQuota(_, tenant, model, where, limit, guarantee, weight):
            texts = ["none" if size is None else str(size // MIB) for size in (limit, guarantee)]
            quota = f"{texts[0]} where={where} guarantee={texts[1]} weight={'none' if weight is None else weight}"
            return f"quota {tenant}{'/' + model if model else ''} {quota}"
        case ev.Sealed(segment):
            return f"sealed {ids_text([segment])}"
        case ev.NotSealed(segment, reason):
            return f"notsealed {ids_text([segment])} {reason}"
        case ev.Dropped(segment):
            return f"dropped {ids_text([segment])}"
        case ev.Elapsed():
            return "elapsed"
        case ev.SetDraining(_, draining):
            return "drain" if draining else "undrain"
        case ev.Stocked(where, size, made):
            return f"{'stocked' if made else 'notstocked'} {size // MIB} where={where}"
        case ev.DeleteSegment(_, None):
            return f"delete operator {event.request_id} {_segment(event.name)}{_generation(event.generation)}"
    name = names[event.session]
    match event:
        case ev.ConnectionLost():
            return f"lost {name}"
        case ev.AnswerRecall():
            return f"answer {name} {ids_text([event.recall])} heard={event.size}B"
        case ev.ResumeSession():
            return f"resume {name} process={event.process}"
        case ev.StateHolds():
            return f"holds {name}{_holds(event)}"
        case ev.ForgetSession():
            return f"forget {name}"
        case ev.ProcessDied():
            return f"died {name}{_seen(event.seen)}"
        case ev.Acknowledge():
            return f"ack {name} {event.request_id} {event.part}"
        case ev.AcknowledgeUpTo():
            return f"taken {name} {event.count}"
        case ev.Made():
            return f"made {name} {event.request_id} {event.part}"
        case ev.NotMade():
            return f"notmade {name} {event.request_id} {event.part} {event.reason}"
        case ev.NotDelivered():
            return f"notdelivered {name} {event.request_id} {event.part}"
        case ev.Goodbye():
            return f"bye {name} {event.request_id}"
        case ev.Release():
            return f"release {name} {event.request_id} {ids_text(event.ids)}"
        case ev.SealSegment():
            return f"seal {name} {event.request_id} {ids_text([event.segment])}"
        case ev.DetachSegment():
            return f"detach {name} {event.request_id} {ids_text([event.segment])}"
        case ev.CreateSegment():
            size = event.size // MIB
            own = f"{_segment(event.name)} {size} where={event.location}{_wait(event.wait_ns)}"
            return f"create {name} {event.request_id} {own}"
        case ev.AttachSegment():
            return f"attach {name} {event.request_id} {_segment(event.name)}{_wait(event.wait_ns)}"
        case ev.DeleteSegment():
            left = " only=left" if event.only_if_left else ""
            return f"delete {name} {event.request_id} {_segment(event.name)}{_generation(event.generation)}{left}"
    model = f"{name} {event.request_id} {event.name.tenant}/{event.name.model}"
    match event:
        case ev.RegisterModel():
            limit = "".join(f" limit={where}:{size // MIB}" for where, size in event.limits.items())
            answers = "" if event.answers is None else f" answers={'yes' if event.answers else 'no'}"
            words = " exclusive=1" * event.exclusive + " replaces=1" * event.replaces
            return f"register {model}{limit}{words}{answers}"
        case ev.UnregisterModel():
            return f"unregister {model}"
        case ev.Allocate():
            what = f"{event.count} x {event.extent_bytes // MIB} where={event.location}"
            wanted = f" wanted={event.wanted_bytes // MIB}" if event.wanted_bytes else ""
            return f"allocate {model} {what}{_wait(event.wait_ns)}{wanted}"
        case ev.Declare():
            guest = " guest=yes" if event.recallable else ""
            return f"declare {model} {event.declared_bytes // MIB} where={event.location}{guest}{_wait(event.wait_ns)}"
    raise AssertionError(f"no command for {event}")


def _wait(wait_ns: int | None) -> str:
    return "" if wait_ns is None else f" wait={wait_ns / SECOND:.9f}"


def _holds(event: ev.StateHolds) -> str:
    extents = f" extents={ids_text(sorted(event.extents))}" if event.extents else ""
    segments = ",".join(f"{ids_text([segment])}:{times}" for segment, times in sorted(event.segments.items()))
    declared = ",".join(
        f"{name.tenant}/{name.model}:{size // MIB}:{where}" for (name, where), size in event.declarations.items()
    )
    answers = ",".join(f"{name.tenant}/{name.model}" for name in sorted(event.answering))
    guests = ",".join(f"{name.tenant}/{name.model}" for name, _ in sorted(event.guests))
    named = {"segments": segments, "declared": declared, "answers": answers, "guests": guests}
    return extents + "".join(f" {key}={text}" for key, text in named.items() if text)


def _segment(name: SegmentName) -> str:
    return f"{name.tenant}/{name.model}/{name.label}"


def _generation(number: int) -> str:
    return f" {ids_text([number])}" if number else ""


def _seen(seen: ev.Seen) -> str:
    return "".join(f" {where}={size // MIB}" for where, size in seen.items() if size is not None)
