"""A machine of a test's own: Debian with a real systemd as process 1, in a container, with membroker installed.

systemd keeps the descriptors of a daemon, starts it again and decides what it may: only a real one shows that our unit
is right. Debian is made once for each machine that runs tests, in a cache; a test writes to a layer over it, which is
gone when it ends. Membroker is installed as deploy/systemd says: the tree of this checkout and Debian's own Python.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.support.daemons import DEADLINE_SECONDS, to_toml, until
from tests.support.workers import ROOT, children, proc_of

SUITE = os.environ.get("MEMBROKER_TEST_SUITE", "trixie")
"""Which Debian. trixie has systemd 257; an older one has what its systemd can be shown to do."""
MIRROR = os.environ.get("MEMBROKER_TEST_MIRROR")
"""Where from; debootstrap knows a place itself."""
PACKAGES = "systemd,systemd-sysv,dbus,python3,python3-venv"
TOOLS: Mapping[str, str] = {
    "systemd-nspawn": "systemd-container",
    "debootstrap": "debootstrap",
    "unshare": "util-linux",
    "nsenter": "util-linux",
}
PREFIX = "opt/membroker"
TESTS = "opt/tests"
UNIT = "membrokerd.service"
MAKE_SECONDS = 900.0


def machine_or_skip() -> Path:
    """Return the file system of a Debian without membroker; skip with what to do where none can be made."""
    if os.geteuid() != 0:
        give_up("only root can boot a systemd: run `make test-system` as root")
    packages = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if packages:
        give_up(f"a real systemd takes tools that are missing: apt-get install {' '.join(sorted(packages))}")
    requirements = requirements_of("broker")
    recipe = hashlib.sha256("\n".join([SUITE, PACKAGES, *requirements]).encode()).hexdigest()[:8]
    cached = Path("/var/cache/membroker-tests", f"{SUITE}-{recipe}")
    if not cached.is_dir():
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{SUITE}-", dir=cached.parent) as place:
            _make(Path(place) / "root", requirements)
            with suppress(OSError):  # another run was faster: then there is one already
                (Path(place) / "root").rename(cached)
            assert cached.is_dir()
    return cached


def give_up(why: str) -> NoReturn:
    """Skip the test, or fail it where it must run."""
    if os.environ.get("MEMBROKER_REQUIRE_SYSTEMD"):
        pytest.fail(f"this must run here: {why}")
    pytest.skip(why)


def requirements_of(*extras: str) -> list[str]:
    """Return what an installation of membroker with these extras depends on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]


def _make(root: Path, requirements: Sequence[str]) -> None:
    """Make a Debian, and in it the virtual environment that the unit expects, without membroker."""
    run_or_give_up(
        "a Debian must be fetched (MEMBROKER_TEST_MIRROR says where from)",
        ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), *filter(None, [MIRROR])],
    )
    shutil.rmtree(root / "var/cache/apt")
    inside = ["chroot", str(root)]
    run_or_give_up(
        "its Python must make an environment", [*inside, "python3", "-m", "venv", "--without-pip", f"/{PREFIX}"]
    )
    packages = _site_packages(root)
    # Wheels for that Python, by this one's pip: it knows where this machine gets its packages from.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    target = ["--target", str(packages), "--python-version", packages.parent.name.removeprefix("python")]
    run_or_give_up("pip must find wheels for it", [*pip, *target, "--only-binary=:all:", *requirements])
    # Beside the sources, where the daemon may not write.
    run_or_give_up(
        "its Python must compile them", [*inside, f"/{PREFIX}/bin/python", "-m", "compileall", "-q", f"/{PREFIX}/lib"]
    )


def _site_packages(root: Path) -> Path:
    (packages,) = (root / PREFIX / "lib").glob("python3.*/site-packages")
    return packages


def run_or_give_up(what: str, command: Sequence[str]) -> None:
    """Run a command that needs the network, or else give up with what it takes."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=MAKE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        give_up(f"{what}: nothing came for {MAKE_SECONDS:.0f} s")
    if done.returncode != 0:
        last = (done.stdout.strip().splitlines() or ["it said nothing"])[-1]
        give_up(f"{what}: {last}")


def install(root: Path, tree: Path) -> None:
    """Write to `tree` what an installation adds to the file system `root`, and the tests' own workers."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = tree / _site_packages(root).relative_to(root)
    leave = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "client" / "membroker", packages / "membroker", ignore=leave)
    shutil.copytree(ROOT / "broker" / "membrokerd", packages / "membrokerd", ignore=leave)
    tests = tree / TESTS / "tests"
    shutil.copytree(ROOT / "tests" / "support", tests / "support", ignore=leave)
    shutil.copy(ROOT / "tests" / "__init__.py", tests)
    for name, entry in project["scripts"].items():
        module, function = entry.split(":")
        script = tree / PREFIX / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(
            f"#!/{PREFIX}/bin/python\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        )
        script.chmod(0o755)
    unit = tree / "etc/systemd/system" / UNIT
    unit.parent.mkdir(parents=True)
    shutil.copy(ROOT / "deploy/systemd" / UNIT, unit)
    (tree / "etc/membroker").mkdir()
    for path in (tree, *tree.rglob("*")):
        path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o644))


