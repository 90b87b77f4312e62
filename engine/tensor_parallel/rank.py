"""`python -m engine.tensor_parallel.rank`: a rank beside rank 0 (ranks.py), which starts it and hands over sockets and memory.

It has no say: it loads its share, computes what it is told to, and ends at once when rank 0 does, or closes its sockets. SIGINT
and SIGTERM are blocked from its first instruction on: whoever ends a whole group means rank 0, which drains first.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from baton.errors import ConfigError
from baton.request import SamplingParams
from engine.ports import BatchEntry, RunnerLost
from engine.tensor_parallel.exchange import SharedExchange
from engine.tensor_parallel.ranks import Entry, Job
from engine.torch_runner import load_rank

NICENESS = 5  # that of rank 0's engine thread: docs/adr/0005-the-loop-comes-first.md
_NOT_DRAWN = SamplingParams(max_tokens=1)


def main(argv: Sequence[str]) -> int:
    """Exit status: 0 when rank 0 ended it or has ended; 1 where it could not go on."""
    orders_fd, signal_fd, shared_fd, kv_fd = map(int, argv)
    threading.Thread(target=_end_with_rank_0, args=(signal_fd,), name="rank-0", daemon=True).start()
    os.nice(NICENESS)
    try:
        return _work(Connection(orders_fd), signal_fd, shared_fd, kv_fd)
    except (EOFError, ConnectionError):  # rank 0 has ended, or is done with this one
        return 0
    except RunnerLost as error:  # within a step
        print(f"rank: {error}", file=sys.stderr)
        return 1


def _work(orders: Connection, signal_fd: int, shared_fd: int, kv_fd: int) -> int:
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
    orders.recv()
    runner = rank.runner()
    while True:
        entries: list[Entry] = orders.recv()
        runner.compute([BatchEntry(0, ids, start, table, sample, _NOT_DRAWN) for ids, start, table, sample in entries])


def _end_with_rank_0(signal_fd: int) -> None:
    """End this process once rank 0's end of the socket is closed, whatever else it is at: it may load for minutes."""
    poll = select.poll()
    poll.register(signal_fd, 0)  # hang-up, which is always reported, and nothing else
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
