"""The router of the handoff rig: submits calls, collects what workers say, and judges it against the reference.

What every call owes, whatever happens to it:

    tokens    each equals the reference at its index; one worker sends its indices in order without a hole; prefill sends
              the first one only, decode all others
    an end    prefill says exactly one of Refused, FINISHED, HANDED_OFF, FAILED, CANCELLED (unless it or the router dies);
              after HANDED_OFF decode says exactly one of FINISHED, FAILED, CANCELLED
    FINISHED  means that every token has come, and nothing comes after any of these; decode, if its link to prefill broke, may
              refuse its ticket meanwhile

A call whose prefill has failed or died is over: the router cancels decode and goes elsewhere (router/handoff.py). Decode may
have adopted the sequence by then and say so once; what it says must still be right.

Where the handoff is lost, `on_handoff_lost` decides: by default nobody, so that the call fails a lease later.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton.request import FinishReason, Request, SamplingParams
from baton.v1 import worker_pb2
from baton.wire import error_from_pb, request_to_pb
from engine.scripted_runner import answer
from tests.handoff.handoff_rig import EOS, Cluster, EndedOut, LostOut, RefusedOut, RigWorker, SessionOut, TokenOut

LATE_S = 1.0  # DESIGN section 5: whatever is told to end has ended within 1 s; a deadline is no less
REFUSED = "REFUSED"
FINISHED = "FINISHED"
HANDED_OFF = "HANDED_OFF"
CANCELLED = "CANCELLED"
FAILED = "FAILED"


@dataclass(slots=True)
class Part:
    """What one worker said about one call."""

    worker: RigWorker
    outcome: str = ""
    error_code: str = ""
    message: str = ""
    finish: FinishReason = FinishReason.NONE
    indices: list[int] = field(default_factory=list)
    stats: worker_pb2.SeqStats = field(default_factory=worker_pb2.SeqStats)

    @property
    def is_over(self) -> bool:
        return bool(self.outcome) or not self.worker.alive


@dataclass(slots=True)
class Call:
    request: Request
    expected: dict[int, int]  # token by output index
    finish: FinishReason
    deadline_s: float
    prefill: Part | None  # None: local prefill on decode
    decode: Part
    tokens: dict[int, int] = field(default_factory=dict)
    cancelled: bool = False
    router_lost: bool = False
    over_s: float = 0.0
    left: list[Part] = field(default_factory=list)  # decode workers before a Reroute
    num_lost: int = 0  # handoffs

    @property
    def seq(self) -> int:
        return self.request.seq

    @property
    def parts(self) -> list[Part]:
        return [part for part in (self.prefill, self.decode, *self.left) if part is not None]

    @property
    def is_over(self) -> bool:
        """Nobody owes the router anything any more."""
        if self.router_lost:
            return True
        if self.prefill is not None and self.prefill.outcome != HANDED_OFF:
            return self.prefill.is_over
        return self.decode.is_over

    @property
    def is_finished(self) -> bool:
        return FINISHED in (part.outcome for part in self.parts) and self.tokens == self.expected

    @property
    def outcome(self) -> str:
        """Of the worker that answers for the call."""
        if self.prefill is not None and self.prefill.outcome != HANDED_OFF:
            return self.prefill.outcome
        return self.decode.outcome


class RigRouter:
    """One router process. Its mistakes are the test's own; everything that workers say is checked on arrival."""

    def __init__(self, cluster: Cluster, epoch: int = 0x7001) -> None:
        self.cluster = cluster
        self.epoch = epoch
        self.calls: list[Call] = []
        self.errors: list[str] = []
        self.on_handoff_lost: Callable[[Call], None] = lambda call: None
        self._by_seq: dict[int, Call] = {}
        self._num_seqs = 0
        cluster.routers.add(epoch)
        others = cluster.extra_turns
        cluster.extra_turns = lambda: others() + self._turns()

    # --- what a client wants ---

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        prefill: str = "prefill-0",
        decode: str = "decode-0",
        local: bool = False,
        num_sent: int = 0,
        pull_from: str = "",
        pull_blocks: int = 1_000,
        ttl_s: float = 60.0,
        sampling: SamplingParams | None = None,
        script: Sequence[int] = (),
        seq: int | None = None,
    ) -> Call:
        """Start a call. `num_sent` output tokens are in the client's hands already (continuation); `pull_from` caches more
        of the prompt than the prefill worker."""
        sampling = sampling or SamplingParams(max_tokens=max_tokens, temperature=0.0)
        if seq is None:
            self._num_seqs += 1
            seq = self.epoch << 32 | self._num_seqs
        output, finish = reference(prompt, sampling, script)
        if script:
            self.cluster.script[seq] = script
        else:
            self.cluster.script.pop(seq, None)
        request = Request(seq, (*prompt, *output[:num_sent]), sampling, num_sent)
        prefill_worker, decode_worker = self.cluster.workers[prefill], self.cluster.workers[decode]
        call = Call(
            request=request,
            expected=dict(list(enumerate(output))[num_sent:]),
            finish=finish,
            deadline_s=self.cluster.clock.now_s + ttl_s,
            prefill=None if local else Part(prefill_worker),
            decode=Part(decode_worker),
        )
        self.calls.append(call)
        self._by_seq[seq] = call
        submit = worker_pb2.Submit(request=request_to_pb(request), ttl_ms=int(1_000 * ttl_s))
        if not local:
            submit.decode.worker_id, submit.decode.epoch = decode_worker.worker_id, decode_worker.epoch
        if pull_from:
            holder = self.cluster.workers[pull_from]
            submit.pull_from.worker_id, submit.pull_from.epoch = holder.worker_id, holder.epoch
            submit.pull_blocks = pull_blocks
        self._send(decode_worker if local else prefill_worker, worker_pb2.SessionRequest(submit=submit))
        return call

    def cancel(self, call: Call) -> None:
        """As the router does: every worker that may hold it is told."""
        call.cancelled = True
        for part in call.parts:
            if not part.is_over:
                self._send(part.worker, worker_pb2.SessionRequest(cancel=worker_pb2.Cancel(seq=call.seq)))

    def reroute(self, call: Call, decode: str) -> None:
        """Have prefill ship to another decode worker; the one before, which may have adopted it, is told to end."""
        worker = self.cluster.workers[decode]
        if worker is not call.decode.worker or call.decode.is_over:
            self.cancel_decode(call)
            call.left.append(call.decode)
            call.decode = Part(worker)
        reroute = worker_pb2.Reroute(
            seq=call.seq, decode=worker_pb2.Peer(worker_id=worker.worker_id, epoch=worker.epoch)
        )
        assert call.prefill is not None
        self._send(call.prefill.worker, worker_pb2.SessionRequest(reroute=reroute))

    def die(self) -> None:
        """The process is gone; every worker loses its session."""
        self.cluster.routers.discard(self.epoch)
        for call in self.calls:
            call.router_lost = call.router_lost or not call.is_over
        for worker in self.cluster.workers.values():
            worker.lost_routers.append(self.epoch)
            worker.sessions.outbox = deque(event for event in worker.sessions.outbox if not self._owns(event))

    def _send(self, worker: RigWorker, request: worker_pb2.SessionRequest) -> None:
        if worker.alive:
            worker.session_inbox.append(request)

    # --- what workers say ---

    def _turns(self) -> list[Callable[[], None]]:
        return [
            lambda worker=worker: self._read_one(worker)  # type: ignore[misc]
            for worker in self.cluster.workers.values()
            if worker.sessions.outbox and self._owns(worker.sessions.outbox[0])
        ]

    def _owns(self, event: SessionOut) -> bool:
        return seq_of(event) >> 32 == self.epoch

    def _read_one(self, worker: RigWorker) -> None:
        event = worker.sessions.outbox.popleft()
        call = self._by_seq.get(seq_of(event))
        if call is None:
            return
        part = next((part for part in call.parts if part.worker is worker), None)
        if part is None:
            self._error(call, f"{worker.worker_id} speaks of a call that it was not given")
        elif part.outcome:
            self._error(call, f"{worker.worker_id} says {event} after {part.outcome}")
        elif isinstance(event, LostOut):
            call.num_lost += 1
            if part is not call.prefill:
                self._error(call, f"{worker.worker_id} has lost a handoff that is not its own")
            self.on_handoff_lost(call)
        elif isinstance(event, TokenOut):
            self._on_token(call, part, event)
        else:
            self._on_end(call, part, event)

    def _on_token(self, call: Call, part: Part, event: TokenOut) -> None:
        index, token = event.token.index, event.token.token
        start = call.request.num_output_tokens
        first_here = start if part is call.prefill or call.prefill is None else start + 1
        if index != (part.indices[-1] + 1 if part.indices else first_here):
            self._error(call, f"{part.worker.worker_id} sent index {index} after {part.indices}")
        if part is call.prefill and index != start:
            self._error(call, f"prefill sent index {index}")
        if call.expected.get(index) != token:
            self._error(call, f"token {index} is {token}, the reference says {call.expected.get(index)}")
        is_last = index == max(call.expected)
        if event.token.finish != (call.finish if is_last else FinishReason.NONE):
            self._error(call, f"token {index} is flagged {event.token.finish!r}")
        part.indices.append(index)
        call.tokens[index] = token

    def _on_end(self, call: Call, part: Part, event: EndedOut | RefusedOut) -> None:
        if isinstance(event, RefusedOut):
            part.outcome, part.error_code, part.message = REFUSED, event.error.code, event.error.message
        else:
            message = event.message
            part.outcome = worker_pb2.Outcome.Name(message.outcome).removeprefix("OUTCOME_")
            part.finish = FinishReason(message.finish_reason)
            part.stats = message.stats
            if message.HasField("error"):
                error = error_from_pb(message.error)
                part.error_code, part.message = error.code, error.message
            if (part.outcome == FAILED) != message.HasField("error"):
                self._error(call, f"{part.outcome} and an error: {part.error_code!r}")
        if part.outcome == FINISHED and part.finish != call.finish:
            self._error(call, f"finished with {part.finish!r}, not {call.finish!r}")
        if part.outcome == HANDED_OFF and part is not call.prefill:
            self._error(call, "decode says HANDED_OFF")
        if call.prefill is part and part.outcome in (REFUSED, FAILED, CANCELLED):
            self.cancel_decode(call)
        if call.is_over and not call.over_s:
            call.over_s = self.cluster.clock.now_s

    def cancel_decode(self, call: Call) -> None:
        if not call.decode.is_over:
            self._send(call.decode.worker, worker_pb2.SessionRequest(cancel=worker_pb2.Cancel(seq=call.seq)))

    def on_worker_lost(self, worker: RigWorker) -> None:
        """Its session broke: whatever it held is over, and the other worker is told."""
        for call in self.calls:
            if any(part.worker is worker and not part.outcome for part in call.parts):
                self.cancel(call)

    def _error(self, call: Call, what: str) -> None:
        self.errors.append(f"call {call.seq:#x}: {what}")

    # --- judgement ---

    def check(self, call: Call) -> list[str]:
        """What is wrong with a call that is over."""
        wrong: list[str] = []
        if not call.is_over:
            wrong.append(
                f"has no end; prefill {call.prefill and call.prefill.outcome!r}, decode {call.decode.outcome!r}"
            )
        if call.outcome == FINISHED and call.tokens != call.expected:
            wrong.append(f"is finished with {len(call.tokens)} of {len(call.expected)} tokens")
        if call.prefill is not None and call.prefill.outcome == FINISHED and call.decode.outcome not in ("", REFUSED):
            wrong.append("finished on prefill, and decode speaks of it")
        if call.over_s > call.deadline_s + LATE_S and not self.cluster.had_stops:
            wrong.append(f"ended {call.over_s - call.deadline_s:.2f} s after its deadline")
        return [f"call {call.seq:#x} {what}" for what in wrong]