# A cgroup of its own, so that two machines at once are two; moved out of again, so that it can be removed.
_BOOT = """
set -eu
mount -t cgroup2 none /sys/fs/cgroup
outer=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)
inner=$outer/membroker-test-$$
mkdir "$inner"
echo $$ > "$inner/cgroup.procs"
mount -t tmpfs -o mode=0755 none "$PLACE"
mkdir "$PLACE/written" "$PLACE/work" "$PLACE/root"
mount -t overlay -o "lowerdir=$TREE:$DEBIAN,upperdir=$PLACE/written,workdir=$PLACE/work" overlay "$PLACE/root"
systemd-nspawn --quiet --directory="$PLACE/root" --register=no --keep-unit --boot --console=pipe --private-network \
  --resolv-conf=off --link-journal=no --timezone=off --machine="membroker-$$" || true
echo $$ > "$outer/cgroup.procs"
find "$inner" -depth -type d -exec rmdir {} +
"""


class Machine:
    """A machine that is up. Paths are those inside."""

    def __init__(self, init: int) -> None:
        self.init = init
        self.version = int(self.run("systemctl", "--version").split()[1])

    def path(self, inside: str) -> Path:
        return Path(f"/proc/{self.init}/root{inside}")

    def command(self, command: Sequence[str], user: int = 0) -> list[str]:
        """Return a command of this machine that runs one there: a process of none of its units."""
        enter = ["nsenter", f"--target={self.init}", "--all", "--"]
        other = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        places = ["PATH=/usr/sbin:/usr/bin:/sbin:/bin:/opt/membroker/bin", f"PYTHONPATH=/{TESTS}"]
        return [*enter, *other, "env", "-i", *places, *command]

    def run(self, *command: str) -> str:
        """Run a command there and return what it says; it must succeed."""
        done = subprocess.run(
            self.command(command), capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout

    def show(self, *properties: str) -> list[str]:
        told = self.run("systemctl", "show", UNIT, f"--property={','.join(properties)}")
        values = dict(line.split("=", 1) for line in told.splitlines())
        return [values[name] for name in properties]

    def configure(self, configuration: Mapping[str, Any]) -> None:
        self.path("/etc/membroker/membrokerd.toml").write_text(to_toml(configuration))

    def override(self, settings: str) -> None:
        """Put settings over the unit's own, as `systemctl edit` does."""
        directory = self.path(f"/etc/systemd/system/{UNIT}.d")
        directory.mkdir(exist_ok=True)
        (directory / "override.conf").write_text(f"[Service]\n{settings}\n")
        self.run("systemctl", "daemon-reload")

    def daemon(self) -> int:
        """Return the daemon's pid, as the machine has it, when it is ready; 0 before."""
        pid, active, state = self.show("MainPID", "ActiveState", "SubState")
        return int(pid) if (active, state) == ("active", "running") else 0

    def log(self, *options: str) -> str:
        return self.run("journalctl", f"--unit={UNIT}", "--output=cat", "--no-pager", *options)


@contextmanager
def booted(debian: Path) -> Iterator[Machine]:
    """Boot a machine with membroker installed, and neither configured nor started."""
    with tempfile.TemporaryDirectory(prefix="mb-machine-") as directory:
        place = Path(directory)
        install(debian, place / "tree")
        (place / "over").mkdir()
        where = {"TREE": str(place / "tree"), "DEBIAN": str(debian), "PLACE": str(place / "over")}
        with (place / "console").open("wb") as console:
            process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "private", "sh", "-c", _BOOT],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                # Above what a host without cgroup v2 in its usual place would choose.
                env={**os.environ, **where, "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
                start_new_session=True,
            )
        init = 0
        try:
            init = until(lambda: _init_of(process) or process.poll() is not None)
            if process.poll() is not None:
                last = (place / "console").read_text(errors="replace").strip().splitlines()[-1:]
                give_up(f"systemd-nspawn cannot boot here: {' '.join(last)}")
            machine = Machine(init)
            until(lambda: _is_up(machine))
            machine.run(f"/{PREFIX}/bin/python", "-m", "compileall", "-q", f"/{PREFIX}/lib", f"/{TESTS}")
            yield machine
        finally:
            with suppress(ProcessLookupError):
                # With process 1 all that is in there ends.
                os.kill(init, signal.SIGKILL) if init > 1 else os.killpg(process.pid, signal.SIGKILL)
            process.wait(DEADLINE_SECONDS)


def _init_of(process: subprocess.Popen[bytes]) -> int:
    """Return the pid of process 1 of the machine, once systemd runs there."""
    for nspawn in children(process.pid):
        for child in children(nspawn):
            first = proc_of(child, "status")
            if first.startswith("Name:\tsystemd\n") and "\t1\n" in first:
                return child
    return 0


def _is_up(machine: Machine) -> bool:
    """Say whether systemd has started all that it starts, whether or not each of it could."""
    command = machine.command(["systemctl", "is-system-running", "--wait"])
    said = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False).stdout.strip()
    return said in ("running", "degraded")
