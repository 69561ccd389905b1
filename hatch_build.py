"""Writes the commit of this tree into what is built, so that a daemon can say of which it is.

MEMBROKER_COMMIT names it where there is no git, as in a container's build. A tree without either, and an editable
installation, whose commit changes, have none: nothing fails for want of it.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FILE = "membroker/commit.txt"


class CommitHook(BuildHookInterface):
    """Adds FILE to a wheel and to a source archive; the wheel of an archive has the archive's."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Say which file is added."""
        archived = Path(self.root, "client", FILE)
        commit = os.environ.get("MEMBROKER_COMMIT") or commit_of(self.root)
        if version == "editable" or archived.exists() or not commit:
            return
        self._place = tempfile.TemporaryDirectory(prefix="membroker-")
        made = Path(self._place.name, "commit.txt")
        made.write_text(f"{commit}\n")
        build_data["force_include"][str(made)] = f"client/{FILE}" if self.target_name == "sdist" else FILE

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was only for this build."""
        if (place := getattr(self, "_place", None)) is not None:
            place.cleanup()


def commit_of(root: str) -> str:
    """Return the commit that is checked out, with `-dirty` if files differ; nothing where that is not known."""
    if not Path(root, ".git").exists():
        return ""
    command = ["git", "-C", root, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
