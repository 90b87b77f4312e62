"""Block hashes: a hit can never cross a model, a tenant or a precision."""

from __future__ import annotations

from baton.hashing import block_hashes, root_hash
from baton.kv_layout import DTYPE_BYTES

TOKENS = list(range(100, 164))


def test_precision_is_part_of_every_hash_of_a_chain() -> None:
    chains = [block_hashes(root_hash("model", dtype), TOKENS, 16) for dtype in DTYPE_BYTES]
    assert all(len(chain) == 4 for chain in chains)
    assert len({block_hash for chain in chains for block_hash in chain}) == 4 * len(DTYPE_BYTES)


def test_the_parts_of_a_root_cannot_be_moved_into_each_other() -> None:
    roots = {
        root_hash("ab", "c"),
        root_hash("a", "bc"),
        root_hash("ab", "", b"c"),
        root_hash("", "abc"),
        root_hash("ab", "c", b"d"),
    }
    assert len(roots) == 5


def test_a_chain_is_of_whole_blocks_and_of_all_tokens_before() -> None:
    root = root_hash("model", "float32")
    assert block_hashes(root, TOKENS[:63], 16) == block_hashes(root, TOKENS, 16)[:3]
    changed = [7, *TOKENS[1:]]
    assert not set(block_hashes(root, changed, 16)) & set(block_hashes(root, TOKENS, 16))
