"""`import membroker` costs nothing that is not used; and what it and `membroker.ext` list is what there is.

The names of `membroker.ext` are the line between the library's kernel and its extensions.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.ext_modules import check_names, listed, used_names

import membroker
from membroker import ext

ROOT = Path(membroker.__file__).parent
EXTENSIONS = [
    path for name in ("kv", "cli", "dra", "adapters", "managed") for path in sorted(ROOT.glob(f"{name}/**/*.py"))
]
EXTENSIONS += [ROOT / "shared_pool.py"]
HEAVY = ("grpc", "google", "torch", "cuda", "numpy", "cupy", "rich")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def modules_after(program: str) -> set[str]:
    done = python("-c", f"{program}\nimport sys\nprint(*sys.modules)")
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def packages_after(program: str) -> set[str]:
    return {name.partition(".")[0] for name in modules_after(program)}


def test_import_is_light() -> None:
    """A launcher imports membroker to catch its errors; it must not pay for gRPC, protobuf or a framework."""
    program = "import membroker; membroker.OutOfMemory; membroker.Resumed; membroker.__version__; dir(membroker)"
    assert not packages_after(program) & set(HEAVY)


def test_connecting_needs_no_grpc() -> None:
    """The error for an absent broker comes before gRPC would be loaded, which takes a tenth of a second."""
    program = "import membroker, contextlib\nwith contextlib.suppress(membroker.BrokerUnavailable): "
    program += "membroker.connect('/nowhere', timeout=0.01)"
    assert not packages_after(program) & {"grpc", "torch", "cuda", "numpy"}


def test_a_command_begins_without_the_library() -> None:
    """It has descriptors 0 to 2, and ends quietly on Ctrl-C, before anything slow is imported."""
    found = {name for name in modules_after("import membroker.cli") if name.startswith("membroker")}
    assert found == {"membroker", "membroker.cli", "membroker.ext", "membroker.wire", "membroker.wire.standard"}


def test_the_module_is_the_command() -> None:
    """`python -m membroker`, for an interpreter whose scripts are not on the PATH."""
    assert python("-m", "membroker", "--version").stdout == f"membroker {membroker.__version__}\n"
    assert python("-m", "membroker", "nothing").returncode == 2


def test_about_fifty_names_are_enough_for_a_program() -> None:
    """What only calls return, or only an operator or an extension needs, is in a module of its own."""
    assert len(membroker.__all__) <= 50


def test_every_public_name_is_there() -> None:
    assert [name for name in membroker.__all__ if getattr(membroker, name) is None] == []
    assert set(membroker.__all__) <= set(dir(membroker))


def test_the_type_checker_sees_what_is_imported() -> None:
    check_names(ext, ROOT)


def test_each_name_is_used_by_an_extension() -> None:
    assert used_names(EXTENSIONS) == set(listed(ROOT))
