"""Memory, seats and time run out, models fail, workers refuse: others go on, and everybody gets an answer."""

from __future__ import annotations

import pytest

from baton.request import Role
from tests.handoff.handoff_calls import FAILED, FINISHED, REFUSED, Rig, random_prompt
from tests.handoff.handoff_links import cut
from tests.handoff.handoff_rig import Cluster, RigConfig

SEEDS = range(10)


@pytest.mark.parametrize("seed", SEEDS)
def test_reservations_wait_in_order_while_decode_is_full(seed: int) -> None:
    rig = Rig(seed, Cluster(seed, RigConfig(decode_blocks=16, prefix_cache=False)))
    rig.cluster.run_for(0.5)
    calls = [rig.router.submit(random_prompt(rig.rng, 40), 8) for _ in range(6)]  # 10 blocks of 16 each
    rig.finish_all()
    ends = [call.over_s for call in calls]
    assert ends == sorted(ends)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_full_decode_worker_does_not_stall_calls_for_another(seed: int) -> None:
    rig = Rig(seed, Cluster(seed, RigConfig(num_decode=2, decode_blocks=16, prefix_cache=False, step_tokens=40)))
    rig.cluster.run_for(0.5)
    rig.cluster.workers["decode-0"].has_slow_engine = True
    stuck = [rig.router.submit(random_prompt(rig.rng, 40), 20, decode="decode-0") for _ in range(5)]
    rig.cluster.run_until(lambda: len(stuck[0].tokens) > 1, limit_s=10.0)
    free = [rig.router.submit(random_prompt(rig.rng, 40), 4, decode="decode-1") for _ in range(5)]
    assert rig.cluster.run_until(lambda: all(call.is_over for call in free), limit_s=10.0)
    assert not any(call.is_over for call in stuck[2:])
    rig.finish_all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sequence_preempted_after_its_handoff_is_computed_again_locally(seed: int) -> None:
    config = RigConfig(block_size=16, decode_blocks=32, prefill_blocks=64, chunk_tokens=64, step_tokens=128)
    rig = Rig(seed, Cluster(seed, config))
    calls = [rig.router.submit(random_prompt(rig.rng, 96), 100) for _ in range(4)]  # 13 blocks each in the end
    rig.finish_all()
    decode = rig.cluster.workers["decode-0"]
    assert decode.local_engine.load().num_preemptions > 0
    assert len(decode.committed) == len(calls)  # a spent ticket stays spent: no second transfer
    assert rig.cluster.workers["prefill-0"].core.load().num_outgoing == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_decode_worker_that_refuses_ends_the_call_before_it_is_computed(seed: int) -> None:
    rig = Rig(seed, Cluster(seed))
    rig.cluster.workers["decode-0"].draining = True
    call = rig.router.submit(random_prompt(rig.rng, 60))
    rig.drain()
    assert (call.outcome, call.prefill and call.prefill.error_code) == (FAILED, "unavailable")
    assert rig.cluster.workers["prefill-0"].local_engine.load().num_admitted == 0


def test_a_worker_of_another_role_and_a_draining_one_refuse_new_work_and_finish_what_is_open() -> None:
    rig = Rig(0, Cluster(0))
    prefill = rig.cluster.workers["prefill-0"]
    open_call = rig.router.submit(random_prompt(rig.rng, 60))
    rig.cluster.run_until(lambda: prefill.prefill.num_open() == 1, limit_s=5.0)
    prefill.draining = True
    late = rig.router.submit(random_prompt(rig.rng, 60))
    rig.drain()
    prefill.draining, prefill.role = False, Role.DECODE
    misled = rig.router.submit(random_prompt(rig.rng, 60))
    rig.drain()
    assert open_call.is_finished
    assert late.outcome == misled.outcome == REFUSED


def test_more_calls_than_the_queue_holds_are_refused_with_a_hint_and_the_others_are_whole() -> None:
    rig = Rig(0, Cluster(0, RigConfig(max_queued=8)))
    calls = [rig.router.submit(random_prompt(rig.rng, 40)) for _ in range(40)]
    rig.drain()
    refused = [call for call in calls if call.outcome == REFUSED]
    assert refused
    assert all(call.prefill is not None and call.prefill.error_code == "overloaded" for call in refused)
    assert all(call.outcome == FINISHED for call in calls if call not in refused)


