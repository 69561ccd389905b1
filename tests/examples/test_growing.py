"""The examples of growable buffers and sparse arrays, run as their reader would run them, against a real daemon."""

from __future__ import annotations

import pytest
from tests.examples.conftest import Run

pytestmark = pytest.mark.shared_daemon


def test_a_column_that_grows(run: Run) -> None:
    """Two million measurements in whole pages; what was made first stays valid, and at the end one page is left."""
    pytest.importorskip("numpy")
    counted, mean, kept = run("growable_numpy.py")
    assert counted == "2000000 measurements in 16000000 bytes; 16777216 are charged"
    assert mean.startswith(("their mean is 0.00", "their mean is -0.00"))
    assert mean.endswith("the first array is still valid: True")
    assert kept.startswith("kept the smallest 50000, up to -1.9")
    assert kept.endswith("; 2097152 are charged")


@pytest.mark.deep
def test_a_conversation_that_grows(run: Run) -> None:
    """Its beginning is never moved, and what it releases is charged no more."""
    pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    assert run("growable_torch.py") == [
        "2200 tokens, 6 MiB are charged",
        "the prompt's entries are where they were: True",
        "1000 tokens, 2 MiB are charged",
    ]


def test_a_table_of_a_terabyte(run: Run) -> None:
    """A tebibyte of addresses on a broker of 256 MiB: only the ids that came have memory."""
    pytest.importorskip("numpy")
    table, found, stranger, first, left = run("sparse_numpy.py")
    tiles = int(table.split(": ")[1].split(" of ")[0])
    assert table == f"a table of 1024 GiB: {tiles} of 524288 tiles have memory"
    assert 12 <= tiles <= 24
    assert (found, stranger) == ("every row is right: True", "id 0 never occurred, so its row is zero: True")
    assert first == "the first tile has 20 rows that are not zero"
    assert left == f"dropped it: {2 * (tiles - 1)} MiB are charged"


def test_a_paged_cache(run: Run) -> None:
    """Two requests fit, the third when the first has ended; and it finds nothing of what was there before."""
    pytest.importorskip("torch", reason="PyTorch is not installed here: pip install torch")
    assert run("sparse_torch.py") == [
        "two requests on cpu: 32 MiB",
        "a third is refused: 16 MiB asked",
        "the first has ended: the third gets blocks [0, 1, 2, 3]; they begin as zeros: True; "
        "the second's are unchanged: True",
    ]
