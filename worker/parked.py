"""What this worker keeps of calls that a client may resume: each sequence's request and the tokens it has said so far.

Routers keep nothing, so that any of them can go on with a call whose router died; the workers are the journal. An entry lives

    1 RUNNING  from Submit or Reserve, growing with every token                               -> 2
    2 KEPT     ended here for whatever reason, or its router is gone; its blocks are not kept -> gone
and goes when its call's window is over, a later attempt at the same sequence has a token here, the call is forgotten, or
room is needed (the longest kept first). A prefill and a decode worker each keep their part of a sequence; the router joins them.

A `Find` claims the call for one router, so that of several that are asked to resume it one does. A claim ends with its time,
with its router's Session, or with the next attempt. Requests that carry no Resumption cost a look-up per token and nothing
else. Knows no router by name, no clock, no text: the key and the router's state are opaque. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.log import get_log
from baton.request import FinishReason, Request, SampledToken
from baton.v1 import worker_pb2
from baton.wire import request_to_pb

log = get_log("worker.parked")

# Between a Find's first answer and the Submit that follows; routers wait for answers at most half as long
CLAIM_S = 2.0
PAGE_BYTES = 512 << 10  # of one Found: an eighth of a Session's outbox
ENTRY_BYTES = 4 << 10  # charged for an entry besides its tokens: bounds their number, too
TOKEN_BYTES = 4  # protobuf keeps u32 in arrays
LOGPROB_BYTES = 80  # a message, measured; and 8 per top entry
SCAN_S = 0.5  # how often windows are looked at; they are seconds


@dataclass(slots=True)
class _Entry:
    resumption_key: bytes
    window_s: float
    sequence: worker_pb2.ParkedSequence
    deadline_s: float | None  # None: a ticket's, whose deadline the prefill worker knows
    nbytes: int
    kept_since_s: float | None = None  # None while it runs here

    @property
    def seq(self) -> int:
        return self.sequence.request.seq

    @property
    def next_index(self) -> int:
        return self.sequence.request.num_output_tokens + len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class _Claim:
    router_epoch: int
    until_s: float
    page_source: bytes  # the ParkedCall; does not change between pages


class ParkedCalls:
    """The journal of one worker; `max_bytes` bounds it, running entries included."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: dict[int, _Entry] = {}  # by seq
        self._seqs: dict[bytes, list[int]] = {}  # by key
        self._kept: dict[int, None] = {}  # seqs in state 2, the longest kept first
        self._claims: dict[bytes, _Claim] = {}
        self._num_bytes = 0
        self._num_evicted = 0  # since the last scan
        self._scan_s = 0.0

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    # --- a sequence's life ---

    def open(self, request: Request, deadline_s: float | None = None) -> None:
        """A sequence begins here."""
        resumption = request.resumption
        if resumption is None or request.seq in self._entries:
            return
        self._claims.pop(resumption.key, None)
        sequence = worker_pb2.ParkedSequence(request=request_to_pb(request))
        entry = _Entry(resumption.key, resumption.window_s, sequence, deadline_s, nbytes=0)
        self._entries[request.seq] = entry
        self._seqs.setdefault(resumption.key, []).append(request.seq)
        self._grow(entry, ENTRY_BYTES + len(resumption.router_state) + TOKEN_BYTES * len(request.token_ids))

    def is_superseded(self, request: Request) -> bool:
        """Whether the call was resumed since `request` was made: by a router that its own did not hear of."""
        resumption = request.resumption
        if resumption is None:
            return False
        return any(e.sequence.request.resumption.generation > resumption.generation for e in self._of(resumption.key))

    def token(self, token: SampledToken) -> None:
        """Called for every token that leaves this worker."""
        entry = self._entries.get(token.seq)
        if entry is None or token.index != entry.next_index or token.finish is FinishReason.CANCELLED:
            return
        sequence, nbytes = entry.sequence, TOKEN_BYTES
        if not sequence.tokens:
            self._drop_earlier(entry)
        if token.logprobs is not None:
            sequence.logprobs.add(
                entry=len(sequence.tokens),
                logprob=token.logprobs.logprob,
                top_ids=token.logprobs.top_ids,
                top_logprobs=token.logprobs.top_logprobs,
            )
            nbytes += LOGPROB_BYTES + 8 * len(token.logprobs.top_ids)
        sequence.tokens.append(token.token)
        sequence.finish_reason = int(token.finish)
        self._grow(entry, nbytes)

    def adopted(self, seq: int, first_token: int) -> None:
        """The token that the prefill worker said; its logprobs are there."""
        entry = self._entries.get(seq)
        if entry is not None and not entry.sequence.tokens:
            self._drop_earlier(entry)
            entry.sequence.tokens.append(first_token)

    def ended(self, seq: int, now_s: float) -> None:
        entry = self._entries.get(seq)
        if entry is not None and entry.kept_since_s is None:
            entry.kept_since_s = now_s
            self._kept[seq] = None

    def forget_seq(self, seq: int) -> None:
        """The router cancelled it for good."""
        entry = self._entries.get(seq)
        if entry is not None:
            self._drop(entry)

    # --- routers ---

    def router_lost(self, router_epoch: int, now_s: float) -> None:
        for seq in list(self._entries):
            if seq >> 32 == router_epoch:
                self.ended(seq, now_s)
        for key, claim in list(self._claims.items()):
            if claim.router_epoch == router_epoch:
                del self._claims[key]

    def running(self, key: bytes) -> list[int]:
        """Seqs of a call that are not over here."""
        return [entry.seq for entry in self._of(key) if entry.kept_since_s is None]

    def is_claimed(self, key: bytes, router_epoch: int, now_s: float) -> bool:
        """Whether another router is about to go on with the call."""
        claim = self._claims.get(key)
        return claim is not None and claim.router_epoch != router_epoch and now_s < claim.until_s

    def find(self, find: worker_pb2.Find, router_epoch: int, now_s: float) -> worker_pb2.Found:
        """One page of what is kept; the first one claims it. End what runs first."""
        if self.is_claimed(find.key, router_epoch, now_s):
            return worker_pb2.Found(find=find.find, claimed=True)
        if (
            not find.offset
        ):  # also where nothing is kept: who asks everybody asks one worker first, and has the call by it
            call = worker_pb2.ParkedCall(sequences=self._told(self._of(find.key), now_s))
            self._claims[find.key] = _Claim(router_epoch, now_s + CLAIM_S, call.SerializeToString())
        claim = self._claims.get(find.key)
        if claim is None:
            return worker_pb2.Found(find=find.find)
        page = claim.page_source[find.offset : find.offset + PAGE_BYTES]
        return worker_pb2.Found(
            find=find.find, total_bytes=len(claim.page_source), offset=find.offset, data=page
        )  # fmt: skip

    def forget(self, key: bytes) -> None:
        for entry in self._of(key):
            self._drop(entry)
        self._claims.pop(key, None)

    def expire(self, now_s: float) -> None:
        if now_s < self._scan_s:
            return
        self._scan_s = now_s + SCAN_S
        if self._num_evicted:
            log.warning("parked_calls_evicted", num_sequences=self._num_evicted, limit_bytes=self._max_bytes)
            self._num_evicted = 0
        for entry in [self._entries[seq] for seq in self._kept]:
            if entry.kept_since_s is not None and now_s > entry.kept_since_s + entry.window_s:
                self._drop(entry)
        for key, claim in list(self._claims.items()):
            if now_s >= claim.until_s:
                del self._claims[key]

    # --- room ---

    def _of(self, key: bytes) -> list[_Entry]:
        return [self._entries[seq] for seq in self._seqs.get(key, ())]

    def _told(self, entries: Iterable[_Entry], now_s: float) -> Iterable[worker_pb2.ParkedSequence]:
        for entry in entries:
            if entry.deadline_s is not None:
                entry.sequence.ttl_ms = max(1, int(1e3 * (entry.deadline_s - now_s)))
            yield entry.sequence

    def _drop_earlier(self, entry: _Entry) -> None:
        """Other attempts at the same sequence: its request carries all that was sent of them."""
        for other in self._of(entry.resumption_key):
            same = other.sequence.request.sampling.sample_index == entry.sequence.request.sampling.sample_index
            if same and other is not entry:
                self._drop(other)

    def _grow(self, entry: _Entry, nbytes: int) -> None:
        entry.nbytes += nbytes
        self._num_bytes += nbytes
        while self._num_bytes > self._max_bytes:
            self._drop(self._entries[next(iter(self._kept), entry.seq)])
            self._num_evicted += 1

    def _drop(self, entry: _Entry) -> None:
        seq = entry.seq
        if self._entries.pop(seq, None) is None:
            return
        self._kept.pop(seq, None)
        self._num_bytes -= entry.nbytes
        seqs = self._seqs[entry.resumption_key]
        seqs.remove(seq)
        if not seqs:
            del self._seqs[entry.resumption_key]
