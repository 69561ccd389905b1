"""A claim's CDI file, applied as a container runtime does: an ordinary user enters its tenant and no other."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.client.dra.claims import UID, claim, config
from tests.client.dra.cluster import Node, node
from tests.support.daemons import DEADLINE_SECONDS, running
from tests.support.workers import python_path

pytestmark = pytest.mark.root

USER = "60001"
_CONTAINER = """
set -e
endpoint=$1 runtime=$2 inside=$3 options=$4
mount --bind "$endpoint" "$inside"
mount -t tmpfs none "$runtime"
mkdir -p "$endpoint"
mount --bind "$inside" "$endpoint"
mount -o "remount,$options" "$endpoint"
shift 4
exec setpriv --reuid=60001 --regid=60001 --clear-groups --inh-caps=-all --bounding-set=-all "$@"
"""
_PROGRAM = """
import os, membroker
here = os.environ["MEMBROKER_ENDPOINT"]
try:
    with membroker.connect() as client, client.model("m").allocate("2MiB"):
        print(client.tenant, os.listdir(os.path.dirname(here)))
    open(os.path.join(here, "x"), "w")
except (membroker.AccessDenied, OSError) as error:
    print(type(error).__name__, getattr(error, "errno", None))
"""


@pytest.fixture
def one() -> Iterator[Node]:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("takes root, unshare and setpriv")
    if subprocess.run(["setpriv", f"--reuid={USER}", sys.executable, "-c", ""], capture_output=True).returncode:
        pytest.skip("other users cannot run this interpreter")
    with running() as daemon, node(daemon) as found:
        daemon.directory.chmod(0o755)
        yield found


def enter(one: Node) -> list[str]:
    """Run the program in the claim's container, and return what it prints."""
    (device,) = json.loads((one.cdi / f"membroker-{UID}.json").read_text())["devices"]
    (mount,), variables = device["containerEdits"]["mounts"], device["containerEdits"]["env"]
    assert mount["hostPath"] == mount["containerPath"]
    inside = tempfile.mkdtemp(prefix="mb-in-")
    places = (mount["hostPath"], str(one.daemon.root.parent), inside, ",".join(mount["options"]))
    command = ["unshare", "--mount", "--propagation=private", "sh", "-c", _CONTAINER, "sh", *places]
    environment = {**os.environ, "PYTHONPATH": python_path(), **dict(each.split("=", 1) for each in variables)}
    done = subprocess.run(
        [*command, sys.executable, "-c", _PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=DEADLINE_SECONDS,
        cwd=Path(__file__).parents[3],
    )
    os.rmdir(inside)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_pod_of_any_user_enters_its_own_tenant(one: Node) -> None:
    """With the mode of the chart's class. The mount is read-only, and has nothing of others."""
    asked = one.api.add(claim(configs=[config("Class", mode="0666")]))
    assert one.prepare(asked)[UID].error == ""
    assert enter(one) == [f"tenants/dra-{UID} ['dra-{UID}']", f"OSError {errno.EROFS}"]
    assert one.unprepare(asked)[UID].error == ""


def test_without_a_mode_only_root_enters(one: Node) -> None:
    asked = one.api.add(claim())
    assert one.prepare(asked)[UID].error == ""
    assert enter(one) == ["AccessDenied None"]
    assert one.unprepare(asked)[UID].error == ""
