"""PrefixCache: what is found, what is published, what is told to others."""

from __future__ import annotations

import pytest

from baton.hashing import block_hashes, root_hash
from engine.block_pool import BlockPool, Hold
from engine.prefix_cache import PrefixCache
from engine.sequence import SeqState, Sequence
from tests.engine.engine_rig import make_request

S = 4  # tokens per block here


class Cache:
    """A cache over a small pool, and sequences made for it."""

    def __init__(self, num_blocks: int = 8, *, enabled: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, block_size=S, fingerprint="f", kv_dtype="float32", enabled=enabled)

    def sequence(self, token_ids: list[int], tenant_salt: bytes = b"") -> Sequence:
        return Sequence(make_request(1, token_ids, tenant_salt=tenant_salt), 1, 0.0, SeqState.RUNNING)

    def computed(self, token_ids: list[int], num_computed: int, tenant_salt: bytes = b"") -> Sequence:
        """A sequence that owns blocks and has published what it may."""
        sequence = self.sequence(token_ids, tenant_salt)
        sequence.blocks = self.pool.allocate(-(-len(token_ids) // S), Hold.ACTIVE)
        sequence.num_computed = num_computed
        self.cache.publish(sequence)
        return sequence

    def num_hits(self, token_ids: list[int], tenant_salt: bytes = b"") -> int:
        return len(self.cache.lookup(self.sequence(token_ids, tenant_salt)))


@pytest.mark.parametrize(("length", "num_hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_at_least_one_token_is_left_to_compute(length: int, num_hits: int) -> None:
    tokens = list(range(20))
    cache = Cache()
    cache.computed(tokens, 20)
    assert cache.num_hits(tokens[:length]) == num_hits


def test_only_full_and_computed_blocks_are_found() -> None:
    tokens = list(range(12))
    cache = Cache()
    sequence = cache.computed(tokens, 7)
    assert cache.num_hits([*tokens, 99]) == 1
    sequence.num_computed = 8
    cache.cache.publish(sequence)
    assert cache.num_hits([*tokens, 99]) == 2


def test_a_hit_ends_at_the_first_block_that_differs() -> None:
    cache = Cache()
    cache.computed([1] * 4 + [2] * 4 + [3] * 4, 12)
    assert cache.num_hits([1] * 4 + [9] * 4 + [3] * 4 + [0]) == 1
    assert cache.num_hits([9] + [1] * 3 + [2] * 4 + [3] * 4 + [0]) == 0


def test_tenants_never_share() -> None:
    cache = Cache()
    cache.computed(list(range(9)), 9, tenant_salt=b"a")
    assert cache.num_hits(list(range(9)), b"a") == 2
    assert cache.num_hits(list(range(9)), b"b") == 0
    assert cache.num_hits(list(range(9))) == 0


def test_the_twin_of_a_published_block_stays_private() -> None:
    cache = Cache()
    first = cache.computed(list(range(4)), 4)
    twin = cache.computed(list(range(4)), 4)
    cache.pool.release(twin.blocks, Hold.ACTIVE)
    assert cache.pool.num_cached == 0
    assert cache.cache.lookup(cache.sequence(list(range(5)))) == first.blocks


def test_evicted_blocks_are_never_found() -> None:
    cache = Cache(num_blocks=3)
    old = cache.computed(list(range(8)), 8)
    cache.pool.release(old.blocks, Hold.ACTIVE)
    cache.pool.allocate(2, Hold.ACTIVE)
    assert cache.num_hits([*range(8), 0]) == 1
    cache.cache.check_integrity()


def test_deltas_carry_the_hashes_that_a_router_computes_itself() -> None:
    tokens = list(range(10))
    cache = Cache()
    cache.computed(tokens, 10)
    assert cache.cache.take_delta() == (block_hashes(root_hash("f", "float32"), tokens, S), [])
    assert cache.cache.take_delta() == ([], [])


def test_deltas_are_net_of_what_came_and_went() -> None:
    cache = Cache(num_blocks=1)
    for _ in range(3):
        sequence = cache.computed([1, 2, 3, 4], 4)
        cache.pool.release(sequence.blocks, Hold.ACTIVE)
    assert len(cache.cache.take_delta()[0]) == 1
    cache.pool.release(cache.pool.allocate(1, Hold.ACTIVE), Hold.ACTIVE)
    added, removed = cache.cache.take_delta()
    assert (added, len(removed)) == ([], 1)


def test_hashes_of_generated_tokens_continue_the_prompt_s_chain() -> None:
    cache = Cache()
    sequence = cache.computed(list(range(6)), 6)
    for token in range(6, 10):
        sequence.append(token)
    sequence.blocks += cache.pool.allocate(1, Hold.ACTIVE)
    sequence.num_computed = 9
    cache.cache.publish(sequence)
    assert cache.num_hits(list(range(10))) == 2


def test_switched_off_nothing_is_found_published_or_told() -> None:
    cache = Cache(enabled=False)
    sequence = cache.computed(list(range(9)), 9)
    assert cache.num_hits(list(range(9))) == 0
    assert not cache.cache.has_delta()
    cache.pool.release(sequence.blocks, Hold.ACTIVE)
    assert cache.pool.num_cached == 0
