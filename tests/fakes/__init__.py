"""Stand-ins for what a test machine lacks. Owns how they are built; must never be imported by the packages."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")
_SOURCE = Path(__file__).with_name("fake_cuda.c")


def build_fake_cuda(directory: Path) -> Path | None:
    """Build both libraries in `directory` and return it, for LD_LIBRARY_PATH; None without a C compiler.

    Raises `RuntimeError` instead of returning None where MEMBROKER_REQUIRE_FAKE_CUDA is 1, and
    `subprocess.CalledProcessError` where the source does not compile.
    """
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        if os.environ.get("MEMBROKER_REQUIRE_FAKE_CUDA") == "1":
            raise RuntimeError("MEMBROKER_REQUIRE_FAKE_CUDA=1, and there is no C compiler (gcc or cc)")
        return None
    directory.mkdir(parents=True, exist_ok=True)
    for library in LIBRARIES:
        options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread"]
        target = directory / library
        subprocess.run([compiler, *options, "-o", target, _SOURCE, "-ldl"], check=True)
    return directory
