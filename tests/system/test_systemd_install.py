"""From a clone to two tenants that are scraped, and back: a real systemd, and the commands of docs/ alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.daemons import DEADLINE_SECONDS, until
from tests.support.systemd_machine import PREFIX, UNIT, Machine, booted, machine_or_skip
from tests.support.workers import ROOT

# The first test on a machine makes a Debian.
pytestmark = [pytest.mark.root, pytest.mark.timeout(1_000)]

SOURCE = "/opt/src"
"""Where the repository's root is on the machine."""
QUICK_START = (ROOT / "docs" / "quickstart.md").read_text()
SYSTEMD = (ROOT / "docs" / "systemd.md").read_text()
UPGRADE = (ROOT / "docs" / "upgrade.md").read_text()
COMMANDS = re.compile(r"^```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIRST, SECOND = "membroker-1", "membroker-2"
GPUS = "#!/bin/sh\n# What the driver's own command says of two GPUs.\nprintf '0\\n1\\n'\n"


def blocks(page: str, heading: str) -> list[str]:
    """Return the blocks of commands below a heading, without the commands that fetch packages."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = [re.sub(r"^.*/pip install .*\n", "", text, flags=re.MULTILINE) for text in COMMANDS.findall(section)]
    assert found, heading
    return found


def block(page: str, heading: str, number: int = 0) -> str:
    return blocks(page, heading)[number]


@pytest.fixture
def machine() -> Iterator[Machine]:
    """A bare machine with the repository, the environment that pip would have made, and two GPUs as nvidia-smi says."""
    with booted(machine_or_skip()) as one:
        one.path(f"/etc/systemd/system/{UNIT}").unlink()
        # Two versions, as pip makes them; the commands of the pages lead the link to one.
        one.run("sh", "-euc", f"cd /opt; mv membroker {FIRST}; ln -s {FIRST} {SECOND}; ln -s {FIRST} membroker")
        shutil.copytree(ROOT / "deploy", one.path(f"{SOURCE}/deploy"))
        smi = one.path("/usr/bin/nvidia-smi")
        smi.write_text(GPUS)
        smi.chmod(0o755)
        yield one


def shell(machine: Machine, commands: str, directory: str = SOURCE) -> str:
    """Run commands of a page, in the repository's root, each of which must succeed."""
    return machine.run("sh", "-euc", f"cd {directory}\n{commands}")


def configure(machine: Machine) -> None:
    machine.configure({"driver": "host", "capacity": "64MiB", "tenants": {"red": {}}})


def devices(machine: Machine) -> list[str]:
    said = machine.run("sh", "-c", f"/{PREFIX}/bin/membroker status --json || true")
    return [json.loads(line)["uuid"] for line in said.splitlines()]


def active(machine: Machine) -> list[str]:
    said = machine.run("systemctl", "list-units", "--plain", "--no-legend", "--state=active", "membrokerd*.service")
    return sorted(line.split()[0] for line in said.splitlines() if "gpus" not in line)


def start_target(machine: Machine, smi: str) -> None:
    """Start the target beside a driver whose own command is this script."""
    shell(machine, "install -D -m 0644 deploy/membrokerd.toml /etc/membroker/membrokerd.toml")
    configure(machine)
    machine.path("/usr/bin/nvidia-smi").write_text(smi)
    shell(machine, block(SYSTEMD, "Several GPUs"))


BOTH = ["membrokerd@0.service", "membrokerd@1.service"]
GPUS_LOG = ("journalctl", "--unit=membrokerd-gpus", "--output=cat")


def test_a_target_starts_a_daemon_for_each_gpu_and_all_of_it_goes_again(machine: Machine) -> None:
    """Install for several GPUs, reload, stop, boot again, upgrade, uninstall: with the commands of the page alone."""
    machine.path(f"/{PREFIX}").unlink()
    copied, _, _, checked = blocks(QUICK_START, "Install")
    shell(machine, copied)  # the configuration; then the tenants are named in it
    configure(machine)
    shell(machine, checked.splitlines()[0].removesuffix(" &&"))
    shell(machine, block(SYSTEMD, "Several GPUs"))
    until(lambda: active(machine) == BOTH)
    until(lambda: len(devices(machine)) == 2)
    assert machine.run("systemctl", "is-enabled", "membrokerd.target").strip() == "enabled"

    machine.configure({"driver": "host", "capacity": "64MiB", "tenants": {"red": {}, "blue": {}}})
    machine.run("systemctl", "reload", "membrokerd@*")
    for device in ("host", "host-1"):
        until(lambda device=device: machine.path(f"/run/membroker/{device}/tenants/blue/handoff.sock").exists())

    machine.run("systemctl", "stop", "membrokerd.target")
    until(lambda: active(machine) == [])
    machine.run("systemctl", "start", "membrokerd.target")
    until(lambda: active(machine) == BOTH)

    upgrade = block(UPGRADE, "Upgrade").replace("membrokerd.service /etc", "membrokerd@.service /etc")
    before = machine.run("systemctl", "show", "--property=MainPID", *BOTH)
    shell(machine, upgrade.replace("systemctl restart membrokerd ", "systemctl restart 'membrokerd@*' "))
    until(lambda: active(machine) == BOTH)
    assert machine.run("systemctl", "show", "--property=MainPID", *BOTH) != before

    drain, _, after = block(UPGRADE, "Uninstall").partition("\n")
    for number in (0, 1):
        shell(machine, drain.partition(" &&")[0].replace("--exit", f"--exit --device {number}"))
    until(lambda: active(machine) == [])
    shell(machine, after.replace("--now membrokerd ", "--now membrokerd.target 'membrokerd@*' "))
    left = [one for one in ("/run/membroker", "/etc/membroker", f"/{PREFIX}") if machine.path(one).exists()]
    assert left == []
    assert list(Path(machine.path("/etc/systemd/system")).rglob("membroker*")) == []


LATE = """#!/bin/sh
test -e /run/driver || { echo "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."; exit 9; }
printf '0\\n1\\n'
"""
BROKEN = """#!/bin/sh
echo 0
echo "Unable to determine the device handle for GPU0000:41:00.0: GPU is lost.  Reboot the system to recover this GPU"
echo 2
echo "WARNING: infoROM is corrupted at gpu 0000:C1:00.0"
exit 14
"""


def test_a_driver_that_comes_after_the_boot_is_waited_for(machine: Machine) -> None:
    """The daemons start when it answers. A GPU that comes later takes a command; a broken one keeps no other away."""
    start_target(machine, LATE)
    until(lambda: "the driver does not answer yet: nvidia-smi ends with status 9" in machine.run(*GPUS_LOG))
    assert active(machine) == []
    machine.path("/run/driver").touch()
    until(lambda: active(machine) == BOTH)
    before = machine.run("systemctl", "show", "--property=MainPID", *BOTH)
    machine.path("/usr/bin/nvidia-smi").write_text(BROKEN)
    shell(machine, block(SYSTEMD, "Several GPUs", 1))
    until(lambda: active(machine) == [*BOTH, "membrokerd@2.service"])
    assert machine.run("systemctl", "show", "--property=MainPID", *BOTH) == before, "those that run go on"
    said = machine.run(*GPUS_LOG)
    assert "nvidia-smi ends with status 14, and lists 0 2" in said
    assert "GPU is lost" in said


def test_without_a_gpu_the_target_says_so(machine: Machine) -> None:
    """The driver is not loaded: a unit has failed, with the reason, and no daemon runs."""
    start_target(machine, "#!/bin/sh\n")
    until(lambda: machine.run("sh", "-c", "systemctl is-failed membrokerd-gpus || true").strip() == "failed")
    assert active(machine) == []
    assert "nvidia-smi lists no GPU" in machine.run(*GPUS_LOG)


@contextmanager
def prometheus(machine: Machine, directory: Path) -> Iterator[Callable[[str], str]]:
    """Run this machine's Prometheus on the other's loopback, by its files; yield what runs a command there."""
    configuration = machine.path("/etc/prometheus/prometheus.yml")
    often = configuration.read_text().replace("scrape_interval: 15s", "scrape_interval: 1s")
    configuration.write_text(f"global: {{evaluation_interval: 1s}}\n{often}")
    rules = machine.path("/etc/prometheus/alerts.yml")
    rules.write_text(re.sub("for: 1m$", "for: 1s", rules.read_text(), flags=re.MULTILINE))
    beside = ["nsenter", f"--target={machine.init}", "--net", "--"]
    options = [f"--config.file={configuration}", f"--storage.tsdb.path={directory}/data", "--log.level=warn"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([*beside, "prometheus", *options], cwd=directory, stdout=log, stderr=log)

    def say(command: str) -> str:
        done = subprocess.run([*beside, "sh", "-c", command], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
        return done.stdout

    try:
        yield say
    finally:
        process.kill()
        process.wait()


def test_a_newcomer_clones_and_scrapes_two_tenants(machine: Machine, tmp_path: Path) -> None:
    """All commands of docs/quickstart.md in order, an alert, the upgrade, and nothing is left at the end.

    What pip would install is there. Prometheus is this machine's own, on the loopback of the one with systemd.
    """
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    clone = block(QUICK_START, "Try it").splitlines()[0].replace("REPOSITORY", str(ROOT))
    # Git refuses to clone from another user's directory, and CI's checkout is not root's.
    (tmp_path / "gitconfig").write_text(f"[safe]\n\tdirectory = {ROOT}/.git\n")
    git = {**os.environ, "GIT_CONFIG_GLOBAL": str(tmp_path / "gitconfig")}
    subprocess.run(["sh", "-euc", clone], cwd=tmp_path, env=git, check=True, capture_output=True)
    # No git reaches into another mount namespace.
    shutil.copytree(tmp_path / "membroker", machine.path("/root/membroker"))
    machine.path(f"/{PREFIX}").unlink()
    start = "".join([*blocks(QUICK_START, "Install"), block(QUICK_START, "Two tenants")])
    shell(machine, f"exec >/tmp/said 2>&1\n{start}", "/root/membroker")
    assert active(machine) == ["membrokerd.service"]
    until(lambda: machine.path("/tmp/said").read_text().count("borrowed 67108864") == 2)
    told = shell(machine, block(QUICK_START, "Look at it"), "/root/membroker")
    assert [name for name in ("red", "blue", "chat", "search") if name not in told] == []

    copied, question = blocks(QUICK_START, "Scrape it")
    machine.path("/etc/prometheus").mkdir()
    shell(machine, copied.replace("systemctl restart prometheus\n", ""), "/root/membroker")
    with prometheus(machine, tmp_path) as beside:
        until(lambda: set(re.findall(r'tenant="(\w+)"\} => 67108864 ', beside(question))) == {"red", "blue"})
        stop, start = re.findall(r"`(systemctl (?:stop|start) membrokerd)`", QUICK_START)
        alert = 'ALERTS{alertname="MembrokerDown",alertstate="firing"}'
        fires = f"promtool query instant http://127.0.0.1:9090 '{alert}'"
        assert "=>" not in beside(fires)
        shell(machine, stop)
        until(lambda: "=> 1 " in beside(fires))
        shell(machine, start)
        until(lambda: "=>" not in beside(fires) and beside(question).count("=> 67108864 ") == 2)

    sessions = json.loads(machine.run("membroker", "sessions", "--admin", "--json"))
    machine.run("sh", "-c", "kill " + " ".join(str(session["pid"]) for session in sessions))
    shell(machine, block(UPGRADE, "Upgrade"), "/root/membroker")
    assert machine.run("readlink", f"/{PREFIX}").strip() == SECOND
    until(lambda: active(machine) == ["membrokerd.service"] and len(devices(machine)) == 1)
    shell(machine, block(UPGRADE, "Uninstall"))
    assert active(machine) == []
    assert machine.run("ls", "/opt").split() == ["src", "tests"], "no version is left"
