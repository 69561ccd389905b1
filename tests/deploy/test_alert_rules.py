"""When each alert fires and when it is silent, as promtool's unit tests: a table of series over time.

`test_alerts` makes the states real; here are the hours and gaps that no test can wait for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.test_deploy import check, tool

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
SEVERITIES = dict(re.findall(r"- alert: (\w+)\n(?:(?!- alert:).*\n)*? +severity: (\w+)", RULES.read_text()))
TARGET = {"job": "membroker", "instance": "i", "gpu_uuid": "g"}
"""The labels of the target are added to each series and to each alert; an empty one takes a label away."""
CASES = """
MembrokerDown: a scrape fails
  up = 1x10 0x10
  membroker_build_info = 1x10 stale
  fires 12m gpu_uuid=
  silent 5m 11m
MembrokerDown: a target that was never a broker
  up{job="other"} = 0x20
  silent 10m
MembrokerDown: one daemon of a parent's
  up = 1x20
  membroker_daemon_up = 1x10 0x10
  fires 12m
  silent 10m
MembrokerTargetGone: the node has left the cluster
  up = 1x10 stale
  membroker_build_info = 1x10 stale
  fires 22m 3h
  silent 10m 18m 3h12m
MembrokerTargetGone: the pod was replaced and has another address
  up = 1x10 stale
  membroker_build_info{version="1"} = 1x10 stale
  up{instance="j"} = _x10 1x60
  membroker_build_info{instance="j",version="2"} = _x10 1x60
  silent 30m 60m
MembrokerTargetGone: it is down, which is another alert's
  up = 1x10 0x60
  membroker_build_info = 1x10 stale
  silent 30m 60m
MembrokerUnaccounted: others fill the headroom; the gate's reserve is part of it
  membroker_device_headroom_bytes{location="device"} = 2048x30
  membroker_device_gate_reserve_bytes{location="device"} = 256x30
  membroker_device_unaccounted_bytes{location="device"} = 1792x10 1793x20
  fires 14m location=device
  silent 10m 12m
MembrokerDeviceFull: the first refusal counts, and ten minutes later no more
  denials DEVICE_FULL = 0x5 1x30
  fires 6m reason=DEVICE_FULL
  silent 5m 20m
MembrokerDeviceFull: Prometheus was down for an hour: refusals before that are no news
  denials DEVICE_FULL = 3x10 _x60 3x60
  silent 71m 75m 90m
MembrokerDeviceFull: the daemon was restarted and counts from 0
  denials DEVICE_FULL = 3x10 0x30
  silent 11m 15m
MembrokerDeviceFull: another refusal
  denials MODEL_LIMIT = 0+1x30
  silent 10m
MembrokerGuaranteeShortfall:
  membroker_device_guarantee_shortfall_bytes{location="device"} = 0x5 7x10 0x5
  fires 9m location=device
  silent 5m 7m 17m
MembrokerLateRecall:
  membroker_model_late_bytes{tenant="a",model="m",location="device"} = 0x5 7x10 0x5
  fires 9m tenant=a model=m location=device
  silent 5m 7m 17m
MembrokerGuaranteedRequestRefused:
  membroker_wait_seconds_count{result="refused",guaranteed="true"} = 0x5 1x30
  membroker_wait_seconds_count{result="refused",guaranteed="false"} = 0+1x30
  fires 6m result=refused guaranteed=true
  silent 5m 20m
MembrokerJournalFull:
  membroker_journal_full = 0x5 1x5 0x5
  fires 8m
  silent 5m 6m 13m
MembrokerDeviceLost:
  membroker_device_lost = 0x5 1x5 0x5
  fires 8m
  silent 5m 6m 13m
MembrokerSessionsDetached:
  membroker_sessions{state="detached"} = 1x20 0x5
  fires 10m state=detached
  silent 9m 22m
MembrokerMemoryNotReturned:
  membroker_device_unproven_releases_total{location="device"} = 0x5 1x30
  fires 6m location=device
  silent 5m 25m
