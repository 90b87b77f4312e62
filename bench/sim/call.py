"""One call on its way through the simulated deployment: what it asks for, where it is, and the instants that its client saw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.request import Request, SamplingParams
from baton.slo import SLO, Verdict
from bench.traces import TraceRow

if TYPE_CHECKING:
    from bench.sim.worker import SimWorker
    from router.admission import Turn
    from router.flow_back import Plan
    from router.holds import Hold

ANSWER_TOKEN = 0  # every token of every answer; prompts are made of larger ids, so no answer is ever found in a cache
_PRIVATE = 1 << 31  # above every block id, below 2^32: ids are hashed as u32


@dataclass(slots=True, eq=False)
class Call:
    row: TraceRow
    seq: int
    slo: SLO
    request: Request
    turn: Turn | None = None
    plan: Plan | None = None
    holds: tuple[Hold, ...] = ()
    prefill_hold: Hold | None = None
    prefill_worker: SimWorker | None = None  # that asked decode for room
    num_computed_tokens: int = 0  # of the prompt
    num_shipped_blocks: int = 0  # or that decode held already
    num_flows: int = 0  # of its KV, on their way
    reserve_sent_s: float | None = None  # None before it asks, and once granted
    is_computed: bool = False  # for another worker: the first token is out
    is_shipped: bool = False
    first_s: float | None = None
    last_s: float = 0.0  # of the tokens so far, as far as anybody asks
    end_s: float | None = None
    handoff_gap_s: float | None = None
    num_long_gaps: int = 0  # longer than its class's itl limit
    long_steps_before: int = 0  # of its decode worker, when the steps that are its gaps began

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None, "no token yet"
        return self.first_s - self.row.at_s

    @property
    def tpot_s(self) -> float:
        """0 for answers of one token."""
        assert self.first_s is not None, "no token yet"
        assert self.end_s is not None, "not over yet"
        return (self.end_s - self.first_s) / (self.row.output_tokens - 1) if self.row.output_tokens > 1 else 0.0

    @property
    def verdict(self) -> Verdict:
        """Nearest-rank p99: of m gaps one in a hundred may be longer than the limit."""
        if self.end_s is None:
            return Verdict.FAILED
        over = self.num_long_gaps > (self.row.output_tokens - 1) // 100
        return self.slo.verdict(
            ttft_ms=1e3 * self.ttft_s,
            tpot_ms=1e3 * self.tpot_s,
            itl_p99_ms=float("inf") if over else 0.0,
            e2e_ms=1e3 * (self.end_s - self.row.at_s),
        )


def request_of(row: TraceRow, seq: int, slo: SLO) -> Request:
    """As a router would have made it: equal block ids become equal tokens."""
    sampling = SamplingParams(max_tokens=row.output_tokens, temperature=0.0, ignore_eos=True)
    return Request(seq, _tokens(row, seq), sampling, priority=slo.priority, slo_class=slo.name)


def _tokens(row: TraceRow, seq: int) -> tuple[int, ...]:
    """What no block id tells is nobody else's."""
    private = _PRIVATE | seq
    if not row.block_ids:
        return (private,) * row.input_tokens
    tokens: list[int] = []
    for block_id in row.block_ids:
        tokens += [block_id + 1] * row.block_tokens
    tokens += [private] * (row.input_tokens - len(tokens))
    return tuple(tokens[: row.input_tokens])
