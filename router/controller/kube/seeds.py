"""What a release's values say of SLO classes and budget: the defaults of a new store, no more. Pure, but for the file it reads.

What operators change later is live and stays, also through upgrades; where that differs from the values is shown as drift. With
slo_source = values it is the other way round: the values are put in force whenever a leader starts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from baton.config import KubernetesConfig
from baton.errors import ConfigError
from router.controller.admin_models import MAX_CLASSES, SLOClass
from router.controller.settings import Budget, PoolBounds
from router.controller.slo_changes import Change, changes, contradiction
from router.controller.slo_store import SLOSet
from router.controller.versioned import StaleVersion, Versions

_FIELD = "kubernetes.slo_seed"


def seeded_classes(config: KubernetesConfig, default: SLOSet) -> SLOSet:
    """Raises: ConfigError: the file is none, or no call could meet what it says."""
    if not config.slo_seed:
        return default
    try:
        found = json.loads(Path(config.slo_seed).read_text(encoding="utf-8"))
        classes = tuple(SLOClass.model_validate(_without_name(body)).named(str(body["name"])) for body in found)
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise ConfigError(f"{config.slo_seed}: these are no SLO classes: {error}", field=_FIELD) from error
    if not 1 <= len(classes) <= MAX_CLASSES or len({slo.name for slo in classes}) < len(classes):
        raise ConfigError(f"{config.slo_seed}: 1 to {MAX_CLASSES} classes, each under its own name", field=_FIELD)
    for slo in classes:
        if found := contradiction(slo):
            raise ConfigError(f"{config.slo_seed}: {slo.name}.{found[0]}: {found[1]}", field=_FIELD)
    return classes


def _without_name(body: dict[str, object]) -> dict[str, object]:
    """Numbers as JSON writes them: 2000 is a target as 2000.0 is."""
    fields = {key: value for key, value in body.items() if key != "name"}
    whole = {"priority"}
    return {k: float(v) if isinstance(v, int) and k not in whole else v for k, v in fields.items()}


def seeded_budget(config: KubernetesConfig, budget: Budget) -> Budget:
    def bounds(smallest: int, largest: int) -> PoolBounds:
        return PoolBounds(smallest, largest or None)

    return replace(
        budget,
        prefill=bounds(config.prefill_min, config.prefill_max),
        decode=bounds(config.decode_min, config.decode_max),
        both=bounds(config.both_min, config.both_max),
    )


def put_values_in_force(store: Versions[SLOSet], classes: SLOSet) -> None:
    """Raises: Unavailable."""
    current = store.current()
    if current.value != classes:
        try:
            store.replace(current.version, classes, "chart", "slo.source = values")
        except StaleVersion:
            put_values_in_force(store, classes)


def drift(classes: SLOSet, live: SLOSet) -> Sequence[Change]:
    """From what values say to what is in force."""
    return list(changes(classes, live))
