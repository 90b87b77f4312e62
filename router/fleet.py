"""The workers this router may use: one Endpoint each, kept in line with what the controller (or a static list) says.

The fleet is told whole (`apply`), never patched, so a lost message cannot leave a ghost. While the controller is away the
last fleet stays. Sessions live and die with their Endpoint; liveness is the Session's own business, never the controller's.
Every count of work in flight is a Hold, which the attempt that has it releases, however it ends. Event loop only.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from baton import clock
from baton.errors import Unavailable
from baton.log import get_log
from baton.request import Request, Role
from baton.v1 import control_pb2, worker_pb2
from router.explain import Explanation, Explanations, Rules, explain
from router.flow_back import Plan, plan
from router.forecast import Backlog, DecodeSteps, StepModel, backlog
from router.health import PACE_WINDOW_S, Health, judge, judge_pace
from router.holds import Hold, Ledger
from router.placement import Choice, Demand, NoPlace, Outlook, choose, helps, local_limit, look
from router.prefix_index import ExpectedPrefixes, Hashes, PrefixIndex, PrefixRoot, PromptHashing, WorkerPrefixes
from router.rates import PeerSpeed, Rates
from router.session import Liveness, SessionIdentity, WorkerSession, WorkerView
from router.session_cache import HashCache
from router.worker_table import DEFAULT_CHUNK_TOKENS, LinkView, WorkerSnapshot, WorkerTable

log = get_log("router.fleet")

NO_HASHES: Hashes = {}
# Prompts up to this are hashed on the event loop: 256 blocks of 16 tokens, at 3-5 us each (measured, with 12 runnable
# processes on 2 cores). For longer ones a thread costs less than the wait of everybody else.
INLINE_HASH_TOKENS = 4_096
# Whose caches are followed: twice the largest fleet we measure; a popular block takes 528 bytes for it
MAX_WORKERS = 2_048
MAX_SESSIONS = 65_536  # whose last decode worker is remembered, about 10 MB
SETTLE_S = 0.02  # between two at least: each looks at every worker, and names all decode workers to all prefill workers
# A heartbeat and its answer take 0.2 ms of a busy loop (measured with 1,000 Sessions): 250 workers, two a second, a tenth of it.
UNHURRIED_WORKERS = 250
MAX_IDLE_BEATS = 4.0  # 2 s: what a worker without calls says of its load is as old as that
SETTLE_SHARE = 0.1  # of the loop's time at most, while a thousand workers come and go
AWAY = ("draining", "standby")  # states in which the controller wants a worker to take no call
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
class Peers:
    """What workers that are alike, by model and shape, teach about each other."""

    speed: PeerSpeed = field(default_factory=PeerSpeed)  # of those that prefill
    steps: StepModel = field(default_factory=StepModel)  # of those that decode


class Endpoint:
    """A worker as the router sees it. Its row of the table is kept in line with what it says and what it is given."""

    def __init__(self, address: str, worker_id: str, role: Role, health: Health, fleet: Fleet) -> None:
        self.health = health  # outlives the Endpoint where the worker comes back at another address
        self.told_away = (
            ""  # draining | standby, by the controller, before the worker says so itself; "" = it is to serve
        )
        self.shape = ""  # of its hardware, as the controller says
        self.rates = Rates()  # of the Session under way
        self.opened: worker_pb2.Opened | None = None  # the last one; survives the loss of the Session
        self.row = fleet.table.add()
        self.ledger = Ledger(self._touch)
        self.session = WorkerSession(
            worker_id,
            address,
            fleet.identity,
            fleet.liveness,
            lambda: fleet.on_change(self),
            on_load=self._note_load,
            follow=self._follow,
        )
        self._fleet = fleet
        self._role = role  # the last one known
        self.last_standing: tuple[int, Role, str, str] | None = None  # that the fleet has settled, or is about to
        self._peers = Peers()
        self._idle_step_s = 0.0  # a step's length without what sequences and their KV add to it
        self._links: tuple[object, dict[str, LinkView]] = (None, {})  # as they came, and as placement reads them
        self._peers_sent: tuple[WorkerView | None, list[worker_pb2.Peer]] = (None, [])  # in which Session, and whom
        self._judged: WorkerView | None = None  # the Session that `health` knows of
        self._left = False  # the fleet; the row is another worker's, or nobody's
        self._sampled = (0, 0)  # steps and prompt tokens of the worker's life at the last sample
        self._decode_steps = DecodeSteps()  # for the step model
        self._chunk_tokens = DEFAULT_CHUNK_TOKENS

    @property
    def worker_id(self) -> str:
        return self.session.worker_id or self.session.address

    @property
    def role(self) -> Role:
        """As last known."""
        return self._role

    @property
    def standing(self) -> tuple[int, Role, str, str]:
        """What other workers, and the judgement of its pool, depend on."""
        return self.session.epoch, self._role, self.session.state, self.told_away

    @property
    def state(self) -> str:
        """connecting | ready | draining | standby | flipping | ejected."""
        state = self.session.state
        if self.told_away and state in ("ready", "draining"):
            return self.told_away
        if state != "ready":
            return state
        return "ready" if self.health.takes_calls(self.num_inflight, clock.now_s()) else "ejected"

    @property
    def num_inflight(self) -> int:
        """Sequences this router has placed here and not yet seen end."""
        return self.ledger.num_held

    def hold(self, waiting_tokens: int, used_tokens: int) -> Hold:
        """Count a sequence here until the Hold is released; the holder may lower its numbers."""
        return self.ledger.hold(waiting_tokens, used_tokens)

    # -- the row -----------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Write the row anew if anything but its numbers has changed."""
        if self._left:
            return
        fact, now = self._fleet.table.facts[self.row], self._facts()
        if fact is None or replace(fact, last_chosen=0) != now:
            last_chosen = int(self._fleet.table.last_chosen[self.row]) if fact is not None else 0
            self._fleet.table.put(self.row, replace(now, last_chosen=last_chosen))
            self._touch()

    def _facts(self) -> WorkerSnapshot:
        view, state = self.session.view, self.state
        if view is None:
            return WorkerSnapshot(self.worker_id, 0, self.role, state, reason=f"{state}: {self.session.reason}")
        opened = view.opened
        if self._links[0] is not view.links:
            links = {peer: LinkView(link.peer.epoch, link.state, link.reason) for peer, link in view.links.items()}
            self._links = (view.links, links)
        return WorkerSnapshot(
            worker_id=self.worker_id,
            epoch=opened.epoch,
            role=self.role,
            state=state,
            reason=f"ejected: {self.health.reason}" if state == "ejected" else "",
            fingerprint=opened.fingerprint,
            pool_tokens=opened.num_blocks * opened.block_size,
            root=view.prefixes.root,
            token_bytes=opened.kv_block_bytes // max(1, opened.block_size),
            fabric=opened.fabric,
            links=self._links[1],
        )

    def _follow(self, root: PrefixRoot, num_blocks: int) -> WorkerPrefixes:
        self.rates, self._idle_step_s, self._decode_steps = Rates(), 0.0, DecodeSteps()
        self._peers = self._fleet.peers_like(root.fingerprint, self.shape)
        self._fleet.expected.forget(self.row)
        return self._fleet.prefixes.follow(self.row, root, num_blocks)

    def _note_load(self, load: worker_pb2.Load) -> None:
        """Learn from a report, and write what it changes."""
        view = self.session.view
        assert view is not None
        used_tokens = (load.active_blocks + load.reserved_blocks) * view.opened.block_size
        peers = self._peers
        if self.rates.observe_load(load) and self.role is not Role.DECODE:
            peers.speed.observe(self.rates.prefill_tokens_per_s)
        if load.num_running and load.step_ms and self.role is not Role.PREFILL:
            step_s = 1e-3 * load.step_ms
            if decode_step_s := self._decode_steps.take(load):
                peers.steps.observe(load.num_running, used_tokens, decode_step_s)
            self._idle_step_s = max(0.0, step_s - peers.steps.grow_s(load.num_running, used_tokens))
        self._chunk_tokens = load.chunk_tokens or DEFAULT_CHUNK_TOKENS
        self.ledger.report(load.waiting_tokens, used_tokens, load.num_running)

    def _touch(self) -> None:
        self._fleet.touched.add(self)

    def write_load(self, table: WorkerTable) -> None:
        """Write the row's numbers, once for all that has changed since somebody read the table."""
        if self._left:
            return
        row, ledger, steps = self.row, self.ledger, self._peers.steps
        num_running, used_tokens = ledger.num_running, ledger.used_tokens
        table.waiting_tokens[row] = ledger.waiting_tokens
        table.used_tokens[row] = used_tokens
        table.num_running[row] = num_running
        table.step_s[row] = (self._idle_step_s or steps.base_s) + steps.grow_s(num_running, used_tokens)
        table.step_s_per_seq[row] = steps.per_seq_s
        table.step_s_per_token[row] = steps.per_token_s
        table.prefill_tokens_per_s[row] = self._peers.speed.of(self.rates)
        table.kv_bytes_per_s[row] = self.rates.kv_bytes_per_s
        table.chunk_tokens[row] = self._chunk_tokens

    def observe_pull(self, stats: worker_pb2.SeqStats, asked_bytes: int) -> None:
        """Learn from what a pull that this worker was told to make has come to."""
        self.rates.observe_pull(stats, asked_bytes)

    def observe_grant(self, stats: worker_pb2.SeqStats) -> None:
        """Learn from how long a prompt that it computed waited for room on a decode worker, if it asked for any."""
        self.rates.grants.observe(1e-3 * stats.reserve_wait_ms)

    def remember(self) -> None:
        """Keep what the worker says of itself for the time when it says nothing."""
        view = self.session.view
        assert view is not None
        self.opened = view.opened
        self._role = Role(view.load.role or view.opened.role)

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
        if num_steps > last[0] and num_prompt_tokens == last[1] and view.load.num_running and view.load.step_ms:
            self.health.stepped(view.load.num_running, 1e-3 * view.load.step_ms)

    def leave(self, now_s: float) -> None:
        """Its Session is about to be closed: a successor at another address starts with this loss."""
        if self._judged is not None:
            self.health.lost(now_s)
            self._judged = None

    def vacate(self) -> None:
        """From now on nothing is placed here."""
        self._left = True
        self._fleet.table.clear(self.row)

    async def close(self) -> None:
        """End the Session of a vacated Endpoint; its row is free once nothing of it can come any more."""
        table = self._fleet.table
        await self.session.close()
        self._fleet.prefixes.forget(self.row)
        self._fleet.expected.forget(self.row)
        table.free(self.row)

    def send_peers(self, peers: list[worker_pb2.Peer]) -> None:
        """Tell the worker whom it may hand over to, once per Session (with which it forgets them) and change."""
        view, sent = self._peers_sent
        if view is not self.session.view or sent is not peers:
            self._peers_sent = (self.session.view, peers)
            self.session.set_peers(peers)


