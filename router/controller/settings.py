"""How far the autoscaler may go: its mode and its GPU budget, a versioned document like the SLO classes.

auto       it decides and acts
advisory   it decides and writes down what it would have done
frozen     it does nothing; pools stay as they are, lost workers are still replaced
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from baton.errors import InvalidRequest
from router.controller.versioned import Format

MAX_GPUS = 100_000  # the largest clusters known have as many; more is a slip of the hand


class Mode(enum.StrEnum):
    AUTO = "auto"
    ADVISORY = "advisory"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class PoolBounds:
    """Workers of one role. A pool may only go to zero where min_workers is 0."""

    min_workers: int = 0
    max_workers: int | None = None  # None: the GPU budget is the only bound


@dataclass(frozen=True, slots=True)
class Budget:
    max_gpus: int | None = None  # of all pools together; None: no bound but the machines'
    prefill: PoolBounds = field(default_factory=PoolBounds)
    decode: PoolBounds = field(default_factory=PoolBounds)
    both: PoolBounds = field(default_factory=PoolBounds)

    def pools(self) -> Mapping[str, PoolBounds]:
        """By role."""
        return {"prefill": self.prefill, "decode": self.decode, "both": self.both}

    def check(self, gpus_per_worker: int) -> None:
        """Raises: InvalidRequest: min above max, or a budget that does not hold the smallest pools."""
        for name, pool in self.pools().items():
            if pool.max_workers is not None and pool.min_workers > pool.max_workers:
                raise InvalidRequest(
                    f"{name}.min_workers = {pool.min_workers} is above {name}.max_workers = {pool.max_workers}",
                    field=f"{name}.min_workers",
                )
        smallest = {name: pool.min_workers for name, pool in self.pools().items() if pool.min_workers}
        floor = sum(smallest.values()) * gpus_per_worker
        if self.max_gpus is not None and self.max_gpus < floor:
            parts = " + ".join(f"{size} {name}" for name, size in smallest.items())
            raise InvalidRequest(
                f"max_gpus = {self.max_gpus} is below the floor of {floor}: the smallest pools are {parts} workers, of"
                f" {gpus_per_worker} GPU each",
                field="max_gpus",
            )


@dataclass(frozen=True, slots=True)
class ControlSettings:
    mode: Mode = Mode.AUTO
    budget: Budget = field(default_factory=Budget)


def _encode(settings: ControlSettings) -> str:
    return json.dumps(asdict(settings), allow_nan=False)


def _decode(body: str) -> ControlSettings:
    fields: dict[str, Any] = json.loads(body)
    budget = fields["budget"]
    pools = {name: PoolBounds(**budget[name]) for name in Budget().pools()}
    return ControlSettings(Mode(fields["mode"]), Budget(budget["max_gpus"], **pools))


def settings_format(configured: Mapping[str, int]) -> Format[ControlSettings]:
    """A new store lets no pool go to zero that was configured with workers; roles to sizes."""

    def bounds(role: str) -> PoolBounds:
        return PoolBounds(min_workers=min(1, configured.get(role, 0)))

    seed = ControlSettings(budget=Budget(None, bounds("prefill"), bounds("decode"), bounds("both")))
    return Format("settings", _encode, _decode, seed)
