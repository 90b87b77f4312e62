"""What routers are told of this worker's prefix cache: all of it after Opened, then what each step changes.

Said in pages, so that no message comes near gRPC's default limit of 4 MiB or fills a router's outbox, however large the pool.
Pure; runs on the worker's event loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.v1 import worker_pb2

PAGE_HASHES = 32_768  # of each kind; 18 bytes each on the wire: 0.6 MB, twice that with as many removed


class CacheReport:
    """Knows which block hashes are cached, and the number of the last change."""

    def __init__(self) -> None:
        self._cached: set[bytes] = set()
        self._generation = 0

    def whole(self) -> Iterator[worker_pb2.CacheDelta]:
        """All that is cached at this moment; pages are made as they are taken."""
        return _pages(self._generation, list(self._cached), (), reset=True)

    def change(self, added: Sequence[bytes], removed: Sequence[bytes]) -> Iterator[worker_pb2.CacheDelta]:
        self._cached.update(added)
        self._cached.difference_update(removed)
        self._generation += 1
        return _pages(self._generation, added, removed, reset=False)


def _pages(
    generation: int, added: Sequence[bytes], removed: Sequence[bytes], *, reset: bool
) -> Iterator[worker_pb2.CacheDelta]:
    """At least one message, so that an empty cache is said too; only the first resets."""
    starts = range(0, max(1, len(added), len(removed)), PAGE_HASHES)
    for start in starts:
        page = slice(start, start + PAGE_HASHES)
        yield worker_pb2.CacheDelta(
            generation=generation, added=added[page], removed=removed[page], reset=reset and start == 0
        )
