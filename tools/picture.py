"""Draw the packages and their imports in ARCHITECTURE.md: `python -m tools.picture`, with `--check` to compare only.

Reads the imports with grimp, which import-linter brings. A package is one box. Arrows that a longer way implies are not
drawn. The tables above the picture must name each box once.
"""

from __future__ import annotations

import graphlib
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

PAGE = Path(__file__).parents[1] / "ARCHITECTURE.md"
BEGIN, END = "<!-- written by `make picture` -->\n", "<!-- the end of what `make picture` writes -->\n"
Graph = dict[str, set[str]]


def read() -> Graph:
    """Return which modules and packages directly below the two roots import which, as `membroker.wire`."""
    graph = grimp.build_graph("membroker", "membrokerd", cache_dir=None)
    boxes = {child for root in ("membroker", "membrokerd") for child in graph.find_children(root)}
    for box in boxes:
        graph.squash_module(box)
    return {box: graph.find_modules_directly_imported_by(box) & boxes - {box} for box in sorted(boxes)}


def reduced(graph: Graph) -> Graph:
    """Return the graph without the arrows that a longer way implies. Raises `graphlib.CycleError` for a circle."""
    below: Graph = {}
    for box in graphlib.TopologicalSorter(graph).static_order():
        below[box] = set().union(*({to} | below[to] for to in graph[box]))
    return {box: found.difference(*(below[to] for to in found)) for box, found in graph.items()}


def drawn(graph: Graph, root: str) -> Iterator[str]:
    """Yield the lines of one Mermaid flowchart. Boxes outside of `root` have their full names."""
    yield from ("", "```mermaid", "flowchart TD")
    for box, found in graph.items():
        for to in sorted(found) if box.startswith(f"{root}.") else ():
            yield f"    {box.removeprefix(f'{root}.')} --> {to.removeprefix(f'{root}.')}"
    yield from ("```", "")


def unnamed(page: str, boxes: Iterable[str]) -> Iterator[str]:
    """Yield what is wrong with the tables: boxes that are not in one row each, and names without a box."""
    named: Counter[str] = Counter()
    for part in ("broker/membrokerd/", "client/membroker/"):
        _, _, table = page.partition(f"`{part}` | |\n")
        for row in table.partition("\n\n")[0].splitlines():
            root, first = Path(part).name, row.split("|")[1]
            named.update(f"{root}.{name}" for name in re.findall(r"`(\w+)`", first))
    for box in sorted({*boxes, *named}):
        if box not in boxes or named[box] != 1:
            yield f"{box} is in {named[box]} rows of the tables, and {'' if box in boxes else 'not '}in the picture"


def main(arguments: list[str]) -> int:
    """Write the picture, or say that it is stale; and say what the tables lack."""
    page, graph = PAGE.read_text(), reduced(read())
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    lines = [*drawn(graph, "membrokerd"), "The library:", *drawn(graph, "membroker")]
    fresh = before + BEGIN + "\n".join(["", "The daemon:", *lines, ""]) + END + after
    wrong = list(unnamed(page, graph))
    if "--check" not in arguments:
        PAGE.write_text(fresh)
    elif fresh != page:
        wrong.append("the picture of the packages is stale: make picture")
    for what in wrong:
        print(f"ARCHITECTURE.md: {what}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
