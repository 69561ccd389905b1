"""docs/metrics.md is what the code says."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from tests.support.daemons import Daemon
from tools import metrics_page

from membrokerd.observe import catalog


def test_the_page_is_current() -> None:
    """A metric, a label or a help that is changed is changed there, too: make metrics."""
    assert metrics_page.PAGE.read_text() == metrics_page.page()


def test_every_metric_has_a_row_and_every_series_of_a_daemon_a_metric(daemon: Daemon) -> None:
    rows = [line.split("|")[1].strip(" `") for line in metrics_page.page().splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(catalog.ALL)
    served = {family.name for family in text_string_to_metric_families(daemon.metrics())}
    own = {name for name in served if name.startswith("membroker_")}
    assert own <= {name.removesuffix("_total") for name in rows}
