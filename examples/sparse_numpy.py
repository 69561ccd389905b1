"""A table with a row for every possible id, and memory only for the ids that occurred.

python examples/sparse_numpy.py        (MEMBROKER_ENDPOINT, or the default endpoint; the host driver)
"""

from __future__ import annotations

import membroker

try:
    import numpy
except ImportError as error:
    raise SystemExit(f"this example needs NumPy: {error}") from None

IDS = 1 << 30
WIDTH = 256
FAMILIES, MEMBERS = 12, 200
"""Ids come in runs of neighbours, such as ids that were made at the same time."""


def main() -> None:
    """Write a row for each id that occurs, and read the row of an id that never occurred."""
    random = numpy.random.default_rng(7)
    with (
        membroker.connect() as client,
        client.model("embeddings").sparse_array((IDS, WIDTH), "F32", absent="zero") as table,
    ):
        seen = {}
        for family in random.integers(0, IDS - MEMBERS, FAMILIES):
            for number in family + random.choice(MEMBERS, 20, replace=False):
                seen[number] = table[number] + random.normal(size=WIDTH).astype("f4")  # absent is zero
                table[number] = seen[number]
        print(f"a table of {table.size >> 30} GiB: {len(table.tiles())} of {table.tile_count} tiles have memory")
        print(f"every row is right: {all((table[number] == row).all() for number, row in seen.items())}")
        stranger = next(number for number in range(IDS) if number // table.tile_rows not in table.tiles())
        print(f"id {stranger} never occurred, so its row is zero: {not table[stranger].any()}")
        oldest = table.tiles()[0]
        view = numpy.from_dlpack(table.tensor(oldest))  # no copy: the host driver's memory itself
        print(f"the first tile has {int(view.any(axis=1).sum())} rows that are not zero")
        del view  # an array keeps its tile mapped
        table.drop(oldest)
        print(f"dropped it: {table.physical_usage_bytes >> 20} MiB are charged")


if __name__ == "__main__":
    try:
        main()
    except membroker.MembrokerError as error:  # no broker, no memory left, or a drained device
        raise SystemExit(f"the example did not finish: {error}") from None
