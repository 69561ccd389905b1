"""`make release`, from a commit to an image in which the demo has run: over a bare Debian, and without a registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.support.release_tree import VERSION, git, make_ready
from tests.support.systemd_machine import PREFIX, give_up, machine_or_skip, requirements_of, run_or_give_up
from tests.support.workers import ROOT

# The first test on a machine makes a Debian.
pytestmark = [pytest.mark.root, pytest.mark.timeout(1_000)]

BASE = "localhost/debian-with-python"
ROOM_BYTES = 4 << 30
STORAGE = """[storage]
driver = "overlay"
graphroot = "{0}/images"
runroot = "{0}/run"
"""
PIP = "[global]\nno-index = true\nfind-links = /srv/wheels\n"
MANIFESTS = ("deploy/kubernetes/membroker.yaml", "examples/kubernetes/tenant.yaml")


def buildah(*arguments: str) -> str:
    done = subprocess.run(["buildah", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with images of its own, the base among them, and with wheels: some 15,000 files in a gigabyte."""
    if shutil.which("buildah") is None:
        give_up("an image takes buildah: apt-get install buildah")
    debian = machine_or_skip()
    # A disk that discards what is deleted takes half a minute more for so many files.
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() and shutil.disk_usage(memory).free > ROOM_BYTES else Path("/var/tmp")
    with tempfile.TemporaryDirectory(prefix="mb-release-", dir=where) as name:
        place = Path(name)
        (place / "storage.conf").write_text(STORAGE.format(place))
        (place / "pip.conf").write_text(PIP)
        monkeypatch.setenv("CONTAINERS_STORAGE_CONF", f"{place}/storage.conf")
        monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")  # takes neither runc nor crun, nor cgroups
        fetch_wheels(debian, place / "wheels")
        make_base(debian)
        yield place


def fetch_wheels(debian: Path, wheels: Path) -> None:
    """Fetch what the image's build installs, by this machine's pip: it knows where packages come from."""
    (library,) = (debian / PREFIX / "lib").glob("python3.*")
    builders = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(wheels)]
    which = ["--only-binary=:all:", "--python-version", library.name.removeprefix("python")]
    run_or_give_up("pip must find wheels for the image", [*pip, *which, *builders, *requirements_of("broker", "cuda")])


def make_base(debian: Path) -> None:
    """Import the file system of the tests' Debian, without the environment that systemd's tests have in it."""
    run_or_give_up("buildah must find storage that it can use", ["buildah", "info"])
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(debian), "/")
    run_or_give_up("buildah must run a program", ["buildah", "run", container, "--", "/bin/rm", "-r", f"/{PREFIX}"])
    buildah("commit", "--quiet", "--rm", container, BASE)


def repository(tree: Path) -> Path:
    """Make a repository of this checkout's files, with a commit that can be released."""
    for name in git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    make_ready(tree)
    return tree


def make_release(tree: Path, place: Path) -> str:
    volumes = f"--volume={place}/wheels:/srv/wheels:ro --volume={place}/pip.conf:/etc/pip.conf:ro"
    this = [f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.installed"]
    command = ["make", "--directory", str(tree), *this, "release", f"BASE={BASE}", f"BUILD_OPTIONS={volumes}"]
    environment = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_commit_becomes_packages_and_an_image_that_were_all_tried(place: Path) -> None:
    """Then the packages of another clone are the same bytes, and the image has what our manifests start."""
    tree = repository(place / "source")
    said = make_release(tree, place)
    assert said.count("\nProved: ") == 2, "the demo from the wheel, and in the image"
    commit = git(tree, "rev-parse", "--short=12", "HEAD").strip()
    for name in ("membrokerd", "membroker"):
        assert said.count(f"\n{name} {VERSION} ({commit})\n") == 2, "of the wheel, and of the image"
    assert said.splitlines()[-2].endswith(f"git tag -a v{VERSION}")

    dist = tree / "dist"
    wheel, source = f"membroker-{VERSION}-py3-none-any.whl", f"membroker-{VERSION}.tar.gz"
    image = f"membroker-{VERSION}-image-{os.uname().machine}.tar"
    assert {path.name for path in dist.iterdir()} == {wheel, source, image, "SHA256SUMS"}
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"], cwd=dist, check=True)
    assert len((dist / "SHA256SUMS").read_text().splitlines()) == 3

    git(place, "clone", "--quiet", str(tree), str(place / "clone"))
    program = "from pathlib import Path; from tools import release; release.build_packages(Path('dist'))"
    subprocess.run([sys.executable, "-c", program], cwd=place / "clone", check=True, capture_output=True)
    for name in (wheel, source):
        assert (place / "clone" / "dist" / name).read_bytes() == (dist / name).read_bytes(), name

    with tarfile.open(dist / image) as archive:
        manifest = archive.extractfile("manifest.json")
        assert manifest is not None
        assert f"docker.io/library/membroker:{VERSION}" in json.load(manifest)[0]["RepoTags"], "as docker names it"
    commit = git(tree, "rev-parse", "HEAD").strip()
    check_image(buildah("from", "--pull-never", f"docker-archive:{dist / image}"), commit)


def check_image(container: str, commit: str) -> None:
    """Check that a container of the image starts what the manifests start, also without root."""
    config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
    assert config["Entrypoint"] == ["membrokerd"]
    assert config["Labels"]["org.opencontainers.image.version"] == VERSION
    assert config["Labels"]["org.opencontainers.image.revision"] == commit
    commands = {"seq", "membrokerd"}
    for manifest in MANIFESTS:
        pods = [one["spec"]["template"]["spec"] for one in documents(manifest) if "template" in one.get("spec", {})]
        assert pods
        for pod in pods:
            containers = [*pod.get("initContainers", ()), *pod["containers"]]
            assert {one["image"] for one in containers} == {f"membroker:{VERSION}"}
            commands |= {one["command"][0] for one in containers if "command" in one}
    assert {"membroker", "membroker-fdstore", "python", "/bin/sh"} < commands
    buildah("run", container, "--", "/bin/sh", "-euc", "for one; do command -v $one; done", "sh", *sorted(commands))
    program = "import membroker as m; p = m.VirtualMemoryPool(m.LocalSource('host'), '8MiB', '2MiB'); p.allocate(0, 1)"
    buildah("run", "--user", "10001:10001", container, "--", "python", "-c", program)
    left = buildah("run", container, "--", "/bin/sh", "-c", "ls -d /source /srv/wheels /etc/pip.conf || true")
    assert left.splitlines() == [], "what only the build needs stays out of the image"


def documents(manifest: str) -> list[dict[str, object]]:
    return [one for one in yaml.safe_load_all((ROOT / manifest).read_text()) if one]
