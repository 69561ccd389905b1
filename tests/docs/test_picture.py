"""The picture of the packages in ARCHITECTURE.md is drawn from the imports, and `make check` fails when it is stale."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools import picture


def test_a_stale_picture_is_seen_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A new import is missing from the page as an arrow; the text around the picture stays."""
    page = picture.PAGE.read_text()
    assert "    client --> model\n" in page
    stale = tmp_path / "ARCHITECTURE.md"
    stale.write_text(page.replace("    client --> model\n", ""))
    monkeypatch.setattr(picture, "PAGE", stale)
    assert picture.main(["--check"]) == 1
    assert "make picture" in capsys.readouterr().out
    assert picture.main([]) == 0
    assert stale.read_text() == page
    assert picture.main(["--check"]) == 0
