"""What a scene gets, what it makes, and how scenes are played one after the other. It knows no scene."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .machine import busy_percent
from .report import Tell, progress
from .samples import Samples, joined

ROUNDS = 3
"""What is compared is measured in so many turns, one after the other."""
Turn = Callable[[float], Samples]
"""Works for some seconds, and returns what it took."""
_T = TypeVar("_T")


@dataclass(slots=True)
class Section:
    """One scene. `note` says what its rows cannot, and `failure` why there are no more of them.

    `others_percent` is how busy the processors were just before the scene and just after, with the work of others.
    """

    title: str
    note: str
    failure: str = ""
    others_percent: tuple[float, float] = (0.0, 0.0)

    @property
    def about(self) -> str:
        """What stands above the rows."""
        before, after = self.others_percent
        said = f"{self.note} Others kept the processors busy: {before:.0f}% just before, {after:.0f}% just after."
        return said + f" It FAILED here: rows show what was seen before. {self.failure}" * bool(self.failure)


@dataclass(frozen=True, slots=True)
class Stage:
    """What every scene gets: whether all is small, where to report progress, and the kind of driver."""

    quick: bool
    tell: Tell
    driver: str = "host"

    def size(self, full: _T, quick: _T) -> _T:
        """Return one of two sizes, or numbers of seconds."""
        return quick if self.quick else full

    def in_turns(
        self, what: str, turns: Mapping[str, Turn], seconds: float, rounds: int = ROUNDS
    ) -> dict[str, Samples]:
        """Measure each for some seconds in all, in several turns, so that a slow moment of the machine falls on all."""
        taken: dict[str, list[Samples]] = {name: [] for name in turns}
        for number in range(rounds):
            self.tell(f"{what}, turn {number + 1} of {rounds}")
            for name, turn in turns.items():
                taken[name].append(turn(seconds / rounds))
        return {name: joined(each) for name, each in taken.items()}


_S = TypeVar("_S", bound=Section)
Scene = Callable[[Stage], Iterator[_S]]
"""Yields its section before it measures, so that what it has seen when it fails is not lost."""


def play(scenes: Sequence[Scene[_S]], quick: bool, driver: str, look_seconds: float) -> Iterator[_S]:
    """Yield the sections of all scenes as they begin. One that fails says so, and the next one is played."""
    with progress(len(scenes)) as (tell, done):
        stage = Stage(quick, tell, driver)
        before = busy_percent(look_seconds)
        for scene in scenes:
            measuring = scene(stage)
            section = next(measuring)
            yield section
            try:
                next(measuring, None)
            except Exception as error:  # noqa: BLE001 - what the other scenes see is worth having
                traceback.print_exc()
                section.failure = f"{type(error).__name__}: {error}"
            after = busy_percent(look_seconds)
            section.others_percent = (before, after)
            before = after
            done(section.title)