def test_a_prompt_that_no_decode_pool_can_hold_is_refused_and_prefill_never_computes_it() -> None:
    rig = Rig(0, Cluster(0, RigConfig(decode_blocks=8)))
    call = rig.router.submit(random_prompt(rig.rng, 33))
    rig.drain()
    assert (call.outcome, call.prefill and call.prefill.error_code) == (FAILED, "invalid_request")
    assert rig.cluster.workers["prefill-0"].local_engine.load().num_admitted == 0


@pytest.mark.parametrize("worker_id", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_model_that_fails_for_one_sequence_fails_that_call_alone(seed: int, worker_id: str) -> None:
    rig = Rig(seed, Cluster(seed))
    calls = [rig.router.submit(random_prompt(rig.rng, 40), 8) for _ in range(4)]
    rig.cluster.workers[worker_id].fail_seqs.add(calls[1].seq)
    rig.drain()
    assert (calls[1].outcome, [part.error_code for part in calls[1].parts if part.error_code]) == (FAILED, ["internal"])
    assert all(call.is_finished for call in calls if call is not calls[1])


@pytest.mark.parametrize("stage", ["queued", "prefill", "decode"])
def test_a_deadline_ends_the_call_where_it_is(stage: str) -> None:
    rig = Rig(0, Cluster(0))
    rig.cluster.run_for(0.5)
    prefill, decode = rig.cluster.workers["prefill-0"], rig.cluster.workers["decode-0"]
    decode.has_slow_engine = True
    prefill.has_slow_engine = stage == "prefill"
    if stage == "queued":
        decode.stop()
    call = rig.router.submit(random_prompt(rig.rng, 200), 100, ttl_s=0.3)
    assert rig.cluster.run_until(lambda: call.is_over, limit_s=0.3 + 1.0)
    decode.resume()
    rig.drain()
    assert call.outcome == FAILED
    assert "deadline_exceeded" in [part.error_code for part in call.parts]
    rig.router.submit(random_prompt(rig.rng, 30))
    rig.drain()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_link_that_is_cut_comes_back_and_the_next_call_uses_it(seed: int) -> None:
    rig = Rig(seed, Cluster(seed))
    rig.cluster.run_for(0.5)
    prefill = rig.cluster.workers["prefill-0"]
    for _ in range(3):
        cut(next(iter(prefill.links.ends.values())), rig.rng)
        rig.cluster.run_for(2.0)
        call = rig.router.submit(random_prompt(rig.rng, 30))
        rig.drain()
        assert call.is_finished


def test_a_decode_worker_that_never_answers_costs_the_call_its_deadline_and_nothing_else() -> None:
    rig = Rig(0, Cluster(0, RigConfig(num_decode=2)))
    rig.cluster.run_for(0.5)
    rig.cluster.workers["decode-0"].stop()
    lost = rig.router.submit(random_prompt(rig.rng, 30), decode="decode-0", ttl_s=30.0)
    good = rig.router.submit(random_prompt(rig.rng, 30), decode="decode-1")
    assert rig.cluster.run_until(lambda: good.is_over, limit_s=2.0)
    assert rig.cluster.run_until(lambda: lost.num_lost == 1, limit_s=RigConfig().lease_s + 1.0)
    assert rig.cluster.run_until(lambda: lost.is_over, limit_s=RigConfig().lease_s + 1.0)
    rig.cluster.workers["decode-0"].resume()
    rig.drain()
    assert (lost.outcome, lost.prefill and lost.prefill.error_code) == (FAILED, "worker_lost")


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_of_another_router_live_on_when_one_router_dies(seed: int) -> None:
    rig = Rig(seed, Cluster(seed))
    for _ in range(3):
        rig.router.submit(random_prompt(rig.rng, 40), 10)
    first = rig.router
    rig.add_router()
    others = [rig.router.submit(random_prompt(rig.rng, 40), 10) for _ in range(3)]
    rig.cluster.run_turns(rig.rng.randrange(200))
    first.die()
    rig.drain()
    assert all(call.is_finished for call in others)