MembrokerTenantAtLimit: an hour of refusals, which end
  denials TENANT_LIMIT = 0x5 1+1x60 61x20
  fires 17m 60m tenant=a
  silent 5m 10m 75m
MembrokerTenantAtLimit: a single one
  denials TENANT_LIMIT = 0x5 1x60
  silent 7m 20m
MembrokerTenantNearLimit: a tenant that keeps all it has
  membroker_tenant_used_bytes{tenant="a",location="device"} = 94x5 96x20
  membroker_tenant_limit_bytes{tenant="a",location="device"} = 100x30
  membroker_model_recallable_bytes{tenant="a",model="m",location="device"} = 0x30
  fires 17m tenant=a location=device
  silent 5m 14m
MembrokerTenantNearLimit: two elastic engines fill the limit, and release when asked
  membroker_tenant_used_bytes{tenant="a",location="device"} = 100x60
  membroker_tenant_limit_bytes{tenant="a",location="device"} = 100x60
  membroker_model_recallable_bytes{tenant="a",model="m",location="device"} = 40x60
  membroker_model_recallable_bytes{tenant="a",model="n",location="device"} = 20x60
  silent 30m 60m
MembrokerModelAtLimit: an hour of refusals, which end
  denials MODEL_LIMIT = 0x5 1+1x60 61x20
  fires 17m 60m tenant=a
  silent 5m 10m 75m
MembrokerCapacityRefused: an hour of refusals, which end
  denials CAPACITY = 0x5 1+1x60 61x20
  fires 22m 60m tenant=a
  silent 5m 18m 75m
MembrokerCapacityRefused: a burst of a minute
  denials CAPACITY = 0x5 99x60
  silent 8m 30m
MembrokerDriverFailed: one failure
  denials DRIVER_FAILED = 0x5 1x30
  fires 6m reason=DRIVER_FAILED
  silent 5m 20m
MembrokerLongWaits: one model after the other waits
  membroker_model_waiting_requests{tenant="a",model="m",location="device"} = 0x5 1x10 0x30
  membroker_model_waiting_requests{tenant="a",model="n",location="device"} = 0x15 1x10 0x20
  fires 22m tenant=a location=device
  silent 5m 19m 30m
MembrokerPeersUnknown: a pod that starts again and again
  membroker_connections_refused_total{reason="PEER_UNKNOWN"} = 0x5 1+1x60 61x20
  fires 17m 60m reason=PEER_UNKNOWN
  silent 5m 10m 75m
MembrokerPeersUnknown: a worker that died as it connected
  membroker_connections_refused_total{reason="PEER_UNKNOWN"} = 0x5 1x60
  silent 7m 30m
MembrokerSlowTurns: two a minute for an hour
  membroker_loop_slow_turns_total = 0x5 2+2x60 122x30
  fires 35m 60m
  silent 5m 20m 80m
MembrokerSlowTurns: a bad minute
  membroker_loop_slow_turns_total = 0x5 30x60
  silent 7m 30m
MembrokerSessionsNearLimit:
  membroker_sessions{state="open"} = 80x5 85x10 80x5
  membroker_sessions{state="detached"} = 5x20
  membroker_observers = 1x20
  membroker_sessions_limit = 100x20
  fires 12m
  silent 5m 9m 17m
MembrokerDescriptorsNearLimit:
  process_open_fds = 90x5 91x10 90x5
  process_max_fds = 100x20
  membroker_build_info{version="1"} = 1x20
  fires 12m gpu_uuid=
  silent 5m 9m 17m
MembrokerLogLinesDropped:
  membroker_log_lines_dropped_total = 0x5 9x30
  fires 6m
  silent 5m 20m
MembrokerDriverFallback:
  membroker_driver_fallback = 1x20 0x5
  fires 5m
  silent 4m 22m
MembrokerDrained:
  membroker_device_draining = 1x20 0x5
  fires 10m
  silent 9m 22m
