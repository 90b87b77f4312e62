"""What the last turns of conversations cost, kept: token ids of pieces of text, and hashes of runs of blocks.

A turn's prompt repeats the last one's and adds to it. So both are kept by content, not by session: a piece of text
(router/piece_encoder.py) by its characters, a run of blocks by its parent's hash and its tokens. Equal content has equal tokens
and hashes whoever sent it; conversations that share a beginning share its entries, and nothing has to be invalidated.
    Exact     a key is the whole content, compared by equality
    Bounded   in bytes, keys and bookkeeping included; the least recently used goes first
    Tenants   a tenant's salt is part of every key, so how long a call takes says nothing about another tenant's prompts,
              only that they fill the cache. Within one tenant it does.
Any thread: short operations under a lock, none of which encodes or hashes.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from baton.hashing import HASH_BYTES, ID_BYTES, BlockHash, hash_packed

HASH_CACHE_BYTES = 32 << 20  # about 4 million tokens; docs/api.md
# Kept together: a look-up takes a quarter of hashing them (measured: 22 and 90 us, load 14); the rest is hashed
RUN_BLOCKS = 64
ENTRY_BYTES = 220  # of an entry besides its key and value: dict slot, link, tuples; measured with tracemalloc: 196-213
HASH_ENTRY_BYTES = sys.getsizeof(bytes(HASH_BYTES)) + 8  # in a tuple

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class ByteBoundedLru(Generic[Key, Value]):
    """A map that forgets what was not used for longest."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def get(self, key: Key) -> Value | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: Key, value: Value, num_bytes: int) -> None:
        """Keep it; `num_bytes` is what key and value take. What alone exceeds the bound is not kept."""
        num_bytes += ENTRY_BYTES
        if num_bytes > self._max_bytes:
            return
        with self._lock:
            if (old := self._entries.pop(key, None)) is not None:
                self._num_bytes -= old[1]
            self._entries[key] = (value, num_bytes)
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= self._entries.popitem(last=False)[1][1]


RunCache = ByteBoundedLru[bytes, Sequence[BlockHash]]  # parent | packed ids -> hashes


class HashCache:
    """Block hashes of prompts, continued from what was hashed before. The same as baton.hashing.block_hashes."""

    def __init__(self, max_bytes: int = HASH_CACHE_BYTES) -> None:
        self._runs: RunCache = ByteBoundedLru(max_bytes)

    def begin(self, root: BlockHash, packed: bytes, block_size: int) -> PromptHashes:
        """Find what is known; cheap, for the event loop. `root` binds the tenant, `packed` are ids (baton/hashing.py)."""
        return PromptHashes(self._runs, root, packed, block_size)


class PromptHashes:
    """The hashes of one prompt: the leading ones that are known; after `finish`, all."""

    def __init__(self, runs: RunCache, root: BlockHash, packed: bytes, block_size: int) -> None:
        self._runs = runs
        self._packed = packed
        self._block_size = block_size
        self._parent = root
        self._hashes: list[BlockHash] = []
        while (run := self._next_run()) and (known := runs.get(self._parent + run)):
            self._take(known)

    @property
    def num_tokens_left(self) -> int:
        """To be hashed by `finish`."""
        return len(self._packed) // ID_BYTES - len(self._hashes) * self._block_size

    def finish(self) -> list[BlockHash]:
        """Hash what is left and keep its whole runs; shape [blocks], first block first. Once, on any thread."""
        while run := self._next_run():
            key = self._parent + run
            hashes = hash_packed(self._parent, run, self._block_size)
            self._runs.put(key, hashes, sys.getsizeof(key) + len(hashes) * HASH_ENTRY_BYTES)
            self._take(hashes)
        self._take(hash_packed(self._parent, self._packed[self._start :], self._block_size))
        return self._hashes

    @property
    def _start(self) -> int:
        return len(self._hashes) * self._block_size * ID_BYTES

    def _next_run(self) -> bytes:
        """Token ids of the next whole run; b"" where none is left."""
        stop = self._start + RUN_BLOCKS * self._block_size * ID_BYTES
        return self._packed[self._start : stop] if stop <= len(self._packed) else b""

    def _take(self, hashes: Sequence[BlockHash]) -> None:
        if hashes:
            self._hashes += hashes
            self._parent = hashes[-1]
