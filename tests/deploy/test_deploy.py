"""What stands in deploy/ is right by the tools that will read it, and by our own names."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from membroker.wire.sessions import descriptors_for
from membrokerd.config.config import Config, LogConfig, MetricsConfig, ModelConfig, TenantConfig, load
from membrokerd.daemon import DEFAULT_MAX_SESSIONS
from membrokerd.observe import catalog

DEPLOY = Path(__file__).parents[2] / "deploy"
TOML = DEPLOY / "membrokerd.toml"


def tool(name: str, package: str) -> str:
    """Return the path of a tool, or skip with one line that says how to get it."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed ({package})")
    return found


def check(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def load_yaml(text: str) -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip install pyyaml)")
    return [document for document in yaml.safe_load_all(text) if document is not None]


# --- The annotated configuration ---


def uncommented() -> str:
    """Return the file with every key set: prose has a space after its #, a key has none."""
    return re.sub(r"^#(?=[a-z_\[])", "", TOML.read_text(), flags=re.MULTILINE)


def keys_in(document: dict[str, Any]) -> set[tuple[str, str]]:
    def walk(table: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
        for key, value in table.items():
            if isinstance(value, dict):
                inner = {"tenants": "tenants.NAME", "tenants.NAME.models": "tenants.NAME.models.MODEL"}
                below = f"{path}.{key}" if path else key
                if below in inner:
                    for each in value.values():
                        yield from walk(each, inner[below])
                else:
                    yield from walk(value, below)
            else:
                yield path, key

    return set(walk(document, ""))


def test_the_annotated_configuration_loads_as_it_is_and_with_every_key_set(tmp_path: Path) -> None:
    """A key that an older daemon does not know would keep that one from starting after a rollback, so none is set.

    The driver is: `auto` would start on a node whose driver is not loaded, and be ready.
    """
    assert tomllib.loads(TOML.read_text()) == {"driver": "cuda", "metrics": {}, "log": {}}
    whole = tmp_path / "whole.toml"
    whole.write_text(uncommented())
    found = load(whole, {}, env={}, uid=0)
    assert set(found.tenants) == {"acme"}
    assert set(found.tenants["acme"].models) == {"llama-7b"}


def test_the_annotated_configuration_names_every_key() -> None:
    tables: dict[str, tuple[type, set[str]]] = {
        "": (Config, {"metrics", "log", "tenants"}),
        "metrics": (MetricsConfig, set()),
        "log": (LogConfig, set()),
        "tenants.NAME": (TenantConfig, {"models"}),
        "tenants.NAME.models.MODEL": (ModelConfig, set()),
    }
    known = {
        (name, key.name)
        for name, (table, inner) in tables.items()
        for key in dataclasses.fields(table)
        if key.name not in inner
    }
    assert keys_in(tomllib.loads(uncommented())) == known


@pytest.mark.parametrize("path", ["membrokerd.toml", "systemd/membrokerd.service"])
def test_the_first_lines_say_who_may_borrow_everything(path: str) -> None:
    """Someone installs both as they are, on a machine with other users."""
    first = (DEPLOY / path).read_text().splitlines()[:3]
    assert "EVERY LOCAL USER MAY BORROW THE WHOLE GPU" in " ".join(first)
    assert "default_limit" in " ".join(first)
    assert load(TOML, {}, env={}, uid=0).uid_tenants, "it is still so"


# --- systemd ---


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze", "Debian: apt-get install systemd")
    for path in (DEPLOY / "systemd").iterdir():
        # It looks whether the commands exist: ours is here, not where the unit expects an installation.
        text = path.read_text().replace("/opt/membroker/bin/membrokerd", f"{sys.executable} -m membrokerd.cli")
        text = text.replace("/opt/membroker/bin/membroker ", f"{sys.executable} -m membroker.cli.main ")
        (tmp_path / path.name.replace("@.", "@0.")).write_text(text)
    units = sorted(tmp_path.iterdir())
    names = {"membrokerd.service", "membrokerd@0.service", "membrokerd-gpus.service", "membrokerd.target"}
    assert {unit.name for unit in units} == {*names, "membroker-guest@0.service"}
    # It has words about other units of this machine too; a mistake in ours has our path before it. Three keys are of
    # systemd 254, and an older one says that it leaves them out.
    said = [line for line in check(analyze, "verify", "--man=no", *units).splitlines() if str(tmp_path) in line]
    newer = re.compile("'(FileDescriptorStorePreserve|RestartSteps|RestartMaxDelaySec)'")
    assert [line for line in said if not newer.search(line)] == []


def test_the_unit_of_one_gpu_of_several_is_the_other_one_with_its_number() -> None:
    """A setting that one of them gets, the other one gets, too."""
    one, each = (
        (DEPLOY / "systemd" / name).read_text().partition("[Unit]\n")[2].splitlines()
        for name in ("membrokerd.service", "membrokerd@.service")
    )
    each = [line.replace(" --device %i", "") for line in each]
    differ = {line.partition("=")[0] for line in {*one} ^ {*each}}
    assert differ == {"Description", "PartOf", "# Only one daemon may run on a GPU.", "Conflicts", "WantedBy"}


def test_the_unit_has_what_a_broker_needs_and_not_what_breaks_one() -> None:
    text = (DEPLOY / "systemd" / "membrokerd.service").read_text()
    settings = dict(re.findall(r"^([A-Za-z]+)=(.*)$", text, re.MULTILINE))
    assert settings["Type"] == "notify"
    assert settings["ExecReload"] == f"{settings['ExecStart']} --reload", "which fails if the file is refused"
    assert int(settings["RestartSteps"]) > 0
    assert settings["Restart"] == "on-failure", "a drained daemon that exits is to stay away"
    assert settings["StartLimitIntervalSec"] == "0"
    assert int(settings["LimitNOFILE"]) >= descriptors_for(DEFAULT_MAX_SESSIONS)
    assert settings["RuntimeDirectory"] == "membroker"
    assert settings["ExecStartPre"].startswith("+-")
    breaking = {"PrivateUsers", "PrivateDevices", "PrivateNetwork", "ProtectProc", "ProtectClock", "DevicePolicy"}
    assert breaking.isdisjoint(settings)


# --- Kubernetes; test_chart.py has the rest ---


def test_kustomize_builds_what_the_documents_say() -> None:
    kubectl = tool("kubectl", "the Kubernetes client")
    built = check(kubectl, "kustomize", DEPLOY / "kubernetes")
    kinds = sorted(re.findall(r"^kind: (\w+)$", built, re.MULTILINE))
    assert kinds == ["ConfigMap", "DaemonSet", "DaemonSet", "Namespace", "ServiceAccount"]
    assert set(re.findall(r"^  namespace: (\S+)$", built, re.MULTILINE)) == {"membroker"}


# --- Docker ---


def test_the_image_copies_what_the_wheel_is_made_of() -> None:
    """The paths exist, the ignore file lets them through, and nothing is installed editable."""
    text = (DEPLOY / "Dockerfile").read_text()
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [path for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE) for path in line.split()]
    assert copied
    for path in copied:
        assert (DEPLOY.parent / path).exists(), path
        assert f"!{path}" in ignore
    assert "[broker,cuda]" in text
    assert not re.search(r"pip install.*(-e|--editable)\b", text)
    assert not re.search(r"https?://", text), "no registry is named: pip's own configuration decides"


# --- Prometheus ---


def test_alerts_speak_of_metrics_and_labels_that_exist() -> None:
    text = (DEPLOY / "prometheus" / "alerts.yml").read_text()
    used = set(re.findall(r"\bmembroker_[a-z_]+", text))
    assert used
    assert {_metric(name) for name in used} <= set(catalog.ALL)
    for name, label in re.findall(r"(membroker_\w+)\{(\w+)=", text):
        assert label in catalog.ALL[_metric(name)].labels


def _metric(series: str) -> str:
    """Return the metric of a series: a histogram's end with _count, _sum and _bucket."""
    base = series.removesuffix("_count").removesuffix("_sum").removesuffix("_bucket")
    return base if base in catalog.ALL and catalog.ALL[base].kind == "histogram" else series


def test_prometheus_accepts_the_configuration_and_the_rules() -> None:
    promtool = tool("promtool", "Debian: apt-get install prometheus")
    assert "SUCCESS" in check(promtool, "check", "rules", DEPLOY / "prometheus" / "alerts.yml")
    assert "SUCCESS" in check(promtool, "check", "config", DEPLOY / "prometheus" / "scrape.yml")