MembrokerReloadRefused:
  membroker_config_last_reload_successful = 1x5 0x20 1x5
  fires 11m
  silent 5m 9m 27m
MembrokerRestarts:
  process_start_time_seconds = 1x5 2 3 4 4x30
  membroker_build_info{version="1"} = 1x40
  fires 9m gpu_uuid=
  silent 5m 7m 30m
"""
"""Of each alert and story: series over the minutes, when it fires and with which labels, and when it is silent.

`denials` are the tenant's and the device's.
"""


@dataclass
class Case:
    """One story of an alert."""

    alert: str
    series: dict[str, str] = field(default_factory=dict)
    fires: dict[str, dict[str, str]] = field(default_factory=dict)
    silent: list[str] = field(default_factory=list)


def cases() -> Iterator[Case]:
    """Read the table."""
    for block in re.split(r"\n(?=\S)", CASES.strip()):
        alert, *lines = block.splitlines()
        case = Case(alert.partition(":")[0])
        for line in lines:
            name, _, values = line.strip().partition(" = ")
            kind, *words = name.split()
            if kind == "fires":
                labels = dict(word.split("=") for word in words if "=" in word)
                case.fires |= {word: labels for word in words if "=" not in word}
            elif kind == "silent":
                case.silent += words
            elif kind == "denials":
                case.series[f'membroker_tenant_denials_total{{tenant="a",reason="{words[0]}"}}'] = values
                case.series[f'membroker_device_denials_total{{reason="{words[0]}"}}'] = values
            else:
                case.series[name] = values
        yield case


def _series(name: str, values: str) -> dict[str, str]:
    base, _, labels = name.partition("{")
    given = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    target = {key: value for key, value in TARGET.items() if key != "gpu_uuid" or base.startswith("membroker_")}
    named = ",".join(f"{key}={json.dumps(value)}" for key, value in {**target, **given}.items())
    return {"series": f"{base}{{{named}}}", "values": values}


def _expected(case: Case, labels: dict[str, str]) -> dict[str, Any]:
    given = {"severity": SEVERITIES[case.alert], **TARGET, **labels}
    return {"exp_labels": {key: value for key, value in given.items() if value}, "exp_annotations": {}}


def test_an_alert_fires_when_it_should_and_not_otherwise(tmp_path: Path) -> None:
    promtool = tool("promtool", "Debian: apt-get install prometheus")
    rules = tmp_path / "alerts.yml"
    # promtool compares annotations word by word; what is tested here is when an alert fires.
    rules.write_text(re.sub(r"^ +annotations:\n(?: {10}.*\n)+", "", RULES.read_text(), flags=re.MULTILINE))
    groups = []
    for case in cases():
        looks = [{"eval_time": at, "exp_alerts": [_expected(case, labels)]} for at, labels in case.fires.items()]
        looks += [{"eval_time": at, "exp_alerts": []} for at in case.silent]
        groups.append(
            {
                "interval": "1m",
                "input_series": [_series(name, values) for name, values in case.series.items()],
                "alert_rule_test": [{**look, "alertname": case.alert} for look in looks],
            }
        )
    document = {"rule_files": [str(rules)], "evaluation_interval": "1m", "tests": groups}
    test = tmp_path / "test.yml"
    test.write_text(json.dumps(document))  # JSON is YAML
    check(promtool, "test", "rules", test)


def test_each_alert_is_seen_to_fire_and_to_be_silent() -> None:
    """And begins with its machine and GPU: a pod's address says nothing at night, so it is the node where one is."""
    place = r"\{\{ or \$labels\.node \$labels\.instance \}\}(, \{\{ \$labels\.gpu_uuid|\{\{ with \$labels\.gpu_uuid)"
    assert len(re.findall(rf"summary: >-\n +{place}", RULES.read_text())) == len(SEVERITIES)
    assert {case.alert for case in cases() if case.fires} == set(SEVERITIES)
    assert {case.alert for case in cases() if case.silent} == set(SEVERITIES)
