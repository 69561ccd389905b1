"""What the tests of the core share: expected texts that a flag rewrites, and the books as one comparable value.

`MEMBROKER_REWRITE=1 pytest tests/broker/core` writes transcripts and docs/lifecycles.md anew; read the diff.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from membrokerd.core.ledger import Ledger


@pytest.fixture(scope="session")
def golden() -> Callable[[Path, str], None]:
    """Return a function that holds a file to a text, or writes it with MEMBROKER_REWRITE=1."""

    def hold(path: Path, text: str) -> None:
        if os.environ.get("MEMBROKER_REWRITE") == "1":
            path.write_text(text)
        assert path.read_text() == text, f"{path.name} differs; MEMBROKER_REWRITE=1 writes it anew"

    return hold


@pytest.fixture(scope="session")
def books() -> Callable[[Ledger], Any]:
    """Return a function that takes a ledger's whole content as a value of its own."""

    def content(ledger: Ledger) -> Any:
        parts = (ledger.revision, ledger.totals, ledger.sessions, ledger.models, ledger.tenants, ledger.quotas)
        return copy.deepcopy((*parts, ledger.segments, ledger.labels))

    return content
