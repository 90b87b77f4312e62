"""Blocks that other workers read or write while KV flows back: published ones lent out, empty ones for what they send.

    pin        the leading blocks of a chain that are published here are held, for another worker to read -> unpin
    make_room  blocks are held for what the prefix cache lacks of a prompt, and with them its leading blocks that are here,
               so that they are not evicted for their own continuation                                    -> publish
    publish    what came in whole is findable from now on, under the hashes it was asked for; all else is given back

Everything held here counts as reserved and is held until unpin or publish: the KV plane may be at it. A worker that computes
is never starved by one that asks: neither takes a block that somebody waits for. Answers come out of the engine's next step.
Runs on the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.hashing import BlockHash, max_prefix_hit_blocks
from baton.request import Request
from engine.block_pool import BlockPool, Hold
from engine.ports import Pinned, Room
from engine.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class _Held:
    """Of one room: the prompt's leading blocks that were here, then those set aside."""

    hits: list[int]
    blocks: list[int]
    hashes: list[BlockHash]  # of `blocks`


class BlockExchange:
    def __init__(self, pool: BlockPool, cache: PrefixCache, num_spare: Callable[[], int], *, block_size: int) -> None:
        """`num_spare` says how many blocks nobody waits for (the scheduler's)."""
        self._pool = pool
        self._cache = cache
        self._num_spare = num_spare
        self._block_size = block_size
        self._pins: dict[int, list[int]] = {}  # by seq
        self._rooms: dict[int, _Held] = {}  # by seq
        self._pinned: dict[int, Pinned] = {}  # answers not taken yet, by seq
        self._made: dict[int, Room] = {}

    def pin(self, seq: int, hashes: Sequence[BlockHash]) -> None:
        """Hold the leading ones of these blocks that are published and can be spared; a seq that has a pin keeps it."""
        if seq in self._pins:
            return
        blocks = self._sparable(self._cache.find(hashes))
        self._pool.acquire(blocks, Hold.RESERVED)
        self._pins[seq] = blocks
        self._pinned[seq] = Pinned(seq, tuple(blocks))

    def unpin(self, seq: int) -> None:
        """Idempotent."""
        self._pinned.pop(seq, None)
        self._pool.release(self._pins.pop(seq, []), Hold.RESERVED)

    def make_room(self, request: Request, num_blocks: int) -> None:
        """Set blocks aside for what is lacking of the prompt's first `num_blocks`; a seq that has room keeps it."""
        seq = request.seq
        if seq in self._rooms:
            return
        held = self._take(request, num_blocks)
        self._rooms[seq] = held
        self._made[seq] = Room(seq, tuple(held.hashes), tuple(held.blocks))

    def publish(self, seq: int, num_blocks: int) -> None:
        """Make the first `num_blocks` of a room findable and give all of it back. Idempotent."""
        self._made.pop(seq, None)
        held = self._rooms.pop(seq, None)
        if held is None:
            return
        for block_hash, block in list(zip(held.hashes, held.blocks, strict=True))[:num_blocks]:
            self._cache.remember(block_hash, block)
        self._pool.release(held.hits + held.blocks, Hold.RESERVED)

    def has_answers(self) -> bool:
        return bool(self._pinned or self._made)

    def take_answers(self) -> tuple[list[Pinned], list[Room]]:
        """What pins and rooms have come to since the last call."""
        answers = list(self._pinned.values()), list(self._made.values())
        self._pinned.clear()
        self._made.clear()
        return answers

    def blocks(self) -> set[int]:
        """All that is held here."""
        rooms = self._rooms.values()
        return {block for pinned in self._pins.values() for block in pinned} | {
            block for held in rooms for block in held.hits + held.blocks
        }

    def _sparable(self, blocks: list[int]) -> list[int]:
        """The leading ones up to the first that is wanted back; those that are in use anyway cost nothing."""
        num_spare = self._num_spare()
        for index, block in enumerate(blocks):
            if self._pool.num_unheld((block,)):
                num_spare -= 1
                if num_spare < 0:
                    return blocks[:index]
        return blocks

    def _take(self, request: Request, num_blocks: int) -> _Held:
        num_blocks = min(num_blocks, max_prefix_hit_blocks(len(request.token_ids), self._block_size))
        hashes = self._cache.hashes_of(request, num_blocks)
        hits = self._cache.find(hashes)
        lacking = hashes[len(hits) :]
        if not lacking or len(lacking) + self._pool.num_unheld(hits) > self._num_spare():
            return _Held([], [], [])
        self._pool.acquire(hits, Hold.RESERVED)
        return _Held(hits, self._pool.allocate(len(lacking), Hold.RESERVED), lacking)
