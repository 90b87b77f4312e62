"""`python -m tests.worker.router_process EPOCH PREFILL DECODE DECODE_EPOCH`: a router with calls under way, to be killed.

Two calls over the pair, and two local ones on decode; prints a line once all of them have tokens, then only reads.
"""

from __future__ import annotations

import asyncio
import sys

from baton.v1 import worker_pb2
from tests.worker.session_client import SessionClient, request

NUM_TOKENS = 1_800  # as many as fit: they are running whenever the test looks


async def run(epoch: int, prefill: str, decode: str, decode_epoch: int) -> None:
    peer = worker_pb2.Peer(worker_id="d", epoch=decode_epoch, address=decode)
    async with SessionClient(prefill, epoch) as at_prefill, SessionClient(decode, epoch) as at_decode:
        for n in range(4):
            session, target = (at_prefill, peer) if n % 2 else (at_decode, None)
            session.submit(
                request(epoch << 32 | n, range(20, 120), NUM_TOKENS, ignore_eos=True), target, ttl_ms=600_000
            )
        await at_decode.until(lambda: len(at_decode.tokens) == 4)
        print("running", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])))
