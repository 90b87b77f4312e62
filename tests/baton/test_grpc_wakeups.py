"""Events of gRPC reach the loop together, however slow its turns are. In its own process: the first use of grpc.aio counts."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time

import grpc.aio
import pytest

from baton import grpc_wakeups

NUM_STREAMS, NUM_MESSAGES, TURN_S = 150, 20, 0.002


def test_events_that_come_together_are_taken_in_a_few_slow_turns_of_the_loop() -> None:
    script = "from tests.baton import test_grpc_wakeups as here; here.main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    # 580 measured, most of them since a server takes one new call after another; 7,000 with a write end that blocks
    assert int(done.stdout) < 2_000


async def test_sockets_that_open_meanwhile_are_left_alone_by_who_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    grpc_wakeups.never_block()
    pairs: list[tuple[socket.socket, socket.socket]] = []
    monkeypatch.setattr(grpc.aio, "init_grpc_aio", lambda: pairs.append(socket.socketpair()))
    grpc_wakeups.never_block()
    for end in (end for pair in pairs for end in pair):
        assert end.getblocking()
        assert os.get_blocking(end.fileno())
        end.close()


def main() -> None:
    """Print how many turns it takes until every stream has been read."""
    grpc_wakeups.never_block()
    print(asyncio.run(_count_turns()))


async def _count_turns() -> int:
    turns, turn_s, loop = 0, 0.0, asyncio.get_running_loop()

    def turn() -> None:
        nonlocal turns
        turns += 1
        time.sleep(turn_s)
        loop.call_soon(turn)

    async def say_much(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        for _ in range(NUM_MESSAGES):
            await context.write(request)

    async def read() -> None:
        async for _ in channel.unary_stream("/test/Say", None, None)(b"x"):
            pass

    server = grpc.aio.server()
    methods = {"Say": grpc.unary_stream_rpc_method_handler(say_much)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        reading = [asyncio.create_task(read()) for _ in range(NUM_STREAMS)]
        loop.call_soon(turn)
        await asyncio.sleep(0.05)
        turns, turn_s = 0, TURN_S
        await asyncio.gather(*reading)
        turn_s = 0.0
    await server.stop(0)
    return turns
