"""The page of a device, as HTML of books that a test made up."""

from __future__ import annotations

from dataclasses import replace

from tests.support.calls import calls_of
from tests.support.pages import Page
from tests.support.sizes import MIB
from tests.support.views import FULL, books, model

from membroker.vmm.driver import DeviceInfo
from membrokerd.core.snapshot import TenantLocationView, TenantView
from membrokerd.observe import catalog
from membrokerd.observe.history import SAMPLES, Sample
from membrokerd.observe.status_page import MOST_MODELS, page

HOSTILE = '"><script>alert(1)</script>&lt;'


def test_every_name_is_escaped() -> None:
    """The grammar of names allows none of this. The page does not rely on it."""
    tenant = TenantView(HOSTILE, (TenantLocationView("device", MIB, 2 * MIB, MIB, 1, MIB),), 1, 1, {})
    view = books(model(HOSTILE, HOSTILE, MIB, limit=2 * MIB, **{HOSTILE: 1}), tenants=(tenant,), unaccounted=5)
    device = DeviceInfo(HOSTILE, HOSTILE, "cuda", 2 * MIB)
    history = tuple(Sample(float(at), {HOSTILE: MIB}, MIB, 4 * MIB, MIB, 7, MIB, at) for at in range(3))
    text = page(replace(view, device=device, version=HOSTILE, history=history), {"granted": 1})
    assert "<script" not in text
    shown = Page(text)
    assert HOSTILE in shown.titles["bytes by tenant over the last minutes"]
    assert f"{HOSTILE}/{HOSTILE}" in [row[0] for row in shown.rows]


def test_what_is_wrong_stands_at_the_top() -> None:
    wrong = dict.fromkeys((catalog.DRAINING, catalog.JOURNAL_FULL, catalog.DEVICE_LOST, catalog.DRIVER_FALLBACK), 1)
    text = Page(page(replace(FULL, figures={**FULL.figures, **wrong}), {})).text
    for sentence in (
        "An operator drains this device",
        "The journal cannot be written",
        "The device does not answer",
        "No usable GPU was found",
        "1.0 MiB of the guarantees cannot be kept now",
        "1.0 MiB were recalled from workers that do not answer",
        "1 session has lost its connection.",
    ):
        assert sentence in text
    assert "drains" not in Page(page(FULL, {})).text


def test_a_thousand_tenants_make_no_endless_page() -> None:
    """4,096 models of 1,024 tenants, and the longest history: the page is bounded, and made in a moment."""
    tenants = tuple(
        TenantView(f"uid-{number}", (TenantLocationView("device", MIB, None, 0, 1, 0),), 4, 1, {})
        for number in range(1024)
    )
    models = [model(f"uid-{number % 1024}", f"m{number}", MIB) for number in range(4096)]
    history = tuple(
        Sample(at * 2.0, {f"uid-{number}": MIB for number in range(12)}, MIB, 1 << 40, MIB, 0, 0, at)
        for at in range(SAMPLES)
    )
    view = replace(books(*models, tenants=tenants), history=history)
    texts: list[str] = []
    calls = calls_of(lambda: texts.append(page(view, {})))
    (text,) = texts
    assert len(text) < 1 << 20
    assert calls.total() < 50_000, calls.most_common(10)
    shown = Page(text)
    assert len(shown.rows) == MOST_MODELS + 1
    assert "3896 that use less are not shown." in shown.text
    assert "960 tenants that use less are not shown." in shown.text
