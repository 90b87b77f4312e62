"""What a plan may choose from: GPUs on offer, and every deployment of so many of them. Pure.

A candidate is a Deployment and the router's window, which is the one setting outside of workers that changes how much they carry:
a prefill worker that ships its prompts needs some in stock, since each waits for a decode worker's answer first, while one that
decodes as well should be given no more than it can begin (docs/planner.md has the measurement).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.request import Role
from bench.sim.deployment import MEMORY_SHARE, Deployment, Hardware, Layout
from engine.timing.hardware import gpu
from engine.timing.shapes import model_shape

BLOCK_TOKENS = (
    64  # as simulated: 16-token blocks give the same attainment and times within 1 %, slower (docs/simulator.md)
)
WIDTHS = (1, 2, 4, 8)  # GPUs of a worker: one NVLink domain of an HGX board
BUDGETS = (256, 384, 512, 640, 1_024, 2_048)  # tokens of a step of a worker that decodes and prefills
LOCAL_TOKENS = (0, 512)  # prompts up to it may be prefilled where they are decoded
OWN_WINDOW_S = 0.01  # router.queue_window_s: what a router learns of workers that ship nothing (router/lane_window.py)
SHIPPING_WINDOW_S = 0.1  # the most that it learns: some prompts of an 8B model, one of a 70B model
MAX_SEATS = 1_024  # sequences of a step: vLLM's default on GPUs of 80 GB and more
MAX_WORKERS = 8  # of one plan; a larger cluster is several of it


@dataclass(frozen=True, slots=True)
class Offer:
    """GPUs of one type, USD per hour of each."""

    gpu: str
    usd_per_hour: float

    @classmethod
    def parse(cls, text: str) -> Offer:
        """Read "h100" or "h100=2.50".

        Raises:
            ConfigError: an unknown GPU, or a price that is not a number above 0.
        """
        name, _, price = text.partition("=")
        try:
            known = gpu(name)
            usd_per_hour = float(price) if price else known.usd_per_hour
        except ValueError as error:
            raise ConfigError(f"gpu {text!r}: {error}") from error
        if not 0 < usd_per_hour < math.inf:
            raise ConfigError(f"gpu {text!r}: the price is {usd_per_hour:g}; it must be a number above 0")
        return cls(known.name, usd_per_hour)


@dataclass(frozen=True)
class Candidate:
    deployment: Deployment
    window_s: float | None  # None: the router learns it; inf: no admission, which only baselines do without
    usd_per_hour: float  # at the prices of this plan

    @property
    def layout(self) -> Layout:
        return self.deployment.layout

    @cached_property
    def num_gpus(self) -> int:
        return self.deployment.num_gpus

    @property
    def is_colocated(self) -> bool:
        return not self.layout.num_prefill

    @property
    def budget(self) -> int:
        """Tokens of a step of a worker that decodes."""
        return self.deployment.engine.max_num_batched_tokens

    def describe(self) -> str:
        """As "2 prefill x 1 h100 + 2 decode x 2 h100"."""
        parts = []
        counts = (
            (Role.PREFILL, self.layout.num_prefill),
            (Role.DECODE, self.layout.num_decode),
            (Role.BOTH, self.layout.num_both),
        )
        for role, num in counts:
            if num:
                where = self.deployment.hardware(role)
                parts.append(f"{num} {role.name.lower()} x {where.tp} {where.gpu}")
        return " + ".join(parts)


@dataclass(frozen=True)
class Space:
    """Every candidate of one model on these offers."""

    model: str
    offers: Sequence[Offer]
    widths: Sequence[int] = WIDTHS
    weight_dtype: str = "fp8"
    kv_dtype: str = "bf16"
    caches: bool = False
    held_tokens: float = 1_024.0  # of a sequence, which says how many can be there

    def __post_init__(self) -> None:
        """Raises: ConfigError: nothing that is offered holds the model, or a name that nobody knows."""
        if not self.offers:
            raise ConfigError("gpus are none; give at least one")
        if not self.hardware:
            widest = f"{max(self.widths)} x {', '.join(offer.gpu for offer in self.offers)}"
            raise ConfigError(
                f"{self.model} in {self.weight_dtype} does not fit {widest}; offer larger GPUs, or more of them"
            )

    @cached_property
    def hardware(self) -> Sequence[Hardware]:
        """That hold the model and room for one sequence."""
        found = []
        for offer in self.offers:
            for tp in self.widths:
                where = Hardware(offer.gpu, tp)
                if _kv_tokens(self.model, where, self.weight_dtype, self.kv_dtype) >= self.held_tokens:
                    found.append(where)
        return found

    def usd_per_hour(self, deployment: Deployment) -> float:
        prices = {offer.gpu: offer.usd_per_hour for offer in self.offers}
        where = map(deployment.hardware, deployment.layout.roles)
        return sum(one.tp * prices[one.gpu] for one in where)

    def of_size(self, num_gpus: int) -> Iterator[Candidate]:
        """Every candidate that uses exactly so many GPUs, in at most MAX_WORKERS workers."""
        for prefill in self.hardware:
            for layout in _even_layouts(num_gpus, prefill.tp):
                yield from self._tuned(layout, prefill, None)
            for decode in self.hardware:
                if decode != prefill:
                    for layout in _uneven_layouts(num_gpus, prefill.tp, decode.tp):
                        yield from self._tuned(layout, prefill, decode)

    def _tuned(self, layout: Layout, where: Hardware, decode: Hardware | None) -> Iterator[Candidate]:
        splits, decodes_alone = layout.num_prefill > 0, layout.num_decode > 0
        windows = (
            (SHIPPING_WINDOW_S, OWN_WINDOW_S)
            if splits and layout.num_both
            else (SHIPPING_WINDOW_S if splits else OWN_WINDOW_S,)
        )
        locals_ = LOCAL_TOKENS if splits and decodes_alone else LOCAL_TOKENS[:1]
        for local in locals_:
            budgets = BUDGETS if layout.num_both or local else BUDGETS[-1:]
            for budget in budgets:
                for window_s in windows:
                    yield self.candidate(layout, where, decode, budget=budget, local_tokens=local, window_s=window_s)

    def candidate(
        self,
        layout: Layout,
        where: Hardware,
        decode: Hardware | None,
        *,
        budget: int,
        local_tokens: int,
        window_s: float,
    ) -> Candidate:
        least = min((one for one in (where, decode) if one is not None), key=self._kv_tokens)
        seats = min(MAX_SEATS, budget, max(1, int(self._kv_tokens(least) / self.held_tokens)))
        deployment = Deployment(
            layout,
            gpu=where.gpu,
            model=self.model,
            tp=where.tp,
            decode_hardware=decode,
            weight_dtype=self.weight_dtype,
            kv_dtype=self.kv_dtype,
            measured=False,
            engine=EngineConfig(
                block_size=BLOCK_TOKENS,
                max_num_seqs=seats,
                max_num_batched_tokens=budget,
                chunk_tokens=budget,
                prefix_cache=self.caches,
                max_queued_seqs=sys.maxsize,
            ),
            local_prefill_tokens=local_tokens,
        )
        return Candidate(deployment, window_s, self.usd_per_hour(deployment))

    def _kv_tokens(self, where: Hardware) -> float:
        return _kv_tokens(self.model, where, self.weight_dtype, self.kv_dtype)


def neighbours(space: Space, one: Candidate) -> Iterator[Candidate]:
    """The same GPUs: one worker in another role where roles are on equal hardware, or the next setting of one knob."""
    for other in space.of_size(one.num_gpus):
        if _hardware(other) == _hardware(one) and _distance(other, one) == 1:
            yield other


def _hardware(one: Candidate) -> tuple[Hardware, Hardware]:
    return one.deployment.hardware(Role.PREFILL), one.deployment.hardware(Role.DECODE)


def _distance(a: Candidate, b: Candidate) -> int:
    """Knobs that differ, a budget by its steps; a worker in another role is one."""
    moved = sum(abs(x - y) for x, y in zip(_counts(a.layout), _counts(b.layout), strict=True)) // 2
    budgets = abs(BUDGETS.index(a.deployment.engine.chunk_tokens) - BUDGETS.index(b.deployment.engine.chunk_tokens))
    locals_ = a.deployment.local_prefill_tokens != b.deployment.local_prefill_tokens
    return moved + budgets + locals_ + (a.window_s != b.window_s)


def _counts(layout: Layout) -> tuple[int, int, int]:
    return layout.num_prefill, layout.num_decode, layout.num_both


def _even_layouts(num_gpus: int, tp: int) -> Iterator[Layout]:
    """All workers alike. Decode workers without prefill workers would be idle, for who does both keeps what it prefilled."""
    num, rest = divmod(num_gpus, tp)
    if rest or not 1 <= num <= MAX_WORKERS:
        return
    for num_both in range(num + 1):
        others = num - num_both
        if not others:
            yield Layout(num_both=num_both)
        for num_prefill in range(1, others + 1):
            if num_both or num_prefill < others:
                yield Layout(num_prefill, others - num_prefill, num_both)


def _uneven_layouts(num_gpus: int, prefill_tp: int, decode_tp: int) -> Iterator[Layout]:
    for num_prefill in range(1, num_gpus // prefill_tp + 1):
        num_decode, rest = divmod(num_gpus - num_prefill * prefill_tp, decode_tp)
        if num_decode > 0 and not rest and num_prefill + num_decode <= MAX_WORKERS:
            yield Layout(num_prefill, num_decode)


def _kv_tokens(model: str, where: Hardware, weight_dtype: str, kv_dtype: str) -> float:
    """As bench/sim/deployment.py has it. Raises: ConfigError: a name that nobody knows."""
    try:
        shape, memory_bytes = model_shape(model), where.tp * gpu(where.gpu).memory_bytes
        return (MEMORY_SHARE * memory_bytes - shape.weight_bytes(weight_dtype)) / shape.kv_bytes_per_token(kv_dtype)
    except (ValueError, KeyError) as error:
        raise ConfigError(str(error)) from error
