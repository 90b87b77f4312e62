"""What the admin endpoint takes and says, as strict models: no field is guessed, coerced or ignored."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.slo import MIN_TARGET_MS, SLO

_MAX_TARGET_MS = 86_400_000.0  # a day; a target nobody can miss is no target
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]  # a metric label and a URL segment
Target = Annotated[float, Field(ge=MIN_TARGET_MS, le=_MAX_TARGET_MS, allow_inf_nan=False)]
Percentile = Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)]
Weight = Annotated[float, Field(gt=0.0, le=1_000.0, allow_inf_nan=False)]
Priority = Annotated[int, Field(ge=-100, le=100)]  # serving.proto: GenerateRequest.priority
Reason = Annotated[str, Field(max_length=500)]


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
    classes: Annotated[dict[Name, SLOClass], Field(min_length=1, max_length=64)]
    reason: Reason = ""


class PatchSet(Strict):
    classes: dict[Name, SLOClassPatch | None]  # None removes the class
    reason: Reason = ""


class PutClass(SLOClass):
    reason: Reason = ""


class PatchClass(SLOClassPatch):
    reason: Reason = ""


class Rollback(Strict):
    version: Annotated[int, Field(ge=1)]
    reason: Reason = ""


class SetRole(Strict):
    role: Literal["prefill", "decode", "both"]
