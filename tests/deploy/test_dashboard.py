"""The dashboard, the rules and the runbooks: each query gives data in a real Prometheus, with a real daemon."""

from __future__ import annotations

import json
import re
import threading
import time
import tomllib
import urllib.parse
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.test_alerts import RULES, Prometheus, prometheus
from tests.deploy.test_deploy import check, tool
from tests.support.daemons import DEADLINE_SECONDS, running
from tests.support.sizes import MIB

import membroker
from membrokerd.observe import catalog

DEPLOY = Path(__file__).parents[2] / "deploy"
BOARD = json.loads((DEPLOY / "grafana" / "membroker.json").read_text())
FLEET = json.loads((DEPLOY / "grafana" / "membroker-fleet.json").read_text())
RUNBOOKS = (DEPLOY.parent / "docs" / "alerts.md").read_text()


def queries() -> list[tuple[str, str]]:
    """Return each panel's queries as they are asked of Prometheus: with all GPUs, and a short interval."""
    panels = [*BOARD["panels"], *FLEET["panels"]]
    found = [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
    return [(title, expr.replace("$gpu_uuid", ".*").replace("$__rate_interval", "10s")) for title, expr in found]


def test_the_dashboard_refers_to_what_exists() -> None:
    text = " ".join(expr for _, expr in queries())
    named = {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"\bmembroker_\w+", text)}
    assert named <= set(catalog.ALL)
    for board, variables in ((BOARD, {"datasource", "gpu_uuid"}), (FLEET, {"datasource"})):
        assert {variable["name"] for variable in board["templating"]["list"]} == variables
        assert set(re.findall(r"\$\{?(?!__)(\w+)", json.dumps(board))) == variables
    assert f"/d/{BOARD['uid']}?var-gpu_uuid=" in json.dumps(FLEET), "a row leads to the GPU's board"


def test_each_alert_has_a_runbook() -> None:
    """A person who is paged finds a section for the alert, and every section is about an alert that exists.

    Its first words are the severity of the rule, and for how long the condition holds before it fires.
    """
    base = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["urls"]["Documentation"]
    rules = {rule.split()[0]: rule for rule in re.split(r"- alert: ", RULES.read_text())[1:]}
    assert set(re.findall(r"^## (Membroker\w+)$", RUNBOOKS, re.MULTILINE)) == set(rules)
    for name, rule in rules.items():
        assert f"runbook_url: {base}/alerts.html#{name.lower()}\n" in rule
        severity, lasts = re.search(r"severity: (\w+)", rule), re.search(r"\bfor: (\d+)m", rule)
        assert severity is not None
        after = f"after {lasts[1]} minute" if lasts else "at once"
        assert f"\n## {name}\n\n**{severity[1]}**, {after}" in RUNBOOKS


CONFIG = {
    "capacity": "256MiB",
    "host_capacity": "64MiB",
    "tenants": {"red": {"limit": "192MiB", "guarantee": "32MiB"}, "blue": {}},
}


def ask(watch: Prometheus, expr: str) -> Any:
    """Return the result of a query; None while there is no answer."""
    found = watch.ask(f"query?query={urllib.parse.quote(expr)}")
    return found["result"] if found else None


@pytest.mark.deep
def test_each_query_of_the_dashboard_has_data(tmp_path: Path) -> None:
    """Two tenants at work: one is refused, one waits, one was recalled, and a segment is shared. No panel is empty."""
    with running(CONFIG) as daemon, prometheus(tmp_path, daemon.device().metrics_url) as watch, ExitStack() as stack:
        red, blue, reader = (
            stack.enter_context(membroker.connect(daemon.endpoint(name))) for name in ("red", "blue", "red")
        )
        model, other = red.model("chat"), blue.model("night")
        with model.create_segment("weights", "8MiB") as segment:
            segment.seal()
        for client in (red, reader):
            stack.enter_context(client.attach("chat/weights"))
        stack.enter_context(model.allocate("64MiB"))
        stack.enter_context(other.allocate("64MiB"))
        over = threading.Event()
        waiter = threading.Thread(target=_work, args=(other, model, over))
        waiter.start()
        try:
            end, empty = time.monotonic() + DEADLINE_SECONDS, queries()
            while empty and time.monotonic() < end:
                empty = [one for one in empty if not _has_data(ask(watch, one[1]))]
                over.wait(0.2)
            assert empty == []
            saved = ask(watch, "membroker_segment_saved_bytes")
            assert [float(one["value"][1]) for one in saved] == [8 * MIB], "two sessions, one copy"
        finally:
            over.set()
            waiter.join()
        red.delete_segment("chat/weights")


def _has_data(result: Any) -> bool:
    """Say whether a query gave series, none of them without a value."""
    return bool(result) and any(one["value"][1] != "NaN" for one in result)


def _work(night: membroker.Model, chat: membroker.Model, over: threading.Event) -> None:
    """Be refused, and wait, again and again."""
    while not over.wait(0.1):
        with suppress(membroker.OutOfMemory):
            chat.allocate("200MiB")
        with suppress(membroker.OutOfMemory):
            night.allocate("200MiB", timeout=0.5)


