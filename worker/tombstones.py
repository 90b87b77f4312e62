"""Seqs that must not begin here for a while: their end is known, and something of them may still be on its way.

A role keeps one for seqs that ended (an engine result of theirs may wait in the loop's queue: taken for a newer sequence of
the same seq it would be text of another prompt) and decode one for cancels that overtook their Reserve. Routers never use a
seq twice, so nobody waits for a tombstone to go. Pure; runs on the worker's event loop.
"""

from __future__ import annotations


class Tombstones:
    """Remembers each seq for `keep_s` seconds."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._until_s: dict[int, float] = {}  # oldest first

    def __contains__(self, seq: int) -> bool:
        return seq in self._until_s

    def __len__(self) -> int:
        return len(self._until_s)

    def add(self, seq: int, now_s: float) -> None:
        self._until_s.pop(seq, None)
        self._until_s[seq] = now_s + self._keep_s

    def expire(self, now_s: float) -> None:
        while self._until_s:
            seq = next(iter(self._until_s))
            if self._until_s[seq] > now_s:
                return
            del self._until_s[seq]
