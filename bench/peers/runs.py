"""Runs a library's pair for the cases of `baton bench kv`, in each of its settings. A library that does not run is a line, not a
failure: its own words say why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.child import Child, ChildError, Pipe
from bench.kv_plan import Case, Spread, block_tables, spread
from bench.peers.messages import (
    Expect,
    Meet,
    PeerDigest,
    PeerDigestIs,
    PeerDone,
    PeerStart,
    PeerStarted,
    Table,
    Write,
    Written,
)

ANSWER_S = 90.0
# With cma, since these libraries bring their own memory, which shared-memory transports cannot map.
PEER_TLS = {"shm": "posix,sysv,cma,self", "tcp": "tcp"}


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    progress_thread: bool


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    module: str
    transports: tuple[str, ...]
    settings: tuple[Setting, ...]


PEERS = {
    "nixl": Peer(
        "nixl",
        "bench.peers.nixl",
        ("shm", "tcp"),
        (Setting("progress thread", True), Setting("no progress thread", False)),
    ),
    "mooncake": Peer("mooncake", "bench.peers.mooncake", ("tcp",), (Setting("tcp", False),)),
}


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One setting of one library in one case."""

    peer: str
    transport: str
    setting: str
    paged: bool  # one descriptor a run; False: block tables in order, so that runs join
    case: Case
    gb_per_s: Spread | None  # None where it does not run here
    reason: str = ""  # why not


def measure_peer(name: str, transport: str, cases: Sequence[Case], rounds: int, python: str) -> Iterator[PeerRow]:
    """Paged and contiguous, in every setting; nothing where the library does not have the transport."""
    peer = PEERS[name]
    if transport not in peer.transports:
        return
    for setting in peer.settings:
        for paged in (True, False):
            for case in cases:
                try:
                    moved = measure_case(peer, setting, transport, case, rounds, python, paged=paged)
                    yield PeerRow(name, transport, setting.name, paged, case, moved)
                except ChildError as error:
                    yield PeerRow(name, transport, setting.name, paged, case, None, str(error))


def measure_case(
    peer: Peer, setting: Setting, transport: str, case: Case, rounds: int, python: str, *, paged: bool
) -> Spread:
    """Raises: ChildError: it does not run, or moved other bytes."""
    environment = {
        "UCX_TLS": PEER_TLS[transport],
        "UCX_NET_DEVICES": "lo",
        "UCX_POSIX_ERROR_HANDLING": "y",
        "UCX_SYSV_ERROR_HANDLING": "y",
        "NIXL_LOG_LEVEL": "WARN",
        "MC_LOG_LEVEL": "ERROR",
    }
    sender_end, receiver_end = Pipe()
    sender = Child(f"{peer.name} sender", peer.module, [sender_end], python, environment)
    receiver = Child(f"{peer.name} receiver", peer.module, [receiver_end], python, environment)
    try:
        meet(sender, receiver, case, setting)
        rates = []
        for seed in range(-1, rounds):
            source = tables(case, 2 * seed, paged=paged)
            wall_s = move(sender, receiver, source, tables(case, 2 * seed + 1, paged=paged))
            if seed >= 0:  # the first connects and warms up
                rates.append(case.nbytes / 1e9 / wall_s)
        return spread(rates)
    finally:
        sender.close()
        receiver.close()


def tables(case: Case, seed: int, *, paged: bool) -> tuple[Table, ...]:
    if paged:
        return tuple(block_tables(case, case.pool_blocks, seed))
    each = case.blocks_each
    return tuple(tuple(range(i * each, (i + 1) * each)) for i in range(case.transfers))


def meet(sender: Child, receiver: Child, case: Case, setting: Setting) -> None:
    threaded = setting.progress_thread
    sender.tell(PeerStart("sender", case.layout, case.pool_blocks, 1, threaded))
    receiver.tell(PeerStart("receiver", case.layout, case.pool_blocks, None, threaded))
    started = sender.hear(PeerStarted, ANSWER_S), receiver.hear(PeerStarted, ANSWER_S)
    sender.ask(Meet(started[1]), PeerDone, ANSWER_S)


def move(sender: Child, receiver: Child, source: tuple[Table, ...], target: tuple[Table, ...]) -> float:
    """Seconds until the receiver has every byte. Raises: ChildError: it has not."""
    receiver.ask(Expect(target), PeerDone, ANSWER_S)
    written = sender.ask(Write(source, target), Written, ANSWER_S)
    sender.tell(PeerDigest(source))
    receiver.tell(PeerDigest(target))
    if sender.hear(PeerDigestIs, ANSWER_S) != receiver.hear(PeerDigestIs, ANSWER_S):
        raise ChildError(f"{receiver.name}: the blocks are not what was sent")
    return written.wall_s
