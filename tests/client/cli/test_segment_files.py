"""What `membroker segments load` says of a file before it asks a broker."""

from __future__ import annotations

from pathlib import Path

from tests.support.command import refused


def test_a_file_that_is_no_safetensors_file_is_refused_before_the_broker_is_asked(tmp_path: Path) -> None:
    """There is no broker here at all; what else a file may be, tests/client/checkpoint says."""
    assert refused("segments", "load", "missing", "m/w", "--endpoint", str(tmp_path)).startswith("membroker: missing ")


def test_a_control_character_in_a_files_name_is_not_obeyed(tmp_path: Path) -> None:
    assert "\x1b" not in refused("segments", "load", f"{tmp_path}/\x1b[2Jx", "m/w", "--endpoint", str(tmp_path))
