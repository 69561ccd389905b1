"""Where `membroker demo` makes its directory: where a broker can be, whatever its name."""

from __future__ import annotations

import os
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from membroker.cli.demo import processes


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mb-") as directory:
        yield Path(directory)


def test_where_no_broker_can_be_it_takes_another_directory(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TMPDIR has a comma, no text, or another user's hands in it: the demo is about something else."""
    for name in (b"a,b", b"\xff", b"a\nb", b"n" * 80, b"open"):
        directory = place / os.fsdecode(name)
        directory.mkdir(mode=0o700)
        if name == b"open":
            directory.chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", os.fspath(directory))
        made = processes.make_directory()
        made.rmdir()
        assert (made.parent, list(directory.iterdir())) == (Path("/tmp"), []), name


def test_it_begins_in_a_directory_with_quotes(place: Path) -> None:
    directory = place / "a'b\"c\\d#e"
    directory.mkdir()
    broker = processes.DemoBroker(directory)
    config = tomllib.loads((directory / "membrokerd.toml").read_text())
    assert config["runtime_directory"] == str(directory / "run")
    assert broker.starts == 0
