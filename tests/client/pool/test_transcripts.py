"""A pool as stories: each file in transcripts/ has some, and behind every command what followed from it.

A story begins with `==`, and has a pool of 64 pages and a lender of its own, with what its line says. Offsets and sizes
are in pages: `3`, or `3+5` with five bytes more, or `5b` for bytes alone. Behind `->` is first what the call returned
or how it refused. Then what stands in the pages: a letter of the command that allocated a page, `.` nothing, a small
letter a spare page with its bytes, `_` one that was never used, `#` an offloaded one; `A{9}` is nine of them. Then what
is lent, and what was asked and waited for. At every step each page must have its own bytes, and be the extent that it
was. A refusal must leave everything as it was. MEMBROKER_REWRITE=1 writes again what follows from the commands.
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.fake_lender import PAGE, Lender, state
from tests.support.garbage import collect

from membroker.errors import MembrokerError, OutOfVirtualMemory
from membroker.pool import offload
from membroker.pool.pool import VirtualMemoryPool
from membroker.vmm import DriverError

FILES = sorted(Path(__file__).with_name("transcripts").glob("*.txt"))
WIDTH = 28
REFUSALS = (MembrokerError, DriverError, BufferError, ArithmeticError)
ACCESS = {"none": "-", "read": "r", "read_write": "w"}


def bytes_of(word: str) -> int:
    """Return the bytes that `3`, `3+5`, `3-1` or `5b` stand for."""
    if word.endswith("b"):
        return int(word[:-1])
    cut = max(word.rfind("+"), word.rfind("-"))
    return int(word) * PAGE if cut < 1 else int(word[:cut]) * PAGE + int(word[cut:])


def pages(size: int) -> str:
    """Return a size as `bytes_of` reads it."""
    whole, rest = divmod(size, PAGE)
    return f"{whole}+{rest}" if rest else f"{whole}"


class Story:
    """A pool in play, its lender, and what commands hold."""

    def __init__(self, title: str) -> None:
        options = dict(word.split("=") for word in title.split() if "=" in word)
        self.lender = Lender(part=int(options.get("part", 64)))
        spare = int(options.get("spare", 0))
        self.pool = VirtualMemoryPool(self.lender, 64 * PAGE, PAGE, spare_pages=spare)
        self.pool._backing._is_never_busy = "busy" not in title
        self.letters = iter(string.ascii_uppercase * 3)
        self.marks = iter(range(1, 10_000))
        self.by_extent: dict[int, int] = {}
        """The mark that stands in each extent, and in each page that had one when it was looked at last."""
        self.by_offset: dict[int, int] = {}
        self.held: dict[str, Any] = {}
        self.asked: list[str] = []
        self.waits = 0
        borrow = self.lender.borrow

        def noted(size: int, count: int, *rest: Any, **hints: Any) -> None:
            self.asked.append(f"{count} ahead" if hints.get("ahead") else f"{count}")
            borrow(size, count, *rest, **hints)

        self.lender.borrow = noted  # type: ignore[method-assign]
        self.lender.driver.before_synchronize = self._waited

    def _waited(self) -> None:
        self.waits += 1

    def synchronize(self) -> None:
        """Be a fence."""
        self.asked.append("the fence")

    def play(self, line: str) -> str:
        """Do a command; return what followed from it."""
        name, *words = line.split()
        self.asked.clear()
        self.waits = 0
        before = self.content()
        try:
            told = getattr(self, f"do_{name}")(*words)
        except REFUSALS as error:
            told = type(error).__name__
            if isinstance(error, OutOfVirtualMemory):
                told += f" {pages(error.available_bytes)} of {pages(error.requested_bytes)}"
            assert self.content() == before, f"{line}: a refusal changed something"
        self.mark()
        self.check()
        parts = [told or "", self.picture(), self.figures()]
        return "  ".join(part for part in parts if part)

    def content(self) -> object:
        return state(self.pool, self.lender), self.picture(), self.lender.declared_bytes

    def mark(self) -> None:
        """Write a new letter into the pages that are new, those that are zero, and a number at the end of each."""
        new = [row for row in self.rows() if row.state in ("used", "pinned") and self.letter(row) == "\0"]
        letter = next(self.letters).encode() if new else b""
        for row in new:
            address = self.pool.base_address + row.offset
            self.lender.driver.write(address, letter)
            self.by_extent[row.extents[0]] = mark = next(self.marks)
            self.lender.driver.write(address + PAGE - 4, mark.to_bytes(4, "little"))

    def rows(self) -> list[Any]:
        return self.pool.mappings(by_page=True)

    def letter(self, row: Any) -> str:
        """Return what stands in a page."""
        if row.state == "offloaded":
            return "#"
        if row.access == "none":
            return "!"
        found = self.lender.driver.read(self.pool.base_address + row.offset, 1).decode()
        return found.lower() if row.state == "spare" else found

    def picture(self) -> str:
        found = {row.offset // PAGE: self.letter(row).replace("\0", "_") for row in self.rows()}
        whole = "".join(found.get(page, ".") for page in range(max(found, default=-1) + 1))
        return re.sub(r"(.)\1{7,}", lambda run: f"{run[1]}{{{len(run[0])}}}", whole) or "empty"

    def figures(self) -> str:
        told = [f"lent {self.lender.lent_bytes // PAGE}"]
        if any(row.access != "read_write" for row in self.rows()):
            told.append("access " + "".join(ACCESS[row.access] for row in self.rows()))
        told += [f"host {pages(self.lender.declared_bytes)}"] * bool(self.lender.declared_bytes)
        told += [f"asked {', '.join(self.asked)}"] * bool(self.asked)
        told += [f"waited {self.waits}"] * bool(self.waits)
        return ", ".join(told)

    def check(self) -> None:
        """Raise unless the pool's figures, the lender's books and the device agree."""
        stats, rows = self.pool.stats(), self.rows()
        kinds = [row.state for row in rows]
        assert stats.virtual_capacity_bytes == self.pool.capacity == 64 * PAGE
        assert stats.mapped_pages == len(rows) - kinds.count("offloaded")
        assert (stats.spare_pages, stats.offloaded_bytes) == (kinds.count("spare"), kinds.count("offloaded") * PAGE)
        assert stats.mapped_pages * PAGE == stats.physical_usage_bytes == self.pool.physical_usage_bytes
        assert stats.physical_usage_bytes == self.lender.lent_bytes == self.lender.used_bytes
        assert self.lender.declared_bytes == sum(self.lender.driver._pinned.values())
        for row in rows:
            assert self.pool.is_mapped(row.offset, PAGE) == (row.state in ("used", "pinned"))
            if row.extents:  # a page that was restored has another one
                mark = self.by_extent.setdefault(row.extents[0], self.by_offset.get(row.offset, 0))
                end = self.pool.base_address + row.offset + PAGE - 4
                assert row.access == "none" or self.lender.driver.read(end, 4) == mark.to_bytes(4, "little")
                self.by_offset[row.offset] = mark

    def at(self, address: int) -> str:
        return "at " + pages(address - self.pool.base_address)

    # --- commands, each by the first word of its line ---

    def do_allocate(self, offset: str, size: str) -> str:
        return self.at(self.pool.allocate(bytes_of(offset), bytes_of(size)))

    def do_anywhere(self, size: str, alignment: str = "0") -> str:
        return self.at(self.pool.allocate_anywhere(bytes_of(size), bytes_of(alignment)))

    def do_grow(self, size: str) -> str:
        return self.at(self.pool.grow(bytes_of(size)))

    def do_shrink(self, size: str) -> None:
        self.pool.shrink(bytes_of(size))

    def do_prepare(self, size: str) -> None:
        self.pool.prepare(bytes_of(size))

    def do_trim(self) -> str:
        return pages(self.pool.trim())

    def do_free(self, offset: str, size: str = "", *after: str) -> None:
        """Free a range, or the allocation at an offset."""
        if size:
            self.pool.free(bytes_of(offset), bytes_of(size), after=self if after else None)
        else:
            self.pool.free(self.pool.base_address + bytes_of(offset))

    def do_ranges(self, *offsets: str) -> None:
        ranges = [(int(offset) * PAGE, PAGE) for offset in offsets if offset != "ahead"]
        self.pool.allocate_ranges(ranges, ahead="ahead" in offsets)

    def do_unranges(self, *offsets: str) -> None:
        ranges = [(int(offset) * PAGE, PAGE) for offset in offsets if offset != "after"]
        self.pool.free_ranges(ranges, after=self if "after" in offsets else None)

    def do_protect(self, offset: str, size: str, access: str) -> None:
        self.pool.protect(bytes_of(offset), bytes_of(size), access)

    def do_compact(self, *dry: str) -> str:
        moves = self.pool.compact(dry_run=bool(dry))
        return "; ".join(f"{pages(m.size)} of {pages(m.old_offset)} to {pages(m.new_offset)}" for m in moves) or "none"

    def do_offload(self, *range_: str) -> str:
        return pages(self.pool.offload(*map(bytes_of, range_)))

    def do_restore(self, *words: str) -> str:
        range_ = [bytes_of(word) for word in words if word != "keep"]
        return pages(self.pool.restore(*range_, keep_pinned="keep" in words))

    def do_hold(self, name: str, kind: str, offset: str, size: str) -> None:
        made = getattr(self.pool, "view" if kind == "slice" else kind)(bytes_of(offset), bytes_of(size))
        if kind == "pin":
            assert made.__enter__() == self.pool.base_address + bytes_of(offset)
        if kind == "span":
            assert made.writable != any(row.access == "read" for row in self.rows() if row.state == "pinned")
        if kind == "view":
            assert made.readonly == any(row.access == "read" for row in self.rows() if row.state == "pinned")
        self.held[name] = made[1:2] if kind == "slice" else made

    def do_drop(self, name: str) -> None:
        held = self.held.pop(name)
        if hasattr(held, "__exit__") and not isinstance(held, memoryview):
            held.__exit__(None, None, None)

    def do_mapped(self, offset: str, size: str) -> str:
        return "yes" if self.pool.is_mapped(bytes_of(offset), bytes_of(size)) else "no"

    def do_stats(self) -> str:
        found = self.pool.stats()
        return f"fragmented {found.fragmentation_ratio:.2f}, largest {pages(found.largest_free_run_bytes)}"

    def do_mappings(self) -> str:
        rows = [f"{pages(row.offset)}+{pages(row.size)} {row.state} {row.access}" for row in self.pool.mappings()]
        extents = ", ".join(f"#{number}" for row in self.pool.mappings() for number in row.extents)
        return f"{'; '.join(rows)} ({extents})"

    def do_write(self, offset: str) -> None:
        self.lender.driver.write(self.pool.base_address + bytes_of(offset), b"x")

    def do_give(self, count: str, *unasked: str) -> str:
        before = self.pool.stats().mapped_pages
        self.pool._holding.give_spare(int(count) * PAGE, lambda _: not unasked)
        return f"gave {before - self.pool.stats().mapped_pages}"

    def do_spare(self, count: str) -> None:
        self.pool._backing.spare_pages = int(count)

    def do_lender(self, what: str, number: str = "") -> None:
        """Have the lender, or its device, fail: `capacity 4`, `host 4`, `fails 2`, `maps 3`, `lost`, or `well`."""
        size = int(number or 0)
        self.lender.capacity = size * PAGE if what == "capacity" else 1 << 40
        self.lender.host_capacity = size * PAGE if what == "host" else 1 << 40
        self.lender.fails_after = size if what == "fails" else None
        self.lender.driver.maps_left = size if what == "maps" else None
        self.lender.driver.lost = what == "lost"


@contextmanager
def told(title: str) -> Iterator[Story]:
    """A story, at whose end the lender has everything back."""
    story = Story(title)
    yield story
    story.do_lender("well")
    story.held.clear()
    story.pool.close()
    collect()
    lender = story.lender
    lender.settle()
    assert (lender.lent, lender.used_bytes, lender.declared_bytes, lender.holdings) == ({}, 0, 0, set())
    lender.driver.close()
    lender.device.close()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_transcript(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "CHUNK_BYTES", 2 * PAGE)
    monkeypatch.setattr(offload, "BLOCK_BYTES", 3 * PAGE)
    text = path.read_text()
    found = []
    for part in text.split("== ")[1:]:
        title, *lines = part.splitlines()
        found.append(f"== {title}")
        with told(title) as story:
            for line in lines:
                command = line.partition("->")[0].rstrip()
                if not command or command.startswith("#"):
                    found.append(line.rstrip())
                    continue
                found.append(f"{command:{WIDTH}}-> {story.play(command)}")
    new = text.partition("== ")[0] + "\n".join(found) + "\n"
    if os.environ.get("MEMBROKER_REWRITE") == "1":
        path.write_text(new)
    assert path.read_text() == new, f"{path.name} differs; MEMBROKER_REWRITE=1 writes it again"
