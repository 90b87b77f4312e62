"""Whoever leaves, and whenever: exactly one party frees, at once where it is told and by its own clock where it is not.

Tests name the moment by what lies unread in a mailbox: the event has happened, and its handler has not run yet.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kv_transfer.events import Committed
from tests.handoff.handoff_calls import CANCELLED, Call, Rig, random_prompt
from tests.handoff.handoff_links import cut
from tests.handoff.handoff_rig import Cluster, RigConfig, RigWorker

CANCEL_S = 1.0  # DESIGN section 5: the cancel path frees within 1 s
SILENT_S = RigConfig().lease_s + 1.0  # and the silent path within lease + 1 s


def unread(worker: RigWorker, kind: str) -> bool:
    """Whether a link message of this kind has come and was not read."""
    return any(
        message is not None and message.HasField(kind)  # type: ignore[arg-type]
        for end in worker.links.ends.values()
        for message in end.inbox
    )


MOMENTS: dict[str, Callable[[RigWorker, RigWorker], bool]] = {
    "reserve under way": lambda p, d: unread(d, "reserve"),
    "grant under way": lambda p, d: unread(p, "grant"),
    "prefill ended": lambda p, d: any(result.prefilled for result in p.results),
    "commit under way": lambda p, d: unread(d, "commit"),
    "committed": lambda p, d: any(isinstance(event, Committed) for event in d.kv_events),
    "ack under way": lambda p, d: unread(p, "ack"),
    "first decode step": lambda p, d: any(result.tokens for result in d.results),
    "finished": lambda p, d: any(result.ended for result in d.results),
}


def rig_at(moment: str, seed: int) -> tuple[Rig, Call]:
    """A cluster in which one call's event has just happened."""
    rig = Rig(seed, Cluster(seed))
    prefill, decode = rig.cluster.workers["prefill-0"], rig.cluster.workers["decode-0"]
    call = rig.router.submit(random_prompt(rig.rng, rig.rng.randint(1, 40)), 3)
    assert rig.cluster.run_until(lambda: MOMENTS[moment](prefill, decode) or call.is_over, limit_s=10.0)
    return rig, call


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_cancel_in_the_same_tick_as_an_event_frees_once(moment: str) -> None:
    for seed in range(200):
        rig, call = rig_at(moment, seed)
        rig.router.cancel(call)
        cancelled_s = rig.cluster.clock.now_s
        rig.drain()
        assert rig.cluster.clock.now_s - cancelled_s < CANCEL_S, f"seed {seed}"
    rig.router.submit(random_prompt(rig.rng, 30))
    rig.finish_all()


def test_thirty_calls_cancelled_while_prefill_computes_leave_its_pool_whole() -> None:
    rig = Rig(0, Cluster(0))
    prefill = rig.cluster.workers["prefill-0"]
    prefill.has_slow_engine = True
    for _ in range(30):
        call = rig.router.submit(random_prompt(rig.rng, 160), 8)
        rig.cluster.run_until(lambda: prefill.local_engine.load().active_blocks > 0, limit_s=5.0)
        rig.router.cancel(call)
        cancelled_s = rig.cluster.clock.now_s
        rig.drain()
        assert rig.cluster.clock.now_s - cancelled_s < CANCEL_S
        assert call.outcome == CANCELLED
    rig.router.submit(random_prompt(rig.rng, 160), 8)
    rig.finish_all()


def test_a_cancel_that_overtakes_its_reserve_leaves_a_tombstone_for_one_lease() -> None:
    rig = Rig(0, Cluster(0))
    decode = rig.cluster.workers["decode-0"]
    call = rig.router.submit(random_prompt(rig.rng, 30))
    rig.cluster.run_until(lambda: unread(decode, "reserve"), limit_s=5.0)
    decode.decode.on_cancel(call.seq)  # the router's Cancel to prefill is still on its way
    rig.drain()
    assert call.outcome == CANCELLED
    assert decode.local_engine.load().num_admitted == 0
    rig.cluster.run_for(SILENT_S)
    assert not decode.decode._cancelled


