"""What the admin endpoint takes and says, as strict models: no field is guessed, coerced or ignored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.slo import MIN_TARGET_MS, SLO
from router.controller.settings import MAX_GPUS
from router.controller.versioned import MAX_VERSION

_MAX_TARGET_MS = 86_400_000.0  # a day; a target nobody can miss is no target
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]  # a metric label and a URL segment
Target = Annotated[float, Field(ge=MIN_TARGET_MS, le=_MAX_TARGET_MS, allow_inf_nan=False)]
Percentile = Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)]
Weight = Annotated[float, Field(gt=0.0, le=1_000.0, allow_inf_nan=False)]
Priority = Annotated[int, Field(ge=-100, le=100)]  # serving.proto: GenerateRequest.priority
Reason = Annotated[str, Field(max_length=500)]
GivenReason = Annotated[str, Field(min_length=1, max_length=500, pattern=r"\S")]
Version = Annotated[int, Field(ge=1, lt=MAX_VERSION)]
Workers = Annotated[int, Field(ge=0, le=MAX_GPUS)]
MAX_CLASSES = 64  # each is a label of a dozen metrics


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class SLOClass(Strict):
    """Targets of one class, whole; what is left out takes its default."""

    ttft_ms: Target
    tpot_ms: Target
    itl_p99_ms: Target | None = None
    e2e_ms: Target | None = None
    percentile: Percentile = 0.95
    weight: Weight = 1.0
    priority: Priority = 0

    def named(self, name: str) -> SLO:
        return SLO(name=name, **self.model_dump())


class SLOClassPatch(Strict):
    """Fields to change; null lifts an optional target."""

    ttft_ms: Target | None = None
    tpot_ms: Target | None = None
    itl_p99_ms: Target | None = None
    e2e_ms: Target | None = None
    percentile: Percentile | None = None
    weight: Weight | None = None
    priority: Priority | None = None


class PutSet(Strict):
    classes: Annotated[dict[Name, SLOClass], Field(min_length=1, max_length=MAX_CLASSES)]
    reason: Reason = ""


class PatchSet(Strict):
    classes: Annotated[dict[Name, SLOClassPatch | None], Field(max_length=MAX_CLASSES)]  # None removes the class
    reason: Reason = ""


class PutClass(SLOClass):
    reason: Reason = ""


class PatchClass(SLOClassPatch):
    reason: Reason = ""


class DryRun(Strict):
    """As a PATCH, or as a PUT where `replace` is true."""

    classes: Annotated[dict[Name, SLOClassPatch | None], Field(max_length=MAX_CLASSES)]
    replace: bool = False
    reason: Reason = ""


class Rollback(Strict):
    version: Version
    reason: Reason = ""


class Import(Strict):
    """What an export says; `version`, `at_unix_s` and `who` tell where it comes from and change nothing."""

    format: Literal["baton.slo/1"]
    classes: Annotated[dict[Name, SLOClass], Field(min_length=1, max_length=MAX_CLASSES)]
    version: Version | None = None
    at_unix_s: float | None = None
    who: Annotated[str, Field(max_length=100)] | None = None
    reason: GivenReason


class PutMode(Strict):
    mode: Literal["auto", "advisory", "frozen"]
    reason: GivenReason


class Bounds(Strict):
    """Workers of one pool."""

    min_workers: Workers = 0
    max_workers: Workers | None = None


class BoundsPatch(Strict):
    min_workers: Workers | None = None
    max_workers: Workers | None = None


class PutBudget(Strict):
    """Whole; what is left out takes its default."""

    max_gpus: Workers | None = None
    prefill: Bounds = Bounds()
    decode: Bounds = Bounds()
    both: Bounds = Bounds()
    reason: GivenReason


class PatchBudget(Strict):
    """Fields to change; null lifts a limit, and takes min_workers back to 0."""

    max_gpus: Workers | None = None
    prefill: BoundsPatch = BoundsPatch()
    decode: BoundsPatch = BoundsPatch()
    both: BoundsPatch = BoundsPatch()
    reason: GivenReason


class SetRole(Strict):
    role: Literal["prefill", "decode", "both"]


# Every name that a body may have, for who mistypes one
FIELDS = sorted({name for kind in Strict.__subclasses__() for name in kind.model_fields})
