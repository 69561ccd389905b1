"""What `membroker segments load` says of a file before it asks a broker."""

from __future__ import annotations

from pathlib import Path

from tests.support.command import refused


def test_a_control_character_in_a_files_name_is_not_obeyed(tmp_path: Path) -> None:
    assert "\x1b" not in refused("segments", "load", f"{tmp_path}/\x1b[2Jx", "m/w", "--endpoint", str(tmp_path))