@pytest.mark.parametrize("prefill_dies", [False, True])
def test_decode_takes_its_blocks_back_when_it_never_hears_of_the_prefill_again(prefill_dies: bool) -> None:
    for seed in range(5):
        rig = Rig(seed, Cluster(seed))
        prefill, decode = rig.cluster.workers["prefill-0"], rig.cluster.workers["decode-0"]
        call = rig.router.submit(random_prompt(rig.rng, 100))
        rig.cluster.run_until(lambda d=decode: unread(d, "commit"), limit_s=5.0)  # type: ignore[misc]
        for end in decode.links.ends.values():
            end.inbox.clear()  # the notice is lost
        if prefill_dies:
            rig.cluster.restart("prefill-0")
            rig.router.on_worker_lost(prefill)
        else:
            prefill.stop()  # alive, and silent
        silent_s = rig.cluster.clock.now_s
        assert rig.cluster.run_until(lambda d=decode: not d.check_quiet(), limit_s=SILENT_S), f"seed {seed}"  # type: ignore[misc]
        assert prefill_dies or rig.cluster.clock.now_s - silent_s > 1.0  # not before late frames could have come
        prefill.resume()
        rig.drain()
        assert not call.is_finished


def test_an_arrived_sequence_that_waits_for_a_seat_is_freed_by_cancel() -> None:
    rig = Rig(0, Cluster(0, RigConfig(max_num_seqs=1, prefix_cache=False)))
    decode = rig.cluster.workers["decode-0"]
    rig.cluster.workers["decode-0"].has_slow_engine = True
    long_call = rig.router.submit(random_prompt(rig.rng, 4), 60)
    rig.cluster.run_until(lambda: len(long_call.tokens) > 2, limit_s=10.0)
    for _ in range(20):
        call = rig.router.submit(random_prompt(rig.rng, 64), 8)
        arrived = len(decode.committed)
        assert rig.cluster.run_until(lambda n=arrived: len(decode.committed) > n, limit_s=10.0)  # type: ignore[misc]
        rig.router.cancel(call)
        assert rig.cluster.run_until(lambda: decode.decode.num_open() == 1, limit_s=CANCEL_S)
        if long_call.is_over:
            break
    rig.finish_all()
    assert long_call.is_finished


def test_a_thousand_cancels_at_any_stage_leave_nothing() -> None:
    rig = Rig(0, Cluster(0, RigConfig(num_decode=2)))
    for number in range(1_000):
        call = rig.router.submit(random_prompt(rig.rng, 32), 4, decode=f"decode-{number % 2}")
        rig.cluster.run_turns(rig.rng.randrange(60))
        rig.router.cancel(call)
        if number % 10 == 9:
            rig.drain()
    for decode in ("decode-0", "decode-1"):
        rig.router.submit(random_prompt(rig.rng, 32), decode=decode)
    rig.finish_all()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_link_cut_in_the_same_tick_as_an_event_ends_the_call_on_both_sides(moment: str) -> None:
    for seed in range(30):
        rig, _ = rig_at(moment, seed)
        cut(next(iter(rig.cluster.workers["prefill-0"].links.ends.values())), rig.rng)
        rig.drain()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_worker_killed_in_the_same_tick_as_an_event_leaves_the_other_whole(victim: str, moment: str) -> None:
    for seed in range(15):
        rig, _ = rig_at(moment, seed)
        dead = rig.cluster.workers[victim]
        rig.cluster.restart(victim)
        rig.router.on_worker_lost(dead)
        rig.drain()


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_router_lost_in_the_same_tick_as_an_event_leaves_both_workers_idle(moment: str) -> None:
    for seed in range(30):
        rig, _ = rig_at(moment, seed)
        rig.replace_router()
        lost_s = rig.cluster.clock.now_s
        rig.drain()
        assert rig.cluster.clock.now_s - lost_s < CANCEL_S, f"seed {seed}"
        rig.router.submit(random_prompt(rig.rng, 30))
        rig.drain()
        assert rig.router.calls[0].is_finished
