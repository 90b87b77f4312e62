"""A router that dies, or is only stopped: its workers free what it held, and another router's calls do not notice."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.config import KVTransferConfig
from baton.request import SamplingParams
from baton.v1 import worker_pb2
from engine.ports import Batch
from engine.scripted_runner import answer
from tests.worker.scripted_worker import ScriptedWorker, running, worker_config
from tests.worker.session_client import SessionClient, request

ROOT = Path(__file__).parents[2]
DOOMED, LIVING = 0xDEAD, 0xA11E
BOUND_S = KVTransferConfig().lease_s + 1.0  # DESIGN section 5: the silent path
PROMPT = [(13 * i) % 900 + 20 for i in range(100)]
NUM_TOKENS = 1_900
STEP_S = 0.002  # 1,800 tokens then take longer than the bound


def slow(_: Batch) -> None:
    time.sleep(STEP_S)


@contextlib.asynccontextmanager
async def router_process(prefill: ScriptedWorker, decode: ScriptedWorker) -> AsyncIterator[asyncio.subprocess.Process]:
    """A router with four calls that decode."""
    arguments = [str(DOOMED), prefill.server.address, decode.server.address, str(decode.server.epoch)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.worker.router_process", *arguments, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 60.0) == b"running\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_router_that_is_gone_or_stopped_holds_nothing_for_longer_than_a_lease(how: signal.Signals) -> None:
    prefill, decode = ScriptedWorker(worker_config("p", "prefill")), ScriptedWorker(worker_config("d", "decode"))
    decode.runner.before_run = slow
    async with (
        running(prefill, decode),
        SessionClient(prefill.server.address, LIVING) as at_prefill,
        SessionClient(decode.server.address, LIVING) as at_decode,
        router_process(prefill, decode) as doomed,
    ):
        seq = LIVING << 32 | 1
        at_prefill.submit(request(seq, PROMPT, NUM_TOKENS, ignore_eos=True), decode.peer)
        await at_decode.until(lambda: seq in at_decode.tokens and at_decode.load.num_running == 5)
        stopped_s = time.monotonic()
        doomed.send_signal(how)
        await at_decode.until(lambda: at_decode.load.num_running <= 1)
        took_s = time.monotonic() - stopped_s
        print(f"{how.name}: freed after {took_s:.2f} s; the bound is {BOUND_S:g} s")
        assert seq not in at_decode.ended  # else nobody was freed: they have all run to their ends
        num_seen = len(at_decode.tokens[seq])
        await at_decode.until(lambda: len(at_decode.tokens[seq]) >= num_seen + 10)
        at_decode.send(cancel=worker_pb2.Cancel(seq=seq))
        await at_decode.until(lambda: seq in at_decode.ended)
        tokens = at_prefill.tokens[seq] | at_decode.tokens[seq]
        expected = answer(PROMPT, SamplingParams(max_tokens=1, temperature=0.0), len(tokens))
        assert [tokens[i] for i in range(len(tokens))] == expected
        for session in (at_prefill, at_decode):
            await session.until(lambda session=session: is_idle(session.load))  # type: ignore[misc]
        assert prefill.fatal == decode.fatal == []


def is_idle(load: worker_pb2.Load) -> bool:
    return not any((load.num_running, load.num_waiting, load.active_blocks, load.reserved_blocks, load.num_leases))