def seq_of(event: SessionOut) -> int:
    if isinstance(event, TokenOut):
        return event.token.seq
    return event.message.seq if isinstance(event, EndedOut) else event.seq


def reference(
    prompt: Sequence[int], sampling: SamplingParams, script: Sequence[int] = ()
) -> tuple[list[int], FinishReason]:
    """The whole output, without an engine."""
    output = list(script[: sampling.max_tokens])
    output += answer([*prompt, *output], sampling, sampling.max_tokens - len(output))
    for index, token in enumerate(output):
        stops = (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
        if stops and index + 1 >= sampling.min_tokens:
            return output[: index + 1], FinishReason.STOP
    return output, FinishReason.LENGTH


def random_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(100, 900) for _ in range(length))


class Rig:
    """A cluster with one router: what most tests want."""

    def __init__(self, seed: int, cluster: Cluster) -> None:
        self.seed = seed
        self.cluster = cluster
        self.router = RigRouter(cluster)
        self.routers = [self.router]
        self.rng = random.Random(seed ^ 0x5EED)

    @property
    def calls(self) -> list[Call]:
        return [call for router in self.routers for call in router.calls]

    def replace_router(self) -> None:
        """The router's process dies and another one takes its place."""
        self.router.die()
        self.add_router()

    def add_router(self) -> None:
        """One more router, which is `router` from now on."""
        self.router = RigRouter(self.cluster, self.router.epoch + 1)
        self.routers.append(self.router)

    def drain(self, limit_s: float = 90.0) -> None:
        """Run until every call is over and nothing is left, then judge everything.

        limit_s: the longest deadline (60 s) and every lease and reconnection behind it.
        """
        self.cluster.run_until(lambda: all(call.is_over for call in self.calls) and self.cluster.is_quiet(), limit_s)
        assert not self.problems(), f"seed {self.seed}:\n" + "\n".join(self.problems())

    def problems(self) -> list[str]:
        for worker in self.cluster.workers.values():
            worker.check_poison()
            worker.local_engine.check_integrity()
        found = self.cluster.all_violations() + self.cluster.leftovers()
        for router in self.routers:
            found += router.errors
            for call in router.calls:
                found += router.check(call)
        return found

    def finish_all(self) -> None:
        """For scenarios without faults: everything not cancelled is whole."""
        self.drain()
        unfinished = [
            f"call {call.seq:#x}: {call.outcome} {[(p.error_code, p.message) for p in call.parts]}"
            for call in self.calls
            if not call.cancelled and not call.is_finished
        ]
        assert not unfinished, f"seed {self.seed}:\n" + "\n".join(unfinished)
