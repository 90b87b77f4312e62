"""Pulls: blocks of a prompt that come from a worker that caches them, instead of being computed. The asker's side.

    1 MAKING ROOM  the engine sets blocks aside for what it lacks      -> 2; -> gone where it lacks nothing, or has no room
    2 ASKING       Pull sent; the holder pins what it has of them      -> 3; -> gone where it has none
    3 RECEIVING    PullGrant sent, frames land in the blocks           -> gone once every byte is verified: published
    4 CLOSING      given up; the KV plane lets go of the blocks        -> gone

A pull is all or nothing, and only ever a chance: a holder that refuses, dies or takes longer than `timeout_s`, a link that
goes, damaged frames, they all end it in the same way, and the prompt is computed. The owner of the prompt hears `on_done`
exactly once per `start`, unless it cancels first; in 4 it need not wait. Blocks are findable under the hashes that were asked
for, never before all of them are whole. Runs on the worker's event loop; never blocks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from baton.request import Request
from baton.v1 import kv_pb2
from engine.ports import Room, StepResult
from kv_transfer.events import Committed, IncomingClosed, Incomplete, KVEvent
from worker.role import Ports, PullSource


class State(enum.IntEnum):
    MAKING_ROOM = 1
    ASKING = 2
    RECEIVING = 3
    CLOSING = 4


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a pull has brought; no blocks where it failed."""

    num_blocks: int = 0
    nbytes: int = 0
    moving_s: float = 0.0  # in 3, so without the waits for either engine's steps; 0 = it never came that far


@dataclass(slots=True)
class _Pull:
    """Times are the worker's monotonic clock, seconds."""

    seq: int
    peer: str  # link key of the holder
    generation: int
    deadline_s: float
    state: State = State.MAKING_ROOM
    block_ids: tuple[int, ...] = ()  # set aside; from 3 on only those that are on their way
    receiving_since_s: float | None = None
    wanted: bool = True  # the owner still waits for on_done


