"""Draw the packages and their imports in ARCHITECTURE.md: `python -m tools.picture`, with `--check` to compare only.

Reads the imports with grimp, which import-linter brings. A package is one box. Arrows that a longer way implies are not
drawn.
"""

from __future__ import annotations

import graphlib
import sys
from collections.abc import Iterator
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


def main(arguments: list[str]) -> int:
    """Write the picture, or say that it is stale."""
    page, graph = PAGE.read_text(), reduced(read())
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    lines = [*drawn(graph, "membrokerd"), "The library:", *drawn(graph, "membroker")]
    fresh = before + BEGIN + "\n".join(["", "The daemon:", *lines, ""]) + END + after
    if fresh == page:
        return 0
    if "--check" in arguments:
        print("ARCHITECTURE.md: the picture of the packages is stale: make picture")
        return 1
    PAGE.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
