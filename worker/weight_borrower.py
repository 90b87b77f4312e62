"""A starting worker takes the weights of its model from one that serves it already. All of them, verified, or nothing.

    1 ask      the controller names workers that may have them, those of the same model first
    2 Hello    model, dtype and manifest are the same by every name and size        -> the next worker
    3 prove    a probe frame each way                                               -> the next worker
    4 receive  one ticket over all pages: crc32c of each frame, every page once     -> the next worker
    5 Ack      Committed: every byte is in the buffer

Nothing is believed half: a lender that dies, stalls or sends other bytes ends its try, the next one writes every page again, and
without any the files are read. Frames land in the ring and are copied by our own KV thread, so no lender can write into the
buffer, let alone late. The plane, its UCX worker and its epoch are of this load alone. Runs on the worker's event loop, before
it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc

from baton import clock
from baton.config import KVTransferConfig, WorkerConfig
from baton.errors import BatonError, TransferFailed, WorkerLost
from baton.ids import new_epoch
from baton.log import get_log
from baton.model_spec import ModelSpec
from baton.peer_trust import Part, PeerTrust, why_failed
from baton.v1 import control_pb2, control_pb2_grpc, kv_pb2, kv_pb2_grpc, worker_pb2
from engine.loading.weight_manifest import WeightManifest
from kv_transfer.events import Committed, IncomingClosed, Incomplete, KVEvent, PairLost, PairReady
from kv_transfer.pages import PageBuffer, num_pages, page_layout
from kv_transfer.plane import KVPlane
from worker.hello import check_transport, refusal_by_peer
from worker.link_outbox import LinkOutbox
from worker.weight_hello import check_weight_hello, model_fingerprint, weight_hello
from worker.weight_lender import loan_seq

log = get_log("worker.weight_borrower")

ANSWER_S = 5.0  # the controller answers from memory
MAX_LENDERS = 4  # that are asked: each refusal or silence costs a start at most hello_timeout_s
GOODBYE_S = 1.0  # for the lender to hear the Ack; every byte is here by then
GENERATION = 1  # every try is a pair of its own


async def borrow_weights(
    config: WorkerConfig, spec: ModelSpec, manifest: WeightManifest, buffer: mmap.mmap, trust: PeerTrust
) -> bool:
    """Fill `buffer`, of whole pages, with the image that `manifest` describes. False where nobody lends it: it is not to be used.

    Says why in the log, one line per worker that was asked.
    """
    lenders = await _ask_controller(config, spec, trust)
    if not lenders:
        return False
    borrower = _Borrower(config, spec, manifest, buffer, trust)
    try:
        for lender in lenders[:MAX_LENDERS]:
            started_s = clock.now_s()
            try:
                transport = await borrower.borrow(lender)
            except BatonError as error:
                log.warning("weights_not_borrowed", peer=lender.worker_id, reason=error.message)
                continue
            took_s = round(clock.now_s() - started_s, 3)
            log.info(
                "weights_borrowed", peer=lender.worker_id, transport=transport, nbytes=manifest.nbytes, took_s=took_s
            )
            return True
    finally:
        await borrower.close()
    return False


async def _ask_controller(config: WorkerConfig, spec: ModelSpec, trust: PeerTrust) -> Sequence[worker_pb2.Peer]:
    if not config.control_address:
        return ()
    request = control_pb2.LendersRequest(worker_id=config.worker_id, fingerprint=model_fingerprint(spec))
    try:
        async with trust.channel(config.control_address, Part.CONTROLLER) as channel:
            answer = await control_pb2_grpc.ControlStub(channel).Lenders(request, timeout=ANSWER_S)
    except grpc.aio.AioRpcError as error:
        log.warning("no_lenders_known", reason=why_failed(error))
        return ()
    return [peer for peer in answer.workers if peer.worker_id != config.worker_id]


class _Borrower:
    """The load's own plane, and one try after the other on it."""

    def __init__(
        self, config: WorkerConfig, spec: ModelSpec, manifest: WeightManifest, buffer: mmap.mmap, trust: PeerTrust
    ) -> None:
        self._kv = replace(config.kv, mode="auto")  # pages are staged: nobody can read a packed model in place
        self._trust = trust
        self._loop = asyncio.get_running_loop()
        self._try: _Try | None = None
        layout, epoch = page_layout(self._kv.frame_bytes), new_epoch()
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self._store = PageBuffer(layout, address, num_pages(layout, manifest.nbytes) * layout.block_bytes)
        self._plane = KVPlane(self._store, self._kv, epoch, self._on_event)
        self._plane.start()
        self._hello = weight_hello(config, spec, manifest, epoch, self._plane.address)

    def _on_event(self, event: KVEvent) -> None:
        """On the KV thread, which ends before the loop does."""
        self._loop.call_soon_threadsafe(self._pass_on, event)

    def _pass_on(self, event: KVEvent) -> None:
        if self._try is not None and self._try.concerns(event):
            self._try.happened.put_nowait(event)

    async def borrow(self, lender: worker_pb2.Peer) -> str:
        """One try. Returns the transport. Raises: PeerRefused, WorkerLost, TransferFailed."""
        hello = kv_pb2.Hello()
        hello.CopyFrom(self._hello)
        hello.pair_nonce = secrets.randbits(63) or 1
        attempt = self._try = _Try(lender, hello, self._plane, self._store.num_blocks, self._kv)
        async with self._trust.channel(lender.address, Part.WORKER) as channel:
            call = kv_pb2_grpc.KvWeightsStub(channel).Borrow(attempt.outbox.messages())
            reader = asyncio.create_task(attempt.read(aiter(call)), name="borrow")
            try:
                return await attempt.run()
            finally:
                self._try = None
                self._plane.disconnect(lender.worker_id)
                attempt.outbox.end()
                call.cancel()
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def close(self) -> None:
        await self._loop.run_in_executor(None, self._plane.stop)


