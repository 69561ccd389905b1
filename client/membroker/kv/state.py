"""`CacheState`: what an engine's scheduler thread and the two threads of its cache share, under one lock.

Owns the balloon, the fences, the open recalls, and what is wanted. The lock is held for operations on lists alone: no
method may call a broker, a driver or a pool, because the scheduler thread would wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import ClosedError
from .balloon import Balloon
from .engine import Engine, Fence
from .groups import DOOMED, DRAINING, RETIRING

LINGER_SECONDS: Final = 0.1
"""What the engine needed in this time or the time before is kept: need goes up and down with each batch."""
BLOCKS_PER_TURN: Final = 256
"""How many blocks a turn looks at for what can go, and how many for what drains, unless there is a recall: 50 us."""
FENCE_SECONDS: Final = 0.001
"""How often a fence is looked at. A step of an engine takes 10 to 30 ms."""
LOOK_SECONDS: Final = 1.0
"""How often a thread without work looks whether the pool was closed."""
ANSWER_SECONDS: Final = 0.1
"""A recall is answered so long before its deadline, whatever has been released by then."""
PATIENCE_SECONDS: Final = 0.3
"""A recall waits so long for requests that end by themselves, but at most half of its time, and not at all if a request
within a guarantee waits for it. Then they are preempted, in the last turn before that, since one with long prompts may
take as long."""
ASK_GROUPS, MOST_GROUPS = 4, 64
"""How many groups are asked for at once, at first and at most: a question takes 0.4 ms, and several times that beside
an engine that holds the GIL, whether for one page or for many. After a grant four times as many are asked for, if so
many are wanted; after a question that was refused, or that waited, only one. More than ASK_GROUPS are asked for as
memory ahead of need: the broker lends it if it is free and nobody waits, and else refuses at once, so that no page
waits for others of its question. With several ranks it stays at ASK_GROUPS: until the last rank has answered, those
before it have what it may refuse."""
AHEAD_SECONDS: Final = 1.0
"""How long nothing is asked ahead of need after such a question was refused."""
SHORT_SECONDS: Final = 0.05
"""A question that the broker has not answered after this time waits for others to release memory."""
LOOKS_AT_REST: Final = 3
"""After so many looks that found nothing to release, an engine at rest has no more than it wants."""
AnyRecall = Any
"""A recall of the broker: `membroker.Recall`, or the `RankRecall` of a rank. A model has one open recall at a time."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Figures of a cache at one moment.

    `blocks` is the number of blocks that have memory and that the engine has or gets with its next `grow`.
    `wanted_blocks` is the number that the engine wants. `charged_bytes` are borrowed, and `going_bytes` of them will be
    released. Since the cache was made the broker granted `grants` groups; `refusals` counts its refusals.
    """

    blocks: int
    wanted_blocks: int
    charged_bytes: int
    going_bytes: int
    grants: int
    refusals: int


class CacheState:
    """The state of one cache. Every method may be called by any thread."""

    def __init__(self, balloon: Balloon, *, has_ranks: bool = False) -> None:
        self._balloon = balloon
        self.is_closed: bool = False
        """Whether the cache is closed, and its two threads are to end."""
        self._has_ranks = has_ranks
        self._groups = balloon.groups
        self._want = 1
        self._peaks = [0, 0]
        """The most that was wanted since the last look, and between that and the one before."""
        self._look_at = 0.0
        self._looks_left = 0
        """How many looks an engine at rest still has to make."""
        self._fences: dict[int, Fence] = {}
        self._unfenced: set[int] = set()
        """Groups that retire, and have no fence yet."""
        self._recalls: dict[object, AnyRecall] = {}
        """The open ones, by model: each rank of an engine has a model of its own."""
        self._answers = True
        """Whether recalls are answered: until `end`."""
        self._preempts_at = 0.0
        """Until when recalls wait for requests that end by themselves; 0 if they do not."""
        self._calm_at = 0.0
        """From when on a recall is not for the need of the one before it."""
        self._held_at = 0.0
        """When the engine made its last turn."""
        self._tried: Collection[AnyRecall] = ()
        """The recalls for which groups were chosen last."""
        self.is_suspended: bool = False
        """Whether `suspend` was called last."""
        self._left_bytes = -1
        """What has memory when all that can go has gone, while suspended; -1 before that is known."""
        self._ahead_at = 0.0
        """From when on something may be asked ahead of need."""
        self._asked_at = 0.0
        """When the last question was asked."""
        self._was_refused = False
        """Whether the last answer was a refusal."""
        self._most = ASK_GROUPS
        """How many groups are asked for at once."""
        self._may_wait = False
        """Whether the last question may wait in the broker's queue."""
        self._grants = self._refusals = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        """Told of each answer of the broker."""
        self._grows = True
        """Whether blocks can still come: until `end_growing`."""

    # Growing

    def want(self, blocks: int) -> bool:
        """Note how many blocks are wanted, and return whether anything is to be borrowed for that."""
        with self._lock:
            self._want = blocks
            self._peaks[0] = max(self._peaks[0], blocks)
            if not (self.is_suspended or self._asked_back()):
                for group in self._balloon.revive(blocks):
                    self._fences.pop(group, None)
                    self._unfenced.discard(group)
            return self._next_question() is not None

    def take(self) -> list[int]:
        """Return the blocks that have become usable."""
        with self._lock:
            return [] if self.is_suspended else self._groups.take()

    def question(self) -> tuple[list[int], bool] | None:
        """Return the groups to borrow now, and whether to wait for them, or None. The caller tells the answer.

        Of those that are needed several are asked for at once, unless others have what there is: one may come sooner.
        """
        with self._lock:
            now, asked, found = time.monotonic(), list[int](), self._next_question()
            is_needed = found is not None and found[1]
            most = self._most if is_needed else 1
            while found is not None:
                self._groups.move(found[0], "asked")
                asked.append(found[0])
                is_enough = self._groups.asked_bytes >= self._balloon.wanted_bytes(self._want)
                found = None if is_enough or len(asked) == most else self._next_question()
            self._asked_at, self._may_wait = now, is_needed and len(asked) <= ASK_GROUPS
            return (asked, self._may_wait) if asked else None

    def _next_question(self) -> tuple[int, bool] | None:
        found = None if self.is_suspended or self._asked_back() else self._balloon.next_to_map(self._want)
        return found if found is not None and (found[1] or time.monotonic() >= self._ahead_at) else None

    def wanted_bytes(self) -> int:
        """Return what must be borrowed until the engine has what it wants, in bytes."""
        with self._lock:
            return self._balloon.wanted_bytes(self._want)

    def answered(self, groups: Collection[int], *, is_granted: bool) -> None:
        """Note that groups were borrowed and mapped, or refused."""
        with self._lock:
            for group in groups:
                self._groups.move(group, "mapped" if is_granted else "refused")
            self._was_refused = not is_granted
            now = time.monotonic()
            is_prompt = is_granted and not (self._may_wait and now - self._asked_at > SHORT_SECONDS)
            if not (is_granted or self._may_wait):
                self._ahead_at = now + AHEAD_SECONDS
            self._most = min(ASK_GROUPS if self._has_ranks else MOST_GROUPS, 4 * len(groups)) if is_prompt else 1
            self._grants += len(groups) * is_granted
            self._refusals += not is_granted
            self._changed.notify_all()

    def wait_for(self, blocks: int, seconds: float) -> bool:
        """Wait until so many blocks have memory; return whether they have. Raises `ClosedError`."""
        return self._wait(lambda: self._groups.available >= blocks, seconds)

    def wait_for_ready(self, seconds: float) -> bool:
        """Wait until `take` would return any blocks; return whether it would. Raises `ClosedError`."""
        return self._wait(lambda: self._groups.has_ready and not self.is_suspended, seconds)

    def _wait(self, is_so: Callable[[], bool], seconds: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: is_so() or not self._grows, seconds)
            if is_so() or self._grows:
                return is_so()
        raise ClosedError("no more blocks come: this cache is closed, or its session is over, as the log says")

    def end_growing(self) -> None:
        """Note that no more blocks come, and end all waits for them."""
        with self._changed:
            self._grows = False
            self._changed.notify_all()

    # Shrinking

    def _asked_back(self) -> int:
        """Return the bytes that must go, what is going already included. The caller holds the lock."""
        if self.is_suspended:
            return self._groups.charged_bytes
        return max((recall.remaining for recall in self._recalls.values()), default=0)

    def hold(self, engine: Engine) -> list[int]:
        """Choose what goes, and let the engine hold its unused blocks; return the groups that now need a fence.

        Those are among them for which the engine could give none before.
        """
        now = time.monotonic()
        with self._lock:
            balloon, size = self._balloon, self._asked_back()
            if 2 * now - self._held_at >= self._preempts_at:  # the next turn would come too late
                self._preempts_at = 0.0
            self._held_at = now
            is_asked_anew = any(recall not in self._tried for recall in self._recalls.values())
            if is_asked_anew or 0 < size <= self._groups.retiring_bytes:
                balloon.reconsider()  # others may go sooner than what drains for want of use, or have gone
            draining = self._groups.groups_in(DRAINING) if size else balloon.next_draining(BLOCKS_PER_TURN)
            self._hold_unused(engine, self._groups.blocks_out(draining))
            is_due = now >= self._look_at
            if is_due or balloon.is_sweeping or size:
                chosen = balloon.choose(max(self._peaks), size, engine, most=BLOCKS_PER_TURN)
                self._hold_unused(engine, self._groups.blocks_out(chosen))
                draining += chosen
            if size:
                busy = () if self._preempts_at and not self.is_suspended else self._groups.blocks_out(draining)
                if busy and engine.preempt(busy):
                    self._hold_unused(engine, busy)
            self._tried = list(self._recalls.values())
            if self.is_suspended:
                blocks = self._groups.staying_blocks()
                if self._hold_unused(engine, blocks):
                    blocks = self._groups.staying_blocks()
                self._left_bytes = -1 if blocks else self._groups.staying_bytes
            if is_due:
                self._look_at = now + LINGER_SECONDS
                self._peaks = [self._want, self._peaks[0]]
            retired = self._groups.retire(draining, final=bool(size) and not self.is_suspended)
            if retired:
                self._looks_left = LOOKS_AT_REST
            elif is_due and self._looks_left:
                self._looks_left -= 1
            self._unfenced.update(retired)
            return sorted(self._unfenced)

    def _hold_unused(self, engine: Engine, blocks: Sequence[int]) -> bool:
        """Hold those of the blocks that no request uses; return whether there were any."""
        if not (blocks and (unused := engine.unused(blocks))):
            return False
        assert set(unused) <= set(blocks), "the engine gave blocks up that it was not asked for"
        engine.hold(list(unused))
        self._groups.held(unused)
        return True

    def retire(self, fence: Fence) -> None:
        """Release the groups that need a fence once this one has passed."""
        with self._lock:
            self._fences.update(dict.fromkeys(self._unfenced, fence))
            self._unfenced.clear()

    def retiring(self) -> list[tuple[int, Fence]]:
        """Return the groups that wait for a fence."""
        with self._lock:
            return list(self._fences.items())

    def leave(self, group: int, fence: Fence) -> bool:
        """Note that a group is being unmapped, and return True; False if the engine has wanted it again meanwhile."""
        with self._lock:
            if self._fences.get(group) is not fence or self._groups.state(group) not in (RETIRING, DOOMED):
                return False
            self._groups.move(group, "fence passed")
            return True

    def stayed(self, group: int) -> None:
        """Note that it could not be unmapped, or only a part of it."""
        with self._lock:
            self._groups.move(group, "failed")

    def left(self, group: int) -> None:
        """Note that it was unmapped and released."""
        with self._lock:
            self._groups.move(group, "unmapped")
            self._fences.pop(group, None)

    def rest(self) -> None:
        """Look some more times for what can go: the engine makes no turn from now on."""
        with self._lock:
            self._looks_left = LOOKS_AT_REST

    # Sleep

    def suspend(self) -> None:
        """Release all but the floor, whatever the engine wants, and give it no block before `resume`."""
        with self._lock:
            self.is_suspended, self._left_bytes = True, -1

    def resume(self) -> None:
        """End that."""
        with self._lock:
            self.is_suspended = False
            self._changed.notify_all()

    @property
    def is_empty(self) -> bool:
        """Whether all is released that can go, and the engine has no block but block 0."""
        with self._lock:
            return self.is_suspended and self._groups.charged_bytes == self._left_bytes

    # What others want back

    @property
    def is_asked_back(self) -> bool:
        """Whether memory is to be released for others."""
        with self._lock:
            return bool(self._asked_back())

    @property
    def is_short(self) -> bool:
        """Whether the engine has to do with the memory that it has: others want it, or have what it asked for."""
        with self._lock:
            is_late = time.monotonic() - self._asked_at > SHORT_SECONDS
            waits = self._groups.asked_bytes and self._may_wait and is_late
            return bool(waits or self._was_refused or self._asked_back())

    def recalled(self, recall: AnyRecall) -> bool:
        """Release what a recall asks for, or asks for now: it may be open, and raised. False if it is not answered."""
        with self._lock:
            if self._answers:
                now = time.monotonic()
                if recall.is_guaranteed:
                    self._preempts_at = 0.0
                elif not self._recalls and now > self._calm_at:
                    self._preempts_at = now + min(PATIENCE_SECONDS, (recall.deadline - now) / 2)
                self._recalls[recall.model] = recall
                self._tried = [tried for tried in self._tried if tried is not recall]
            return self._answers

    def settled(self, *, has_engine: bool) -> AnyRecall | None:
        """Return an open recall that is to be answered now and forget it, or return None.

        That is so if all of it is released, nothing more can be, or its time is nearly over.
        """
        with self._lock:
            for recall in self._recalls.values():
                is_over = recall.deadline - ANSWER_SECONDS <= time.monotonic()
                has_no_more = not has_engine or (recall in self._tried and not self._groups.going_bytes)
                if is_over or has_no_more or not recall.remaining:
                    self._calm_at = time.monotonic() + LINGER_SECONDS
                    return self._recalls.pop(recall.model)
            return None

    def end(self) -> list[AnyRecall]:
        """Return the open recalls, which are to be answered now. None is answered after that."""
        with self._lock:
            self._answers = False
            return list(self._recalls.values())

    # Figures

    def patience(self, again: float, *, at_rest: bool) -> float:
        """Return how many seconds the thread that releases may sleep. After a failure it tries nothing before `again`.

        `at_rest` says whether the engine rests, so that this thread makes its turns.
        """
        now = time.monotonic()
        with self._lock:
            ends = [now + LOOK_SECONDS]
            if self._fences:
                ends.append(max(now + FENCE_SECONDS, again))
            if at_rest and self._balloon.is_sweeping:
                ends.append(again)
            elif at_rest and (self._looks_left or self._groups.groups_in(DRAINING)):
                ends.append(max(now + LINGER_SECONDS, again))
            ends += [recall.deadline - ANSWER_SECONDS for recall in self._recalls.values()]
        return max(0.0, min(ends) - now)

    def stats(self) -> CacheStats:
        """Return the present figures."""
        with self._lock:
            return CacheStats(
                blocks=self._groups.available,
                wanted_blocks=self._want,
                charged_bytes=self._groups.charged_bytes,
                going_bytes=self._groups.going_bytes,
                grants=self._grants,
                refusals=self._refusals,
            )
