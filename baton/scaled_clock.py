"""A cluster whose clock is slow: every duration of its configuration, times `time_scale`.

An emulated GPU can be slowed so that few CPUs keep up with many of them. Leases, heartbeats, deadlines and patience then have
to be as much longer, or they would end what is only slow. A field is a duration if its name ends in `_s`, `_ms`; one that ends
in `_per_s` is a rate. 0 stays 0, which means "at once" or "never". Pure.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


def is_duration(name: str) -> bool:
    """Whether a setting of this name is a time."""
    return name.endswith(("_s", "_ms")) and not is_rate(name)


def is_rate(name: str) -> bool:
    return name.endswith("_per_s")


def slowed(config: T, time_scale: float) -> T:
    """Return the configuration with every duration in it, at any depth, multiplied, and every rate divided."""
    changes: dict[str, object] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changes[field.name] = slowed(value, time_scale)
        elif isinstance(value, int | float) and is_duration(field.name):
            changes[field.name] = value * time_scale
        elif isinstance(value, int | float) and is_rate(field.name):
            changes[field.name] = value / time_scale
    return dataclasses.replace(config, **changes)
