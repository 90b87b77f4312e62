"""Which calls meet their targets, and what comes in: one router's, over the last 30 s and 5 min, in constant memory.

    arrived   a call came, whatever becomes of it
    read      its prompt is tokenised: how long it is, how much of it some worker has cached
    refused   it did not come to be and that was not its caller's doing
    ended     it was served: verdict, where its TTFT went, which workers made it

Each costs some microseconds per call, none per token (docs/goodput.md). What a worker says of its own part of a TTFT is
taken only where it can be true: a number, not negative, no more than the router itself measured. Event loop only; instants
come in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from baton.slo import Verdict
from router.ring import SPANS_S, Ring, Sums
from router.series import header, labelled, sample
from router.windows import CLASS_SUMS, NUM_LENGTH_BUCKETS, ClassWindow, TTFTParts, WorkerWindow, length_bucket

_CLOCK_SLACK_S = 1e-3  # two processes' monotonic clocks agree on durations to well below a millisecond


class _F(IntEnum):
    """Places in a class's row, in the order of Verdict, TTFTParts and ClassWindow."""

    FAILED = 5  # after what was met and the four ways to miss
    MET_TOKENS = 6
    FIRST_TOKENS = 7
    TTFT_S = 8
    PARTS = 9  # how many calls, then the four parts
    HANDOFFS = 14
    HANDOFF_GAP_S = 15
    ARRIVED = 16
    SEQUENCES = 17
    PROMPTS = 18
    PROMPT_TOKENS = 19
    CACHED_TOKENS = 20
    OUTPUTS = 21
    OUTPUT_TOKENS = 22
    PROMPT_LENGTHS = 23
    OUTPUT_LENGTHS = 23 + NUM_LENGTH_BUCKETS
    END = 23 + 2 * NUM_LENGTH_BUCKETS


_VERDICTS = {verdict: place for place, verdict in enumerate(Verdict)}
_CALLS, _IN_TARGET, _MET, _MET_TOKENS, _NUM_WORKER_FIELDS = range(5)  # places in a worker's row


@dataclass(frozen=True, slots=True)
class TTFTSplit:
    """Of one call, seconds that make up its TTFT."""

    admission_s: float
    queue_s: float
    prefill_s: float
    network_s: float


def split_ttft(ttft_s: float, admission_s: float, queue_s: float, prefill_s: float) -> TTFTSplit | None:
    """What remains is the network's. None where a part cannot be: a worker that has not said, or says nonsense."""
    network_s = ttft_s - admission_s - queue_s - prefill_s
    if not (queue_s >= 0 and prefill_s > 0 and admission_s >= 0 and network_s >= -_CLOCK_SLACK_S):  # NaN fails, too
        return None
    return TTFTSplit(admission_s, queue_s, prefill_s, max(0.0, network_s))


@dataclass(frozen=True, slots=True)
class Served:
    """A call that was judged: it finished, or failed after it had been admitted."""

    slo_class: str
    verdict: Verdict
    ttft_met: bool
    pace_met: bool  # TPOT and single gaps
    ttft_s: float | None  # None: no token came
    split: TTFTSplit | None
    handoff_gap_s: float | None
    output_tokens: tuple[int, ...]  # by sequence
    prefill_worker: str  # "" = it came to none
    decode_worker: str