DCGM = """
# Kubernetes: two containers have the GPU, so dcgm-exporter has two series for it.
DCGM_FI_DEV_FB_USED{UUID="GPU-1",gpu="0",modelName="H200",Hostname="n1",pod="a"} 1024x10
DCGM_FI_DEV_FB_USED{UUID="GPU-1",gpu="0",modelName="H200",Hostname="n1",pod="b"} 1024x10
DCGM_FI_DEV_GPU_UTIL{UUID="GPU-1",gpu="0",Hostname="n1",pod="a"} 50x10
membroker_model_used_bytes{gpu_uuid="GPU-1",tenant="a",model="m",location="device"} 7x10
membroker_tenant_used_bytes{gpu_uuid="GPU-1",tenant="a",location="device"} 7x10
membroker_tenant_limit_bytes{gpu_uuid="GPU-1",tenant="a",location="device"} 14x10
membroker_tenant_denials_total{gpu_uuid="GPU-1",tenant="a",reason="CAPACITY"} 0+60x10
membroker_model_denials_total{gpu_uuid="GPU-1",tenant="a",model="m",reason="CAPACITY"} 0+60x10
membroker_request_seconds_bucket{gpu_uuid="GPU-1",method="A",le="1"} 0+60x10
membroker_request_seconds_bucket{gpu_uuid="GPU-1",method="A",le="+Inf"} 0+60x10
# Its exporter was replaced: the old pod's series are there for five minutes more.
DCGM_FI_DEV_FB_USED{UUID="GPU-2",gpu="0",modelName="H200",Hostname="old"} 1024x4
DCGM_FI_DEV_FB_USED{UUID="GPU-2",gpu="0",modelName="H200",Hostname="new"} _x4 1024x10
membroker_model_used_bytes{gpu_uuid="GPU-2",tenant="a",model="m",location="device"} 7x10
# Two MIG instances, one of which two containers have.
DCGM_FI_DEV_FB_USED{UUID="GPU-3",GPU_I_ID="1",gpu="1",modelName="H200",Hostname="n1",pod="a"} 512x10
DCGM_FI_DEV_FB_USED{UUID="GPU-3",GPU_I_ID="1",gpu="1",modelName="H200",Hostname="n1",pod="b"} 512x10
DCGM_FI_DEV_FB_USED{UUID="GPU-3",GPU_I_ID="2",gpu="1",modelName="H200",Hostname="n1"} 256x10
"""
ONE, TWO, THREE = (f'{{gpu_uuid="GPU-{number}"}}' for number in (1, 2, 3))
RULES_GIVE = {
    "sum by (gpu_uuid, Hostname, modelName) (membroker:model_used_bytes:by_gpu{gpu_uuid='GPU-1'})": {
        '{gpu_uuid="GPU-1",Hostname="n1",modelName="H200"}': 7
    },
    "sum by (gpu_uuid) (gpu_uuid:dcgm_memory_used_bytes)": {ONE: 1 << 30, TWO: 1 << 30, THREE: 768 << 20},
    "count by (gpu_uuid) (membroker:model_used_bytes:by_gpu)": {ONE: 1, TWO: 1},
    "sum by (gpu_uuid) (gpu_uuid:dcgm_info)": {ONE: 1, TWO: 1, THREE: 1},
    "sum by (gpu_uuid) (gpu_uuid:dcgm_utilization:ratio)": {ONE: 0.5},
    "sum by (gpu_uuid, tenant) (membroker:tenant_limit_used:ratio)": {'{gpu_uuid="GPU-1",tenant="a"}': 0.5},
    "sum by (tenant, reason) (membroker:tenant_denials:rate5m)": {'{tenant="a",reason="CAPACITY"}': 1},
    "sum by (model, reason) (membroker:denials:rate5m)": {'{model="m",reason="CAPACITY"}': 1},
    "sum by (method) (membroker:request_seconds:p99)": {'{method="A"}': 0.99},
}


def test_the_rules_join_with_dcgm_exporter(tmp_path: Path) -> None:
    promtool = tool("promtool", "Debian: apt-get install prometheus")
    rules = DEPLOY / "prometheus" / "rules.yml"
    series = [line.partition("} ") for line in DCGM.strip().splitlines() if not line.startswith("#")]
    expected = [
        {
            "expr": expr,
            "eval_time": "6m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples.items()],
        }
        for expr, samples in RULES_GIVE.items()
    ]
    given = [{"series": name + "}", "values": values} for name, _, values in series]
    document = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": given, "promql_expr_test": expected}],
    }
    test = tmp_path / "test.yml"
    test.write_text(json.dumps(document))  # JSON is YAML
    check(promtool, "test", "rules", test)
    names = set(re.findall(r"\bmembroker_\w+", rules.read_text()))
    assert {re.sub(r"_bucket$", "", name) for name in names} <= set(catalog.ALL)
