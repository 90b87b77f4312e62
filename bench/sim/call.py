"""One call on its way through the simulated deployment: what it asks for, where it is, and the instants that its client saw.

A call is placed on a pair of workers by one Attempt after the other: there is a second one only where a worker was lost, and it
is told every token that the client has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    seq: int  # of its first attempt
    slo: SLO  # as it was when the call came
    turn: Turn | None = None
    attempt: Attempt | None = None  # the one under way
    num_moves: int = 0
    first_s: float | None = None
    last_s: float = 0.0  # of the tokens so far on their worker, as far as anybody asks
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
    def too_many_long_gaps(self) -> bool:
        """Nearest-rank p99: of m gaps one in a hundred may be longer than the limit."""
        return self.num_long_gaps > (self.row.output_tokens - 1) // 100

    @property
    def verdict(self) -> Verdict:
        if self.end_s is None:
            return Verdict.FAILED
        return self.slo.verdict(
            ttft_ms=1e3 * self.ttft_s,
            tpot_ms=1e3 * self.tpot_s,
            itl_p99_ms=float("inf") if self.too_many_long_gaps else 0.0,
            e2e_ms=1e3 * (self.end_s - self.row.at_s),
        )


@dataclass(slots=True, eq=False)
class Attempt:
    """One submission of a call to one pair of workers, or to one that does both."""

    call: Call
    request: Request  # with the tokens that the client has
    plan: Plan
    prefill: SimWorker
    decode: SimWorker
    holds: tuple[Hold, ...] = field(default=())
    num_computed_tokens: int = 0  # of its tokens
    num_shipped_blocks: int = 0  # or that decode held already
    num_flows: int = 0  # of its KV, on their way
    reserve_sent_s: float | None = None  # None before it asks, and once granted
    reserve_wait_s: float = 0.0  # until then; 0: it asked for none
    has_begun: bool = False  # its first token is out
    is_computed: bool = False  # for another worker: its first token is out
    is_adopted: bool = False  # decode has all of it
    is_given_up: bool = False  # a worker was lost, and another attempt goes on: what still comes of this one is stale

    @property
    def seq(self) -> int:
        return self.request.seq

    @property
    def num_tokens(self) -> int:
        """To be in KV before its first token."""
        return len(self.request.token_ids)

    @property
    def ends_on_prefill(self) -> bool:
        return self.request.num_tokens_left == 1


def request_of(row: TraceRow, seq: int, slo: SLO) -> Request:
    """As a router would have made it: equal block ids become equal tokens."""
    sampling = SamplingParams(max_tokens=row.output_tokens, temperature=0.0, ignore_eos=True)
    return Request(seq, _tokens(row, seq), sampling, priority=slo.priority, slo_class=slo.name)


def continued(request: Request, call: Call, seq: int, num_sent: int) -> Request:
    """The rest of it, for another worker. What was sent counts as nobody else's either."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    sent = (_PRIVATE | call.seq,) * num_sent
    return replace(request, seq=seq, token_ids=prompt + sent, num_output_tokens=num_sent)


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
