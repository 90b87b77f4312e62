"""OpenAI's service tiers in Baton's words: an SLO class and a priority. Pure.

    flex       the class `batch`: cheaper, later
    priority   the class `interactive`, before the others of it
    default    the class `interactive`
    auto       what the call says otherwise: its headers, or the default
A reply names the tier that fits what the call was really given.
"""

from __future__ import annotations

from typing import Literal

from baton.errors import InvalidRequest

Tier = Literal["auto", "default", "flex", "priority"]
INTERACTIVE, BATCH = "interactive", "batch"  # baton/slo.py DEFAULT_CLASSES
PRIORITY = 10  # as far above the default as `batch` is below it


def slo_class_of(tier: Tier | None, slo_class: str) -> str:
    """The class of a call that names a tier, or a class by header, or neither, or both if they agree.

    Raises:
        InvalidRequest: they do not agree.
    """
    if tier is None or tier == "auto":
        return slo_class
    wanted = BATCH if tier == "flex" else INTERACTIVE
    if slo_class not in ("", wanted):
        raise InvalidRequest(
            f"service_tier {tier} is the SLO class {wanted}; x-slo-class names another", field="service_tier"
        )
    return wanted


def priority_of(tier: Tier | None, priority: int | None) -> int:
    """What the call says itself wins; 0 = its class's own."""
    if priority is not None:
        return priority
    return PRIORITY if tier == "priority" else 0


def tier_of(slo_class: str, priority: int) -> Tier:
    """The tier to name in a reply."""
    if slo_class == BATCH:
        return "flex"
    return "priority" if priority >= PRIORITY else "default"
