"""A scrape: one moment, the figures of the books, and no series of what has ended."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.sizes import MIB
from tests.support.views import FULL, UUID, Source, books, model, segment

from membrokerd.core import lifecycles
from membrokerd.core.denied import Reason
from membrokerd.core.snapshot import TenantLocationView, TenantView
from membrokerd.observe import catalog, metrics
from membrokerd.observe.metrics import Metrics, MetricsView

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(made: Metrics) -> Series:
    text = generate_latest(made.registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def values(series: Series, name: str, **labels: str) -> list[float]:
    return [value for (found, has), value in series.items() if found == name and labels.items() <= dict(has).items()]


def test_the_models_sum_is_the_devices_figure_and_one_scrape_takes_one_view() -> None:
    """The sum of the series is the device's figure, also while a dead worker's bytes are releasing."""
    source = Source(books(model("acme", "a", 40 * MIB), model("acme", "b", 24 * MIB), releasing=8 * MIB))
    series = scrape(Metrics(source.view, UUID))
    lent = values(series, "membroker_device_lent_bytes", location="device")
    releasing = values(series, "membroker_device_releasing_bytes", location="device")
    assert sum(values(series, "membroker_model_used_bytes", location="device")) == lent[0] + releasing[0] == 64 * MIB
    assert values(series, "membroker_device_free_bytes", location="device") == [192 * MIB]
    assert source.views == 1


def test_a_models_series_begin_at_zero_and_end_with_it() -> None:
    """A model that has borrowed nothing shows zeros; a model that has ended has no series, counters included."""
    source = Source(books(model("acme", "a", 0)))
    made = Metrics(source.view, UUID)
    before = scrape(made)
    assert values(before, "membroker_model_used_bytes", model="a", location="device") == [0]
    assert values(before, "membroker_model_extents", model="a", location="host") == [0]
    source.now = books()
    after = scrape(made)
    assert not [name for name, labels in after if ("model", "a") in labels]
    assert values(after, "membroker_device_lent_bytes", location="device") == [0]


def test_names_that_come_and_go_are_no_endless_series(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant registers other models before each scrape, and writes other segments: 2,000 names in a second.

    What is beyond the bound is summed without a name, so that the models' sum is still the tenant's; other tenants'
    models have their series; and after an hour other names do.
    """
    monkeypatch.setattr(metrics, "MOST_NAMES", 4)
    passed = [0.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: passed[0]))
    source = Source(FULL)
    made = Metrics(source.view, UUID)
    shown: set[str] = set()
    for turn in range(5):
        churned = [model("red", f"{turn}-{number}", 2 * MIB, MODEL_LIMIT=1) for number in range(3)]
        source.now = books(*churned, model("blue", "b", MIB), segments=(segment(9, "red", f"{turn}-0", "sealed"),))
        series = scrape(made)
        shown |= {dict(labels)["model"] for name, labels in series if "red" in dict(labels).get("tenant", "")}
        assert values(series, "membroker_model_used_bytes", model="b", location="device") == [MIB]
        assert sum(values(series, "membroker_model_used_bytes", tenant="red", location="device")) == 6 * MIB
        assert sum(values(series, "membroker_segment_attachments", tenant="red")) == 1
    assert shown == {"0-0", "0-1", "0-2", ""}, "and the segment of the first is the fourth name"
    passed[0] = metrics.NAME_SECONDS
    names = {dict(labels).get("model") for _, labels in scrape(made)}
    assert "4-0" in names


MODELS = books(model("acme", "a", 40 * MIB, limit=8 * MIB, segments=24 * MIB), model("acme", "b", MIB))
TENANTS = books(
    tenants=(
        TenantView("acme", (TenantLocationView("device", 4 * MIB, 16 * MIB, 2 * MIB, 1, 0),), 1, 1, {}),
        TenantView("umbra", (TenantLocationView("device", 0, None, 0, 1, 0),), 0, 0, {}),
    )
)
TWO_OF_A_NAME = books(
    model("acme", "a", 4 * MIB),
    segments=tuple(replace(segment(1, "acme", "a", at), sessions=of) for at, of in (("ending", 2), ("sealed", 3))),
)
A_AT, A_HOST, B_AT = {"model": "a", "location": "device"}, {"model": "a", "location": "host"}, {"model": "b"}


