"""The line between the library's kernel and its extensions: what membroker.ext lists is what there is, and is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.ext_modules import check_names, listed, used_names

import membroker
from membroker import ext

ROOT = Path(membroker.__file__).parent
EXTENSIONS = [path for name in ("kv", "cli", "adapters", "managed") for path in sorted(ROOT.glob(f"{name}/**/*.py"))]
EXTENSIONS += [ROOT / "shared_pool.py"]


def test_the_type_checker_sees_what_is_imported() -> None:
    check_names(ext, ROOT)


def test_there_is_no_other_name() -> None:
    with pytest.raises(ImportError, match="Session"):
        exec("from membroker.ext import Session")


def test_each_name_is_used_by_an_extension() -> None:
    assert used_names(EXTENSIONS) == set(listed(ROOT))


def test_a_command_begins_without_the_library() -> None:
    """It has descriptors 0 to 2, and ends quietly on Ctrl-C, before anything slow is imported."""
    script = "import membroker.cli, sys; print(*sorted(name for name in sys.modules if name.startswith('membroker')))"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert found.stdout.split() == [
        "membroker",
        "membroker.cli",
        "membroker.ext",
        "membroker.wire",
        "membroker.wire.standard",
    ]
