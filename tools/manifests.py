"""Renders the Helm chart into the plain manifests of deploy/kubernetes: `python -m tools.manifests [--check]`.

It first writes what the chart has from elsewhere: copies of the alerts, the rules and the dashboard, because Helm reads
no file outside of the chart, and the keys of membrokerd.toml in the schema of the values.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter

from membrokerd.config import checks
from membrokerd.config.config import Config, ModelConfig, TenantConfig

DEPLOY = Path(__file__).parents[1] / "deploy"
CHART = DEPLOY / "helm" / "membroker"
HEAD = "# Rendered from deploy/helm/membroker by `make manifests`. Change the chart, not this file.\n"
ADMISSION = "admission.yaml"
FILES = ("prometheus/alerts.yml", "prometheus/rules.yml", "grafana/membroker.json", "grafana/membroker-fleet.json")
SCHEMA = CHART / "values.schema.json"
OF_HELM = {"check.yaml", "doctor.yaml", "NOTES.txt"}
"""What only Helm makes use of: its hooks, and the notes after an installation."""
EXAMPLE = {"tenants": {"acme": {"group": 10001, "mode": "0660"}}}
"""The tenant of the plain manifests, and of examples/kubernetes: the chart itself has none."""
OF_CHART = frozenset(
    ("runtime_directory", "driver", "device", "descriptor_store", "systemd_descriptors", "keeper_socket")
) | {"metrics", "log", "tenants"}
"""Keys that the chart sets itself."""
_SIZE = {"type": ["integer", "string"], "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*[A-Za-z]*\s*$"}
_IDENTITY = {"type": ["integer", "string"]}
_KINDS: tuple[tuple[Any, Mapping[str, Any]], ...] = (
    *((kind, _SIZE) for kind in (checks.Size, checks.Capacity, checks.PositiveCapacity)),
    *((kind, _IDENTITY) for kind in (checks.Owner, checks.Group)),
    (checks.Mode, {"type": "string", "pattern": "^0?[0-7]{3}$"}),
    (checks.Uids, {"type": "array", "items": {"type": "integer", "minimum": 0}}),
    (checks.Directory, {"type": "string", "pattern": "^/"}),
)
"""The schema of each kind of value that pydantic does not know."""


def render(values: Mapping[str, Any]) -> dict[str, str]:
    """Return what Helm makes of each template of the chart, by its name; raises Helm's error."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(dict(values))
        rendered = chart.render(dict(values), name="membroker", namespace="membroker")
    return {Path(name).name: f"{text.strip()}\n" for name, text in rendered.items() if text.strip()}


def _schema_of(kind: Any) -> Mapping[str, Any]:
    """Return the schema of one value, which may also be null: to Helm that is a default taken away."""
    if get_origin(kind) in (UnionType, Union):
        (kind,) = (each for each in get_args(kind) if each is not type(None))
    found = next((schema for known, schema in _KINDS if known == kind), None)
    return TypeAdapter(kind).json_schema() if found is None else found


def _table(kind: type, leave_out: Iterable[str] = (), **tables: Any) -> dict[str, Any]:
    """Return the schema of a table of keys."""
    hints = get_type_hints(kind, include_extras=True)
    keys = {key.name: _schema_of(hints[key.name]) for key in fields(kind) if key.name not in {*leave_out, *tables}}
    return {"type": "object", "additionalProperties": False, "properties": keys | tables}


def schema() -> str:
    """Return the text of the schema of the values: as it is, with the keys that membrokerd.toml has now."""
    document = json.loads(SCHEMA.read_text())
    models = {"type": "object", "additionalProperties": _table(ModelConfig)}
    document["definitions"] |= {
        "config": _table(Config, OF_CHART),
        "tenant": _table(TenantConfig, models=models),
    }
    return json.dumps(document, indent=2) + "\n"


def sources() -> dict[Path, str]:
    """Return the text of each file of the chart that is made of something else."""
    copies = {CHART / "files" / Path(name).name: (DEPLOY / name).read_text() for name in FILES}
    return {**copies, SCHEMA: schema()}


def manifests() -> dict[Path, str]:
    """Return the text of each plain manifest."""
    main = [text for name, text in sorted(render(EXAMPLE).items()) if not name.startswith("_") and name not in OF_HELM]
    admission = render({"admissionPolicy": {"enabled": True}})[ADMISSION]
    return {
        DEPLOY / "kubernetes" / "membroker.yaml": HEAD + "---\n".join(main),
        DEPLOY / "kubernetes" / ADMISSION: HEAD + admission,
    }


def main() -> int:
    """Write the chart's files and the manifests, or with `--check` say which are stale."""
    only_checks, stale = "--check" in sys.argv[1:], False
    for made in (sources, manifests):
        for path, text in made().items():
            if path.exists() and path.read_text() == text:
                continue
            stale = True
            if only_checks:
                print(f"{path} is stale: make manifests")
            else:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    return int(stale and only_checks)


if __name__ == "__main__":
    sys.exit(main())
