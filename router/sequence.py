"""A sequence as the router has it: what is to be served, where its tokens go, what has become of it.

Written by the attempt that serves it (router/handoff.py), read by whoever counts, charges or resumes it. Event loop only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from baton.request import FinishReason, Logprobs, Request
from baton.tracing import NO_SPAN, Span
from baton.v1 import worker_pb2
from router.explain import Explanation
from router.prefix_index import Hashes


class TokenSink(Protocol):
    """Takes tokens in order, each index once, a continued sequence's from where it was. Never blocks."""

    def token(self, index: int, token_id: int, finish: FinishReason, logprobs: Logprobs | None) -> bool:
        """Returns True when the answer is complete for the router's reasons (a stop string)."""
        ...


@dataclass(frozen=True, slots=True)
class SequenceJob:
    """What is to be served."""

    request: Request  # as the client made it: no seq, no output tokens
    deadline_s: float  # monotonic
    unavailable_wait_s: float  # how long to wait for a worker to come up, within the deadline
    session_id: str = ""  # of the conversation
    ttft_ms: float = 0.0  # targets of the call; 0 = none
    tpot_ms: float = 0.0  # of its tokens, by whichever target is tighter
    itl_p99_ms: float = 0.0  # the tightest target of all classes
    explain: bool = False  # say why each attempt went where it went
    prefer: str = ""  # a prefill worker that has the prompt in its cache
    hashes: Hashes = field(default_factory=dict)  # of the prompt's blocks, where somebody has made them already
    fingerprint: str = ""  # of the only model that may go on with what the report begins with; "" = any
    span: Span = NO_SPAN  # of its call


def _nothing() -> None:
    pass


@dataclass(slots=True)
class SequenceReport:
    """What became of a sequence; filled while it runs, so that a cancelled call has its counts too."""

    finish: FinishReason = FinishReason.NONE
    token_ids: list[int] = field(default_factory=list)  # that the client has, or is about to have
    submitted_s: float = 0.0  # monotonic; of the last attempt before the first token
    first_token_s: float = 0.0
    second_token_s: float = 0.0
    last_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between consecutive tokens, as they arrived here
    prefill_worker: str = ""
    decode_worker: str = ""
    explanation: Explanation | None = None  # of the last attempt's place
    fingerprint: str = ""  # of what the workers compute: weights, tokenizer, numerics
    stats: worker_pb2.SeqStats = field(default_factory=worker_pb2.SeqStats)  # of the worker that prefilled first
    handed_off: bool = False  # decode has acknowledged the KV
    num_retries: int = 0  # attempts after the first
    num_reroutes: int = 0  # times that prefill shipped again
    on_first_token: Callable[[], None] = _nothing  # called once, from within the worker's message

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def handoff_gap_s(self) -> float | None:
        """0 where the second token came first and waited for the other; None where one worker made both, or there is one."""
        if self.prefill_worker == self.decode_worker or not self.second_token_s:
            return None
        return self.second_token_s - self.first_token_s


@dataclass(frozen=True, slots=True)
class Token:
    """One that came before its turn, or the last one."""

    token_id: int
    finish: FinishReason
    logprobs: Logprobs | None


@dataclass(slots=True)
class TokenMerge:
    """Puts tokens of two workers in the order of their index. Pure."""

    next_index: int = 0
    early: dict[int, Token] = field(default_factory=dict)

    def push(self, index: int, token: Token) -> list[Token]:
        """The tokens that are now in order; empty for a duplicate or one that comes early."""
        if index >= self.next_index:
            self.early.setdefault(index, token)
        in_order = []
        while (ready := self.early.pop(self.next_index, None)) is not None:
            in_order.append(ready)
            self.next_index += 1
        return in_order
