"""Build a release into dist/ and try what was built: `make release`, by `python -m tools.release`.

Owns the order of the steps. It publishes nothing: it sets no tag and uploads no file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[1]
BUILDERS = ("buildah", "podman")
TRIED = (("membrokerd", "--version"), ("membroker", "--version"), ("membroker", "demo"))
NUMBER = r"(\d[\w.+]*)"
VERSIONED = {
    "client/membroker/__init__.py": rf'^__version__ = "{NUMBER}"$',
    "broker/membrokerd/__init__.py": rf'^__version__ = "{NUMBER}"$',
    "deploy/helm/membroker/Chart.yaml": rf"^(?:v|appV)ersion: {NUMBER}$",
    "deploy/kubernetes/membroker.yaml": rf'image: "membroker:{NUMBER}"',
    "deploy/Dockerfile": rf"membroker:{NUMBER}",
    "deploy/compose.yaml": rf"image: membroker(?:-vllm)?:{NUMBER}",
    "docs/kubernetes.md": rf"membroker:{NUMBER}",
    "examples/kubernetes/tenant.yaml": rf"membroker:{NUMBER}",
}
"""Where the version stands beside pyproject.toml, which decides it."""


def project(root: Path = ROOT) -> Mapping[str, object]:
    """Return the table `project` of pyproject.toml."""
    table: Mapping[str, object] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return table


def wrong_versions(root: Path) -> Iterator[str]:
    """Yield a sentence for each file that has another version than pyproject.toml, or none."""
    version = project(root)["version"]
    for name, pattern in VERSIONED.items():
        found = set(re.findall(pattern, (root / name).read_text(), re.MULTILINE))
        if found != {version}:
            says = ", ".join(sorted(found)) or "no version"
            yield f"{name} has {says}, and pyproject.toml {version}: make them the same."


def problems(root: Path) -> Iterator[str]:
    """Yield a sentence for each fact that keeps the tree at `root` from being released."""
    yield from wrong_versions(root)
    version, urls = str(project(root)["version"]), project(root)["urls"]
    section = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    if not re.search(section, (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        yield f"CHANGELOG.md has no section `## [{version}] - YYYY-MM-DD`: turn `Unreleased` into it."
    assert isinstance(urls, dict)
    if made_up := [url for url in urls.values() if (urlsplit(url).hostname or "").endswith(".example")]:
        yield f"project.urls in pyproject.toml are placeholders ({made_up[0]}): put the project's own there."
    if changed := _git(root, "status", "--porcelain").splitlines():
        yield f"the tree has changes that are not committed, such as {changed[0][3:]}: commit or remove them."
    tagged = _git(root, "for-each-ref", "--format=%(*objectname)%(objectname)", f"refs/tags/v{version}")
    if tagged and not tagged.startswith(_git(root, "rev-parse", "HEAD").strip()):
        yield f"the tag v{version} is on another commit, so {version} was released: raise the version."


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout


def _run(*command: str | Path, cwd: Path = ROOT, environment: Mapping[str, str] | None = None) -> None:
    """Run a command, visibly; raises `CalledProcessError`."""
    print("+", shlex.join(str(word) for word in command), flush=True)
    subprocess.run([str(word) for word in command], cwd=cwd, env=environment, check=True)


def build_packages(dist: Path) -> tuple[Path, Path]:
    """Build the source archive, and the wheel from it; return both.

    Files get the time of the last commit, so the same commit and the same hatchling make the same bytes.
    """
    when = _git(ROOT, "log", "-1", "--format=%ct").strip()
    _run(sys.executable, "-m", "build", "--outdir", dist, ROOT, environment={**os.environ, "SOURCE_DATE_EPOCH": when})
    (source,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    if missing := set(_git(ROOT, "ls-files", "-z").split("\0")) - packed - {""}:
        raise SystemExit(f"{source.name} lacks {len(missing)} files of the repository, such as {min(missing)}")
    return source, wheel


def try_wheel(wheel: Path) -> None:
    """Install the wheel into a fresh environment, and run the demo from there."""
    with tempfile.TemporaryDirectory(prefix="mb-release-") as name:
        place = Path(name)
        venv.create(place / "venv", with_pip=True)
        binaries = place / "venv" / "bin"
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "MEMBROKER"))}
        quiet = ("--quiet", "--disable-pip-version-check")
        _run(binaries / "pip", "install", *quiet, f"{wheel}[broker]", cwd=place, environment=clean)
        for command in TRIED:
            _run(binaries / command[0], *command[1:], cwd=place, environment=clean)


def build_image(builder: str, image: str, base: str | None, options: list[str]) -> None:
    """Build the container image of this tree, labelled with its version and its commit."""
    labels = {
        "org.opencontainers.image.title": "membroker",
        "org.opencontainers.image.version": image.partition(":")[2],
        "org.opencontainers.image.revision": _git(ROOT, "rev-parse", "HEAD").strip(),
        "org.opencontainers.image.licenses": str(project()["license"]),
    }
    words = [f"--label={key}={value}" for key, value in labels.items()]
    words += [f"--build-arg=COMMIT={labels['org.opencontainers.image.revision'][:12]}"]
    words += [f"--build-arg=BASE={base}"] if base else []
    file = ("--file", "deploy/Dockerfile", "--ignorefile", "deploy/Dockerfile.dockerignore")
    _run(builder, "build", *file, "--tag", image, *words, *options, ROOT)


def try_image(builder: str, image: str) -> None:
    """Run the demo in a container of the image."""
    if builder == "podman":
        for command in TRIED:
            _run("podman", "run", "--rm", "--entrypoint", command[0], image, *command[1:])
        return
    made = subprocess.run(["buildah", "from", "--pull-never", image], stdout=subprocess.PIPE, text=True, check=True)
    container = made.stdout.split()[-1]
    try:
        for command in TRIED:
            _run("buildah", "run", container, "--", *command)
    finally:
        _run("buildah", "rm", container)


def sums(dist: Path) -> str:
    """Return the SHA-256 sum of each file in `dist`, as `sha256sum --check` reads them."""
    lines = []
    for path in sorted(dist.iterdir()):
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n")
    return "".join(lines)


def release(builder: str, base: str | None, options: list[str]) -> None:
    """Make dist/ again: build everything, try everything, and write the sums."""
    version, dist = str(project()["version"]), ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir()
    _, wheel = build_packages(dist)
    try_wheel(wheel)
    image = f"localhost/membroker:{version}"
    build_image(builder, image, base, options)
    try_image(builder, image)
    file = dist / f"membroker-{version}-image-{os.uname().machine}.tar"
    _run(builder, "push", image, f"docker-archive:{file}:membroker:{version}")
    (dist / "SHA256SUMS").write_text(sums(dist))


def main() -> int:
    """Release, or say why not."""
    parser = argparse.ArgumentParser(prog="make release")
    parser.add_argument("--base", help="the image to build on, instead of the one that deploy/Dockerfile names")
    parser.add_argument("--rehearsal", action="store_true", help="build and try what cannot be released yet, too")
    parser.add_argument("options", nargs="*", help="options for the builder, after --")
    arguments = parser.parse_args()
    builder = next((name for name in BUILDERS if shutil.which(name)), None)
    if builder is None:
        raise SystemExit("an image takes buildah or podman: apt-get install buildah")
    try:
        found = list(problems(ROOT))
        for problem in found:
            print(f"not a release: {problem}", file=sys.stderr)
        if found and not arguments.rehearsal:
            raise SystemExit("nothing was built; to try it all the same: make release REHEARSAL=1")
        release(builder, arguments.base, arguments.options)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"failed with status {error.returncode}: {shlex.join(error.cmd)}") from None
    print((ROOT / "dist" / "SHA256SUMS").read_text(), end="")
    print("A rehearsal: do not publish this." if found else f"Now: git tag -a v{project()['version']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
