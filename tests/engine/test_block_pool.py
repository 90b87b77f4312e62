"""BlockPool against a naive model, and the rules that a reader would ask about."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.block_pool import BlockPool, Hold


def gauges(pool: BlockPool) -> tuple[int, int, int, int]:
    return pool.num_active, pool.num_reserved, pool.num_cached, pool.num_free


def test_a_fresh_pool_is_idle_and_all_free() -> None:
    pool = BlockPool(4)
    assert gauges(pool) == (0, 0, 0, 4)
    assert pool.is_idle


def test_released_blocks_are_cached_if_published_and_free_if_not() -> None:
    pool = BlockPool(4)
    published, private = pool.allocate(2, Hold.ACTIVE)
    pool.publish(published)
    pool.release([published, private], Hold.ACTIVE)
    assert gauges(pool) == (0, 0, 1, 3)
    assert pool.is_idle


def test_a_shared_block_is_freed_by_its_last_holder_only() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1, Hold.ACTIVE)
    pool.publish(block)
    pool.acquire([block], Hold.ACTIVE)
    pool.release([block], Hold.ACTIVE)
    assert gauges(pool) == (1, 0, 0, 1)
    pool.release([block], Hold.ACTIVE)
    assert gauges(pool) == (0, 0, 1, 1)


def test_a_block_that_a_sequence_and_a_reservation_share_counts_once_as_active() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1, Hold.ACTIVE)
    pool.publish(block)
    pool.acquire([block], Hold.RESERVED)
    assert gauges(pool) == (1, 0, 0, 1)
    pool.release([block], Hold.ACTIVE)
    assert gauges(pool) == (0, 1, 0, 1)


def test_adopting_turns_reserved_blocks_into_active_ones() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2, Hold.RESERVED)
    assert gauges(pool) == (0, 2, 0, 1)
    pool.adopt(blocks)
    assert gauges(pool) == (2, 0, 0, 1)


def test_free_blocks_go_first_and_then_the_least_recently_used_cached_one() -> None:
    pool, evicted = BlockPool(3), list[int]()
    pool.on_evict = evicted.append
    old, new = pool.allocate(2, Hold.ACTIVE)
    pool.publish(old)
    pool.publish(new)
    pool.release([old], Hold.ACTIVE)
    pool.release([new], Hold.ACTIVE)
    pool.allocate(1, Hold.ACTIVE)
    assert evicted == []
    assert pool.allocate(1, Hold.ACTIVE) == [old]
    assert evicted == [old]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(3)
    head, middle, tail = pool.allocate(3, Hold.ACTIVE)
    for block in (head, middle, tail):
        pool.publish(block)
    pool.release([head, middle, tail], Hold.ACTIVE)
    assert pool.allocate(3, Hold.ACTIVE) == [tail, middle, head]


@pytest.mark.parametrize("hold", list(Hold))
def test_a_double_free_is_a_defect(hold: Hold) -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1, hold)
    pool.release(blocks, hold)
    with pytest.raises(AssertionError, match="not held"):
        pool.release(blocks, hold)


def test_taking_more_than_is_available_is_a_defect() -> None:
    with pytest.raises(AssertionError, match="num_available"):
        BlockPool(2).allocate(3, Hold.ACTIVE)


class PoolMachine(RuleBasedStateMachine):
    """Holders are lists of (blocks, hold); the model is the multiset of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.pool.on_evict = self.evict
        self.held: list[tuple[list[int], Hold]] = []
        self.published: set[int] = set()

    def evict(self, block: int) -> None:
        assert block in self.published
        assert all(block not in blocks for blocks, _ in self.held)
        self.published.discard(block)

    @rule(num_blocks=st.integers(0, 4), hold=st.sampled_from(Hold))
    def allocate(self, num_blocks: int, hold: Hold) -> None:
        if num_blocks <= self.pool.num_available:
            blocks = self.pool.allocate(num_blocks, hold)
            assert not any(set(blocks) & set(others) for others, _ in self.held)
            assert not set(blocks) & self.published
            self.held.append((blocks, hold))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        blocks, _ = data.draw(st.sampled_from(self.held))
        for block in blocks:
            self.pool.publish(block)
            self.published.add(block)

    @precondition(lambda self: self.published)
    @rule(data=st.data(), hold=st.sampled_from(Hold))
    def acquire(self, data: st.DataObject, hold: Hold) -> None:
        block = data.draw(st.sampled_from(sorted(self.published)))
        self.pool.acquire([block], hold)
        self.held.append(([block], hold))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), adopt=st.booleans())
    def release(self, data: st.DataObject, adopt: bool) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        blocks, hold = self.held.pop(index)
        if adopt and hold is Hold.RESERVED:
            self.pool.adopt(blocks)
            self.held.append((blocks, Hold.ACTIVE))
        else:
            self.pool.release(blocks, hold)

    @invariant()
    def gauges_equal_the_model(self) -> None:
        active = {block for blocks, hold in self.held if hold is Hold.ACTIVE for block in blocks}
        reserved = {block for blocks, _ in self.held for block in blocks} - active
        cached = self.published - active - reserved
        free = 8 - len(active) - len(reserved) - len(cached)
        assert gauges(self.pool) == (len(active), len(reserved), len(cached), free)
        self.pool.check_integrity()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
