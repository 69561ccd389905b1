"""Stand-ins for what a test machine lacks. Owns how they are built; must never be imported by the packages."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
import textwrap
import uuid
from pathlib import Path

import pytest

from tests.support.template import run as run_python

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
        (directory / library).write_bytes(_compiled(compiler))
    return directory


@functools.cache
def _compiled(compiler: str) -> bytes:
    """Return the library, which is the same under both names. Each process of the tests compiles it once."""
    options = ["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-pthread"]
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory, "library")
        subprocess.run([compiler, *options, "-o", target, _SOURCE, "-ldl"], check=True)
        return target.read_bytes()


def with_faults(directory: Path, patch: pytest.MonkeyPatch) -> Path:
    """Have all processes from now on find the fake libraries; return the file of `say_faults`.

    Skips the test without a C compiler.
    """
    libraries = build_fake_cuda(directory / "fake")
    if libraries is None:
        pytest.skip("no C compiler (gcc or cc) to build the fake libcuda with")
    faults = directory / "faults"
    patch.setenv("LD_LIBRARY_PATH", str(libraries))
    patch.setenv("FAKE_CUDA_CARD", uuid.uuid4().hex[:12])
    patch.setenv("FAKE_CUDA_FAULTS", str(faults))
    return faults


def say_faults(faults: Path, text: str) -> None:
    """Have these calls fail from now on, all in one moment: each line is a function and what it returns."""
    fresh = faults.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(faults)


def run_beside_fake_cuda(libraries: Path, code: str, **environment: str) -> str:
    """Run Python `code` in a process of its own beside the libraries, on a GPU of its own; return what it prints.

    A process, because the loader finds the libraries through LD_LIBRARY_PATH, which it reads when it starts.
    """
    own = {"LD_LIBRARY_PATH": str(libraries), "FAKE_CUDA_CARD": uuid.uuid4().hex[:12], **environment}
    imports = ["cuda.bindings.driver", "pynvml", "pytest"]
    done = run_python(["-c", textwrap.dedent(code)], imports=imports, env={**os.environ, **own})
    assert done.returncode == 0, done.stderr
    return done.stdout
