"""Sums and gathers between the ranks of one host, through shared memory. Runs on each rank's engine thread.

    rank 1..T-1   writes its part ── one byte ──> rank 0   adds up in the order of ranks, writes the sum
                  reads the sum  <── one byte ──

A part that is larger than a slot goes in pieces. The order of a sum is that of the ranks, whatever is summed, so a number does
not depend on the batch that it is in. A rank that ended is noticed by its socket, in whatever the others are doing.
"""

from __future__ import annotations

import mmap
import socket
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.ports import RunnerLost

SLOT_BYTES = 4 << 20  # of each rank; 512 tokens of 2,048 numbers in fp32
# Between two words of a rank: one product of a layer. The widest of a 70B, 8,192 x 57,344, takes one core 10 s for 2,048 tokens
# at 187 GFLOP/s (DESIGN section 7); a rank that takes three times as long is stuck, or stopped.
PATIENCE_S = 30.0


class Exchange(Protocol):
    """What a model asks of the other ranks."""

    def sum(self, part: Tensor) -> Tensor:
        """Return the sum of all ranks' parts, of their shape and dtype. Raises: RunnerLost."""
        ...

    def gather(self, part: Tensor) -> Tensor:
        """Return all ranks' parts [R, c] side by side, [R, T * c], on rank 0; `part` on the others.

        Raises: RunnerLost."""
        ...


class NoExchange:
    """Of a model in one process."""

    def sum(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor) -> Tensor:
        return part


class SharedExchange:
    """One rank's end. `signals`: rank 0 has a socket to each of the others, in their order; these have one to rank 0."""

    def __init__(self, rank: int, size: int, shared: mmap.mmap, signals: Sequence[socket.socket]) -> None:
        self._rank = rank
        self._signals = signals
        self._slots = [
            torch.frombuffer(shared, dtype=torch.uint8, count=SLOT_BYTES, offset=i * SLOT_BYTES) for i in range(size)
        ]
        for signal in signals:
            signal.settimeout(PATIENCE_S)

    @staticmethod
    def nbytes(size: int) -> int:
        """Of the shared memory."""
        return size * SLOT_BYTES

    def sum(self, part: Tensor) -> Tensor:
        out = torch.empty_like(part, memory_format=torch.contiguous_format)
        num_elements = SLOT_BYTES // part.element_size()
        pieces = torch.split(part.contiguous().view(-1), num_elements)
        for mine, result in zip(pieces, torch.split(out.view(-1), num_elements), strict=True):
            parts = self._meet(mine)
            if self._rank == 0:
                total = mine.to(torch.float32, copy=True)
                for other in parts[1:]:
                    total += other
                result.copy_(total)
                parts[0].copy_(result)
            self._part()
            if self._rank != 0:
                result.copy_(parts[0])
        return out

    def gather(self, part: Tensor) -> Tensor:
        size = len(self._slots)
        out = part.new_empty(size, part.numel())
        num_elements = SLOT_BYTES // part.element_size()
        pieces = torch.split(part.contiguous().view(-1), num_elements)
        for mine, results in zip(pieces, torch.split(out, num_elements, 1), strict=True):
            parts = self._meet(mine)
            if self._rank == 0:
                for result, other in zip(results, [mine, *parts[1:]], strict=True):
                    result.copy_(other)
            self._part()
        return part if self._rank else out.view(size, *part.shape).transpose(0, 1).flatten(1)

    def _meet(self, mine: Tensor) -> list[Tensor]:
        """Write my part; rank 0 returns once all have written theirs. Returns the slots as parts like mine."""
        parts = [slot[: mine.nbytes].view(mine.dtype) for slot in self._slots]
        if self._rank != 0:
            parts[self._rank].copy_(mine)
            self._tell()
        else:
            self._hear()
        return parts

    def _part(self) -> None:
        """Rank 0 has read all parts and written what it makes of them; the others wait for that."""
        if self._rank != 0:
            self._hear()
        else:
            self._tell()

    def _tell(self) -> None:
        for signal in self._signals:
            try:
                signal.sendall(b"\1")
            except OSError as error:
                raise RunnerLost(f"a rank is gone: {error}") from error

    def _hear(self) -> None:
        for signal in self._signals:
            try:
                heard = signal.recv(1)
            except TimeoutError:
                raise RunnerLost(f"a rank said nothing for {PATIENCE_S:g} s") from None
            except OSError as error:
                raise RunnerLost(f"a rank is gone: {error}") from error
            if not heard:
                raise RunnerLost("a rank has ended")
