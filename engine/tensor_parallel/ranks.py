"""The other ranks of a model, as rank 0 has them: processes of its own that it starts, tells of each step, and ends.

    worker process = rank 0                          rank r: python -m engine.tensor_parallel.rank
      scheduler, sampler, KV plane    ── entries ──>   lays the step out, computes its share, draws nothing
      its share of each layer         <─ exchange ─>

The KV cache is one piece of shared memory of which each rank writes its own heads, so that everything that moves KV sees whole
blocks of one worker, whatever its degree. Nothing here has a port or a name in a file system: sockets and memory are inherited,
and a rank ends when rank 0's end of its socket is closed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import TypeAlias

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.log import get_log
from baton.model_files import ModelFiles
from engine.ports import BatchEntry, RunnerLost
from engine.tensor_parallel.exchange import PATIENCE_S, SharedExchange
from engine.tensor_parallel.shard import Shard

log = get_log("engine.ranks")

_STDERR = 2  # for both outputs of a rank: whoever reads the worker's stdout to its end waits for no rank
_END_S = 5.0  # for a rank to see that its socket is closed; then it is killed


@dataclass(frozen=True, slots=True)
class Job:
    """What a rank is started for. `engine` has the threads of one rank."""

    files: ModelFiles
    engine: EngineConfig
    dtype: str
    num_blocks: int
    shard: Shard


# What a rank needs of a BatchEntry: token_ids, start, block_table, sample
Entry: TypeAlias = tuple[Sequence[int], int, Sequence[int], bool]


class Ranks:
    """Ranks 1 to T - 1, from rank 0's side. The engine thread's, but for `watch` and `close`."""

    def __init__(self, job: Job, kv_bytes: int) -> None:
        """Start them; they load meanwhile. `job`: rank 0's own. Raises: ConfigError where there is no memory for KV."""
        size = job.shard.size
        self._closing = threading.Event()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._orders: list[Connection] = []
        self._signals: list[socket.socket] = []
        shared_fd, kv_fd = os.memfd_create("baton-exchange"), os.memfd_create("baton-kv")
        try:
            shared = _mapped(shared_fd, SharedExchange.nbytes(size))
            self.kv_memory = memoryview(_mapped(kv_fd, kv_bytes))
            for rank in range(1, size):
                orders = self._start(shared_fd, kv_fd)
                orders.send(Job(job.files, job.engine, job.dtype, job.num_blocks, Shard(rank, size)))
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the ranks of a model cannot be started: {error}", field="engine.tensor_parallel_size"
            ) from error
        finally:
            os.close(shared_fd)
            os.close(kv_fd)
        self.exchange = SharedExchange(0, size, shared, self._signals)

    def _start(self, shared_fd: int, kv_fd: int) -> Connection:
        orders, their_orders = socket.socketpair()
        signals, their_signals = socket.socketpair()
        self._signals.append(signals)
        orders.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", *divmod(int(1e6 * PATIENCE_S), 10**6))
        )
        self._orders.append(Connection(orders.detach()))
        with their_orders, their_signals:
            fds = (their_orders.fileno(), their_signals.fileno(), shared_fd, kv_fd)
            command = [sys.executable, "-m", "engine.tensor_parallel.rank", *map(str, fds)]
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))  # inherited; rank.py
            try:
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=_STDERR, pass_fds=fds)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._processes.append(process)
        return self._orders[-1]

    def loaded(self) -> None:
        """Wait until all have their weights, then let them go on to the first step. Raises: ConfigError: what one says."""
        for orders in self._orders:
            try:
                error: ConfigError | None = orders.recv()
            except (OSError, EOFError):
                error = ConfigError(
                    "a rank of the model ended while it loaded; see the log", field="engine.tensor_parallel_size"
                )
            if error is not None:
                self.close()
                raise error
        self._tell(None)

    def begin(self, entries: Sequence[BatchEntry]) -> None:
        """Have a step computed beside rank 0's. Raises: RunnerLost."""
        self._tell([(entry.token_ids, entry.start, entry.block_table, entry.sample) for entry in entries])

    def _tell(self, order: list[Entry] | None) -> None:
        packed = ForkingPickler.dumps(order)  # once for all, as Connection.send does it for each
        try:
            for orders in self._orders:
                orders.send_bytes(packed)
        except BlockingIOError:
            raise RunnerLost(f"a rank took no order for {PATIENCE_S:g} s") from None
        except OSError as error:
            raise RunnerLost(f"a rank is gone: {error}") from error

    def watch(self, on_lost: Callable[[BaseException], None]) -> None:
        """Call `on_lost` once, on a thread of its own, if one ends that nobody ended."""
        told = threading.Lock()

        def wait(process: subprocess.Popen[bytes]) -> None:
            status = process.wait()
            if not self._closing.is_set() and told.acquire(blocking=False):
                log.error("rank_ended", pid=process.pid, status=status)
                on_lost(RunnerLost(f"a rank ended with status {status}"))

        for process in self._processes:
            threading.Thread(target=wait, args=(process,), name="rank-watch", daemon=True).start()

    def close(self) -> None:
        """End them all; when this returns none is left. Idempotent."""
        self._closing.set()
        for orders in self._orders:
            orders.close()
        for signals in self._signals:
            signals.close()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            process.kill()
            process.wait()


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    os.truncate(fd, nbytes)
    return mmap.mmap(fd, nbytes)
