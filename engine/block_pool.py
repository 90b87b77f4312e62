"""Which block of KV memory belongs to whom. Owns the reference counts, the free list and the LRU order; knows no hashes.

Every block is in exactly one of four states, and the gauges count each block once:

    active    a sequence refers to it                 (also when a reservation does too)
    reserved  only reservations refer to it           idle = active and reserved are 0
    cached    nobody does, but its content is published: kept until the memory is needed, least recently used first
    free      nobody does

Runs on the engine thread. Misuse (a double free, more than is available) is a defect and asserts; nothing is waited for here.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable


class Hold(enum.IntEnum):
    """In whose name a block is referred to."""

    ACTIVE = 0
    RESERVED = 1


def _nobody_listens(block: int) -> None:
    del block


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int], None] = _nobody_listens  # told before an evicted block is handed out
        self._refs = ([0] * num_blocks, [0] * num_blocks)  # by Hold, then by block
        self._num_held = [0, 0]  # by Hold
        self._free = list(range(num_blocks - 1, -1, -1))  # last in, first out: warm memory first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._published: set[int] = set()

    @property
    def num_active(self) -> int:
        return self._num_held[Hold.ACTIVE]

    @property
    def num_reserved(self) -> int:
        return self._num_held[Hold.RESERVED]

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated, by eviction where need be."""
        return len(self._free) + len(self._cached)

    @property
    def is_idle(self) -> bool:
        return self.num_active == 0 and self.num_reserved == 0

    def free_ids(self) -> tuple[int, ...]:
        """Blocks whose content is nobody's; tests poison them."""
        return tuple(self._free)

    def num_unheld(self, blocks: Iterable[int]) -> int:
        """How many of these cached blocks would leave the available ones if they were acquired."""
        return sum(block in self._cached for block in blocks)

    def allocate(self, num_blocks: int, hold: Hold) -> list[int]:
        """Take blocks of unknown content; free ones first, then the least recently used cached ones."""
        free, refs = self._free, self._refs[hold]
        if (num_lacking := num_blocks - len(free)) > 0:
            assert num_lacking <= len(self._cached), "allocate: the caller did not check num_available"
            num_blocks = len(free)
        taken = free[len(free) - num_blocks :]
        del free[len(free) - num_blocks :]
        taken.reverse()
        for block in taken:
            refs[block] = 1
        self._num_held[hold] += num_blocks
        if num_lacking > 0:
            taken += [self._evict(hold) for _ in range(num_lacking)]
        return taken

    def acquire(self, blocks: Iterable[int], hold: Hold) -> None:
        """Refer to published blocks that others may share; their content stays."""
        refs, others, cached, published = self._refs[hold], self._refs[1 - hold], self._cached, self._published
        for block in blocks:
            assert block in published, "acquire: the block is not published"
            if refs[block]:
                refs[block] += 1
            elif others[block]:
                self._refer(block, hold, 1)
            else:
                del cached[block]
                refs[block] = 1
                self._num_held[hold] += 1

    def release(self, blocks: Iterable[int], hold: Hold) -> None:
        """Give references back, last block first: the head of a prefix is worth most and is evicted last."""
        refs, others, num_let_go = self._refs[hold], self._refs[1 - hold], 0
        free, cached, published = self._free, self._cached, self._published
        given = list(blocks)
        given.reverse()
        if not published:  # then nothing is shared
            for block in given:
                refs[block] -= 1
            assert not any(map(refs.__getitem__, given)), "release: a block is not held"
            free += given
            self._num_held[hold] -= len(given)
            return
        for block in given:
            if refs[block] != 1 or others[block]:
                assert refs[block] > 0, "release: the block is not held"
                self._refer(block, hold, -1)
                continue
            refs[block] = 0
            num_let_go += 1
            if block in published:
                cached[block] = None
            else:
                free.append(block)
        self._num_held[hold] -= num_let_go

    def adopt(self, blocks: Iterable[int]) -> None:
        """Turn a reservation's references into a sequence's."""
        active, reserved = self._refs
        num_taken_over = 0
        for block in blocks:
            if not active[block]:
                num_taken_over += 1
            active[block] += 1
            reserved[block] -= 1
        self._num_held[Hold.ACTIVE] += num_taken_over
        self._num_held[Hold.RESERVED] -= num_taken_over

    def publish(self, block: int) -> None:
        """Keep the content of this held block when its last reference goes."""
        assert self._holder(block) is not None, "publish: the block is not held"
        self._published.add(block)

    def check_integrity(self) -> None:
        """Assert that every block is in exactly one state and that the gauges say so."""
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is twice in the free list"
        held = {block for block in range(self.num_blocks) if self._holder(block) is not None}
        assert not free & cached, "a block is free and cached"
        assert not held & (free | cached), "a held block is free or cached"
        assert len(held) + len(free) + len(cached) == self.num_blocks, "a block is lost"
        assert cached <= self._published, "a cached block is not published"
        assert not free & self._published, "a free block is published"
        assert min(*self._refs[0], *self._refs[1], 0) == 0, "a reference count is negative"
        for hold in Hold:
            assert self._num_held[hold] == sum(self._holder(block) is hold for block in held), (
                f"wrong {hold.name} gauge"
            )

    def _evict(self, hold: Hold) -> int:
        block, _ = self._cached.popitem(last=False)
        self._published.discard(block)
        self.on_evict(block)
        self._refer(block, hold, 1)
        return block

    def _refer(self, block: int, hold: Hold, change: int) -> None:
        before = self._holder(block)
        self._refs[hold][block] += change
        after = self._holder(block)
        if before is not None:
            self._num_held[before] -= 1
        if after is not None:
            self._num_held[after] += 1

    def _holder(self, block: int) -> Hold | None:
        if self._refs[Hold.ACTIVE][block]:
            return Hold.ACTIVE
        return Hold.RESERVED if self._refs[Hold.RESERVED][block] else None
