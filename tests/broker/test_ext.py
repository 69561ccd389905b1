"""The line between the daemon's kernel and its extensions: what membrokerd.ext lists is what there is, and is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.ext_modules import check_names, listed, used_names

import membrokerd
from membrokerd import ext

ROOT = Path(membrokerd.__file__).parent
EXTENSIONS = [*sorted(ROOT.glob("observe/*.py")), *sorted(ROOT.glob("replay/*.py")), ROOT / "all_gpus.py"]
HEAVY = {"pydantic", "grpc", "google", "asyncio", "cuda", "pynvml", "prometheus_client", "membrokerd.core.machine"}


def test_the_type_checker_sees_what_is_imported() -> None:
    check_names(ext, ROOT)


def test_each_name_is_used_by_an_extension() -> None:
    assert used_names(EXTENSIONS) == set(listed(ROOT))


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("replay.__main__", {"membrokerd.core.machine"}),
        ("all_gpus", {"pydantic", "asyncio"}),  # the configuration is read before
    ],
)
def test_an_extension_starts_without_what_it_does_not_need(module: str, needed: set[str]) -> None:
    """pydantic alone takes as long as all that a replay does import."""
    script = f"import membrokerd.{module}, sys; print(*sys.modules.keys() & {HEAVY!r})"
    found = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert set(found.stdout.split()) == needed
