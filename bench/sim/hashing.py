"""Block hashes as the product's, but a run of blocks is hashed once for router and workers: a memo, nothing to keep in step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.hashing import BlockHash, packed_ids
from router.prefix_index import Hashes, PrefixRoot, PromptHashing
from router.session_cache import HashCache

_known = HashCache()


def hash_prompt(token_ids: Sequence[int], roots: Iterable[PrefixRoot]) -> Hashes:
    """As router/fleet.py does it; nobody's salt."""
    return PromptHashing(_known, token_ids, b"", roots).finish()


def block_hashes(parent: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """As baton/hashing.py does it."""
    return _known.begin(parent, packed_ids(token_ids), block_size).finish()
