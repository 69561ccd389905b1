"""The unit and the Compose service of a guest: what they start is a guest that runs, by a real daemon without a GPU."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.deploy.test_deploy import load_yaml
from tests.support.daemons import DEADLINE_SECONDS, running
from tests.support.sizes import MIB
from tests.support.template import PythonProcess

from membroker.cli import launch, main

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "deploy" / "systemd" / "membroker-guest@.service"
COMPOSE = ROOT / "deploy" / "compose.guest.yaml"
PROGRAM = ROOT / "tests" / "support" / "stand_in_guest.py"


def test_the_unit_starts_what_its_file_says(tmp_path: Path) -> None:
    text = UNIT.read_text()
    settings = dict(re.findall(r"^([A-Za-z]+)=(.*)$", text, re.MULTILINE))
    told = dict(line.split("=", 1) for line in re.findall(r"^#   ([A-Z_]+=.*)$", text, re.MULTILINE))
    assert told.keys() == {"MEMORY", "OPTIONS", "COMMAND", "MEMBROKER_ENDPOINT"}
    assert settings["EnvironmentFile"] == "/etc/membroker/guests/%i.env"
    assert settings["KillMode"] == "mixed", "the program hears SIGTERM from its parent, once"

    def words(file: dict[str, str]) -> list[str]:
        line = settings["ExecStart"].replace("%i", "comfy").replace("${MEMORY}", file["MEMORY"])
        return shlex.split(line.replace("$OPTIONS", file["OPTIONS"]).replace("$COMMAND", file["COMMAND"]))[1:]

    given = main._parser().parse_args(words(told))
    assert (given.command, given.guest, given.model, given.sleep_after) == (launch.run, True, "comfy", 300.0)
    with running({"capacity": 64 * MIB, "tenants": {"red": {}}}) as daemon:
        mine = {"MEMORY": "8MiB", "OPTIONS": "", "COMMAND": f"{sys.executable} {PROGRAM} 8 0"}
        with PythonProcess(
            ["-m", "membroker.cli.main", *words(mine)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MEMBROKER_ENDPOINT": str(daemon.endpoint()), "XDG_STATE_HOME": str(tmp_path)},
        ) as guest:
            assert guest.stdout.readline().startswith("ready")
            assert daemon.books().lent_bytes == 8 * MIB
            guest.communicate("exit 7\n", timeout=DEADLINE_SECONDS)
            assert guest.returncode == 7


def test_the_compose_service_is_a_guest_beside_the_other_services() -> None:
    (both,) = load_yaml((ROOT / "deploy" / "compose.yaml").read_text())
    (document,) = load_yaml(COMPOSE.read_text())
    (service,) = document["services"].values()
    given = main._parser().parse_args([*service["entrypoint"][1:], *service["command"]])
    assert (given.command, given.guest, given.model) == (launch.run, True, *document["services"])
    other: Any = both["services"]["chat"]
    assert service["environment"]["MEMBROKER_ENDPOINT"] == other["environment"]["MEMBROKER_ENDPOINT"]
    assert [volume for volume in other["volumes"] if isinstance(volume, dict)] == service["volumes"]
    assert (service["depends_on"], service["deploy"]) == (other["depends_on"], other["deploy"])
    assert service["pid"] == "host"
    door = given.door
    assert service["ports"] == [f"127.0.0.1:{door.port}:{door.port}"]
    assert door.address == "0.0.0.0"
    assert given.program[-1] == str(door.program)