@dataclass(frozen=True, slots=True)
class Placed:
    """A Plan with its Endpoints."""

    prefill: Endpoint
    decode: Endpoint
    plan: Plan
    holder: Endpoint | None  # whom to pull from
    explanation: Explanation | None


class Fleet:
    """All Endpoints. `known` turns true at the first `apply` or `use_addresses`."""

    def __init__(
        self,
        identity: SessionIdentity,
        liveness: Liveness,
        local_prefill_tokens: int,
        max_index_blocks: int,
        *,
        one_fabric: bool = False,
    ) -> None:
        """`local_prefill_tokens`: as configured, see router/placement.py, local_limit; `one_fabric`: as WorkerTable's."""
        self.known = False
        self.identity = identity
        self.liveness = liveness
        self._table = WorkerTable(one_fabric=one_fabric)
        self.touched: set[Endpoint] = set()  # their rows' numbers are older than they are
        self.prefixes = PrefixIndex(max_index_blocks, MAX_WORKERS)
        self.expected = ExpectedPrefixes(MAX_WORKERS)
        self.explanations = Explanations()
        self._configured_local_tokens = local_limit(local_prefill_tokens)
        self._told_local_tokens: int | None = None  # by the controller; None = it leaves that to the configuration
        self._endpoints: dict[str, Endpoint] = {}  # by worker_id, or by address where that is all we were given
        self._by_row: dict[int, Endpoint] = {}
        self._peers: dict[tuple[str, str], Peers] = {}  # by fingerprint and shape
        self._speed = PeerSpeed()  # of all
        self._homes: OrderedDict[str, str] = OrderedDict()  # session_id -> decode worker, used longest ago first
        self._serial = itertools.count(1)
        self._changed = asyncio.Event()
        self._closing: set[asyncio.Task[None]] = set()
        self._demoted: frozenset[str] = frozenset()  # slow ones, for when nobody else is left
        self._ejected: list[Endpoint] = []
        self._window_ends_s = 0.0  # of the comparison of workers with their peers
        self._starting: list[int] = []  # rows of workers wanted by the controller, not announced yet
        self._settling: asyncio.TimerHandle | None = None
        self._next_settle_s = 0.0
        self._decode_peers: list[worker_pb2.Peer] = []  # as prefill workers were told
        self._limits: PoolLimits | None = None  # None = not known, or to be found again
        self._roots: frozenset[PrefixRoot] | None = None  # of all workers; None = to be found again
        self._known_hashes = HashCache()

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
                endpoint.leave(clock.now_s())
                self._close(worker_id)
        for worker_id, record in wanted.items():
            if worker_id not in self._endpoints:
                role = Role(record.role or Role.BOTH)
                self._open(worker_id, worker_id, record.address, role, known.get(worker_id))
            self._endpoints[worker_id].told_away = record.state if record.state in AWAY else ""
            self._endpoints[worker_id].shape = record.shape
        self._expect([record for record in records if not record.address])
        self._on_change()

    def _expect(self, records: Iterable[control_pb2.WorkerRecord]) -> None:
        """Workers that are still starting are a reason to wait."""
        for row in self._starting:
            self.table.clear(row)
            self.table.free(row)
        self._starting = []
        for record in records:
            row = self.table.add()
            role = Role(record.role or Role.BOTH)
            self.table.put(row, WorkerSnapshot(record.worker_id, 0, role, "connecting", reason=record.state))
            self._starting.append(row)

    def _open(self, key: str, worker_id: str, address: str, role: Role, health: Health | None = None) -> None:
        endpoint = Endpoint(address, worker_id, role, health or Health(self._judge), self)
        self._endpoints[key] = self._by_row[endpoint.row] = endpoint
        endpoint.refresh()
        endpoint.session.start()
        log.info("endpoint_added", worker=worker_id, address=address)

    def _close(self, key: str) -> None:
        endpoint = self._endpoints.pop(key)
        log.info("endpoint_removed", worker=endpoint.worker_id, address=endpoint.session.address)
        endpoint.vacate()
        del self._by_row[endpoint.row]
        task = asyncio.create_task(endpoint.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close every Session."""
        for key in list(self._endpoints):
            self._close(key)
        await asyncio.gather(*self._closing)
        if self._settling is not None:
            self._settling.cancel()

    @property
    def endpoints(self) -> list[Endpoint]:
        return list(self._endpoints.values())

    def epoch_of(self, worker_id: str) -> int:
        """The life that a worker is in; 0 = it is not connected."""
        row = self._table.row_of.get(worker_id)
        endpoint = self._by_row.get(row) if row is not None else None  # None also where it is only being started
        return endpoint.session.epoch if endpoint is not None else 0

    def on_change(self, endpoint: Endpoint) -> None:
        """A Session came, went, or said something new of its worker's state or links."""
        endpoint.tell_health(clock.now_s())
        if endpoint.session.view is not None:
            endpoint.remember()
        endpoint.refresh()
        if endpoint.last_standing != endpoint.standing:
            endpoint.last_standing = endpoint.standing
            self._settle()
        else:  # its links, or why it is away
            self._wake()

    def _on_change(self) -> None:
        """The fleet is another one."""
        for endpoint in self.endpoints:
            endpoint.refresh()
        self._settle()

    def _settle(self) -> None:
        """Introduce workers to each other, judge them and wake whoever waits for a place; soon, and not for each of many."""
        self._limits = self._roots = None
        if self._settling is None:
            wait_s = self._next_settle_s - clock.now_s()
            if wait_s > 0:
                self._settling = asyncio.get_running_loop().call_later(wait_s, self._settle_now)
            else:
                self._settle_now()

    def _settle_now(self) -> None:
        self._settling, began_s = None, clock.now_s()
        self._introduce()
        self._judge()
        self._pace_heartbeats()
        now_s = clock.now_s()
        self._next_settle_s = now_s + max(SETTLE_S, (now_s - began_s) / SETTLE_SHARE)

    def _introduce(self) -> None:
        """Tell prefill workers of decode workers; of other fingerprints too: Hello refuses them once, and says which field
        differs."""
        open_ones = [endpoint for endpoint in self.endpoints if endpoint.session.view is not None]
        decode = [endpoint.session.peer() for endpoint in open_ones if endpoint.role is not Role.PREFILL]
        if decode != self._decode_peers:
            self._decode_peers = decode
        for endpoint in open_ones:
            if endpoint.role is Role.PREFILL:
                endpoint.send_peers(self._decode_peers)

    def _pace_heartbeats(self) -> None:
        """Of workers without a sequence of ours, which harm nobody by being silent, the more slowly the more there are."""
        heartbeat_s = self.liveness.heartbeat_s
        idle_s = heartbeat_s * min(max(1.0, len(self._endpoints) / UNHURRIED_WORKERS), MAX_IDLE_BEATS)
        for endpoint in self.endpoints:
            endpoint.session.idle_heartbeat_s = idle_s

    def _judge(self) -> None:
        """Settle who is ejected, and wake whoever waits for a place."""
        judge([[endpoint.health for endpoint in pool] for pool in self._pools()])
        before, self._ejected = self._ejected, [e for e in self.endpoints if e.health.ejected]
        for endpoint in (*before, *self._ejected):
            endpoint.refresh()
        self._wake()

    def _wake(self) -> None:
        """Let whoever waits for a place look again."""
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
        able = [e for e in self.endpoints if e.session.state == "ready" and not e.told_away]
        return [[e for e in able if e.role in (role, Role.BOTH)] for role in (Role.PREFILL, Role.DECODE)]

    def peers_like(self, fingerprint: str, shape: str) -> Peers:
        """What is known of workers of this model and shape."""
        key = (fingerprint, shape)
        if key not in self._peers:
            self._peers[key] = Peers(PeerSpeed(self._speed))
        return self._peers[key]

    # -- where a sequence goes ---------------------------------------------------------------------------------------

    def snapshots(self) -> list[WorkerSnapshot]:
        """Also of workers that are still starting: they are a reason to wait."""
        return self.table.snapshots()

    async def hash_prompt(self, request: Request) -> Hashes:
        """Under every root, where anybody caches anything; a long prompt off the loop."""
        if not self.prefixes.num_blocks:
            return NO_HASHES
        if self._roots is None:
            views = [endpoint.session.view for endpoint in self.endpoints]
            self._roots = frozenset(view.prefixes.root for view in views if view is not None)
        hashing = PromptHashing(self._known_hashes, request.token_ids, request.tenant_salt, self._roots)
        if hashing.num_tokens_left <= INLINE_HASH_TOKENS:
            return hashing.finish()
        return await asyncio.to_thread(hashing.finish)

    def unready_reason(self) -> str:
        """Why no call could be served now; "" = one could, over a link that was proved."""
        if not self.known:
            return "the controller has not named the fleet yet"
        found = self._find_any()
        if isinstance(found, NoPlace):
            return found.reason
        return f"{found.prefill} to {found.decode} is connecting" if found.score.unproved_link else ""

    def _find_any(self) -> Choice | NoPlace:
        """A place for the least of all calls."""
        return choose(self._look(Demand(prompt_tokens=1, max_total_tokens=1), frozenset()))

    def _refresh_ejected(self) -> None:
        """Time alone lets them be tried again."""
        for endpoint in self._ejected:
            endpoint.refresh()

    def limits(self) -> PoolLimits | None:
        """Of the workers ever opened; None while a pool is unknown."""
        if self._limits is None:
            self._limits = self._new_limits()
        return self._limits

    def _new_limits(self) -> PoolLimits | None:
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

    @property
    def local_prefill_tokens(self) -> int:
        """Prompts that lack at most so many tokens may be prefilled where they decode: see router/placement.py."""
        return self._configured_local_tokens if self._told_local_tokens is None else self._told_local_tokens

    def limit_local_prefill(self, max_tokens: int | None) -> None:
        """Take the controller's limit from the next placement on; None = the configured one."""
        if max_tokens != self._told_local_tokens:
            log.info("local_prefill_tokens", told=max_tokens, configured=self._configured_local_tokens)
            self._told_local_tokens = max_tokens

    def find_place(self, demand: Demand, avoid: frozenset[str], prefer: str = "") -> Placed | NoPlace:
        """Choose workers that could take the sequence now, and count them as chosen."""
        outlook = self._look(demand, avoid)
        local_tokens = self.local_prefill_tokens
        found = choose(outlook, local_prefill_tokens=local_tokens, avoid=avoid, prefer=prefer)
        made = plan(found, outlook) if isinstance(found, Choice) else None
        told = None
        if demand.explain or (demand.request_id and self.explanations.has_room(clock.now_s())):
            told = explain(outlook, found, made, Rules(local_tokens, avoid, prefer))
            self.explanations.add(told)
        if isinstance(found, NoPlace):
            return found
        assert made is not None
        return self._take(found, made, demand, told)

    def forecast(self, demand: Demand, avoid: frozenset[str] = frozenset()) -> Choice | NoPlace:
        """What a call could get now: the place that it would be given, its `ttft_s` and `tpot_s`. Takes nothing."""
        avoid |= self._demoted
        outlook = self._look(demand, avoid)
        return choose(outlook, local_prefill_tokens=self.local_prefill_tokens, avoid=avoid)

    def helps(self, demand: Demand) -> bool:
        """Whether a decode worker would compute the prompt at once, sooner than prefill workers. Takes nothing."""
        if not self.local_prefill_tokens:
            return False
        avoid = self._demoted
        outlook = self._look(demand, avoid)
        return helps(outlook, local_prefill_tokens=self.local_prefill_tokens, avoid=avoid)

    @property
    def table(self) -> WorkerTable:
        """The fleet as it is now."""
        while self.touched:
            self.touched.pop().write_load(self._table)
        return self._table

    def cached_tokens(self, hashes: Hashes) -> int:
        """Leading tokens of a prompt that some worker that computes prompts has cached."""
        if not hashes:
            return 0
        num_blocks = self.prefixes.leading(hashes, len(self._table))
        if not num_blocks.any():
            return 0
        most = num_blocks[self.table.topology().computes].max(initial=0)
        return int(most) * min(root.block_size for root in hashes)

    def backlog(self) -> Backlog:
        """How much work waits for those who take calls."""
        return backlog(self.table, self.table.topology().computes)

    def _look(self, demand: Demand, avoid: frozenset[str]) -> Outlook:
        self._refresh_ejected()
        if demand.session_id and not demand.home:
            demand = replace(demand, home=self._homes.get(demand.session_id, ""))
        blocks = self.prefixes.leading(demand.hashes, len(self.table))
        np.maximum(blocks, self.expected.leading(demand.hashes, len(self.table)), out=blocks)
        np.multiply(blocks, self.table.block_size, out=self.table.cached_tokens)
        return look(self.table, demand, avoid)

    def _take(self, choice: Choice, plan: Plan, demand: Demand, told: Explanation | None) -> Placed:
        prefill, decode = self._by_row[choice.prefill_row], self._by_row[choice.decode_row]
        holder = self._by_row[self.table.row_of[plan.pull.worker_id]] if plan.pull is not None else None
        if plan.forgone:
            prefill.rates.forgo_pull()
        self.table.last_chosen[choice.prefill_row] = self.table.last_chosen[choice.decode_row] = next(self._serial)
        if demand.hashes and prefill.session.view is not None:
            self.expected.add(choice.prefill_row, demand.hashes, prefill.session.view.prefixes.root)
        if demand.session_id:
            self._homes[demand.session_id] = choice.decode
            self._homes.move_to_end(demand.session_id)
            if len(self._homes) > MAX_SESSIONS:
                self._homes.popitem(last=False)
        return Placed(prefill, decode, plan, holder, told)

    def _hopeless(self) -> bool:
        found = self._find_any()
        return self.known and isinstance(found, NoPlace) and found.hopeless

    async def _wait_for_change(self, reason: str, hopeless: bool, until_s: float) -> None:
        changed = self._changed
        left_s = until_s - clock.now_s()
        if hopeless or left_s <= 0:
            raise Unavailable(reason, retry_after_s=RESTART_S)
        try:
            async with asyncio.timeout(left_s):  # `wait_for` of Python 3.11 loses a cancel that comes with the event
                await changed.wait()
        except TimeoutError:
            raise Unavailable(reason, retry_after_s=RESTART_S) from None
