"""The first minute: what `pip install membroker` puts on PATH says what is missing, in a sentence.

The environments are real ones (`python -m venv`), with this project, its dependencies by its own pyproject.toml, and
nothing else. What is installed is linked from the environment that runs the tests, so that no index is asked.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from tests.support.daemons import running

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHARED = {"google"}
"""Directories in which several packages have a part."""
FIRST_PROGRAM = re.compile(r"^```python run(?: numpy)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def closure(requirements: Iterable[str]) -> set[str]:
    """Return the names of the packages that these requirements bring, with all that they need, without extras."""
    found: set[str] = set()
    open_ends = list(requirements)
    while open_ends:
        requirement, _, marker = open_ends.pop().partition(";")
        name = re.split(r"[\s<>=!~\[(]", requirement.strip())[0].lower()
        if "extra" in marker or name in found:
            continue
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another system or Python
        found.add(name)
        open_ends += needs
    return found


def environment(directory: Path, more: Iterable[str] = (), wheel: Path | None = None) -> Path:
    """Make a virtual environment with this project and more, and return its bin directory.

    The project is installed from the wheel, if there is one, and otherwise linked as the packages are.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    site = next((directory / "lib").glob("python3*")) / "site-packages"
    for package in closure([*PROJECT["dependencies"], *more]):
        for file in metadata.files(package) or []:
            depth = 2 if file.parts[0] in SHARED else 1
            link, there = site.joinpath(*file.parts[:depth]), Path(str(file.locate()))
            if file.parts[0] != ".." and not link.exists():
                link.parent.mkdir(exist_ok=True)
                link.symlink_to([there, *there.parents][len(file.parts) - depth])
    if wheel is not None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", directory / "bin" / "python"]
        subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
        return directory / "bin"
    for part in ("client/membroker", "broker/membrokerd"):
        (site / Path(part).name).symlink_to(ROOT / part)
    for name, target in PROJECT["scripts"].items():
        module, _, function = target.partition(":")
        script = directory / "bin" / name
        script.write_text(
            f"#!{directory}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        script.chmod(0o755)
    return directory / "bin"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As after `pip install membroker`."""
    return environment(tmp_path_factory.mktemp("bare"))


def run(command: Path, *arguments: str) -> tuple[int, str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run([command, *arguments], env=clean, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_what_needs_an_extra_names_it(bare: Path) -> None:
    """Somebody installs the library and tries the daemon, or the demo."""
    for command, *words in (("membrokerd", "--driver", "host"), ("membrokerd",), ("membroker", "demo")):
        status, out, err = run(bare / command, *words)
        assert (status, out, err.count("\n")) == (1, "", 1)
        assert err.startswith(f"{command}: ")
        assert "pip install 'membroker[broker]'" in err


def test_the_library_needs_no_extra(bare: Path) -> None:
    """A worker's image has the library alone. What people ask first works, and doctor names the extra too."""
    code = "import membroker as m; p = m.VirtualMemoryPool(m.LocalSource('host'), '8MiB', '2MiB'); p.allocate(0, 1)"
    assert run(bare / "python", "-c", code)[0] == 0
    for command in ("membroker", "membrokerd"):
        assert run(bare / command, "--help")[0] == 0
    assert "pip install 'membroker[broker]'" in run(bare / "membroker", "doctor")[1]


@pytest.mark.deep
def test_the_first_program_of_each_page_runs_from_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a reader has who cloned nothing: a file that the wheel lacks is missed here."""
    building = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    built = subprocess.run([*building, "--wheel-dir", tmp_path, ROOT], capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"the wheel cannot be built without an index that has hatchling: {built.stderr[-200:]}")
    (wheel,) = tmp_path.glob("*.whl")
    binaries = environment(tmp_path / "venv", more=["numpy"], wheel=wheel)
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = {page: block for page in pages if (block := FIRST_PROGRAM.search(page.read_text()))}
    assert len(found) >= 12
    with running({"capacity": "1GiB", "host_capacity": "1GiB"}) as daemon:
        monkeypatch.setenv("MEMBROKER_ENDPOINT", str(daemon.endpoint()))
        monkeypatch.chdir(tmp_path)
        for page, block in found.items():
            code = f"import membroker\nassert {str(tmp_path)!r} in membroker.__file__\n{block[1]}"
            status, _, err = run(binaries / "python", "-c", code)
            assert (status, err) == (0, ""), page


def imports(directory: str) -> Iterator[tuple[str, bool]]:
    """Yield each imported module below a directory, and whether that happens as its file is imported."""
    for path in (ROOT / directory).rglob("*.py"):
        tree = ast.parse(path.read_text())
        first = set(tree.body)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module, node in first
            elif isinstance(node, ast.Import):
                yield from ((alias.name, node in first) for alias in node.names)


def test_no_import_needs_another_package() -> None:
    """Of CUDA only cuda-bindings and nvidia-ml-py are imported, and these, like frameworks, when they are used."""
    own = {"membroker", "membrokerd", "_typeshed", *sys.stdlib_module_names}  # _typeshed is for mypy alone
    library = {"grpc", "google", "rich"}
    broker = library | {"grpc_health", "grpc_reflection", "prometheus_client", "pydantic"}
    for directory, needed in (("client/membroker", library), ("broker/membrokerd", broker)):
        found = set(imports(directory))
        late = {"cuda.bindings.driver", "pynvml", "numpy", "torch", "vllm", "sglang", "huggingface_hub"}
        assert {name.partition(".")[0] for name, _ in found} - own <= needed | {name.partition(".")[0] for name in late}
        assert {name for name, _ in found if name.startswith(("cuda", "pynvml"))} <= late
        early = {name.partition(".")[0] for name, is_early in found if is_early}
        assert not early & {"cuda", "pynvml"}
