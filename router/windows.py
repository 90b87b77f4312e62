"""What calls came to in a span of time, as plain values: of one SLO class, of one worker in one role. Pure.

Routers make them (router/goodput.py), the wire carries them (control.proto), the controller adds them up
(router/controller/observer.py). Every field but `window_s` and `span_s` is a sum, so adding is the only way to merge and its
order does not matter. From the wire they are untrusted: what is no number, negative or beyond any load raises InvalidRequest
whole, since a sum with one wrong part is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from baton.errors import InvalidRequest
from baton.v1 import control_pb2, worker_pb2
from router.ring import BUCKET_S

MAX_COUNT = 1e12  # tokens or calls in one span: 3e9 a second for 5 min, beyond any deployment
MAX_SECONDS = 1e9  # of waiting in one span: three million calls that wait for 5 min each
NUM_LENGTH_BUCKETS = 42  # two per doubling, to 2 million tokens: twice the longest context of today's models
BUCKETS_PER_DOUBLING = 2


def length_bucket(num_tokens: int) -> int:
    """Bucket i holds lengths from 2**(i/2) to 2**((i+1)/2); the last also what is longer, the first also 0."""
    if num_tokens < 2:
        return 0
    return min(NUM_LENGTH_BUCKETS - 1, int(BUCKETS_PER_DOUBLING * math.log2(num_tokens)))


def length_quantile(counts: Sequence[float], share: float) -> float | None:
    """The length that `share` of them do not exceed, to the geometric middle of its bucket; None: there are none."""
    if not any(counts):
        return None
    below = list(accumulate(counts))
    place = next(place for place, num_below in enumerate(below) if num_below and num_below >= share * below[-1])
    return float(2.0 ** ((place + 0.5) / BUCKETS_PER_DOUBLING))


@dataclass(frozen=True, slots=True)
class TTFTParts:
    """Where the time to the first token went, seconds in sum over `num_calls` calls."""

    num_calls: float = 0.0  # whose worker said how long it took
    admission_s: float = 0.0  # door, tokenising, waiting for a turn, placing, attempts that failed
    queue_s: float = 0.0  # in the worker
    prefill_s: float = 0.0
    network_s: float = 0.0  # the rest: to the worker and back


@dataclass(frozen=True, slots=True)
class ClassWindow:
    """Of one SLO class. Calls count where they end, arrivals where they come."""

    class_name: str
    window_s: float  # one of router.ring.SPANS_S
    span_s: float  # that the sums cover: less than the window right after the start
    num_met: float = 0.0
    num_missed_ttft: float = 0.0  # first miss wins, as in baton.slo.Verdict
    num_missed_tpot: float = 0.0
    num_missed_itl: float = 0.0
    num_missed_e2e: float = 0.0
    num_failed: float = 0.0
    met_tokens: float = 0.0  # output of calls that met every target
    num_first_tokens: float = 0.0  # calls that got one
    ttft_s: float = 0.0
    parts: TTFTParts = TTFTParts()
    num_handoffs: float = 0.0
    handoff_gap_s: float = 0.0
    num_arrived: float = 0.0  # calls, also those that were turned away then
    num_sequences: float = 0.0  # of those whose prompt was read; so the three below
    num_prompts: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0  # of the prompts, that some worker had cached
    num_outputs: float = 0.0  # sequences that ended well
    output_tokens: float = 0.0
    prompt_lengths: tuple[float, ...] = (0.0,) * NUM_LENGTH_BUCKETS
    output_lengths: tuple[float, ...] = (0.0,) * NUM_LENGTH_BUCKETS

    @property
    def num_judged(self) -> float:
        missed = self.num_missed_ttft + self.num_missed_tpot + self.num_missed_itl + self.num_missed_e2e
        return self.num_met + missed + self.num_failed

    @property
    def attainment(self) -> float | None:
        """The share of judged calls that met every target; None: there were none."""
        return self.num_met / self.num_judged if self.num_judged else None

    @property
    def cached_share(self) -> float | None:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None

    @property
    def mean_prompt_tokens(self) -> float | None:
        return self.prompt_tokens / self.num_prompts if self.num_prompts else None

    @property
    def mean_output_tokens(self) -> float | None:
        return self.output_tokens / self.num_outputs if self.num_outputs else None

    def per_s(self, count: float) -> float:
        return count / max(self.span_s, BUCKET_S)


@dataclass(frozen=True, slots=True)
class WorkerWindow:
    """Of one worker in one role: `prefill` answers for TTFT, `decode` for TPOT and gaps between tokens."""

    worker_id: str
    role: str  # prefill | decode
    window_s: float
    span_s: float
    num_calls: float = 0.0  # finished or failed there
    num_in_target: float = 0.0  # of the role's own targets
    num_met: float = 0.0  # every target of the call
    met_tokens: float = 0.0

    @property
    def attainment(self) -> float | None:
        return self.num_in_target / self.num_calls if self.num_calls else None

    def per_s(self, count: float) -> float:
        return count / max(self.span_s, BUCKET_S)


@dataclass(frozen=True, slots=True)
class RouterWindows:
    """All that one router tells of its last spans."""

    classes: tuple[ClassWindow, ...] = ()
    workers: tuple[WorkerWindow, ...] = ()
    arrived: tuple[tuple[str, float], ...] = ()  # (class, calls since the router's start)
    oldest_queued_s: float = 0.0  # age of the call that waits longest for its turn; 0 = none waits


# -- on the wire -------------------------------------------------------------------------------------------------------

_SPANS = ("window_s", "span_s")  # equal, or the longest, where others are added
_PARTS = tuple(field.name for field in fields(TTFTParts))
_CLASS = tuple(f.name for f in fields(ClassWindow) if f.name not in ("class_name", "parts"))
_WORKER = tuple(f.name for f in fields(WorkerWindow) if f.name not in ("worker_id", "role"))

CLASS_SUMS = tuple(name for name in _CLASS if name not in _SPANS and not name.endswith("_lengths"))
WORKER_SUMS = tuple(name for name in _WORKER if name not in _SPANS)


def class_pb(window: ClassWindow) -> control_pb2.ClassWindow:
    parts = control_pb2.TtftParts(**{name: getattr(window.parts, name) for name in _PARTS})
    values = {name: getattr(window, name) for name in _CLASS}
    return control_pb2.ClassWindow(class_name=window.class_name, parts=parts, **values)


def worker_pb(window: WorkerWindow) -> control_pb2.WorkerWindow:
    role = worker_pb2.ROLE_PREFILL if window.role == "prefill" else worker_pb2.ROLE_DECODE
    return control_pb2.WorkerWindow(
        worker_id=window.worker_id, role=role, **{name: getattr(window, name) for name in _WORKER}
    )


def windows_of(report: control_pb2.RouterReport) -> RouterWindows:
    """Read what a router says. Raises: InvalidRequest, naming the field that makes no sense."""
    return RouterWindows(
        classes=tuple(map(_class_of, report.class_windows)),
        workers=tuple(map(_worker_of, report.worker_windows)),
        arrived=tuple((pb.class_name, _checked("num_arrived", pb.num_arrived)) for pb in report.arrived),
        oldest_queued_s=_checked("oldest_queued_s", report.oldest_queued_s),
    )


def _class_of(pb: control_pb2.ClassWindow) -> ClassWindow:
    numbers = {name: _checked(name, getattr(pb, name)) for name in _CLASS if not name.endswith("_lengths")}
    return ClassWindow(
        class_name=pb.class_name,
        parts=TTFTParts(*(_checked(f"parts.{name}", getattr(pb.parts, name)) for name in _PARTS)),
        prompt_lengths=_lengths("prompt_lengths", pb.prompt_lengths),
        output_lengths=_lengths("output_lengths", pb.output_lengths),
        **numbers,
    )


def _worker_of(pb: control_pb2.WorkerWindow) -> WorkerWindow:
    role = "prefill" if pb.role == worker_pb2.ROLE_PREFILL else "decode"
    return WorkerWindow(pb.worker_id, role, *(_checked(name, getattr(pb, name)) for name in _WORKER))


def _lengths(name: str, counts: Sequence[float]) -> tuple[float, ...]:
    if len(counts) != NUM_LENGTH_BUCKETS:
        raise InvalidRequest(f"{name} has {len(counts)} buckets; the limit is {NUM_LENGTH_BUCKETS}", field=name)
    return tuple(_checked(name, count) for count in counts)


def _checked(name: str, value: float) -> float:
    limit = MAX_SECONDS if name.endswith("_s") else MAX_COUNT
    if not 0 <= value <= limit:  # NaN fails, too
        raise InvalidRequest(f"{name} is {value}; the limit is 0 to {limit:g}", field=name)
    return float(value)


# -- adding up ---------------------------------------------------------------------------------------------------------


def add_classes(windows: Iterable[ClassWindow]) -> ClassWindow:
    """The sum over routers, of one class; the span is the longest. At least one."""
    together = list(windows)
    sums = {name: math.fsum(getattr(window, name) for window in together) for name in CLASS_SUMS}
    return ClassWindow(
        class_name=together[0].class_name,
        window_s=together[0].window_s,
        span_s=max(window.span_s for window in together),
        parts=TTFTParts(*(math.fsum(getattr(window.parts, name) for window in together) for name in _PARTS)),
        prompt_lengths=tuple(map(math.fsum, zip(*(window.prompt_lengths for window in together), strict=True))),
        output_lengths=tuple(map(math.fsum, zip(*(window.output_lengths for window in together), strict=True))),
        **sums,
    )


def add_workers(windows: Iterable[WorkerWindow], *, named_by_role: bool = False) -> WorkerWindow:
    """The sum over routers of one worker, or over the workers of one role, called by its name. At least one."""
    together = list(windows)
    sums = {name: math.fsum(getattr(window, name) for window in together) for name in WORKER_SUMS}
    first, span_s = together[0], max(window.span_s for window in together)
    return WorkerWindow(
        first.role if named_by_role else first.worker_id, first.role, first.window_s, span_s, **sums
    )  # fmt: skip
