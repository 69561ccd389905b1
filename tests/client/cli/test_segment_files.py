"""What `membroker segments load` says of a file before it asks a broker."""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.command import refused

from membroker.safetensors import write_index


def test_a_file_that_is_no_safetensors_file_is_refused_before_the_broker_is_asked(tmp_path: Path) -> None:
    """There is no broker here at all: the file is looked at first."""
    nowhere = ("m/weights", "--endpoint", str(tmp_path))

    def complaint(content: bytes | None, name: str = "x.safetensors") -> str:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        err = refused("segments", "load", str(path), *nowhere)
        assert err.startswith(f"membroker: {path} ")
        return err

    assert "No such file or directory: name a safetensors file" in complaint(None, "missing")
    assert "it is empty" in complaint(b"")
    assert "too short" in complaint(b"hello")
    assert "it is a zip archive" in complaint(b"PK\3\4" + bytes(range(200)))
    header, index = write_index({"x": ("F32", (1000,))})
    assert "is cut off" in complaint(header + bytes(3999)), "a download that broke off"
    assert "4 bytes follow its last tensor" in complaint(header + bytes(4004))
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in complaint(None, "pipe"), "it does not wait for a writer"
    (tmp_path / "directory").mkdir()
    assert "has no file that ends with .safetensors" in complaint(None, "directory")
    (tmp_path / "private").write_bytes(header)
    (tmp_path / "private").chmod(0)
    if os.geteuid():
        assert "Permission denied" in complaint(None, "private")
    assert index.size == len(header) + 4000


def test_a_control_character_in_a_files_name_is_not_obeyed(tmp_path: Path) -> None:
    assert "\x1b" not in refused("segments", "load", f"{tmp_path}/\x1b[2Jx", "m/w", "--endpoint", str(tmp_path))
