"""Control messages that are lost, said twice, late or out of order, cut streams, and tickets that are stale.

A call ends with its own text or an error, never with another prompt's; what was held is free; the pair goes on.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time

import pytest

from baton.v1 import worker_pb2
from tests.faults.fault_rig import QUICK, Call, FaultRouter, config_of, fleet, prompt, routing, until
from tests.soak.soak_proxy import Proxy

TRANSFER_TIMEOUT_S = 3.0  # a lost Commit is known by it alone
KINDS = ("reserve", "grant", "commit", "ack", "cancel")
SECRET = [4, 4, 7, 1]  # "my code is 4471"


async def storm(router: FaultRouter, rng: random.Random, num_calls: int) -> list[Call]:
    """Calls of every size, some of which leave; until all are over."""
    calls = []
    for n in range(num_calls):
        calls.append(router.submit(prompt(rng.randint(1, 200), salt=n), rng.choice((2, 5, 20)), ttl_s=20.0))
        if rng.random() < 0.2:
            await asyncio.sleep(0.05 * rng.random())
            router.cancel(calls[-1])
    await router.end_of(*calls)
    return calls


async def test_lost_repeated_late_and_reordered_messages_end_calls_with_their_own_text_or_an_error() -> None:
    configs = [
        config_of(name, role, QUICK, transfer_timeout_s=TRANSFER_TIMEOUT_S)
        for name, role in (("p", "prefill"), ("d", "decode"))
    ]
    rng = random.Random(7)
    with fleet() as workers:
        p, d = await workers.start(*configs)
        async with routing(0xE0, p, d) as router:
            await router.plain()
            troubles: list[dict[str, float]] = [
                {"repeat": 0.7},
                {"delay": 0.7},
                {"lose": 0.2, "repeat": 0.2, "delay": 0.2},
                *({f"lose {kind}": 0.5} for kind in KINDS),
            ]
            for rates in troubles:
                for worker in (p, d):
                    worker.ask("trouble", rates)
                calls = await storm(router, rng, 8)
                for worker in (p, d):
                    worker.ask("trouble", {})
                took_s = await router.idle()
                finished = sum(call.outcome == "FINISHED" for call in calls)
                if rates.keys() == {"repeat"}:
                    assert {call.outcome for call in calls} <= {"FINISHED", "CANCELLED"}, [call.error for call in calls]
                print(f"{rates}: {finished} of {len(calls)} finished, idle after {took_s:.1f} s")
                await router.plain()


async def test_a_lost_grant_or_ack_is_said_again_and_the_call_is_whole() -> None:
    with fleet() as workers:
        p, d = await workers.start(config_of("p", "prefill", QUICK), config_of("d", "decode", QUICK))
        async with routing(0xE1, p, d) as router:
            await router.plain()
            for kind in ("grant", "ack"):
                d.ask("trouble", {f"lose {kind}": 1.0})
                lost = d.ask("held").get(f"lost {kind}", 0)
                d.ask("pace", 0.05)
                call = router.submit(prompt(100, salt=1), 60)  # outlives several pings
                await until(lambda: d.ask("held").get(f"lost {kind}", 0) > lost)  # noqa: B023  awaited at once
                d.ask("trouble", {})
                await router.end_of(call)
                assert call.outcome == "FINISHED", (kind, call.error)
                assert router.sessions["p"].ended[call.seq].outcome == worker_pb2.OUTCOME_HANDED_OFF
            await router.idle()


async def test_streams_that_are_cut_in_the_middle_of_a_message_end_calls_and_come_back() -> None:
    """The link runs through a proxy that breaks it at any byte; the data path and the Sessions stay."""
    rng = random.Random(3)
    proxy = await Proxy().start()
    with fleet() as workers:
        p, d = await workers.start(config_of("p", "prefill", QUICK), config_of("d", "decode", QUICK))
        proxy.backend = d.port
        d.peer.address = proxy.address
        async with routing(0xE2, p, d) as router:
            cuts = 0
            for _ in range(4):
                calls = [router.submit(prompt(200, salt=n), 10) for n in range(6)]
                await asyncio.sleep(0.1 * rng.random())
                cuts += proxy.cut(rng)
                await router.end_of(*calls)
                await router.plain()
            assert cuts > 0
            await router.idle()
    await proxy.close()


@pytest.mark.parametrize("mode", ["staged", "direct"])
async def test_a_stale_commit_is_refused_and_counted_and_never_becomes_another_prompts_text(mode: str) -> None:
    configs = [config_of(name, role, QUICK, mode=mode) for name, role in (("p", "prefill"), ("d", "decode"))]
    with fleet() as workers:
        p, d = await workers.start(*configs)
        async with routing(0xE3, p, d) as router:
            first = router.submit([*SECRET, *prompt(96)], 8)
            await router.end_of(first)
            assert first.outcome == "FINISHED"

            async def refused(**changes: int) -> None:
                """Say the last Commit again: one more failed transfer, and nothing else."""
                before = router.sessions["d"].load
                p.ask("commit", changes)
                decode = router.sessions["d"]
                await until(lambda: decode.load.kv_transfers_failed > before.kv_transfers_failed)
                assert decode.load.kv_transfers_failed == before.kv_transfers_failed + 1
                assert decode.load.num_admitted == before.num_admitted

            await router.idle()
            await refused()  # consumed
            await refused(seq=first.seq + 1_000)  # unknown
            await refused(epoch=1)
            await refused(generation=77)
            await refused(generation=0)
            d.ask("hold", "grant", router.epoch << 32 | len(router.calls) + 1)
            expired = router.submit(prompt(100), 8)  # its ticket is granted, and given up unheard
            await until(lambda: d.ask("held").get("grant", 0) > 0)
            router.cancel(expired)
            await router.end_of(expired)
            await router.idle()
            await refused(seq=expired.seq, generation=2)  # given up; its blocks are free, or another's
            d.ask("release")
            d.ask("pace", 0.05)
            other = router.submit(prompt(100, salt=5), 30)  # takes the blocks of the first
            await until(lambda: len(router.sessions["d"].tokens.get(other.seq, ())) > 1)
            await refused(seq=first.seq, generation=1)
            await refused(seq=other.seq)
            d.ask("pace", 0.0)
            await router.end_of(other)
            assert other.outcome == "FINISHED"
            assert not set(expired.tokens) - {0}
            await router.plain()
            await router.idle()


@pytest.mark.parametrize("victim", ["p", "d"])
async def test_a_data_address_that_nobody_can_reach_keeps_its_pair_out_and_harms_no_other(victim: str) -> None:
    names = {"p": "prefill", "p2": "prefill", "d": "decode", "d2": "decode"}
    configs = {name: config_of(name, role, QUICK, ucx_tls="tcp") for name, role in names.items()}
    with fleet() as workers, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and never listens
        port = nobody.getsockname()[1]
        (bad,) = await workers.start(configs.pop(victim), FAULT_DATA_PORT=str(port))
        good = await workers.start(*configs.values())
        async with routing(0xE4, bad, *good) as router:
            pairs = [(p, d) for p in ("p", "p2") for d in ("d", "d2") if victim not in (p, d)]
            started_s = time.monotonic()
            lost = router.submit(prompt(50), 4, *(("p", "d2") if victim == "p" else ("p2", "d")))
            for pair in pairs:
                await router.plain(*pair)
            await router.end_of(lost)
            assert lost.outcome == "FAILED"
            print(f"{lost.error}: after {time.monotonic() - started_s:.1f} s, with the other pairs' calls before it")
            asker = router.sessions["p" if victim == "p" else "p2"]
            broken = "d2" if victim == "p" else "d"
            await until(lambda: bool(asker.links[broken].reason))
            assert asker.links[broken].state != "ready"
            assert not [call for call in router.calls if call is not lost and call.outcome != "FINISHED"]
