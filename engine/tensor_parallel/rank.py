"""`python -m engine.tensor_parallel.rank`: a rank beside rank 0 (ranks.py), which starts it and hands over sockets and memory.

It has no say: it loads its share, computes what it is told to, and ends when rank 0 does, or closes its socket.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from baton.errors import ConfigError
from baton.request import SamplingParams
from engine.ports import BatchEntry, RunnerLost
from engine.tensor_parallel.exchange import SharedExchange
from engine.tensor_parallel.ranks import Entry, Job
from engine.torch_runner import LoadedRank, load_rank

NICENESS = 5  # that of rank 0's engine thread: docs/adr/0005-the-loop-comes-first.md
_NOT_DRAWN = SamplingParams(max_tokens=1)


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 when rank 0 ended it or has ended; 1 where it could not go on."""
    orders_fd, signal_fd, shared_fd, kv_fd = map(int, argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # whoever ends a whole group means rank 0, which drains first
    os.nice(NICENESS)
    orders = Connection(orders_fd)
    job: Job = orders.recv()
    shared = mmap.mmap(shared_fd, SharedExchange.nbytes(job.shard.size))
    kv_memory = memoryview(mmap.mmap(kv_fd, os.fstat(kv_fd).st_size))
    exchange = SharedExchange(job.shard.rank, job.shard.size, shared, [socket.socket(fileno=signal_fd)])
    try:
        rank = load_rank(job.files, job.engine, job.dtype, job.num_blocks, kv_memory, job.shard, exchange)
    except ConfigError as error:
        orders.send(error)
        return 1
    except Exception as error:  # told where it is waited for; this process ends
        orders.send(ConfigError(f"rank {job.shard.rank} cannot load the model: {type(error).__name__}"))
        raise
    orders.send(None)
    return _serve(rank, orders)


def _serve(rank: LoadedRank, orders: Connection) -> int:
    try:
        orders.recv()
        runner = rank.runner()
        while True:
            entries: list[Entry] = orders.recv()
            runner.compute(
                [BatchEntry(0, ids, start, table, sample, _NOT_DRAWN) for ids, start, table, sample in entries]
            )
    except (EOFError, ConnectionResetError):
        return 0
    except RunnerLost:  # rank 0 has ended within a step, or another rank has
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
