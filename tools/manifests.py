"""Renders the Helm chart into the plain manifests of deploy/kubernetes: `python -m tools.manifests [--check]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).parents[1] / "deploy"
CHART = DEPLOY / "helm" / "membroker"
HEAD = "# Rendered from deploy/helm/membroker by `make manifests`. Change the chart, not this file.\n"
ADMISSION = "admission.yaml"


def render(values: Mapping[str, Any]) -> dict[str, str]:
    """Return what Helm makes of each template of the chart, by its name; raises Helm's error."""
    import helm_python

    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(dict(values))
        rendered = chart.render(dict(values), name="membroker", namespace="membroker")
    return {Path(name).name: f"{text.strip()}\n" for name, text in rendered.items() if text.strip()}


def manifests() -> dict[Path, str]:
    """Return the text of each plain manifest."""
    main = [text for name, text in sorted(render({}).items()) if not name.startswith("_")]
    admission = render({"admissionPolicy": {"enabled": True}})[ADMISSION]
    return {
        DEPLOY / "kubernetes" / "membroker.yaml": HEAD + "---\n".join(main),
        DEPLOY / "kubernetes" / ADMISSION: HEAD + admission,
    }


def main() -> int:
    """Write the manifests, or with `--check` say which are stale."""
    stale = [(path, text) for path, text in manifests().items() if not path.exists() or path.read_text() != text]
    for path, text in stale:
        if "--check" in sys.argv[1:]:
            print(f"{path} is stale: make manifests")
        else:
            path.write_text(text)
    return int(bool(stale) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
