"""The writer: when the journal is compacted, and when it must not be."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

from membrokerd.core import events as ev
from membrokerd.core import policy
from membrokerd.core.machine import Broker
from membrokerd.restart.journal import Binding, Journal
from membrokerd.runtime.journal_writer import JournalWriter
from membrokerd.system.device_directory import DeviceDirectory


def test_a_daemon_without_its_directory_leaves_its_successors_journal(tmp_path: Path) -> None:
    """Somebody removed the directory, and a second daemon serves there. The first one's workers go on all the same."""

    async def story() -> None:
        first = DeviceDirectory(tmp_path, "host")
        broker = Broker(policy.Rules(granularity=2, capacities={"device": 64}), epoch=1)
        journal = Journal(first.state / "journal", Binding("boot", "host"), compact_bytes=1)
        journal.begin([])
        writer = JournalWriter(broker, journal, is_in_place=first.is_in_place)
        shutil.rmtree(first.root)
        second = DeviceDirectory(tmp_path, "host")
        (second.state / "journal").write_text("the second's")
        facts = broker.step(ev.OpenSession(1, "t", 1, 1, "p", False, ""), 0).facts
        for _ in range(20):
            assert writer.write(facts)
        assert journal.due
        assert (second.state / "journal").read_text() == "the second's"
        journal.close()

    asyncio.run(story())
