"""Traces without a daemon: the worlds of the simulation, recorded and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from membrokerd.core import events as ev
from membrokerd.core.books import Step
from membrokerd.core.machine import Broker
from membrokerd.replay.changes import Changes
from membrokerd.replay.figures import Tally
from membrokerd.replay.reading import read
from membrokerd.replay.recorder import MAX_FILE_BYTES, Recorder
from membrokerd.replay.recording import Recording
from membrokerd.replay.replayer import Replayer
from tests.simulation.world import World


class RecordedSimulation:
    """Records a simulated world, as long as its first daemon lives."""

    def __init__(self, world: World, directory: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        broker = world.broker
        self.recorder = Recorder(broker, directory, lambda: world.now, max_bytes)
        step, change_rules = broker.step, broker.change_rules

        def recorded(event: ev.Event, now: int) -> Step:
            found = step(event, now)
            self.recorder.take(event, found, now)
            return found

        def changed(rules: Any) -> None:
            change_rules(rules)
            self.recorder.begin("the rules have changed")

        _patch(broker, step=recorded, change_rules=changed)


def _patch(broker: Broker, **methods: Any) -> None:
    for name, method in methods.items():
        setattr(broker, name, method)


def recorded(seed: int, turns: int, directory: Path, max_bytes: int = MAX_FILE_BYTES) -> Path:
    world = World(seed)
    recording = RecordedSimulation(world, directory, max_bytes)
    for number in range(turns):
        world.turn(number)
    recording.recorder.close()
    return directory / "trace.jsonl"


def replayed(path: Path, changes: Changes | None = None) -> tuple[Tally, Tally]:
    happened, again = Tally(), Tally()
    for part in read(path):
        Replayer(part, Recording(part, happened), changes or Changes(), again).run(lambda _: None)
    return happened, again
