"""Pools that are full, in every direction, and clients that leave by the hundred: everybody gets an answer, nothing is left."""

from __future__ import annotations

import random
import time

import pytest

from tests.faults.fault_rig import QUICK, config_of, fleet, prompt, routing, until


async def test_workers_of_both_roles_whose_pools_are_full_of_each_others_prompts_do_not_wait_for_each_other() -> None:
    """Each prompt takes 13 of 32 blocks where it is prefilled and 13, later 15, where it is decoded."""
    configs = [config_of(name, "both", QUICK, num_blocks=32) for name in ("a", "b")]
    with fleet() as workers:
        started = await workers.start(*configs)
        async with routing(0xC0, *started) as router:
            await router.plain("a", "b")
            await router.plain("b", "a")
            calls = [
                router.submit(prompt(200, salt), 20, *(("a", "b") if salt % 2 else ("b", "a"))) for salt in range(24)
            ]
            await router.end_of(*calls)
            assert {call.outcome for call in calls} == {"FINISHED"}
            await router.idle()


async def test_a_full_decode_worker_grants_in_order_and_prefill_serves_others_meanwhile() -> None:
    """`d` holds one call of 13 blocks at a time; what waits there stops nobody who goes to `d2`, and gives up by its own ttl."""
    configs = [config_of("p", "prefill", QUICK), config_of("d", "decode", QUICK, 20), config_of("d2", "decode", QUICK)]
    with fleet() as workers:
        p, d, d2 = await workers.start(*configs)
        async with routing(0xC1, p, d, d2) as router:
            await router.plain()
            await router.plain(decode="d2")
            d.ask("pace", 0.02)
            first = router.submit(prompt(200), 100)
            await until(lambda: len(first.decode.tokens.get(first.seq, ())) > 1)
            waiting = [router.submit(prompt(200, salt), 5) for salt in (1, 2, 3)]
            doomed = router.submit(prompt(200, 4), 5, ttl_s=0.5)
            others = [router.submit(prompt(200, salt), 5, decode="d2") for salt in range(5, 10)]
            await router.end_of(*others, doomed)
            assert {call.outcome for call in others} == {"FINISHED"}
            assert doomed.outcome == "FAILED"
            assert "deadline" in doomed.error
            assert not any(call.outcome for call in waiting)
            d.ask("pace", 0.0)
            await router.end_of(first, *waiting)
            assert {call.outcome for call in (first, *waiting)} == {"FINISHED"}
            ends = list(router.sessions["d"].ended)
            assert [seq for seq in ends if seq in {call.seq for call in waiting}] == [call.seq for call in waiting]
            await router.idle()


@pytest.mark.parametrize("mode", ["staged", "direct"])
async def test_two_hundred_calls_that_leave_during_their_transfer_leave_nothing(mode: str) -> None:
    """Each leaves after its first token, when its KV is on the way or being adopted; copies wait now and then."""
    rng = random.Random(1)
    with fleet() as workers:
        p, d = await workers.start(
            config_of("p", "prefill", QUICK, mode=mode), config_of("d", "decode", QUICK, mode=mode)
        )
        async with routing(0xC2, p, d) as router:
            await router.plain()
            await router.idle()
            before = {name: worker.ask("resources") for name, worker in router.workers.items()}
            for _ in range(5):
                holder, copy = rng.choice([(p, "gather"), (d, "scatter")])
                holder.ask("copy", copy, rng.randrange(40))
                calls = [router.submit(prompt(rng.randint(100, 200), salt), 50) for salt in range(40)]
                await until(lambda: sum(bool(call.tokens) for call in calls) > 3 or bool(p.ask("held").get("gather")))  # noqa: B023
                rng.shuffle(calls)
                for call in calls:
                    router.cancel(call)
                holder.ask("release")
                cancelled_s = time.monotonic()
                await router.end_of(*calls)
                await router.idle()
                print(f"idle {time.monotonic() - cancelled_s:.2f} s after the last cancel")
            assert all(call.outcome in ("CANCELLED", "FINISHED") for call in router.calls)
            await router.plain()
            for name, worker in router.workers.items():
                after = worker.ask("resources")
                assert after["threads"] <= before[name]["threads"]
                assert after["shared"] <= before[name]["shared"]
