"""When each alert fires and when it is silent, as promtool's unit tests: a table of series over time.

`test_alerts` makes the states real; here are the hours and gaps that no test can wait for.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.test_deploy import check, tool

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
SEVERITIES = dict(re.findall(r"- alert: (\w+)\n(?:(?!- alert:).*\n)*? +severity: (\w+)", RULES.read_text()))


@dataclass(frozen=True)
class Case:
    """Series over the minutes, and when the alert fires: each time with the labels of what it is about.

    The labels of the target (job, instance, gpu_uuid) are added to both; an empty one takes a label away.
    """

    alert: str
    story: str
    series: dict[str, str]
    fires: dict[str, list[dict[str, str]]] = field(default_factory=dict)
    silent: tuple[str, ...] = ()


MODEL = {"tenant": "a", "model": "m", "location": "device"}
TARGET = {"job": "membroker", "instance": "i", "gpu_uuid": "g"}


def _denials(reason: str, values: str) -> dict[str, str]:
    return {
        f'membroker_tenant_denials_total{{tenant="a",reason="{reason}"}}': values,
        f'membroker_device_denials_total{{reason="{reason}"}}': values,
    }


AT_DEVICE = {"location": "device"}
OF_TENANT = {"tenant": "a"}
NO_GPU = {"gpu_uuid": ""}
CASES = [
    Case(
        "MembrokerDown",
        "a scrape fails",
        {"up": "1x10 0x10", "membroker_build_info": "1x10 stale"},
        {"12m": [NO_GPU]},
        ("5m", "11m"),
    ),
    Case("MembrokerDown", "a target that was never a broker", {'up{job="other"}': "0x20"}, silent=("10m",)),
    Case(
        "MembrokerDown",
        "one daemon of a parent's",
        {"up": "1x20", "membroker_daemon_up": "1x10 0x10"},
        {"12m": [{}]},
        ("10m",),
    ),
    Case(
        "MembrokerTargetGone",
        "the node has left the cluster",
        {"up": "1x10 stale", "membroker_build_info": "1x10 stale"},
        {"22m": [{}], "3h": [{}]},
        ("10m", "18m", "3h12m"),
    ),
    Case(
        "MembrokerTargetGone",
        "the pod was replaced and has another address",
        {
            "up": "1x10 stale",
            'membroker_build_info{version="1"}': "1x10 stale",
            'up{instance="j"}': "_x10 1x60",
            'membroker_build_info{instance="j",version="2"}': "_x10 1x60",
        },
        silent=("30m", "60m"),
    ),
    Case(
        "MembrokerTargetGone",
        "it is down, which is another alert's",
        {"up": "1x10 0x60", "membroker_build_info": "1x10 stale"},
        silent=("30m", "60m"),
    ),
    Case(
        "MembrokerUnaccounted",
        "others fill the headroom; the gate's reserve is part of it",
        {
            'membroker_device_headroom_bytes{location="device"}': "2048x30",
            'membroker_device_gate_reserve_bytes{location="device"}': "256x30",
            'membroker_device_unaccounted_bytes{location="device"}': "1792x10 1793x20",
        },
        {"14m": [AT_DEVICE]},
        ("10m", "12m"),
    ),
    Case(
        "MembrokerDeviceFull",
        "the first refusal counts, and ten minutes later no more",
        _denials("DEVICE_FULL", "0x5 1x30"),
        {"6m": [{"reason": "DEVICE_FULL"}]},
        ("5m", "20m"),
    ),
    Case(
        "MembrokerDeviceFull",
        "Prometheus was down for an hour: refusals before that are no news",
        _denials("DEVICE_FULL", "3x10 _x60 3x60"),
        silent=("71m", "75m", "90m"),
    ),
    Case(
        "MembrokerDeviceFull",
        "the daemon was restarted and counts from 0",
        _denials("DEVICE_FULL", "3x10 0x30"),
        silent=("11m", "15m"),
    ),
    Case("MembrokerDeviceFull", "another refusal", _denials("MODEL_LIMIT", "0+1x30"), silent=("10m",)),
    Case(
        "MembrokerGuaranteeShortfall",
        "",
        {'membroker_device_guarantee_shortfall_bytes{location="device"}': "0x5 7x10 0x5"},
        {"9m": [AT_DEVICE]},
        ("5m", "7m", "17m"),
    ),
    Case(
        "MembrokerLateRecall",
        "",
        {'membroker_model_late_bytes{tenant="a",model="m",location="device"}': "0x5 7x10 0x5"},
        {"9m": [MODEL]},
        ("5m", "7m", "17m"),
    ),
    Case(
        "MembrokerGuaranteedRequestRefused",
        "",
        {
            'membroker_wait_seconds_count{result="refused",guaranteed="true"}': "0x5 1x30",
            'membroker_wait_seconds_count{result="refused",guaranteed="false"}': "0+1x30",
        },
        {"6m": [{"result": "refused", "guaranteed": "true"}]},
        ("5m", "20m"),
    ),
    Case("MembrokerJournalFull", "", {"membroker_journal_full": "0x5 1x5 0x5"}, {"8m": [{}]}, ("5m", "6m", "13m")),
    Case("MembrokerDeviceLost", "", {"membroker_device_lost": "0x5 1x5 0x5"}, {"8m": [{}]}, ("5m", "6m", "13m")),
    Case(
        "MembrokerSessionsDetached",
        "",
        {'membroker_sessions{state="detached"}': "1x20 0x5"},
        {"10m": [{"state": "detached"}]},
        ("9m", "22m"),
    ),
    Case(
        "MembrokerMemoryNotReturned",
        "",
        {'membroker_device_unproven_releases_total{location="device"}': "0x5 1x30"},
        {"6m": [AT_DEVICE]},
        ("5m", "25m"),
    ),
    Case(
        "MembrokerTenantAtLimit",
        "an hour of refusals, which end",
        _denials("TENANT_LIMIT", "0x5 1+1x60 61x20"),
        {"17m": [OF_TENANT], "60m": [OF_TENANT]},
        ("5m", "10m", "75m"),
    ),
    Case("MembrokerTenantAtLimit", "a single one", _denials("TENANT_LIMIT", "0x5 1x60"), silent=("7m", "20m")),
    Case(
        "MembrokerTenantNearLimit",
        "a tenant that keeps all it has",
        {
            'membroker_tenant_used_bytes{tenant="a",location="device"}': "94x5 96x20",
            'membroker_tenant_limit_bytes{tenant="a",location="device"}': "100x30",
            'membroker_model_recallable_bytes{tenant="a",model="m",location="device"}': "0x30",
        },
        {"17m": [{**OF_TENANT, **AT_DEVICE}]},
        ("5m", "14m"),
    ),
    Case(
        "MembrokerTenantNearLimit",
        "two elastic engines fill the limit, and release when asked",
        {
            'membroker_tenant_used_bytes{tenant="a",location="device"}': "100x60",
            'membroker_tenant_limit_bytes{tenant="a",location="device"}': "100x60",
            'membroker_model_recallable_bytes{tenant="a",model="m",location="device"}': "40x60",
            'membroker_model_recallable_bytes{tenant="a",model="n",location="device"}': "20x60",
        },
        silent=("30m", "60m"),
    ),
    Case(
        "MembrokerModelAtLimit",
        "an hour of refusals, which end",
        _denials("MODEL_LIMIT", "0x5 1+1x60 61x20"),
        {"17m": [OF_TENANT], "60m": [OF_TENANT]},
        ("5m", "10m", "75m"),
    ),
    Case(
        "MembrokerCapacityRefused",
        "an hour of refusals, which end",
        _denials("CAPACITY", "0x5 1+1x60 61x20"),
        {"22m": [OF_TENANT], "60m": [OF_TENANT]},
        ("5m", "18m", "75m"),
    ),
    Case("MembrokerCapacityRefused", "a burst of a minute", _denials("CAPACITY", "0x5 99x60"), silent=("8m", "30m")),
    Case(
        "MembrokerDriverFailed",
        "one failure",
        _denials("DRIVER_FAILED", "0x5 1x30"),
        {"6m": [{"reason": "DRIVER_FAILED"}]},
        ("5m", "20m"),
    ),
    Case(
        "MembrokerLongWaits",
        "one model after the other waits",
        {
            'membroker_model_waiting_requests{tenant="a",model="m",location="device"}': "0x5 1x10 0x30",
            'membroker_model_waiting_requests{tenant="a",model="n",location="device"}': "0x15 1x10 0x20",
        },
        {"22m": [{**OF_TENANT, **AT_DEVICE}]},
        ("5m", "19m", "30m"),
    ),
    Case(
        "MembrokerPeersUnknown",
        "a pod that starts again and again",
        {'membroker_connections_refused_total{reason="PEER_UNKNOWN"}': "0x5 1+1x60 61x20"},
        {"17m": [{"reason": "PEER_UNKNOWN"}], "60m": [{"reason": "PEER_UNKNOWN"}]},
        ("5m", "10m", "75m"),
    ),
    Case(
        "MembrokerPeersUnknown",
        "a worker that died as it connected",
        {'membroker_connections_refused_total{reason="PEER_UNKNOWN"}': "0x5 1x60"},
        silent=("7m", "30m"),
    ),
    Case(
        "MembrokerSlowTurns",
        "two a minute for an hour",
        {"membroker_loop_slow_turns_total": "0x5 2+2x60 122x30"},
        {"35m": [{}], "60m": [{}]},
        ("5m", "20m", "80m"),
    ),
    Case("MembrokerSlowTurns", "a bad minute", {"membroker_loop_slow_turns_total": "0x5 30x60"}, silent=("7m", "30m")),
    Case(
        "MembrokerSessionsNearLimit",
        "",
        {
            'membroker_sessions{state="open"}': "80x5 85x10 80x5",
            'membroker_sessions{state="detached"}': "5x20",
            "membroker_observers": "1x20",
            "membroker_sessions_limit": "100x20",
        },
        {"12m": [{}]},
        ("5m", "9m", "17m"),
    ),
    Case(
        "MembrokerDescriptorsNearLimit",
        "",
        {
            "process_open_fds": "90x5 91x10 90x5",
            "process_max_fds": "100x20",
            'membroker_build_info{version="1"}': "1x20",
        },
        {"12m": [NO_GPU]},
        ("5m", "9m", "17m"),
    ),
    Case(
        "MembrokerDescriptorsNearLimit",
        "another program's",
        {"process_open_fds": "99x20", "process_max_fds": "100x20"},
        silent=("15m",),
    ),
    Case(
        "MembrokerLogLinesDropped", "", {"membroker_log_lines_dropped_total": "0x5 9x30"}, {"6m": [{}]}, ("5m", "20m")
    ),
    Case("MembrokerDriverFallback", "", {"membroker_driver_fallback": "1x20 0x5"}, {"5m": [{}]}, ("4m", "22m")),
    Case("MembrokerDrained", "", {"membroker_device_draining": "1x20 0x5"}, {"10m": [{}]}, ("9m", "22m")),
    Case(
        "MembrokerReloadRefused",
        "",
        {"membroker_config_last_reload_successful": "1x5 0x20 1x5"},
        {"11m": [{}]},
        ("5m", "9m", "27m"),
    ),
    Case(
        "MembrokerRestarts",
        "",
        {"process_start_time_seconds": "1x5 2 3 4 4x30", 'membroker_build_info{version="1"}': "1x40"},
        {"9m": [NO_GPU]},
        ("5m", "7m", "30m"),
    ),
    Case("MembrokerRestarts", "another program's", {"process_start_time_seconds": "0+1x30"}, silent=("20m",)),
]


def _series(name: str, values: str) -> dict[str, str]:
    base, _, labels = name.partition("{")
    given = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    target = {key: value for key, value in TARGET.items() if key != "gpu_uuid" or base.startswith("membroker_")}
    named = ",".join(f"{key}={json.dumps(value)}" for key, value in {**target, **given}.items())
    return {"series": f"{base}{{{named}}}", "values": values}


def _expected(case: Case, labels: dict[str, str]) -> dict[str, Any]:
    given = {"severity": SEVERITIES[case.alert], **TARGET, **labels}
    return {"exp_labels": {key: value for key, value in given.items() if value}, "exp_annotations": {}}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.alert}-{case.story}".strip("-").replace(" ", "-"))
def test_an_alert_fires_when_it_should_and_not_otherwise(case: Case, tmp_path: Path) -> None:
    promtool = tool("promtool", "Debian: apt-get install prometheus")
    rules = tmp_path / "alerts.yml"
    # promtool compares annotations word by word; what is tested here is when an alert fires.
    rules.write_text(re.sub(r"^ +annotations:\n(?: {10}.*\n)+", "", RULES.read_text(), flags=re.MULTILINE))
    looks = [
        *({"eval_time": at, "exp_alerts": [_expected(case, one) for one in those]} for at, those in case.fires.items()),
        *({"eval_time": at, "exp_alerts": []} for at in case.silent),
    ]
    document = {
        "rule_files": [str(rules)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [_series(name, values) for name, values in case.series.items()],
                "alert_rule_test": [{**look, "alertname": case.alert} for look in looks],
            }
        ],
    }
    test = tmp_path / "test.yml"
    test.write_text(json.dumps(document))  # JSON is YAML
    check(promtool, "test", "rules", test)


def test_each_alert_is_seen_to_fire_and_to_be_silent() -> None:
    assert {case.alert for case in CASES if case.fires} == set(SEVERITIES)
    assert {case.alert for case in CASES if case.silent} == set(SEVERITIES)