class Goodput:
    """One router's."""

    def __init__(self, start_s: float) -> None:
        self._start_s = start_s
        self._classes: dict[str, Ring] = {}
        self._workers: dict[tuple[str, str], Ring] = {}  # by (worker, role)
        self._arrived: dict[str, int] = {}

    # -- calls -------------------------------------------------------------------------------------------------------

    def arrived(self, slo_class: str, now_s: float) -> None:
        self._arrived[slo_class] = self._arrived.get(slo_class, 0) + 1
        self._class(slo_class).row(now_s)[_F.ARRIVED] += 1

    def read(self, slo_class: str, prompt_tokens: int, cached_tokens: int, num_seqs: int, now_s: float) -> None:
        row = self._class(slo_class).row(now_s)
        row[_F.PROMPTS] += 1
        row[_F.SEQUENCES] += num_seqs
        row[_F.PROMPT_TOKENS] += prompt_tokens
        row[_F.CACHED_TOKENS] += cached_tokens
        row[_F.PROMPT_LENGTHS + length_bucket(prompt_tokens)] += 1

    def refused(self, slo_class: str, now_s: float) -> None:
        self._class(slo_class).row(now_s)[_F.FAILED] += 1

    def ended(self, call: Served, now_s: float) -> None:
        row = self._class(call.slo_class).row(now_s)
        row[_VERDICTS[call.verdict]] += 1
        is_met = call.verdict is Verdict.MET
        num_tokens = sum(call.output_tokens)
        if is_met:
            row[_F.MET_TOKENS] += num_tokens
        if call.ttft_s is not None:
            row[_F.FIRST_TOKENS] += 1
            row[_F.TTFT_S] += call.ttft_s
        if (split := call.split) is not None:
            row[_F.PARTS : _F.PARTS + 5] += (1, split.admission_s, split.queue_s, split.prefill_s, split.network_s)
        if call.handoff_gap_s is not None:
            row[_F.HANDOFFS] += 1
            row[_F.HANDOFF_GAP_S] += call.handoff_gap_s
        if call.verdict is not Verdict.FAILED:
            for num_output in call.output_tokens:
                row[_F.OUTPUTS] += 1
                row[_F.OUTPUT_TOKENS] += num_output
                row[_F.OUTPUT_LENGTHS + length_bucket(num_output)] += 1
        for worker, role, in_target in (
            (call.prefill_worker, "prefill", call.ttft_met),
            (call.decode_worker, "decode", call.pace_met),
        ):
            if worker:
                self._worker(worker, role).row(now_s)[:] += (1, in_target, is_met, num_tokens * is_met)

    def _class(self, name: str) -> Ring:
        ring = self._classes.get(name)
        if ring is None:
            ring = self._classes[name] = Ring(_F.END, self._start_s)
        return ring

    def _worker(self, worker_id: str, role: str) -> Ring:
        ring = self._workers.get((worker_id, role))
        if ring is None:
            ring = self._workers[worker_id, role] = Ring(_NUM_WORKER_FIELDS, self._start_s)
        return ring

    # -- what they came to -------------------------------------------------------------------------------------------

    def arrivals(self) -> Iterable[tuple[str, int]]:
        """(class, calls) since the router's start."""
        return self._arrived.items()

    def class_windows(self, now_s: float) -> list[ClassWindow]:
        """Each class over each span. Classes without a call for LONG_S are forgotten."""
        windows = []
        for name, ring in list(self._classes.items()):
            sums = [ring.sums(now_s, span_s) for span_s in SPANS_S]
            if sums[-1].fields.any():
                windows += [_class_window(name, *of_span) for of_span in zip(SPANS_S, sums, strict=True)]
            else:
                del self._classes[name]
        return windows

    def worker_windows(self, now_s: float) -> Iterator[WorkerWindow]:
        """Each worker in each role over each span, for one reader at a time; idle ones are forgotten likewise."""
        for (worker_id, role), ring in list(self._workers.items()):
            sums = [ring.sums(now_s, span_s) for span_s in SPANS_S]
            if not sums[-1].fields.any():
                del self._workers[worker_id, role]
                continue
            for window_s, of_span in zip(SPANS_S, sums, strict=True):
                yield WorkerWindow(worker_id, role, window_s, of_span.span_s, *of_span.fields.tolist())


def _class_window(name: str, window_s: float, sums: Sums) -> ClassWindow:
    values = sums.fields.tolist()
    return ClassWindow(
        class_name=name,
        window_s=window_s,
        span_s=sums.span_s,
        parts=TTFTParts(*values[_F.PARTS : _F.HANDOFFS]),
        prompt_lengths=tuple(values[_F.PROMPT_LENGTHS : _F.OUTPUT_LENGTHS]),
        output_lengths=tuple(values[_F.OUTPUT_LENGTHS :]),
        **dict(zip(CLASS_SUMS, values[: _F.PARTS] + values[_F.HANDOFFS : _F.PROMPT_LENGTHS], strict=True)),
    )


class GoodputGauges:
    """Lines of /metrics: attainment and goodput of each class over each span, as of the scrape."""

    def __init__(self, goodput: Goodput, clock: Callable[[], float]) -> None:
        self._goodput = goodput
        self._clock = clock

    def lines(self) -> Iterator[str]:
        windows = [(_labels(window), window) for window in self._goodput.class_windows(self._clock())]
        yield header("baton_slo_attainment_ratio", "Share of judged calls that met every target.", "gauge")
        for labels, window in windows:
            if window.attainment is not None:  # nobody asked: that is neither good nor bad
                yield sample("baton_slo_attainment_ratio", labels, window.attainment)
        yield header("baton_goodput_per_second", "Calls that met every target.", "gauge")
        for labels, window in windows:
            yield sample("baton_goodput_per_second", labels, window.per_s(window.num_met))


def _labels(window: ClassWindow) -> str:
    return labelled(("slo_class", "window"), (window.class_name, f"{window.window_s:g}s"))
