"""A stub worker that keeps resumable calls, with the very journal that real workers have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from baton.errors import Cancelled
from baton.request import FinishReason, Logprobs, SampledToken
from baton.v1 import worker_pb2
from baton.wire import error_to_pb, request_from_pb
from tests.router.stub_worker import StubWorker
from worker.parked import ParkedCalls


class ParkingWorker(StubWorker):
    def __init__(self, worker_id: str, role: worker_pb2.Role.ValueType = worker_pb2.ROLE_BOTH) -> None:
        super().__init__(worker_id, role)
        self.parked = ParkedCalls(1 << 20)
        self.num_parks = 0  # Cancels that said `park`

    async def _read(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], outbox: asyncio.Queue[worker_pb2.SessionEvent]
    ) -> None:
        (epoch,) = [epoch for epoch, known in self._outboxes.items() if known is outbox]
        try:
            await super()._read(self._others(requests, epoch), outbox)
        finally:
            self.parked.router_lost(epoch, time.monotonic())

    async def _others(
        self, requests: AsyncIterator[worker_pb2.SessionRequest], epoch: int
    ) -> AsyncIterator[worker_pb2.SessionRequest]:
        """Everything that the journal does not answer itself."""
        async for request in requests:
            kind = request.WhichOneof("message")
            if kind == "find":
                if not self.parked.is_claimed(request.find.key, epoch, time.monotonic()):
                    self._end_call(request.find.key)
                found = self.parked.find(request.find, epoch, time.monotonic())
                self._outboxes[epoch].put_nowait(worker_pb2.SessionEvent(found=found))
                continue
            if kind == "forget":
                self._end_call(request.forget.key)
                self.parked.forget(request.forget.key)
                continue
            if kind == "cancel":
                self.num_parks += request.cancel.park
                if not request.cancel.park:
                    self.parked.forget_seq(request.cancel.seq)
            yield request

    def _end_call(self, key: bytes) -> None:
        for seq in self.parked.running(key):
            error = error_to_pb(Cancelled("the client resumed the call elsewhere"))
            ended = worker_pb2.Ended(seq=seq, outcome=worker_pb2.OUTCOME_FAILED, error=error)
            self._say(seq, worker_pb2.SessionEvent(ended=ended))
            self._cancel(seq)
            self.parked.ended(seq, time.monotonic())

    def _on_submit(self, submit: worker_pb2.Submit) -> None:
        self.parked.open(request_from_pb(submit.request), time.monotonic() + submit.ttl_ms / 1e3)
        super()._on_submit(submit)

    def adopt(self, request: worker_pb2.Request) -> None:
        self.parked.open(request_from_pb(request))
        self.parked.adopted(request.seq, self.script.tokens[request.num_output_tokens % len(self.script.tokens)])
        super().adopt(request)

    def _say(self, seq: int, event: worker_pb2.SessionEvent) -> None:
        step = event.step
        logprobs = {
            entry.entry: Logprobs(entry.logprob, tuple(entry.top_ids), tuple(entry.top_logprobs))
            for entry in step.logprobs
        }
        for entry, (index, token) in enumerate(zip(step.index, step.token, strict=True)):
            finish = FinishReason(step.flags[entry])
            self.parked.token(SampledToken(seq, index, token, finish, logprobs.get(entry)))
        if event.HasField("ended"):
            self.parked.ended(seq, time.monotonic())
        super()._say(seq, event)


async def start_parking_pair() -> tuple[ParkingWorker, ParkingWorker]:
    prefill, decode = ParkingWorker("p0", worker_pb2.ROLE_PREFILL), ParkingWorker("d0", worker_pb2.ROLE_DECODE)
    await prefill.start()
    await decode.start()
    prefill.peers["d0"] = decode
    return prefill, decode
