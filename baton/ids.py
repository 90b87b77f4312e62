"""Identities: epochs tell one start of a process from the next, a seq names one sequence everywhere."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator


def new_epoch() -> int:
    """A random non-zero u64, drawn once per process start; a message that carries another one is stale."""
    return secrets.randbits(64) or 1


def new_router_epoch() -> int:
    """A random non-zero u32: the high half of every seq that this router makes."""
    return secrets.randbits(32) or 1


def seq_counter(router_epoch: int) -> Iterator[int]:
    """Yield router_epoch << 32 | 1, 2, 3 ..."""
    return (router_epoch << 32 | (n & 0xFFFF_FFFF) for n in itertools.count(1))