class BlockPuller:
    def __init__(
        self, ports: Ports, *, timeout_s: float, lease_s: float, on_done: Callable[[int, Pulled], None]
    ) -> None:
        self._ports = ports
        self._timeout_s = timeout_s
        self._lease_s = lease_s
        self._on_done = on_done
        self._open: dict[int, _Pull] = {}  # by seq
        self._last_generation = 0

    # --- the owner of the prompt ---

    def start(self, request: Request, source: PullSource, deadline_s: float) -> None:
        """Pull what this worker lacks of the blocks that `source` is said to cache."""
        now_s = self._ports.now_s()
        self._last_generation += 1
        deadline_s = min(deadline_s, now_s + self._timeout_s)
        self._open[request.seq] = _Pull(request.seq, source.peer, self._last_generation, deadline_s)
        self._ports.engine.make_room(request, source.num_blocks)

    def cancel(self, seq: int) -> None:
        """The prompt is no longer of interest; nothing happens where it is not being pulled."""
        pull = self._open.get(seq)
        if pull is not None:
            pull.wanted = False
            self._give_up(pull)

    # --- the engine ---

    def on_step(self, result: StepResult) -> None:
        for room in result.rooms:
            pull = self._open.get(room.seq)
            if pull is not None and pull.state is State.MAKING_ROOM:
                self._ask(pull, room)

    def _ask(self, pull: _Pull, room: Room) -> None:
        pull.block_ids = room.block_ids
        message = kv_pb2.Pull(
            seq=pull.seq,
            generation=pull.generation,
            hashes=room.hashes,
            ttl_ms=max(1, int(1_000 * (pull.deadline_s - self._ports.now_s()))),
        )
        if room.block_ids and self._ports.links.send(pull.peer, kv_pb2.LinkMessage(pull=message)):
            pull.state = State.ASKING
        else:
            self._give_up(pull)

    # --- the holder ---

    def on_link(self, peer: str, message: kv_pb2.LinkMessage) -> bool:
        kind = message.WhichOneof("message")
        if kind == "pull_answer":
            answer = message.pull_answer
            pull = self._at(peer, answer.seq, answer.generation)
            if pull is not None:
                self._on_answer(pull, answer.num_blocks)
        elif kind == "pull_commit":
            commit = message.pull_commit
            pull = self._at(peer, commit.seq, commit.generation)
            if pull is not None and pull.state is State.RECEIVING and commit.epoch == self._ports.epoch:
                self._ports.kv.commit_incoming(pull.seq, pull.generation, commit.num_frames, commit.nbytes)
        else:
            return False
        return True

    def _on_answer(self, pull: _Pull, num_blocks: int) -> None:
        if pull.state is State.ASKING and 0 < num_blocks <= len(pull.block_ids):
            self._receive(pull, num_blocks)
        else:
            self._give_up(pull)

    def _receive(self, pull: _Pull, num_blocks: int) -> None:
        pull.receiving_since_s = self._ports.now_s()
        ttl_s = max(0.0, pull.deadline_s - pull.receiving_since_s)
        pull.state = State.RECEIVING
        pull.block_ids = pull.block_ids[:num_blocks]
        # This class watches the time; the plane's own limit is the backstop behind it.
        self._ports.kv.open_incoming(pull.peer, pull.seq, pull.generation, pull.block_ids, 0, ttl_s + self._lease_s)
        ticket = kv_pb2.Ticket(
            seq=pull.seq,
            epoch=self._ports.epoch,
            generation=pull.generation,
            num_blocks=num_blocks,
            ttl_ms=int(1_000 * ttl_s),
        )
        self._ports.links.send(pull.peer, kv_pb2.LinkMessage(pull_grant=kv_pb2.Grant(ticket=ticket)))

    def on_link_lost(self, peer: str) -> None:
        for pull in list(self._open.values()):
            if pull.peer == peer:
                self._give_up(pull)

    # --- the KV plane ---

    def on_kv(self, event: KVEvent) -> bool:
        if not isinstance(event, Committed | Incomplete | IncomingClosed):
            return False
        pull = self._open.get(event.seq)
        if pull is None or pull.state < State.RECEIVING:
            return False
        if isinstance(event, Incomplete):
            nack = kv_pb2.Nack(seq=event.seq, generation=event.generation, missing_frames=event.missing_frames)
            self._ports.links.send(pull.peer, kv_pb2.LinkMessage(pull_nack=nack))
        elif isinstance(event, Committed) and pull.state is State.RECEIVING:
            self._end(pull, len(pull.block_ids), event.nbytes)
        else:
            self._end(pull)
        return True

    # --- time and ends ---

    def on_tick(self) -> None:
        now_s = self._ports.now_s()
        for pull in list(self._open.values()):
            if now_s > pull.deadline_s:
                self._give_up(pull)

    def _give_up(self, pull: _Pull) -> None:
        """Let the owner go on at once; blocks that frames may still land in wait for the KV plane."""
        if pull.state is State.CLOSING:
            return
        if pull.state is not State.RECEIVING:
            self._end(pull)
            return
        pull.state = State.CLOSING
        self._ports.kv.close_incoming(pull.seq)
        self._tell_owner(pull)

    def _end(self, pull: _Pull, num_blocks: int = 0, nbytes: int = 0) -> None:
        """Nothing is written to the blocks any more: publish what is whole, give the rest back."""
        del self._open[pull.seq]
        self._ports.engine.publish(pull.seq, num_blocks)
        if pull.state > State.MAKING_ROOM:
            done = kv_pb2.PullDone(seq=pull.seq, generation=pull.generation)
            self._ports.links.send(pull.peer, kv_pb2.LinkMessage(pull_done=done))
        self._tell_owner(pull, num_blocks, nbytes)

    def _tell_owner(self, pull: _Pull, num_blocks: int = 0, nbytes: int = 0) -> None:
        if pull.wanted:
            pull.wanted = False
            now_s = self._ports.now_s()
            moving_s = now_s - (now_s if pull.receiving_since_s is None else pull.receiving_since_s)
            self._on_done(pull.seq, Pulled(num_blocks, nbytes, moving_s))

    def _at(self, peer: str, seq: int, generation: int) -> _Pull | None:
        pull = self._open.get(seq)
        return pull if pull is not None and (pull.peer, pull.generation) == (peer, generation) else None

    def num_open(self) -> int:
        return len(self._open)
