"""Pools that are full, in every direction, and clients that leave by the hundred: everybody gets an answer, nothing is left."""

from __future__ import annotations

from tests.faults.fault_rig import QUICK, config_of, fleet, prompt, routing


async def test_workers_of_both_roles_whose_pools_are_full_of_each_others_prompts_do_not_wait_for_each_other() -> None:
    """Each prompt takes 13 of 32 blocks where it is prefilled and 13, later 15, where it is decoded."""
    configs = [config_of(name, "both", QUICK, num_blocks=32, mode="staged") for name in ("a", "b")]
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