@pytest.mark.parametrize(
    ("shown", "name", "labels", "expected"),
    [
        # A limit that does not exist is neither 0 nor infinity: a dashboard divides by it.
        (MODELS, "model_limit_bytes", {"model": "a"}, [8 * MIB]),
        (MODELS, "model_limit_bytes", B_AT, []),
        (TENANTS, "tenant_limit_bytes", {"tenant": "acme", "location": "device"}, [16 * MIB]),
        (TENANTS, "tenant_limit_bytes", {"tenant": "umbra"}, []),
        # Signed in the core; a device that cannot report it has no series.
        (books(unaccounted=-5), "device_unaccounted_bytes", {"location": "device"}, [0]),
        (books(unaccounted=None), "device_unaccounted_bytes", {"location": "device"}, []),
        (books(), "device_memory_used_bytes", {"location": "device"}, [1 << 29]),
        (books(), "device_memory_total_bytes", {"location": "host"}, []),
        # The bytes of segments are part of the bytes used: the two must not be added.
        (MODELS, "model_segment_bytes", A_AT, [24 * MIB]),
        (MODELS, "model_segment_bytes", A_HOST, [0]),
        (MODELS, "model_used_bytes", A_AT, [40 * MIB]),
        # A deleted segment lives on while it is attached, and its successor has the same labels: one series.
        (TWO_OF_A_NAME, "segment_attachments", {"segment": "s1"}, [5]),
        # What nobody waits for, declares or recalls is 0, so that a graph has no gaps.
        *(
            (MODELS, f"model_{name}", labels, [value])
            for name, at_device in (("waiting_bytes", 6 * MIB), ("recallable_bytes", 3 * MIB), ("declared_bytes", 5))
            for labels, value in ((A_AT, at_device), (A_HOST, 0))
        ),
    ],
)
def test_a_figure_is_shown_or_is_no_series(
    shown: MetricsView, name: str, labels: dict[str, str], expected: list[float]
) -> None:
    assert values(scrape(Metrics(Source(shown).view, UUID)), f"membroker_{name}", **labels) == expected


def test_sessions_and_segments_are_counted_by_state() -> None:
    """Observers are no sessions. A model with segments shows every state, so that a short one is in a graph."""
    rows = [segment(number, "acme", "a", at) for number, at in enumerate(("sealed", "sealed", "releasing"), 1)]
    rows.append(segment(4, "umbra", "c", "writing"))
    models = model("acme", "a", 6 * MIB), model("acme", "b", 0), model("umbra", "c", MIB)
    source = Source(books(*models, segments=tuple(rows)))
    made = Metrics(source.view, UUID)
    series = scrape(made)
    counts = {state: values(series, "membroker_sessions", state=state) for state in lifecycles.SESSION}
    assert counts == {"open": [1], "leaving": [0], "detached": [1], "releasing": [0], "ended": []}
    assert values(series, "membroker_observers") == [1]
    assert values(series, "membroker_sessions_limit") == [16]
    counts = {state: values(series, "membroker_segments", tenant="acme", state=state) for state in lifecycles.SEGMENT}
    others = {state: [0] for state in ("writing", "sealing", "ending", "retired", "dropping")}
    assert counts == {**others, "sealed": [2], "releasing": [1], "ended": []}
    assert values(series, "membroker_segments", tenant="umbra", model="c", state="writing") == [1]
    assert values(series, "membroker_segments", model="b") == []
    source.now = books(model("acme", "a", 0))
    assert values(scrape(made), "membroker_segments") == []


def test_a_models_reasons_can_be_left_out() -> None:
    """With a thousand models they are a sixth of a scrape. The sum begins at 0, too, and the tenants keep theirs."""
    tenants = (TenantView("acme", (), 1, 1, {"MODEL_LIMIT": 4}),)
    shown = books(model("acme", "a", 0, MODEL_LIMIT=4, INVALID_SIZE=2), model("acme", "b", 0), tenants=tenants)
    series = scrape(Metrics(Source(shown).view, UUID, model_reasons=False))
    assert values(series, "membroker_model_denials_total", model="a") == [6]
    assert values(series, "membroker_model_denials_total", model="b", reason="") == [0]
    assert values(series, "membroker_tenant_denials_total", tenant="acme", reason="MODEL_LIMIT") == [4]