class _Try:
    """One lender's."""

    def __init__(
        self, lender: worker_pb2.Peer, hello: kv_pb2.Hello, plane: KVPlane, num_blocks: int, kv: KVTransferConfig
    ) -> None:
        self._lender = lender
        self._hello = hello
        self._plane = plane
        self._num_blocks = num_blocks
        self._kv = kv
        self._seq = loan_seq(hello.pair_nonce)
        self.outbox = LinkOutbox()
        self.happened: asyncio.Queue[kv_pb2.LinkMessage | KVEvent | BatonError] = asyncio.Queue()

    def concerns(self, event: KVEvent) -> bool:
        if isinstance(event, PairReady | PairLost):
            return event.pair_nonce == self._hello.pair_nonce
        return event.seq == self._seq

    async def read(self, answers: AsyncIterator[kv_pb2.LinkMessage]) -> None:
        """Into `happened`, which ends with an error in any case."""
        error: BatonError = WorkerLost("it ended the loan")
        try:
            async for message in answers:
                self.happened.put_nowait(message)
        except grpc.aio.AioRpcError as failure:
            error = WorkerLost(why_failed(failure))
        self.happened.put_nowait(error)

    async def run(self) -> str:
        """Returns the transport."""
        self._send(hello=self._hello)
        try:
            async with asyncio.timeout(self._kv.hello_timeout_s + 1.0):  # the plane's own limit is within it
                theirs = await self._greet()
                transport = await self._prove(theirs)
        except TimeoutError:
            raise WorkerLost(f"it did not complete the handshake in {self._kv.hello_timeout_s + 1.0:g} s") from None
        self._grant()
        await self._receive()
        self._send(ack=kv_pb2.Ack(seq=self._seq, generation=GENERATION))
        with contextlib.suppress(TimeoutError, BatonError):  # it lets go at once where it hears the Ack
            async with asyncio.timeout(GOODBYE_S):
                await self._next()
        return transport

    async def _greet(self) -> kv_pb2.Hello:
        message = await self._next()
        if not isinstance(message, kv_pb2.LinkMessage) or message.WhichOneof("message") != "hello":
            raise WorkerLost("its first message is no hello")
        refusal = check_weight_hello(self._hello, message.hello, opener=True)
        if refusal is not None:
            raise refusal.error
        return message.hello

    async def _prove(self, theirs: kv_pb2.Hello) -> str:
        """Make the pair; return its transport once both ends have proved it."""
        self._plane.connect(
            self._lender.worker_id,
            theirs.epoch,
            theirs.ucx_address,
            self._hello.pair_nonce,
            min(theirs.frame_bytes, self._hello.frame_bytes),
            min(theirs.num_slots, self._hello.num_slots),
        )
        transport, is_ready = "", False
        while not (transport and is_ready):
            happening = await self._next()
            if isinstance(happening, PairReady):
                transport = happening.transport
                refusal = check_transport(self._hello, theirs.require_rdma, transport)
                if refusal is not None:
                    raise refusal.error
            elif isinstance(happening, kv_pb2.LinkMessage):
                is_ready |= happening.WhichOneof("message") == "ready"
        return transport

    def _grant(self) -> None:
        """Open every page to frames, and say so. From here on the plane watches the time: IncomingClosed."""
        pages = range(self._num_blocks)
        self._plane.open_incoming(self._lender.worker_id, self._seq, GENERATION, pages, 0, self._kv.lease_s)
        ticket = kv_pb2.Ticket(
            seq=self._seq, epoch=self._hello.epoch, generation=GENERATION, num_blocks=self._num_blocks
        )
        self._send(grant=kv_pb2.Grant(ticket=ticket))

    async def _receive(self) -> None:
        """Until every page is whole."""
        while not isinstance(happening := await self._next(), Committed):
            if isinstance(happening, Incomplete):
                missing = happening.missing_frames
                self._send(nack=kv_pb2.Nack(seq=self._seq, generation=GENERATION, missing_frames=missing))
            elif isinstance(happening, kv_pb2.LinkMessage) and happening.HasField("commit"):
                commit = happening.commit
                self._plane.commit_incoming(self._seq, GENERATION, commit.num_frames, commit.nbytes)

    def _send(self, **message: object) -> None:
        self.outbox.put(kv_pb2.LinkMessage(**message))  # type: ignore[arg-type]

    async def _next(self) -> kv_pb2.LinkMessage | KVEvent:
        """What happens next. Raises: PeerRefused, WorkerLost, TransferFailed: nothing more will."""
        happening = await self.happened.get()
        if isinstance(happening, BatonError):
            raise happening
        if isinstance(happening, PairLost):
            raise WorkerLost(f"the data path was lost: {happening.reason}")
        if isinstance(happening, IncomingClosed):
            raise TransferFailed(f"the transfer ended: {happening.reason}")
        if isinstance(happening, kv_pb2.LinkMessage) and happening.HasField("hello_refused"):
            raise refusal_by_peer(happening.hello_refused).error
        return happening
