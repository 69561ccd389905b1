"""Pages of listings: their length, and that the next one begins where the last one ends."""

from __future__ import annotations

import re

import pytest

from membroker.v1 import broker_pb2 as pb
from membroker.v1 import resources_pb2 as rpb
from membrokerd.edge import listings as views


@pytest.mark.parametrize("long", [10, views.MAX_PAGE_BYTES // 8, views.MAX_PAGE_BYTES * 2])
@pytest.mark.parametrize("size", [0, 1, 7, 1_000])
def test_every_row_is_on_one_page(long: int, size: int) -> None:
    """Also rows that are longer than a page on their own."""
    rows, found, token, pages = list(range(150)), [], "", 0
    while token or not pages:
        page, token = views._page(
            rows,
            lambda row: f"{row:016x}",
            re.compile(r"[0-9a-f]{16}").fullmatch,
            pb.ListSessionsRequest(page_size=size, page_token=token),
            lambda row: rpb.Session(name=str(row), client="x" * long),
        )
        pages += 1
        assert 0 < len(page) <= (size or views.DEFAULT_PAGE)
        assert len(page) == 1 or sum(row.ByteSize() for row in page) <= views.MAX_PAGE_BYTES
        found += [int(row.name) for row in page]
    assert found == rows
