"""One Attempt by itself: a test says what its workers say, in which order, and sees what each of them is sent."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast

from baton.request import FinishReason, Logprobs, Request, Resumption, SamplingParams
from baton.v1 import worker_pb2
from router.events import HandoffLost, Listener, SequenceEnded
from router.fleet import Fleet, Placed
from router.flow_back import Plan
from router.handoff import Attempt
from router.health import Health
from router.holds import Hold, Ledger
from router.placement import Choice, Demand, NoPlace, Score
from router.sequence import SequenceReport

SEQ = 1 << 32 | 7
FIRST = 300  # token i of the answer is FIRST + i
VOCAB_SIZE = 1_000


@dataclass
class Worker:
    """An Endpoint and its Session in one."""

    worker_id: str
    listeners: dict[int, Listener] = field(default_factory=dict)
    cancels: list[bool] = field(default_factory=list)  # `park` of each
    reroutes: list[str] = field(default_factory=list)  # to whom
    grants_ms: list[float] = field(default_factory=list)  # waits for room, as it told them
    num_submits: int = 0
    epoch: int = 1
    view: None = None

    def __post_init__(self) -> None:
        self.health = Health(lambda: None)
        self.ledger = Ledger(lambda: None)

    @property
    def session(self) -> Worker:
        return self

    @property
    def num_calls(self) -> int:
        """That its breaker has judged."""
        return len(self.health._failed)

    def hold(self, waiting_tokens: int, used_tokens: int) -> Hold:
        return self.ledger.hold(waiting_tokens, used_tokens)

    def observe_grant(self, stats: worker_pb2.SeqStats) -> None:
        self.grants_ms.append(stats.reserve_wait_ms)

    def attach(self, seq: int, listener: Listener) -> None:
        self.listeners[seq] = listener

    def detach(self, seq: int) -> None:
        self.listeners.pop(seq, None)

    def peer(self) -> worker_pb2.Peer:
        return worker_pb2.Peer(worker_id=self.worker_id)

    def submit(self, *_: object, **__: object) -> None:
        self.num_submits += 1

    def cancel(self, seq: int, *, park: bool = False) -> None:
        self.cancels.append(park)

    def reroute(self, seq: int, decode: worker_pb2.Peer, serial: int) -> None:
        self.reroutes.append(decode.worker_id)


class OneFleet:
    """p0 prefills; decode is the first of `decodes` that is not to be avoided."""

    def __init__(self, decodes: list[Worker]) -> None:
        self.prefill, self.decodes = Worker("p0"), decodes

    def find_place(self, demand: Demand, avoid: frozenset[str], prefer: str = "") -> Placed | NoPlace:
        decode = next((worker for worker in self.decodes if worker.worker_id not in avoid), None)
        if decode is None:
            return NoPlace("none is left", hopeless=False)
        score = Score(False, 0.0, False, 0.0, 0)
        choice = Choice(self.prefill.worker_id, decode.worker_id, score, 0.0, "remote", 0, 1)
        if decode is self.prefill:
            choice = Choice("p0", "p0", score, 0.0, "both", 0, 0)
        placed: Any = (self.prefill, decode, Plan(choice, demand.prompt_tokens), None, None)
        return Placed(*placed)


@dataclass
class Sink:
    token_ids: list[int] = field(default_factory=list)
    stop_at: int = -1  # index of the token that completes a stop string
    breaks: bool = False

    def token(self, index: int, token_id: int, finish: FinishReason, logprobs: Logprobs | None) -> bool:
        if self.breaks:
            raise ValueError("a defect")
        self.token_ids.append(token_id)
        return index == self.stop_at


class Run:
    """p0 and d0, with d1 (and what else `num_decodes` says) to go to."""

    def __init__(self, num_decodes: int = 2, *, local: bool = False, num_before: int = 0, parks: bool = False) -> None:
        decodes = [Worker(f"d{number}") for number in range(num_decodes)]
        self.fleet = OneFleet(decodes)
        self.prefill, self.decodes = self.fleet.prefill, decodes
        if local:
            self.fleet.decodes = [self.prefill]
        before = tuple(range(FIRST, FIRST + num_before))
        self.sink = Sink()
        self.report = SequenceReport(token_ids=list(before))
        request = Request(
            SEQ,
            (1, 2, 3, *before),
            SamplingParams(max_tokens=10),
            num_output_tokens=num_before,
            resumption=Resumption(b"k", 30.0) if parks else None,
        )
        demand = Demand(len(request.token_ids), 13)
        placed = self.fleet.find_place(demand, frozenset())
        assert isinstance(placed, Placed)
        fleet = cast("Fleet", self.fleet)
        self.attempt = Attempt(
            request, placed, fleet, demand, self.sink, self.report, time.monotonic() + 60, VOCAB_SIZE
        )
        self.task = asyncio.create_task(self.attempt.run())

    async def settle(self) -> None:
        """What was said has been dealt with."""
        for _ in range(3):
            await asyncio.sleep(0)

    def say(self, worker: str, *indices: int, finish: FinishReason = FinishReason.NONE) -> None:
        """Tokens; `finish` is the last one's."""
        for index in indices:
            flag = finish if index == indices[-1] else FinishReason.NONE
            self.attempt.on_token(worker, index, FIRST + index, flag, None, time.monotonic())

    def end(self, worker: str, outcome: worker_pb2.Outcome.ValueType, **fields: Any) -> None:
        stats = fields.pop("stats", worker_pb2.SeqStats())
        made = {"finish": FinishReason.NONE, "error": None, **fields}
        self.attempt.put(SequenceEnded(worker, outcome, stats=stats, **made))

    def hand_over(self, reroute: int = 0) -> None:
        self.end("p0", worker_pb2.OUTCOME_HANDED_OFF, reroute=reroute)

    def lose_handoff(self, error: Any, reroute: int = 0) -> None:
        self.attempt.put(HandoffLost(error, reroute))
