"""Write docs/metrics.md from the catalog of metrics: `python -m tools.metrics_page`, with `--check` to compare only."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from membrokerd.observe import catalog

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"
HEAD = """# All metrics

Written from the code by `make metrics`. A broker serves them at `http://127.0.0.1:9710/metrics` (9711 for GPU 1, and so
on), in Prometheus' text format; `/` on the same port is [the status page](operating.md#see-it-the-status-page). Every
series has the label `gpu_uuid`, which is dcgm-exporter's `UUID`: [rules join them](alerts.md#join-with-dcgm-exporter).
Sizes are bytes, times are seconds. `location` is `device` (the GPU) or `host`. Figures of one scrape agree with each
other: they are of one view of the books, at most a second old. The process's own figures (`process_*`) are there, too.

A histogram has the series `_bucket`, `_sum` and `_count`. A counter begins at 0 with the daemon, or with its model.

The models and segments of a tenant have at most 1,024 names in an hour. The gauges of further ones are summed under the
model `""` or the segment `""`, and their counters are left out: Prometheus keeps each series for hours, and a program
can use new names all the time.
"""


def page() -> str:
    """Return the page."""
    return HEAD + "".join(f"{line}\n" for line in _lines())


def _lines() -> Iterator[str]:
    titles = {
        "tenant": "Tenants",
        "model": "Models",
        "segment": "Segments",
        "device": "The device",
        "": "The daemon",
        "daemon": "Several GPUs: served by `membrokerd --all`",
    }
    groups: dict[str, list[catalog.Spec]] = {prefix: [] for prefix in titles}
    for spec in catalog.ALL.values():
        word = spec.name.removeprefix("membroker_").split("_")[0].removesuffix("s")
        groups[word if word in groups else ""].append(spec)
    for prefix, title in titles.items():
        yield from ("", f"## {title}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|")
        for spec in groups[prefix]:
            labels = ", ".join(f"`{label}`" for label in spec.labels)
            meaning = spec.help.replace("|", "\\|")
            yield f"| `{spec.name}` | {spec.kind} | {labels} | {meaning} |"
    yield from ("", "## Label values that always have a series", "")
    yield f"`reason` of refusals: {_values(catalog.DENIAL_REASONS)}, and others with the first one."
    yield f"`change` of the stock: {_values(catalog.STOCK_CHANGES)}."


def _values(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> int:
    """Write the page, or compare it."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page())
    elif not PAGE.is_file() or PAGE.read_text() != page():
        print(f"{PAGE} is stale: make metrics", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
