"""Manifests that were reviewed, in golden_manifests/: `python -m tests.chart.golden` writes what is rendered now."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import yaml

from tests.chart.chart_rig import Manifest, render
from tests.chart.chart_values import MATRIX

GOLDEN = Path(__file__).parent / "golden_manifests"


def _objects(name: str, *wanted: tuple[str, str]) -> str:
    return yaml.safe_dump_all([_read(render(MATRIX[name]).get(*one)) for one in wanted], sort_keys=False)


def _read(manifest: Manifest) -> Manifest:
    """Without what changes with every release."""
    for labels in [manifest["metadata"]["labels"]]:
        labels.pop("helm.sh/chart", None)
    return manifest


golden: dict[str, Callable[[], str]] = {
    "least.yaml": partial(
        _objects,
        "least",
        ("StatefulSet", "demo-baton-decode"),
        ("StatefulSet", "demo-baton-head"),
        ("Role", "demo-baton-controller"),
        ("ConfigMap", "demo-baton-slo"),
        ("ConfigMap", "demo-baton-config"),
        ("ConfigMap", "demo-baton-seed"),
    ),
    "everything.yaml": partial(_objects, "everything", ("StatefulSet", "demo-baton-decode")),
}


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for file, written in golden.items():
        (GOLDEN / file).write_text(written(), encoding="utf-8")


if __name__ == "__main__":
    main()
