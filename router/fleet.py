"""The workers this router may use: one Endpoint each, kept in line with what the controller (or a static list) says.

The fleet is told whole (`apply`), never patched, so a lost message cannot leave a ghost. While the controller is away the
last fleet stays. Sessions live and die with their Endpoint; liveness is the Session's own business, never the controller's.
Every count of work in flight is a Hold, tied to a `with` block. Event loop only.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.errors import Unavailable
from baton.log import get_log
from baton.request import Request, Role
from baton.v1 import control_pb2, worker_pb2
from router.flow_back import Plan, plan
from router.health import PACE_WINDOW_S, Health, judge, judge_pace
from router.placement import Choice, Demand, LinkView, NoPlace, WorkerSnapshot, place
from router.prefix_index import Hashes, hash_prompt
from router.session import Liveness, SessionIdentity, WorkerSession, WorkerView

log = get_log("router.fleet")

NO_HASHES: Hashes = {}
# Prompts up to this are hashed on the event loop: 256 blocks of 16 tokens, at 3-5 us each (measured, with 12 runnable
# processes on 2 cores). For longer ones a thread costs less than the wait of everybody else.
INLINE_HASH_TOKENS = 4_096
RESTART_S = 9.0  # kill -9 of an actor -> answering again; measured: DESIGN section 10


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """The largest sequence that some worker of each pool can hold. Tokens."""

    max_model_len: int
    prefill_tokens: int
    decode_tokens: int

    @property
    def max_prompt_tokens(self) -> int:
        """At least one token must fit behind the prompt; the last token generated needs no KV."""
        return min(self.prefill_tokens, self.decode_tokens, self.max_model_len - 1)


@dataclass(slots=True)
class Hold:
    """One sequence's share of an Endpoint's load, as this router knows it before the worker reports it. Tokens."""

    waiting_tokens: int
    used_tokens: int


class Endpoint:
    """A worker as the router sees it."""

    def __init__(self, session: WorkerSession, role: Role, health: Health) -> None:
        self.session = session
        self.health = health  # outlives the Endpoint where the worker comes back at another address
        self.told_draining = False  # by the controller, before the worker says so itself
        self.shape = ""  # of its hardware, as the controller says
        self.last_chosen = 0
        self.opened: worker_pb2.Opened | None = None  # the last one; survives the loss of the Session
        self._role = role  # the last one known
        self._holds: dict[int, Hold] = {}  # by id()
        self._peers_sent: tuple[WorkerView | None, list[worker_pb2.Peer]] = (None, [])  # in which Session, and whom
        self._judged: WorkerView | None = None  # the Session that `health` knows of
        self._sampled = (0, 0)  # steps and prompt tokens of the worker's life at the last sample

    @property
    def worker_id(self) -> str:
        return self.session.worker_id or self.session.address

    @property
    def role(self) -> Role:
        view = self.session.view
        return Role(view.load.role or view.opened.role) if view else self._role

    @property
    def state(self) -> str:
        state = self.session.state
        if state != "ready":
            return state
        if self.told_draining:
            return "draining"
        return "ready" if self.health.takes_calls(len(self._holds), time.monotonic()) else "ejected"

    @property
    def num_inflight(self) -> int:
        """Sequences this router has placed here and not yet seen end."""
        return len(self._holds)

    @contextmanager
    def hold(self, waiting_tokens: int, used_tokens: int) -> Iterator[Hold]:
        """Count a sequence here until the block is left, however it is left; the holder may lower its numbers."""
        hold = Hold(waiting_tokens, used_tokens)
        self._holds[id(hold)] = hold
        try:
            yield hold
        finally:
            del self._holds[id(hold)]

    def snapshot(self, hashes: Hashes) -> WorkerSnapshot:
        """The worker as placement sees it for a prompt with these block hashes."""
        view = self.session.view
        if view is None:
            return WorkerSnapshot(
                self.worker_id, 0, self.role, self.state, reason=f"{self.state}: {self.session.reason}"
            )
        load, opened, state = view.load, view.opened, self.state
        held = list(self._holds.values())
        reported_used = (load.active_blocks + load.reserved_blocks) * opened.block_size
        return WorkerSnapshot(
            worker_id=self.worker_id,
            epoch=opened.epoch,
            role=self.role,
            state=state,
            reason=f"ejected: {self.health.reason}" if state == "ejected" else "",
            fingerprint=opened.fingerprint,
            pool_tokens=opened.num_blocks * opened.block_size,
            # The worker's report lags by up to a step, ours ignores other routers: the larger one is nearer the truth.
            waiting_tokens=max(load.waiting_tokens, sum(hold.waiting_tokens for hold in held)),
            used_tokens=max(reported_used, sum(hold.used_tokens for hold in held)),
            last_chosen=self.last_chosen,
            root=view.prefixes.root,
            cached_tokens=view.prefixes.num_leading(hashes) * opened.block_size,
            token_bytes=opened.kv_block_bytes // max(1, opened.block_size),
            step_s=1e-3 * load.step_ms,
            prefill_tokens_per_s=view.rates.prefill_tokens_per_s,
            kv_bytes_per_s=view.rates.kv_bytes_per_s,
            links={peer: LinkView(link.peer.epoch, link.state, link.reason) for peer, link in view.links.items()},
        )

    def observe_pull(self, stats: worker_pb2.SeqStats, asked_bytes: int) -> None:
        """Learn from what a pull that this worker was told to make has come to."""
        if self.session.view is not None:
            self.session.view.rates.observe_pull(stats, asked_bytes)

    def remember(self) -> None:
        """Keep what the worker says of itself for the time when it says nothing."""
        assert self.session.view is not None
        self.opened = self.session.view.opened
        self._role = self.role

    def tell_health(self, now_s: float) -> None:
        """Let the breaker know of Sessions lost and opened."""
        view, before = self.session.view, self._judged
        self._judged = view
        if view is not before and before is not None:
            self.health.lost(now_s)
        if view is not before and view is not None:
            self.health.returned(now_s)

    def sample_step(self) -> None:
        """Note how long its steps take, where none of the last ones computed a prompt: those have any length."""
        view = self.session.view
        if view is None:
            return
        last, self._sampled = self._sampled, (view.load.num_steps, view.load.prompt_tokens_computed)
        num_steps, num_prompt_tokens = self._sampled
        if num_steps > last[0] and num_prompt_tokens == last[1] and view.load.num_running:
            self.health.stepped(view.load.num_running, 1e-3 * view.load.step_ms)

    def leave(self, now_s: float) -> None:
        """Its Session is about to be closed: a successor at another address starts with this loss."""
        if self._judged is not None:
            self.health.lost(now_s)
            self._judged = None

    def send_peers(self, peers: list[worker_pb2.Peer]) -> None:
        """Tell the worker whom it may hand over to, once per Session (with which it forgets them) and change."""
        view, sent = self._peers_sent
        if view is not self.session.view or sent != peers:
            self._peers_sent = (self.session.view, peers)
            self.session.set_peers(peers)


@dataclass(frozen=True, slots=True)
class Placed:
    """A Plan with its Endpoints."""

    prefill: Endpoint
    decode: Endpoint
    plan: Plan
    holder: Endpoint | None  # whom to pull from


class Fleet:
    """All Endpoints. `known` turns true at the first `apply` or `use_addresses`."""

    def __init__(self, identity: SessionIdentity, liveness: Liveness, local_prefill_tokens: int) -> None:
        self.known = False
        self._identity = identity
        self._liveness = liveness
        self._local_prefill_tokens = local_prefill_tokens
        self._endpoints: dict[str, Endpoint] = {}  # by worker_id, or by address where that is all we were given
        self._serial = itertools.count(1)
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._demoted: frozenset[str] = frozenset()  # slow ones, for when nobody else is left
        self._window_ends_s = 0.0  # of the comparison of workers with their peers
        self._starting: list[WorkerSnapshot] = []  # wanted by the controller, not announced yet

    # -- who is there ------------------------------------------------------------------------------------------------

    def use_addresses(self, addresses: Iterable[str]) -> None:
        """A fixed fleet, for tests and for a router without a controller."""
        self.known = True
        for address in addresses:
            self._open(address, "", address, Role.BOTH)
        self._on_change()

    def apply(self, records: Sequence[control_pb2.WorkerRecord]) -> None:
        """Make the fleet exactly these workers."""
        self.known = True
        wanted = {record.worker_id: record for record in records if record.address}
        known = {worker_id: endpoint.health for worker_id, endpoint in self._endpoints.items()}
        for worker_id, endpoint in list(self._endpoints.items()):
            record = wanted.get(worker_id)
            if record is None or record.address != endpoint.session.address:
                endpoint.leave(time.monotonic())
                self._close(worker_id)
        for worker_id, record in wanted.items():
            if worker_id not in self._endpoints:
                role = Role(record.role or Role.BOTH)
                self._open(worker_id, worker_id, record.address, role, known.get(worker_id))
            self._endpoints[worker_id].told_draining = record.state == "draining"
            self._endpoints[worker_id].shape = record.shape
        self._starting = [
            WorkerSnapshot(record.worker_id, 0, Role(record.role or Role.BOTH), "connecting", reason=record.state)
            for record in records
            if not record.address
        ]
        self._on_change()

    def _open(self, key: str, worker_id: str, address: str, role: Role, health: Health | None = None) -> None:
        session = WorkerSession(worker_id, address, self._identity, self._liveness, self._on_change)
        self._endpoints[key] = Endpoint(session, role, health or Health(self._judge))
        session.start()
        log.info("endpoint_added", worker=worker_id, address=address)

    def _close(self, key: str) -> None:
        endpoint = self._endpoints.pop(key)
        log.info("endpoint_removed", worker=endpoint.worker_id, address=endpoint.session.address)
        task = asyncio.create_task(endpoint.session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close every Session."""
        for key in list(self._endpoints):
            self._close(key)
        await asyncio.gather(*self._closing)

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self._endpoints.values())

    def _on_change(self) -> None:
        """Introduce workers to each other, judge them and wake whoever waits for a place."""
        now_s = time.monotonic()
        for endpoint in self.endpoints:
            endpoint.tell_health(now_s)
            if endpoint.session.view is not None:
                endpoint.remember()
                if endpoint.role is Role.PREFILL:
                    endpoint.send_peers(self._peers_of(endpoint))
        self._judge()

    def _judge(self) -> None:
        """Settle who is ejected, and wake whoever waits for a place."""
        judge([[endpoint.health for endpoint in pool] for pool in self._pools()])
        self._changed.set()
        self._changed = asyncio.Event()

    def tick(self, now_s: float) -> None:
        """Compare workers with their peers, and let ejected ones be tried once their backoff is over. Call it a few times
        a second."""
        for endpoint in self.endpoints:
            endpoint.sample_step()
        if now_s >= self._window_ends_s:
            self._window_ends_s = now_s + PACE_WINDOW_S
            for peers in self._alike():
                judge_pace([endpoint.health for endpoint in peers], now_s)
        self._demoted = frozenset(e.worker_id for e in self.endpoints if e.health.is_demoted(now_s))
        if any(endpoint.health.is_open for endpoint in self.endpoints):
            self._judge()

    def _alike(self) -> Iterable[list[Endpoint]]:
        """Workers that may be expected to be equally fast."""
        groups: dict[tuple[str, str, Role], list[Endpoint]] = {}
        for endpoint in self.endpoints:
            if endpoint.opened is not None:
                key = (endpoint.opened.fingerprint, endpoint.shape, endpoint.role)
                groups.setdefault(key, []).append(endpoint)
        return groups.values()

    def _pools(self) -> list[list[Endpoint]]:
        """Who may take calls, by what they can do; a `both` worker is in two."""
        able = [e for e in self.endpoints if e.session.state == "ready" and not e.told_draining]
        return [[e for e in able if e.role in (role, Role.BOTH)] for role in (Role.PREFILL, Role.DECODE)]

    def _peers_of(self, prefill: Endpoint) -> list[worker_pb2.Peer]:
        """Of other fingerprints too: Hello refuses them once, and says which field differs."""
        return [
            endpoint.session.peer()
            for endpoint in self.endpoints
            if endpoint is not prefill
            and endpoint.session.view is not None
            and endpoint.role in (Role.DECODE, Role.BOTH)
        ]

    # -- where a sequence goes ---------------------------------------------------------------------------------------

    def snapshots(self, hashes: Hashes = NO_HASHES) -> list[WorkerSnapshot]:
        """Also of workers that are still starting: they are a reason to wait."""
        return [endpoint.snapshot(hashes) for endpoint in self.endpoints] + self._starting

    async def hash_prompt(self, request: Request) -> Hashes:
        """Under every root that some worker caches anything of; a long prompt off the loop."""
        views = [endpoint.session.view for endpoint in self.endpoints]
        roots = {view.prefixes.root for view in views if view is not None and len(view.prefixes)}
        if len(request.token_ids) * len(roots) <= INLINE_HASH_TOKENS:
            return hash_prompt(request.token_ids, request.tenant_salt, roots)
        return await asyncio.to_thread(hash_prompt, request.token_ids, request.tenant_salt, roots)

    def unready_reason(self) -> str:
        """Why no call could be served now; "" = one could, over a link that was proved."""
        if not self.known:
            return "the controller has not named the fleet yet"
        found = place(self.snapshots(), Demand(prompt_tokens=1, max_total_tokens=1))
        if isinstance(found, NoPlace):
            return found.reason
        return f"{found.prefill} to {found.decode} is connecting" if found.score.unproved_link else ""

    def limits(self) -> PoolLimits | None:
        """Of the workers ever opened; None while a pool is unknown."""
        known = [(e.role, e.opened) for e in self.endpoints if e.opened is not None]
        prefill = [o.num_blocks * o.block_size for role, o in known if role in (Role.PREFILL, Role.BOTH)]
        decode = [o.num_blocks * o.block_size for role, o in known if role in (Role.DECODE, Role.BOTH)]
        if not prefill or not decode:
            return None
        return PoolLimits(min(opened.max_model_len for _, opened in known), max(prefill), max(decode))

    async def wait_for_limits(self, until_s: float) -> PoolLimits:
        """Raises: Unavailable, when a pool stays unknown."""
        while (limits := self.limits()) is None:
            await self._wait_for_change(self.unready_reason(), self._hopeless(), until_s)
        return limits

    async def wait_for_place(self, demand: Demand, avoid: frozenset[str], until_s: float, prefer: str = "") -> Placed:
        """Choose workers for a sequence, waiting for one to come up until `until_s` (monotonic); `prefer`: see `place`.

        Raises:
            Unavailable: nobody came, or nobody ever can.
        """
        avoid |= self._demoted
        while True:
            found = self.find_place(demand, avoid, prefer)
            if isinstance(found, Placed):
                return found
            await self._wait_for_change(found.reason, found.hopeless and self.known, until_s)

    def find_place(self, demand: Demand, avoid: frozenset[str], prefer: str = "") -> Placed | NoPlace:
        """Choose workers that could take the sequence now."""
        workers, local_tokens = self.snapshots(demand.hashes), self._local_prefill_tokens
        found = place(workers, demand, local_prefill_tokens=local_tokens, avoid=avoid, prefer=prefer)
        if isinstance(found, NoPlace):
            return found
        return self._take(plan(found, demand, workers, local_prefill_tokens=local_tokens, avoid=avoid))

    def _take(self, plan: Plan) -> Placed:
        by_id = {endpoint.worker_id: endpoint for endpoint in self.endpoints}
        holder = by_id[plan.pull.worker_id] if plan.pull is not None else None
        placed = Placed(by_id[plan.choice.prefill], by_id[plan.choice.decode], plan, holder)
        if plan.forgone and placed.prefill.session.view is not None:
            placed.prefill.session.view.rates.forgo_pull()
        serial = next(self._serial)
        placed.prefill.last_chosen = placed.decode.last_chosen = serial
        return placed

    def _hopeless(self) -> bool:
        found = place(self.snapshots(), Demand(prompt_tokens=1, max_total_tokens=1))
        return self.known and isinstance(found, NoPlace) and found.hopeless

    async def _wait_for_change(self, reason: str, hopeless: bool, until_s: float) -> None:
        changed = self._changed
        left_s = until_s - time.monotonic()
        if hopeless or left_s <= 0:
            raise Unavailable(reason, retry_after_s=RESTART_S)
        try:
            await asyncio.wait_for(changed.wait(), left_s)
        except TimeoutError:
            raise Unavailable(reason, retry_after_s=RESTART_S) from None
