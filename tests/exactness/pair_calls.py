"""Calls to whole workers, one at a time, each prefilled at one of them and decoded at it or at another."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator

from baton.config import WorkerConfig
from baton.request import Request, SamplingParams
from baton.v1 import worker_pb2
from tests.tiny_models import VOCAB_SIZE
from tests.worker.session_client import SessionClient
from worker.server import WorkerServer

NUM_TOKENS = 24
LENGTHS = (1, 15, 16, 17, 33, 64, 200)
PROMPTS = [[(31 * i * i + 7 * i + n) % (VOCAB_SIZE - 10) + 5 for i in range(n)] for n in LENGTHS]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
EPOCH = 0xF8
_numbers = itertools.count(1)


@contextlib.contextmanager
def running(configs: Iterable[WorkerConfig]) -> Iterator[dict[str, WorkerServer]]:
    """Workers by name, all of them started."""
    workers = {config.worker_id: WorkerServer(config) for config in configs}
    with contextlib.ExitStack() as started:
        for worker in workers.values():
            started.callback(worker.stop)
            worker.start()
        yield workers


class Calls:
    """A session to each worker, and calls one at a time."""

    def __init__(self, workers: dict[str, WorkerServer]) -> None:
        self._workers = workers
        self._stack = contextlib.AsyncExitStack()
        self.sessions: dict[str, SessionClient] = {}

    async def __aenter__(self) -> Calls:
        for name, worker in self._workers.items():
            session = SessionClient(worker.address, EPOCH)
            self.sessions[name] = await self._stack.enter_async_context(session)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def submit(self, first: str, last: str, prompt: list[int], sampling: SamplingParams = GREEDY) -> int:
        """Prefill at `first`, decode at `last`; returns the seq once `first` is done with it."""
        seq = EPOCH << 32 | next(_numbers)
        target = self._workers[last]
        peer = worker_pb2.Peer(worker_id=last, epoch=target.epoch, address=target.address)
        session = self.sessions[first]
        session.submit(Request(seq, tuple(prompt), sampling), peer if first != last else None)
        await session.until(lambda: seq in session.ended or seq in session.refused)
        return seq

    async def answer(
        self, first: str, last: str, prompt: list[int], sampling: SamplingParams = GREEDY
    ) -> tuple[list[int], worker_pb2.SeqStats]:
        """All tokens, and what `first` says of the transfer."""
        seq = await self.submit(first, last, prompt, sampling)
        start, end = self.sessions[first], self.sessions[last]
        assert seq in start.ended, start.refused
        assert start.ended[seq].outcome != worker_pb2.OUTCOME_FAILED, start.ended[seq].error
        await end.until(lambda: seq in end.ended)
        tokens = start.tokens[seq] | end.tokens[seq]
        assert sorted(tokens) == list(range(sampling.max_tokens))
        return [tokens[i] for i in range(sampling.max_tokens)], start.ended[seq].stats
