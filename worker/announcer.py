"""Tells the controller where this worker is: at start, and whenever the connection to it was lost, since the one that answers
then may be another process, which knows nothing. The controller may be away for any time; the worker serves meanwhile.
Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from baton import clock
from baton.keepalive import CLIENT_OPTIONS
from baton.log import get_log
from baton.peer_trust import PLAIN, Part, PeerTrust, why_failed
from baton.v1 import control_pb2, control_pb2_grpc

log = get_log("worker.announcer")

RETRY_S = 0.5
ANSWER_S = 5.0  # the controller answers from memory


async def announce(
    address: str,
    record: Callable[[], control_pb2.WorkerRecord],
    adopt_wishes: Callable[[control_pb2.AnnounceResponse], None],
    trust: PeerTrust = PLAIN,
) -> None:
    """Run until cancelled, or until the controller says that a later start has taken this worker's place."""
    told = False  # one line per outage
    while True:
        try:
            async with trust.channel(address, Part.CONTROLLER, CLIENT_OPTIONS) as channel:
                request = control_pb2.AnnounceRequest(worker=record())
                answer = await control_pb2_grpc.ControlStub(channel).Announce(request, timeout=clock.real_s(ANSWER_S))
                told = False
                adopt_wishes(answer)
                await _lost(channel)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                log.error("announce_refused", reason=error.details())
                return
            if not told:
                log.warning("controller_away", reason=why_failed(error))
                told = True
            await asyncio.sleep(RETRY_S)


async def _lost(channel: grpc.aio.Channel) -> None:
    """Until the connection has ended. A channel that goes idle after half an hour counts too: one more call does no harm."""
    while (state := channel.get_state()) is grpc.ChannelConnectivity.READY:
        await channel.wait_for_state_change(state)
