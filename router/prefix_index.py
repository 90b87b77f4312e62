"""Which leading blocks of a prompt each worker caches, as the workers themselves say (CacheDelta). Pure.

A chain of hashes depends on model, precision and block size (its root) and on the tenant: workers of one root can exchange
blocks. The index may lag by a step and forgets after a gap, so it is a hint: the worker that is asked decides, by exact hash.

One inverted index per router process, from block hash to the workers that cache it (router/_prefix_index.c): a block that
many workers cache is stored once, in 20 to 30 bytes, and one walk along a prompt finds the depth of every worker. Memory is
bounded by `max_blocks`; blocks beyond it are not known, and their workers not preferred for them. What one worker may take of
it is bounded by its own pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.hashing import ID_BYTES, BlockHash, max_prefix_hit_blocks, packed_ids, root_hash
from router._prefix_index import Index
from router.session_cache import HashCache, PromptHashes

MAX_EXPECTED_BLOCKS = 65_536  # of one generation; half of it, 4 M tokens of prompts, is a minute of one router's calls
EXPECTED_STRIDE_TOKENS = 128  # which take 2 ms to compute on an H200 (calibration/dynamo_h200)


@dataclass(frozen=True, slots=True)
class PrefixRoot:
    """What block hashes depend on, besides tokens and tenant."""

    fingerprint: str
    kv_dtype: str
    block_size: int  # tokens


Hashes = Mapping[PrefixRoot, Sequence[BlockHash]]  # of one prompt, first block first


class PromptHashing:
    """A prompt on its way to Hashes: all whole blocks that do not hold the last token, which can never be cached."""

    def __init__(
        self, known: HashCache, token_ids: Sequence[int], tenant_salt: bytes, roots: Iterable[PrefixRoot]
    ) -> None:
        """Find what `known` has; cheap, for the event loop."""
        packed = packed_ids(token_ids)
        self._chains: dict[PrefixRoot, PromptHashes] = {}
        for root in roots:
            num_tokens = max_prefix_hit_blocks(len(token_ids), root.block_size) * root.block_size
            parent = root_hash(root.fingerprint, root.kv_dtype, tenant_salt)
            self._chains[root] = known.begin(parent, packed[: num_tokens * ID_BYTES], root.block_size)

    @property
    def num_tokens_left(self) -> int:
        """To be hashed by `finish`."""
        return sum(chain.num_tokens_left for chain in self._chains.values())

    def finish(self) -> Hashes:
        """Hash what is left. Once, on any thread; 0.8 us per block."""
        return {root: chain.finish() for root, chain in self._chains.items()}


def hash_prompt(token_ids: Sequence[int], tenant_salt: bytes, roots: Iterable[PrefixRoot]) -> Hashes:
    """The same for a prompt of which nothing is known."""
    return PromptHashing(HashCache(), token_ids, tenant_salt, roots).finish()


class PrefixIndex:
    """The blocks that all workers cache. Workers are rows, as in router/worker_table.py; those beyond `max_rows` are served, and
    not known to cache anything."""

    def __init__(self, max_blocks: int, max_rows: int) -> None:
        self._index = Index(max_blocks, max_rows)
        self._max_rows = max_rows

    def follow(self, row: int, root: PrefixRoot, max_blocks: int) -> WorkerPrefixes:
        """Begin to follow a worker of which nothing is known. `max_blocks`: its whole pool."""
        if row >= self._max_rows:
            return WorkerPrefixes(Index(max(1, max_blocks), 1), 0, root, max_blocks)
        return WorkerPrefixes(self._index, row, root, max_blocks)

    def forget(self, row: int) -> None:
        """Its worker is gone."""
        if row < self._max_rows:
            self._index.reset(row)

    def leading(self, hashes: Hashes, num_rows: int) -> npt.NDArray[np.int32]:
        """Blocks of a prompt that each row's worker caches, up to the first that it does not; [num_rows]."""
        found = np.zeros(num_rows, np.int32)
        for chain in hashes.values():
            self._index.match(chain, found)
        return found

    @property
    def nbytes(self) -> int:
        return self._index.nbytes

    @property
    def num_blocks(self) -> int:
        """Different ones."""
        return self._index.num_blocks

    @property
    def num_ignored(self) -> int:
        """Reports of a block for which there was no room."""
        return self._index.num_ignored


class ExpectedPrefixes:
    """The prompts that this router has just given to workers, which will cache them: of two that begin alike and come together
    the second one finds the first.

    Two generations: the younger one fills, then takes the place of the elder, which is forgotten, by then long confirmed by its
    workers, or never to be. Every EXPECTED_STRIDE_TOKENS a block is kept: enough to see where long prompts part, at a
    fraction of the work.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._elder, self._younger = self._empty(), self._empty()

    def _empty(self) -> Index:
        return Index(MAX_EXPECTED_BLOCKS, self._max_rows)

    def add(self, row: int, hashes: Hashes, root: PrefixRoot) -> None:
        """A prompt was given to the row's worker."""
        if row >= self._max_rows:
            return
        self._younger.apply(row, hashes.get(root, ())[_stride(root) - 1 :: _stride(root)], ())
        if self._younger.num_blocks > MAX_EXPECTED_BLOCKS // 2:
            self._elder, self._younger = self._younger, self._empty()

    def forget(self, row: int) -> None:
        """Its worker lost everything."""
        if row < self._max_rows:
            self._elder.reset(row)
            self._younger.reset(row)

    def leading(self, hashes: Hashes, num_rows: int) -> npt.NDArray[np.int32]:
        """Blocks of a prompt that each row's worker will cache, a little less than the truth; [num_rows]."""
        found = np.zeros(num_rows, np.int32)
        for root, chain in hashes.items():
            stride = _stride(root)
            some, part = chain[stride - 1 :: stride], np.zeros(num_rows, np.int32)
            self._elder.match(some, part)
            self._younger.match(some, part)
            found += stride * part  # a row has one root
        return found


def _stride(root: PrefixRoot) -> int:
    return max(1, EXPECTED_STRIDE_TOKENS // root.block_size)


class WorkerPrefixes:
    """The blocks that one worker caches: its part of the index, kept in line with what it says."""

    def __init__(self, index: Index, row: int, root: PrefixRoot, max_blocks: int) -> None:
        self.root = root
        self._index = index
        self._row = row
        self._max_blocks = max_blocks
        self._generation = 0
        index.reset(row)

    def __len__(self) -> int:
        return self._index.count(self._row)

    def apply(self, generation: int, added: Sequence[BlockHash], removed: Sequence[BlockHash], *, reset: bool) -> None:
        """Take one message. After a gap, or more blocks than there are, only what this message adds is known to be true."""
        if reset or generation - self._generation not in (0, 1):  # 0: another page of the same change
            self.forget()
        self._generation = generation
        self._index.apply(self._row, added, removed)
        if len(self) > self._max_blocks:
            self.forget()

    def forget(self) -> None:
        self._index.reset(self._row)

    def num_leading(self, hashes: Hashes) -> int:
        """Blocks of a prompt that are cached, up to the first that is not; 0 where it was not hashed under this root."""
        found = np.zeros(self._row + 1, np.int32)
        self._index.match(hashes.get(self.root, ()), found)
        return int(found[self._row])
