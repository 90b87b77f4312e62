"""What placement knows of every worker, as columns: a row per worker, an array per fact. Pure: no clock, no socket.

A WorkerSnapshot is one row written out, for people, tests, simulations and explanations. Facts that change rarely (who it is,
its state, its links) come as a snapshot by `put`; numbers that change with every step and every call are written into their
column by whoever owns the row. So a choice among a thousand workers reads arrays and rebuilds nothing.

Invariants: rows never move while their worker lives; a free row has neither role nor state, so it can never be chosen.
`links[p, d]` is of this life of d: a link to an earlier epoch says nothing of this one and counts as CONNECTING.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.request import Role
from router.prefix_index import PrefixRoot
from router.rates import DEFAULT_KV_BYTES_PER_S, DEFAULT_PREFILL_TOKENS_PER_S

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

REFUSED, LOST, CONNECTING, READY = range(4)  # codes of a link's state; only the last two can be used
LINK_STATES = ("refused", "lost", "connecting", "ready")
MIN_ROWS = 16
DEFAULT_CHUNK_TOKENS = 512  # engine.chunk_tokens, of a worker that does not say


@dataclass(frozen=True, slots=True)
class LinkView:
    """A prefill worker's link to one decode worker."""

    epoch: int  # of the peer the link was made with
    state: str  # connecting | ready | refused | lost
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker as placement sees it. Reported loads are merged with what this router has in flight there."""

    worker_id: str
    epoch: int
    role: Role
    state: str  # connecting | ready | draining | standby | flipping | ejected
    fingerprint: str = ""
    pool_tokens: int = 0  # what all of its KV blocks hold
    waiting_tokens: int = 0  # prompt tokens not yet computed
    used_tokens: int = 0  # KV of running sequences and reservations
    num_running: int = 0
    last_chosen: int = 0  # serial number of the last placement here, 0 = never
    root: PrefixRoot | None = None  # what its block hashes depend on
    cached_tokens: int = 0  # leading ones of the prompt at hand, in whole blocks, as far as it has said
    token_bytes: int = 0  # KV of one token
    step_s: float = 0.0  # of a step at this moment
    step_s_per_seq: float = 0.0  # what one more sequence adds to it
    step_s_per_token: float = 0.0  # what its KV adds
    prefill_tokens_per_s: float = DEFAULT_PREFILL_TOKENS_PER_S
    kv_bytes_per_s: float = DEFAULT_KV_BYTES_PER_S  # of what it pulls
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS  # of a prompt in one step, at most
    fabric: str = ""  # of its network: workers of one fabric reach each other the fast way; "" = not said
    links: Mapping[str, LinkView] = field(default_factory=dict)  # by decode worker
    reason: str = ""  # why it is not ready

    @property
    def prefills(self) -> bool:
        return self.role in (Role.PREFILL, Role.BOTH)

    @property
    def decodes(self) -> bool:
        return self.role in (Role.DECODE, Role.BOTH)


# Columns that a snapshot's field of the same name fills.
NUMBERS = (
    "pool_tokens", "waiting_tokens", "used_tokens", "num_running", "last_chosen", "cached_tokens", "token_bytes",
    "step_s", "step_s_per_seq", "step_s_per_token", "prefill_tokens_per_s", "kv_bytes_per_s",
    "chunk_tokens",
)  # fmt: skip
# Columns of names: equal numbers for equal names; 0 = no name.
NAMES = ("fingerprint", "root", "fabric")


# What a link costs whoever would use it: nothing, much before it is proved, and no sum makes up for one that is down.
UNPROVED = 100.0
UNPROVED_S = 1e9  # for a prefill worker none of whose links is proved
LINK_COST = np.array((np.inf, np.inf, UNPROVED, 0.0))  # by code


@dataclass(frozen=True, slots=True)
class Topology:
    """What follows from rarely changing facts alone; made anew when one of them changes. [rows] each."""

    prefill: Mask  # takes prompts for others
    paired: Mask  # of those: some decode worker may be linked to it
    proved: Mask  # of those: its link to some decode worker is ready
    decode: Mask  # takes sequences
    both: Mask  # of those: prefills for itself
    any_both: bool
    computes: Mask  # prompts, for others or for itself
    prefill_cost: Floats  # 0 for those that prefill, UNPROVED_S where no link is proved, inf for others
    decode_cost: Floats  # 0 for those that decode, inf for others
    per_pool_token: Floats  # 1 / pool_tokens
    least_pool_tokens: float  # of those that take anything
    one_model: bool  # every worker that takes calls has the same fingerprint
    pull_cost: dict[int, Floats]  # by holder: 0 for rows that can pull from it, else inf; filled as they are asked for


class WorkerTable:
    """Rows of workers. Columns are attributes, named as the snapshot's fields, float64 [rows]."""

    pool_tokens: Floats
    waiting_tokens: Floats
    used_tokens: Floats
    num_running: Floats
    last_chosen: Floats
    cached_tokens: Floats
    token_bytes: Floats
    step_s: Floats
    step_s_per_seq: Floats
    step_s_per_token: Floats
    prefill_tokens_per_s: Floats
    kv_bytes_per_s: Floats
    chunk_tokens: Floats
    fingerprint: Floats
    root: Floats
    fabric: Floats

    def __init__(self, *, one_fabric: bool = False) -> None:
        """`one_fabric`: workers that say different fabrics are no pair; who says none may be on any."""
        self.one_fabric = one_fabric
        self.facts: list[WorkerSnapshot | None] = []  # by row; its numbers are as old as the last `put`
        self.row_of: dict[str, int] = {}
        self.links: npt.NDArray[np.int8] = np.zeros((0, 0), np.int8)  # [prefill row, decode row]
        self._columns: Floats = np.ones((len(NUMBERS) + len(NAMES), 0))  # 1 in free rows, so that all may be divided by
        self.block_size: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._codes: dict[Hashable, int] = {"": 0}
        self._free: list[int] = []
        self._topology: Topology | None = None
        self._grow(MIN_ROWS)

    def __len__(self) -> int:
        """Rows, free ones included: the length of every column."""
        return len(self.facts)

    def add(self) -> int:
        """Set a row aside for a worker."""
        if not self._free:
            self._grow(2 * len(self))
        return self._free.pop()

    def clear(self, row: int) -> None:
        """Its worker is gone; the row can be chosen no more, and waits for `free`."""
        self._forget_name(row)
        self.facts[row] = None
        self._columns[:, row] = 1
        self.block_size[row] = 0
        self.links[row, :] = self.links[:, row] = CONNECTING
        self._topology = None

    def free(self, row: int) -> None:
        """Nobody writes to a cleared row any more."""
        assert self.facts[row] is None, "a row is cleared before it is free"
        self._free.append(row)

    def put(self, row: int, snapshot: WorkerSnapshot) -> None:
        """Write a whole row."""
        before = self.facts[row]
        if before is not None and before.worker_id != snapshot.worker_id:
            self._forget_name(row)
        self.facts[row] = snapshot
        self.row_of[snapshot.worker_id] = row
        for number, name in enumerate(NUMBERS):
            self._columns[number, row] = getattr(snapshot, name)
        root = (snapshot.fingerprint, snapshot.root)
        self.fingerprint[row], self.fabric[row] = self.code(snapshot.fingerprint), self.code(snapshot.fabric)
        self.root[row] = self.code(root)
        self.block_size[row] = snapshot.root.block_size if snapshot.root is not None else 0
        is_another = before is None or _who(before) != _who(snapshot)
        if is_another or before is None or before.links is not snapshot.links:
            self._put_links(row, snapshot.links)
        if is_another:
            self._put_links_to(row, snapshot)
        if self.one_fabric and snapshot.fabric:
            other = (self.fabric != self.fabric[row]) & (self.fabric > 0)
            self.links[row, other] = self.links[other, row] = REFUSED
        self._topology = None

    def _forget_name(self, row: int) -> None:
        fact = self.facts[row]
        if fact is not None and self.row_of.get(fact.worker_id) == row:
            del self.row_of[fact.worker_id]

    def _put_links(self, row: int, links: Mapping[str, LinkView]) -> None:
        self.links[row, :] = CONNECTING
        for peer, link in links.items():
            column = self.row_of.get(peer)
            if column is not None and self._epoch(column) == link.epoch:
                self.links[row, column] = LINK_STATES.index(link.state)

    def _put_links_to(self, column: int, snapshot: WorkerSnapshot) -> None:
        """What others said of it before it said who it is."""
        self.links[:, column] = CONNECTING
        for row, fact in enumerate(self.facts):
            link = fact.links.get(snapshot.worker_id) if fact is not None else None
            if link is not None and link.epoch == snapshot.epoch:
                self.links[row, column] = LINK_STATES.index(link.state)

    def _epoch(self, row: int) -> int:
        fact = self.facts[row]
        return fact.epoch if fact is not None else 0

    def code(self, name: Hashable) -> int:
        """The number that stands for a name in its column."""
        return self._codes.setdefault(name, len(self._codes))

    def name(self, row: int) -> str:
        fact = self.facts[row]
        assert fact is not None, "a free row"
        return fact.worker_id

    def topology(self) -> Topology:
        if self._topology is None:
            self._topology = self._new_topology()
        return self._topology

    def _new_topology(self) -> Topology:
        roles = np.array([fact.role if fact and fact.state == "ready" else 0 for fact in self.facts])
        prefill, both = roles == Role.PREFILL, roles == Role.BOTH
        decode = (roles == Role.DECODE) | both
        fits = (self.fingerprint[:, None] == self.fingerprint[None, :]) & decode[None, :]
        paired = prefill & (fits & (self.links >= CONNECTING)).any(axis=1)
        proved = prefill & (fits & (self.links == READY)).any(axis=1)
        return Topology(
            prefill=prefill,
            paired=paired,
            proved=proved,
            decode=decode,
            both=both,
            any_both=bool(both.any()),
            computes=prefill | both,
            prefill_cost=_prefill_cost(paired, proved),
            decode_cost=np.where(decode, 0.0, np.inf),
            per_pool_token=1 / np.maximum(self.pool_tokens, 1.0),
            least_pool_tokens=float(self.pool_tokens[roles > 0].min(initial=np.inf)),
            one_model=len(np.unique(self.fingerprint[roles > 0])) < 2,
            pull_cost={},
        )

    def pull_cost(self, holder: int) -> Floats:
        """0 for rows to which blocks that `holder` caches are of use, and can go; inf for others."""
        known = self.topology().pull_cost
        if holder not in known:
            usable = (self.root == self.root[holder]) & (self.links[:, holder] == READY)
            known[holder] = np.where(usable, 0.0, np.inf)
        return known[holder]

    def assume(self, paired: Mask, proved: Mask) -> None:
        """Take as given who has partners, where those themselves are not part of the table; until the next `put`."""
        cost = _prefill_cost(paired, proved)
        self._topology = replace(self.topology(), paired=paired, proved=proved, prefill_cost=cost)

    def snapshot(self, row: int) -> WorkerSnapshot:
        """The row as it is now."""
        fact = self.facts[row]
        assert fact is not None, "a free row"
        return with_numbers(fact, self._columns[: len(NUMBERS), row])

    def snapshots(self) -> list[WorkerSnapshot]:
        return [self.snapshot(row) for row, fact in enumerate(self.facts) if fact is not None]

    def numbers(self, rows: npt.NDArray[np.intp]) -> Floats:
        """A copy of these rows' numbers, [NUMBERS, rows]: for `with_numbers`, later."""
        return self._columns[: len(NUMBERS), rows]

    def _grow(self, num_rows: int) -> None:
        old = len(self)
        columns = np.ones((len(self._columns), num_rows))
        columns[:, :old] = self._columns
        links = np.full((num_rows, num_rows), CONNECTING, np.int8)
        links[:old, :old] = self.links
        self._columns, self.links = columns, links
        self.block_size = np.concatenate([self.block_size, np.zeros(num_rows - old, np.int32)])
        for number, name in enumerate((*NUMBERS, *NAMES)):
            setattr(self, name, columns[number])
        self.facts += [None] * (num_rows - old)
        self._free = [*reversed(range(old, num_rows)), *self._free]
        self._topology = None


def _who(fact: WorkerSnapshot) -> tuple[str, int, str]:
    """What its links are of."""
    return fact.worker_id, fact.epoch, fact.fabric


def _prefill_cost(paired: Mask, proved: Mask) -> Floats:
    return np.where(proved, 0.0, np.where(paired, UNPROVED_S, np.inf))


_IS_INT = {f.name: f.type == "int" for f in fields(WorkerSnapshot)}


def with_numbers(fact: WorkerSnapshot, numbers: Floats) -> WorkerSnapshot:
    """A snapshot with other numbers, [NUMBERS]."""
    values = zip(NUMBERS, numbers.tolist(), strict=True)
    changes: dict[str, Any] = {name: int(value) if _IS_INT[name] else value for name, value in values}
    return replace(fact, **changes)


def table_of(snapshots: Iterable[WorkerSnapshot]) -> WorkerTable:
    """A table of these workers, in this order."""
    table = WorkerTable()
    for snapshot in snapshots:
        table.put(table.add(), snapshot)
    return table
