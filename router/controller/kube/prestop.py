"""What a worker pod runs before it is ended: `python -m router.controller.kube.prestop --control ... --worker ... --limit-s ...`.

    1. ask the controller to drain this pod's worker (`Leave`), each second: its successor may have to be asked, too
    2. until the worker has drained, or nobody listens on its port any more, or the limit is reached
    3. exit 0: the kubelet ends the pod

A controller that is away is asked again for as long as the limit allows: the worker goes on serving meanwhile, and what runs
there at the end goes on elsewhere, as after a death. The pod's grace period has to be longer than the limit. Imports neither
kubernetes, ray nor torch: a pod that ends has little time and memory.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

import grpc

from baton import clock
from baton.log import configure, get_log
from baton.peer_trust import Part, PeerTrust, why_failed
from baton.v1 import control_pb2, control_pb2_grpc

log = get_log("prestop")

ASK_S = 1.0  # between two questions
ANSWER_S = 6.0  # the controller waits for the worker's word for 5 s
_CONNECT_S = 2.0  # within a pod
_MISSES = 3  # a listener that is slow to accept is not gone


async def wait_until_drained(
    control: str, worker_id: str, address: tuple[str, int], limit_s: float, trust: PeerTrust
) -> str:
    """Why the wait is over."""
    deadline_s, misses = clock.now_s() + limit_s, 0
    while clock.now_s() < deadline_s:
        if await _is_drained(control, worker_id, trust):
            return "drained"
        misses = 0 if await _listens(*address) else misses + 1
        if misses >= _MISSES:
            return "nobody listens on the worker's port"
        await asyncio.sleep(ASK_S)
    return f"not drained after {limit_s:g} s; what runs there goes on elsewhere"


async def _is_drained(control: str, worker_id: str, trust: PeerTrust) -> bool:
    try:
        async with trust.channel(control, Part.CONTROLLER) as channel:
            request = control_pb2.LeaveRequest(worker_id=worker_id)
            answer = await control_pb2_grpc.ControlStub(channel).Leave(request, timeout=ANSWER_S)
            return answer.drained
    except grpc.aio.AioRpcError as error:
        log.warning("controller_away", reason=why_failed(error))
        return False


async def _listens(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m router.controller.kube.prestop")
    parser.add_argument("--control", required=True, metavar="HOST:PORT", help="the controller")
    parser.add_argument("--worker", required=True, help="the pod's name")
    parser.add_argument("--limit-s", required=True, type=float, help="at most so long; the grace period must be longer")
    parser.add_argument("--tls-dir", default="", help="of this pod's certificate")
    parser.add_argument("--host", default=os.environ.get("POD_IP", "127.0.0.1"), help="where the worker listens")
    parser.add_argument("--port", type=int, default=7_100)
    args = parser.parse_args(argv)
    configure("prestop", "info")
    trust = PeerTrust(args.tls_dir, Part.WORKER)
    why = clock.run(wait_until_drained(args.control, args.worker, (args.host, args.port), args.limit_s, trust))
    log.info("pod_may_end", worker=args.worker, reason=why)
    return 0


if __name__ == "__main__":
    sys.exit(main())
