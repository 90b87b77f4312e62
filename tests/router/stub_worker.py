"""A worker without an engine: a real gRPC server that speaks worker.proto and says what its Script tells it.

Two stubs hand over by a method call: the prefill stub says token 0 and calls the decode stub, which says the rest on its own
Session, as real workers would after KV arrived. Gates (asyncio.Event) hold a stage until the test opens it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from baton.errors import BatonError
from baton.ids import new_epoch
from baton.peer_trust import PLAIN, PeerTrust
from baton.v1 import serving_pb2, worker_pb2, worker_pb2_grpc
from baton.wire import PROTOCOL_VERSION, error_to_pb

EOS = 2  # tests/tiny_models.py
BLOCK = 16


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate


@dataclass
class Script:
    """What a stub says; each part may be changed while it runs."""

    tokens: Sequence[int] = tuple(range(300, 340))  # the answer to everything, cut by max_tokens, repeated as needed
    refuse: BatonError | None = None
    fail_prefill: BatonError | None = None
    transfer_ms: float = 0.0  # of a handoff, as its Ended says
    exposed_ms: float = 0.0
    fail_handoff: BatonError | None = None  # prefill says so after decode has adopted the sequence
    hold_handoff: BatonError | None = None  # prefill says HandoffLost, and ships again to whom it is told
    lose_handoff: bool = False  # decode never gets the sequence
    fail_after: tuple[int, BatonError] | None = None  # (tokens said, error)
    duplicate: bool = False  # each token is said twice
    skip_index: int | None = None  # this token is never said
    give_up_at: int | None = None  # this token is flagged as the last of a cancelled sequence
    silent: bool = False  # heartbeats and everything else go unanswered
    prefill_gate: asyncio.Event = field(default_factory=_open_gate)
    decode_gate: asyncio.Event = field(default_factory=_open_gate)
    pause_at: int | None = None  # wait for decode_gate before this index only


class StubWorker(worker_pb2_grpc.WorkerServicer):
    """Start it, point a router at `address`, look at `submits` and `cancels`."""

    def __init__(
        self,
        worker_id: str,
        role: worker_pb2.Role.ValueType = worker_pb2.ROLE_BOTH,
        *,
        num_blocks: int = 64,
        max_model_len: int = 2048,
        fingerprint: str = "f" * 32,
        tokenizer_hash: str = "",
        fabric: str = "",
        port: int = 0,
        trust: PeerTrust = PLAIN,
    ) -> None:
        self.worker_id = worker_id
        self._trust = trust
        self._fabric = fabric
        self.role = role
        self.epoch = new_epoch()
        self.script = Script()
        self.peers: dict[str, StubWorker] = {}
        self.link_state = "ready"
        self.kv_load = worker_pb2.Load()  # what it says of its KV plane
        self.submits: list[worker_pb2.Submit] = []
        self.adopted: list[int] = []
        self.cancels: list[int] = []
        self.heartbeats: list[worker_pb2.Heartbeat] = []
        self.reroutes: list[worker_pb2.Reroute] = []
        self._rerouted: dict[int, worker_pb2.Reroute] = {}  # while they are prefilled
        self._held: dict[
            int, tuple[worker_pb2.Request, worker_pb2.SeqStats]
        ] = {}  # prefilled, and nobody to give it to
        self.told_peers: list[worker_pb2.Peer] = []
        self.address = ""
        self._num_blocks = num_blocks
        self._max_model_len = max_model_len
        self._fingerprint = fingerprint
        self._tokenizer_hash = tokenizer_hash
        self._port = port
        self._seen_prompts: set[tuple[int, ...]] = set()
        self._outboxes: dict[int, asyncio.Queue[worker_pb2.SessionEvent]] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    @property
    def num_open(self) -> int:
        return len(self._running)

    async def start(self) -> StubWorker:
        self._server = grpc.aio.server(
            options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20))
        )
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._trust.listen(self._server, "127.0.0.1", self._port)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def kill(self) -> None:
        """What SIGKILL looks like from outside: every stream breaks at once, nothing is said before."""
        for task in self._running.values():
            task.cancel()
        await self._server.stop(None)

    async def Session(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[worker_pb2.SessionEvent]:
        first = await anext(aiter(requests))
        router_epoch = first.open.router_epoch
        outbox: asyncio.Queue[worker_pb2.SessionEvent] = asyncio.Queue()
        self._drop(router_epoch)  # as workers do: its old stream has ended, and may not know it yet
        self._outboxes[router_epoch] = outbox
        reader = asyncio.create_task(self._read(requests, outbox))
        try:
            yield worker_pb2.SessionEvent(opened=self._opened())
            while True:
                event = await outbox.get()
                if not self.script.silent:
                    yield event
        finally:
            reader.cancel()
            if self._outboxes.get(router_epoch) is outbox:
                del self._outboxes[router_epoch]
                self._drop(router_epoch)

    def _drop(self, router_epoch: int) -> None:
        """What a stream that has ended had submitted."""
        for seq in [seq for seq in self._running if seq >> 32 == router_epoch]:
            self._running.pop(seq).cancel()

    async def _read(
        self,
        requests: AsyncIterator[worker_pb2.SessionRequest],
        outbox: asyncio.Queue[worker_pb2.SessionEvent],
    ) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "heartbeat":
                self.heartbeats.append(request.heartbeat)
                reply = worker_pb2.HeartbeatReply(sent_ns=request.heartbeat.sent_ns, load=self.load())
                outbox.put_nowait(worker_pb2.SessionEvent(heartbeat=reply))
            elif kind == "submit":
                self._on_submit(request.submit)
            elif kind == "cancel":
                self.cancels.append(request.cancel.seq)
                self._cancel(request.cancel.seq)
            elif kind == "reroute":
                self._on_reroute(request.reroute)
            elif kind == "peers":
                self.told_peers = list(request.peers.decode)
                outbox.put_nowait(worker_pb2.SessionEvent(links=worker_pb2.Links(links=self._links())))

    # -- what it says of itself --------------------------------------------------------------------------------------

    def load(self) -> worker_pb2.Load:
        load = worker_pb2.Load(role=self.role, num_running=self.num_open, free_blocks=self._num_blocks)
        load.MergeFrom(self.kv_load)
        return load

    def _opened(self) -> worker_pb2.Opened:
        return worker_pb2.Opened(
            worker_id=self.worker_id,
            epoch=self.epoch,
            role=self.role,
            model="tiny",
            fingerprint=self._fingerprint,
            weights_hash=self._fingerprint.swapcase(),
            tokenizer_hash=self._tokenizer_hash,
            fabric=self._fabric,
            max_model_len=self._max_model_len,
            num_blocks=self._num_blocks,
            block_size=BLOCK,
            max_num_seqs=64,
            load=self.load(),
            links=self._links(),
            protocol_version=PROTOCOL_VERSION,
        )

    def _links(self) -> list[worker_pb2.LinkStatus]:
        return [
            worker_pb2.LinkStatus(peer=peer, state=self.link_state, transport="loopback") for peer in self.told_peers
        ]

    def _say(self, seq: int, event: worker_pb2.SessionEvent) -> None:
        if outbox := self._outboxes.get(seq >> 32):
            outbox.put_nowait(event)

    # -- sequences ---------------------------------------------------------------------------------------------------

    def _on_submit(self, submit: worker_pb2.Submit) -> None:
        self.submits.append(submit)
        seq = submit.request.seq
        if self.script.refuse is not None:
            refused = worker_pb2.Refused(seq=seq, error=error_to_pb(self.script.refuse))
            self._say(seq, worker_pb2.SessionEvent(refused=refused))
            return
        self._running[seq] = asyncio.create_task(self._prefill(submit))

    def _cancel(self, seq: int) -> None:
        if task := self._running.pop(seq, None):
            task.cancel()
            self._end(seq, worker_pb2.OUTCOME_CANCELLED)

    async def _prefill(self, submit: worker_pb2.Submit) -> None:
        request = submit.request
        await self.script.prefill_gate.wait()
        stats = self._stats(request)
        if self.script.fail_prefill is not None:
            self._end(request.seq, worker_pb2.OUTCOME_FAILED, stats, self.script.fail_prefill)
            return
        if self._token(request, request.num_output_tokens):
            self._end(request.seq, worker_pb2.OUTCOME_FINISHED, stats)
        elif submit.HasField("decode"):
            stats.kv_bytes, stats.transport = 4096, "loopback"
            stats.kv_transfer_ms, stats.exposed_transfer_ms = self.script.transfer_ms, self.script.exposed_ms
            if reroute := self._rerouted.pop(request.seq, None):
                self._hand_over(request, stats, reroute)
                return
            if self.script.hold_handoff is not None:
                self._held[request.seq] = (request, stats)
                lost = worker_pb2.HandoffLost(seq=request.seq, error=error_to_pb(self.script.hold_handoff))
                self._say(request.seq, worker_pb2.SessionEvent(handoff_lost=lost))
                return
            if not self.script.lose_handoff:
                self.peers[submit.decode.worker_id].adopt(request)
            if self.script.fail_handoff is not None:
                self._end(request.seq, worker_pb2.OUTCOME_FAILED, stats, self.script.fail_handoff)
            else:
                self._end(request.seq, worker_pb2.OUTCOME_HANDED_OFF, stats)
        else:
            await self._decode(request, stats)

    def _on_reroute(self, reroute: worker_pb2.Reroute) -> None:
        """A sequence that has ended here leaves it unanswered."""
        self.reroutes.append(reroute)
        if held := self._held.pop(reroute.seq, None):
            self._hand_over(*held, reroute)
        elif reroute.seq in self._running:
            self._rerouted[reroute.seq] = reroute

    def _hand_over(self, request: worker_pb2.Request, stats: worker_pb2.SeqStats, reroute: worker_pb2.Reroute) -> None:
        self.peers[reroute.decode.worker_id].adopt(request)
        self._end(request.seq, worker_pb2.OUTCOME_HANDED_OFF, stats, reroute=reroute.serial)

    def adopt(self, request: worker_pb2.Request) -> None:
        """Decode gets a sequence whose KV has arrived."""
        self.adopted.append(request.seq)
        self._running[request.seq] = asyncio.create_task(self._decode(request, worker_pb2.SeqStats()))

    async def _decode(self, request: worker_pb2.Request, stats: worker_pb2.SeqStats) -> None:
        index = request.num_output_tokens + 1
        while True:
            if self.script.pause_at in (None, index):
                await self.script.decode_gate.wait()
            if self.script.fail_after is not None and index >= self.script.fail_after[0]:
                self._end(request.seq, worker_pb2.OUTCOME_FAILED, stats, self.script.fail_after[1])
                return
            if self._token(request, index):
                self._end(request.seq, worker_pb2.OUTCOME_FINISHED, stats)
                return
            index += 1
            await asyncio.sleep(0)

    def _token(self, request: worker_pb2.Request, index: int) -> bool:
        """Say one token in a Step of its own; True when it is the last one."""
        sampling = request.sampling
        token = self.script.tokens[index % len(self.script.tokens)]
        finish = serving_pb2.FINISH_REASON_UNSPECIFIED
        if (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            finish = serving_pb2.FINISH_REASON_STOP
        elif index + 1 == sampling.max_tokens:
            finish = serving_pb2.FINISH_REASON_LENGTH
        if index == self.script.give_up_at:
            finish = serving_pb2.FINISH_REASON_CANCELLED
        step = worker_pb2.Step(seq=[request.seq], index=[index], token=[token], flags=[finish])
        if sampling.HasField("num_logprobs"):
            top_ids = [token, *range(3, 2 + sampling.num_logprobs)]
            step.logprobs.append(
                worker_pb2.TokenLogprobs(
                    entry=0,
                    logprob=-0.25 * (index + 1),
                    top_ids=top_ids[: sampling.num_logprobs],
                    top_logprobs=[-0.25 * (index + 1) - rank for rank in range(sampling.num_logprobs)],
                )
            )
        if index != self.script.skip_index:
            for _ in range(1 + self.script.duplicate):
                self._say(request.seq, worker_pb2.SessionEvent(step=step))
        return finish != serving_pb2.FINISH_REASON_UNSPECIFIED

    def _stats(self, request: worker_pb2.Request) -> worker_pb2.SeqStats:
        """Cached tokens as a prefix cache would find them: whole blocks, never the last token."""
        prompt = tuple(request.token_ids)
        cached = (len(prompt) - 1) // BLOCK * BLOCK if prompt in self._seen_prompts else 0
        self._seen_prompts.add(prompt)
        return worker_pb2.SeqStats(
            queue_ms=1.0, prefill_ms=2.0, cached_tokens=cached, computed_tokens=len(prompt) - cached
        )

    def _end(
        self,
        seq: int,
        outcome: worker_pb2.Outcome.ValueType,
        stats: worker_pb2.SeqStats | None = None,
        error: BatonError | None = None,
        reroute: int = 0,
    ) -> None:
        self._running.pop(seq, None)
        ended = worker_pb2.Ended(
            seq=seq,
            outcome=outcome,
            stats=stats,
            error=error_to_pb(error) if error is not None else None,
            reroute=reroute,
        )
        self._say(seq, worker_pb2.SessionEvent(ended=ended))


async def start_pair(**settings: object) -> tuple[StubWorker, StubWorker]:
    """A prefill and a decode stub that know each other."""
    prefill = await StubWorker("p0", worker_pb2.ROLE_PREFILL, **settings).start()  # type: ignore[arg-type]
    decode = await StubWorker("d0", worker_pb2.ROLE_DECODE, **settings).start()  # type: ignore[arg-type]
    prefill.peers["d0"] = decode
    return prefill, decode
