"""Decode dies while prefill has the KV: it is shipped to another decode worker, and nothing is computed twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_transfer.events import Committed
from tests.handoff.handoff_calls import FAILED, HANDED_OFF, Call, Rig, random_prompt
from tests.handoff.handoff_links import cut
from tests.handoff.handoff_rig import Cluster, RigConfig, RigWorker
from tests.handoff.test_handoff_cancel import unread

LEASE_S = RigConfig().lease_s
SEEDS = range(20)

MOMENTS: dict[str, Callable[[RigWorker, RigWorker], bool]] = {
    "queued": lambda p, d: bool(p.prefill.queued_tokens()),
    "reserve under way": lambda p, d: unread(d, "reserve"),
    "grant under way": lambda p, d: unread(p, "grant"),
    "first frames there": lambda p, d: d.core.load().bytes_received > 0,
    "prefill ended": lambda p, d: any(result.prefilled for result in p.results),
    "commit under way": lambda p, d: unread(d, "commit"),
    "committed": lambda p, d: any(isinstance(event, Committed) for event in d.kv_events),
}


def rig_at(moment: str, seed: int) -> tuple[Rig, Call]:
    """Two decode workers, and a call of several chunks that is bound for the first one at some moment of its life."""
    rig = Rig(seed, Cluster(seed, RigConfig(num_decode=2)))
    rig.cluster.run_for(0.5)
    prefill, decode = rig.cluster.workers["prefill-0"], rig.cluster.workers["decode-0"]
    call = rig.router.submit(random_prompt(rig.rng, rig.rng.randint(40, 90)), 5)
    assert rig.cluster.run_until(lambda: MOMENTS[moment](prefill, decode), limit_s=10.0)
    return rig, call


def assert_shipped_not_computed_again(rig: Rig, call: Call) -> None:
    prefill, second = rig.cluster.workers["prefill-0"], rig.cluster.workers["decode-1"]
    assert call.prefill is not None
    assert (call.prefill.outcome, call.is_finished) == (HANDED_OFF, True)
    assert prefill.local_engine.load().prompt_tokens_computed == len(call.request.token_ids)
    assert call.prefill.stats.computed_tokens == len(call.request.token_ids)
    assert second.local_engine.load().prompt_tokens_computed == 0
    assert call.prefill.stats.kv_blocks == -(-len(call.request.token_ids) // rig.cluster.config.block_size)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_decode_worker_that_dies_costs_no_token_and_no_recompute(moment: str) -> None:
    for seed in SEEDS:
        rig, call = rig_at(moment, seed)
        rig.router.on_handoff_lost = lambda lost, router=rig.router: router.reroute(lost, "decode-1")  # type: ignore[misc]
        rig.cluster.kill("decode-0")
        rig.finish_all()
        assert call.num_lost == 1
        assert_shipped_not_computed_again(rig, call)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_router_may_know_before_the_prefill_worker_does(moment: str) -> None:
    for seed in SEEDS:
        rig, call = rig_at(moment, seed)
        rig.cluster.kill("decode-0")
        rig.router.reroute(call, "decode-1")
        rig.finish_all()
        assert call.num_lost <= 1  # where the prefill worker noticed before it read the Reroute
        assert_shipped_not_computed_again(rig, call)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_silent_decode_worker_is_replaced_before_the_link_to_it_ends(moment: str) -> None:
    rig, call = rig_at(moment, seed=3)
    rig.cluster.workers["decode-0"].stop()
    rig.router.reroute(call, "decode-1")
    stopped_s = rig.cluster.clock.now_s
    assert rig.cluster.run_until(lambda: call.is_over, limit_s=LEASE_S)
    assert rig.cluster.clock.now_s - stopped_s < 1.0  # it waits for no silence limit
    assert_shipped_not_computed_again(rig, call)
    rig.cluster.workers["decode-0"].resume()
    rig.finish_all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_broken_link_sends_it_to_another_worker_or_the_same_one_again(seed: int) -> None:
    rig, call = rig_at("first frames there", seed)
    rig.router.on_handoff_lost = lambda lost: rig.router.reroute(lost, "decode-0" if seed % 2 else "decode-1")
    links = rig.cluster.workers["prefill-0"].links
    cut(next(end for end in links.ends.values() if end.peer_id == "decode-0"), rig.rng)
    rig.cluster.run_until(lambda: call.is_over, limit_s=2 * LEASE_S)
    rig.drain()
    assert rig.cluster.workers["prefill-0"].local_engine.load().prompt_tokens_computed == len(call.request.token_ids)
    if call.num_lost <= 1:  # a link that is still down when the router asks for it loses the call once more
        assert call.is_finished


def test_a_full_decode_worker_that_refuses_is_replaced_by_one_that_takes_it() -> None:
    rig = Rig(0, Cluster(0, RigConfig(num_decode=2)))
    rig.cluster.run_for(0.5)
    rig.router.on_handoff_lost = lambda lost: rig.router.reroute(lost, "decode-1")
    rig.cluster.workers["decode-0"].draining = True
    call = rig.router.submit(random_prompt(rig.rng, 50), 5)
    rig.finish_all()
    assert call.num_lost == 1
    assert_shipped_not_computed_again(rig, call)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_router_that_does_not_answer_gets_the_reason_as_the_end_a_lease_later(moment: str) -> None:
    rig, call = rig_at(moment, seed=5)
    rig.cluster.kill("decode-0")
    assert rig.cluster.run_until(lambda: call.num_lost == 1, limit_s=1.0)
    lost_s = rig.cluster.clock.now_s
    assert rig.cluster.run_until(lambda: bool(call.prefill and call.prefill.outcome), limit_s=LEASE_S + 2.0)
    assert rig.cluster.clock.now_s - lost_s > LEASE_S - 0.1
    assert call.prefill is not None
    assert call.prefill.outcome == FAILED
    assert call.prefill.error_code in (
        "worker_lost",
        "transfer_failed",
    )  # the link or the data path, whichever is first
    rig.drain()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cancel_instead_of_an_answer_frees_at_once(moment: str) -> None:
    rig, call = rig_at(moment, seed=7)
    rig.router.on_handoff_lost = rig.router.cancel
    rig.cluster.kill("decode-0")
    assert rig.cluster.run_until(lambda: call.num_lost == 1, limit_s=1.0)
    lost_s = rig.cluster.clock.now_s
    rig.drain()
    assert rig.cluster.clock.now_s - lost_s < 1.0


def test_decode_workers_may_die_one_after_another() -> None:
    rig = Rig(1, Cluster(1, RigConfig(num_decode=4)))
    rig.cluster.run_for(0.5)
    call = rig.router.submit(random_prompt(rig.rng, 80), 5)
    order = iter(("decode-1", "decode-2", "decode-3"))
    rig.router.on_handoff_lost = lambda lost: rig.router.reroute(lost, next(order))
    prefill = rig.cluster.workers["prefill-0"]
    for name in ("decode-0", "decode-1", "decode-2"):
        decode = rig.cluster.workers[name]
        assert rig.cluster.run_until(lambda d=decode: unread(d, "commit"), limit_s=10.0)  # type: ignore[misc]
        rig.cluster.kill(name)
    rig.finish_all()
    assert (call.num_lost, call.is_finished) == (3, True)
    assert prefill.local_engine.load().prompt_tokens_computed == 80