def test_refusals_exist_before_the_first_one() -> None:
    """`increase()` sees no step from nothing to 1: a first refusal for want of room would be invisible.

    A model can be refused before its first scrape: the tenant's and the device's figures begin before it.
    """
    tenants = (TenantView("quiet", (), 0, 0, {}),)
    series = scrape(Metrics(Source(books(model("acme", "a", 0, INVALID_SIZE=2), tenants=tenants)).view, UUID))
    for why in catalog.DENIAL_REASONS:
        assert values(series, "membroker_tenant_denials_total", tenant="quiet", reason=why) == [0]
        assert values(series, "membroker_device_denials_total", reason=why) == [0]
        assert values(series, "membroker_model_denials_total", model="a", reason=why) == [0]
    assert values(series, "membroker_model_denials_total", model="a", reason="INVALID_SIZE") == [2]
    assert values(series, "membroker_model_denials_total", model="a", reason="INVALID_COUNT") == []
    for why in Reason:
        assert values(series, "membroker_connections_refused_total", reason=why) == [0]
    for change in catalog.STOCK_CHANGES:
        assert values(series, "membroker_stock_extents_total", change=change) == [0]
    assert values(series, "membroker_device_unproven_releases_total", location="device") == [0]
    assert values(series, "membroker_log_lines_dropped_total") == [0]


def test_every_series_names_the_gpu_and_every_name_is_in_the_table() -> None:
    made = Metrics(Source(FULL).view, UUID)
    made.driver_call("cuMemCreate").observe(1e-4)
    made.request("AllocateExtents", "handoff").observe(1e-5)
    made.steps.observe(1e-5)
    made.journal.observe(5e-6)
    series = scrape(made)
    own = {(name, labels) for name, labels in series if not name.startswith("process_")}
    assert all(dict(labels)["gpu_uuid"] == UUID for _, labels in own)
    stems = {name.removesuffix(end) for name, _ in series for end in ("_bucket", "_count", "_sum")}
    names = {name for name, _ in series} | stems
    missing = {spec.name for spec in catalog.ALL.values() if spec not in catalog.PARENT} - names
    assert not missing
    assert not names & {spec.name for spec in catalog.PARENT}, "those are the parent's"
    assert {"process_open_fds", "process_max_fds", "process_resident_memory_bytes"} <= {name for name, _ in series}


def test_histograms_count_in_buckets() -> None:
    """Of calls up to a second, and of waits up to a minute, by how they ended.

    Each result is there before the first wait, because `increase()` does not see a step from absent to 1.
    """
    made = Metrics(Source(books()).view, UUID)
    for seconds in (4e-6, 5e-6, 0.3, 2.0):
        made.driver_call("cuMemCreate").observe(seconds)
    for seconds in (0.02, 45.0, 61.0):
        made.waits["refused", True].observe(seconds)
    assert made.waits_ended() == {"granted": 0, "refused": 3, "cancelled": 0}
    series = scrape(made)
    buckets = {le: values(series, "membroker_driver_call_seconds_bucket", le=le) for le in ("5e-06", "1.0", "+Inf")}
    assert buckets == {"5e-06": [2], "1.0": [3], "+Inf": [4]}
    assert values(series, "membroker_driver_call_seconds_sum") == [pytest.approx(2.300009)]
    counts = {kind: values(series, "membroker_wait_seconds_count", result=kind) for kind in made.waits_ended()}
    assert counts == {"granted": [0, 0], "refused": [0, 3], "cancelled": [0, 0]}
    kind = {"result": "refused", "guaranteed": "true"}
    buckets = {le: values(series, "membroker_wait_seconds_bucket", le=le, **kind) for le in ("0.025", "60.0")}
    assert buckets == {"0.025": [1], "60.0": [2]}


def test_promtool_finds_nothing_to_mend() -> None:
    """Prometheus's own linter over a full scrape."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    made = Metrics(Source(FULL).view, UUID)
    made.driver_call("cuMemCreate").observe(1e-4)
    made.request("AllocateExtents", "handoff").observe(1e-5)
    done = subprocess.run([promtool, "check", "metrics"], input=generate_latest(made.registry), capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
