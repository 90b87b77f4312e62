"""Admission without a clock or a fleet: what is let in, in which order, what is shed and when coming back helps."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from router.admission import HOLD_S, MAX_RETRY_AFTER_S, MIN_RETRY_AFTER_S, Admission, Bounds, Reason, Turn
from router.capacity import Lanes, Seats, WorkerLoad
from router.kept_targets import MEMORY_S
from router.tenants import OPEN, Tenant

RATE = 1_000.0  # tokens per second of a prefill worker
WINDOW_S = 0.02


def bounds(
    max_inflight: int = 1_000, max_queued: int = 1_000, *, by_forecast: bool = True, max_queued_tokens: int = 10**9
) -> Bounds:
    return Bounds(max_inflight, max_queued, max_queued_tokens, WINDOW_S, by_forecast)


def prefill(name: str = "p0", rate: float = RATE, waiting_tokens: int = 0) -> WorkerLoad:
    return WorkerLoad(name, True, False, rate, waiting_tokens, 0, 0.0, 64, 100_000, 0)


def decode(
    name: str = "d0", *, num_seqs: int = 0, max_seqs: int = 1_000, step_s: float = 0.0, per_seq_s: float = 0.0,
    used: int = 0,
) -> WorkerLoad:  # fmt: skip
    return WorkerLoad(name, False, True, math.inf, 0, num_seqs, step_s, max_seqs, 1_000_000, used, per_seq_s)


def turn(
    tokens: int = 100,
    tenant: Tenant = OPEN,
    *,
    since_s: float = 0.0,
    band: int = 0,
    ttft_s: float = 2.0,
    tpot_s: float = 0.1,
    class_tpot_s: float = 0.1,
    timeout_s: float = 600.0,
    num_seqs: int = 1,
    max_tokens: int = 100,
    min_tokens: int = 0,
    asks_ttft: bool = False,
    e2e_s: float = math.inf,
) -> Turn:
    return Turn(
        tenant, band, tokens, since_s, "interactive", ttft_s, tpot_s, class_tpot_s, since_s + timeout_s, num_seqs, tokens,
        max_tokens, min_tokens, asks_ttft, e2e_s=e2e_s,
    )  # fmt: skip


def admission(*loads: WorkerLoad, max_inflight: int = 1_000, max_queued: int = 1_000) -> Admission:
    policy = Admission(bounds(max_inflight, max_queued))
    policy.observe(loads or (prefill(), decode()), 0.0)
    return policy


def let_in(policy: Admission, call: Turn, now_s: float = 0.0) -> Turn:
    assert policy.arrive(call, now_s) is None
    return call


def test_a_call_that_finds_a_free_lane_and_a_seat_goes_at_once() -> None:
    policy = admission()
    assert let_in(policy, turn()).released_s == 0.0
    assert not policy.has_news


def test_a_prompt_that_is_computed_where_it_is_decoded_holds_no_lane() -> None:
    policy = admission()
    first, second, third = (let_in(policy, turn(1_000, ttft_s=10.0)) for _ in range(3))
    first.worker = "d0"
    policy.observe([prefill(), decode(num_seqs=1)], 0.01)
    assert policy.due(0.01)[0] == [second]
    second.worker = "p0"
    policy.observe([prefill(), decode(num_seqs=2)], 0.02)
    assert policy.due(0.02)[0] == []
    assert third.released_s is None


def test_while_no_lane_is_open_calls_go_where_a_decode_worker_helps_one_after_the_other() -> None:
    asked: list[Turn] = []

    def helps(call: Turn) -> bool:
        asked.append(call)
        return True

    policy = Admission(bounds(), helps)
    policy.observe([prefill(), decode()], 0.0)
    first, second, third = (let_in(policy, turn(1_000, ttft_s=10.0)) for _ in range(3))
    assert (first.is_helped, second.is_helped, second.released_s) == (False, True, 0.0), "where nobody waits, at once"
    assert policy.due(0.01)[0] == [], "where the second goes is not known yet"
    assert {id(call) for call in asked} == {id(second)}
    first.worker, second.worker = "p0", "d0"
    assert policy.due(0.02)[0] == [third]
    policy.observe([prefill(), decode(num_seqs=2)], 0.03)
    fourth = let_in(policy, turn(100))
    assert policy.due(1.0)[0] == [fourth], "neither of those that are helped holds the lane, which is free now"
    assert not fourth.is_helped


def test_a_call_that_is_helped_at_once_is_not_turned_away_for_the_wait_at_a_lane() -> None:
    for helps in (False, True):
        policy = Admission(bounds(), lambda call, helps=helps: helps)  # type: ignore[misc]
        policy.observe([prefill(waiting_tokens=10_000), decode()], 0.0)
        assert (policy.arrive(turn(), 0.0) is None) is helps


def test_help_is_no_way_around_a_seat() -> None:
    policy = Admission(bounds(), lambda call: True)
    policy.observe([prefill(), decode(max_seqs=1)], 0.0)
    let_in(policy, turn())
    assert let_in(policy, turn(ttft_s=60.0)).released_s is None


def test_a_call_that_was_helped_but_is_placed_on_a_lane_counts_there() -> None:
    policy = Admission(bounds(), lambda call: True)
    policy.observe([prefill(), decode()], 0.0)
    first, second = (let_in(policy, turn(1_000, ttft_s=10.0)) for _ in range(2))
    first.worker = second.worker = "p0"
    policy.observe([prefill(), decode(num_seqs=2)], 0.0)
    assert policy._lanes.open_s == pytest.approx(2.0 - WINDOW_S)


def test_others_wait_until_the_lane_is_nearly_free_and_leave_in_order() -> None:
    policy = admission()
    first, second, third = (let_in(policy, turn(100)) for _ in range(3))
    assert (first.released_s, second.released_s) == (0.0, None)
    assert policy.due(0.1 - 2 * WINDOW_S) == ([], [])
    assert policy.due(0.1 - WINDOW_S / 2)[0] == [second]
    assert policy.due(0.1)[0] == []
    assert policy.due(0.2)[0] == [third]


def test_the_fleet_s_own_word_is_taken_when_it_comes() -> None:
    policy = admission()
    first, second = let_in(policy, turn(100)), let_in(policy, turn(100))
    first.worker = "p0"
    policy.began(first, 0.03)
    policy.observe((prefill(), decode(num_seqs=1)), 0.03)
    assert policy.due(0.03)[0] == [second]


def test_work_that_other_routers_gave_a_lane_counts() -> None:
    policy = admission(prefill(waiting_tokens=1_000), decode())
    call = let_in(policy, turn())
    assert call.released_s is None
    policy.observe((prefill(waiting_tokens=0), decode()), 0.5)
    assert policy.due(0.5)[0] == [call]


def test_a_fleet_of_unknown_speed_is_not_second_guessed() -> None:
    policy = admission(prefill(rate=math.inf), decode())
    assert all(let_in(policy, turn(50_000)).released_s == 0.0 for _ in range(50))


def test_where_nobody_is_ready_placement_has_the_word() -> None:
    for loads in ((), (prefill(),), (decode(),)):
        policy = Admission(bounds())
        policy.observe(loads, 0.0)
        assert let_in(policy, turn()).released_s == 0.0


def test_those_who_wait_are_kept_through_a_short_outage_and_not_for_ever() -> None:
    policy = Admission(bounds(by_forecast=False))
    policy.observe((prefill(), decode()), 0.0)
    _, second, third = (let_in(policy, turn(1_000)) for _ in range(3))
    for ready in ((), (prefill(),), (decode(),)):
        policy.observe(ready, 5.0)
        assert policy.due(5.0) == ([], [])
        assert let_in(policy, turn(since_s=5.0), 5.0).released_s == 5.0  # placement says why nobody serves it
    assert policy.due(HOLD_S + 0.1) == ([second, third], [])


def test_a_wait_that_would_miss_the_target_is_shed_with_the_time_at_which_it_would_not() -> None:
    policy = admission()
    for _ in range(13):
        let_in(policy, turn(100))
    shed = policy.arrive(turn(100), 0.0)  # 1.3 s of work; 0.7 x 1.9 s may be waited
    assert shed is None
    shed = policy.arrive(turn(100), 0.0)
    assert shed is not None
    assert shed.reason is Reason.TTFT
    assert shed.retry_after_s == MIN_RETRY_AFTER_S
    assert "TTFT target" in shed.message


def test_work_within_a_long_window_is_a_wait_like_any_other() -> None:
    busy = replace(prefill(waiting_tokens=90), grant_s=0.09)  # 90 ms of work, and a window of 100 ms
    policy = Admission(replace(bounds(), window_s=None))
    policy.observe((busy, decode()), 0.0)
    shed = policy.arrive(turn(100, ttft_s=0.12), 0.0)  # 20 ms to spare
    assert shed is not None
    assert shed.reason is Reason.TTFT
    assert let_in(policy, turn(100, ttft_s=1.0)).released_s == 0.0


def test_who_comes_back_when_told_is_let_in() -> None:
    policy = admission()
    first, *_ = (let_in(policy, turn(100)) for _ in range(14))
    first.worker = "p0"
    hints = []
    for _ in range(40):
        shed = policy.arrive(turn(100), 0.0)
        assert shed is not None
        hints.append(shed.retry_after_s)
    assert hints == sorted(hints)  # appointments follow each other: not all come back at once
    assert hints[-1] > 3.0
    now_s = done_s = 0.0
    running = [first]
    for hint in hints:
        while now_s < hint:
            now_s += 0.01
            policy.observe((prefill(), decode()), now_s)
            released, shed_late = policy.due(now_s)
            assert not shed_late
            for call in released:
                call.worker = "p0"
                running.append(call)
            if running and now_s - max(running[0].released_s or 0.0, done_s) >= 0.1 - 1e-9:
                done, done_s = running.pop(0), now_s
                policy.began(done, now_s)
                policy.leave(done, now_s)
        assert policy.arrive(turn(100, since_s=now_s), now_s) is None


def test_a_hint_never_promises_more_than_a_minute() -> None:
    policy = admission()
    for _ in range(14):
        let_in(policy, turn(100))
    hints = [shed.retry_after_s for _ in range(3_000) if (shed := policy.arrive(turn(100), 0.0))]
    assert hints[-1] == MAX_RETRY_AFTER_S


def test_a_prompt_too_long_for_its_class_s_target_waits_behind_those_that_can_be_served_in_time() -> None:
    policy = admission()
    first = let_in(policy, turn(5_000))
    waits = let_in(policy, turn(5_000))
    assert (first.released_s, waits.released_s) == (0.0, None)
    assert policy.due(4.9) == ([], [])  # its class's 2 s are long over
    policy.began(first, 5.0)
    policy.observe((prefill(), decode()), 5.0)
    short = let_in(policy, turn(100, since_s=5.0), 5.0)
    assert policy.due(5.0)[0] == [short]
    assert policy.due(5.1)[0] == [waits]


def test_a_target_that_the_call_itself_asks_for_is_no_reason_to_wait_where_it_cannot_be_met() -> None:
    policy = admission()
    assert let_in(policy, turn(5_000, asks_ttft=True)).released_s == 0.0  # in slack
    shed = policy.arrive(turn(5_000, asks_ttft=True), 0.0)
    assert shed is not None
    assert shed.reason is Reason.TTFT


def test_a_long_prompt_is_refused_where_its_deadline_comes_first() -> None:
    policy = admission()
    let_in(policy, turn(5_000))
    shed = policy.arrive(turn(5_000, timeout_s=9.0), 0.0)
    assert shed is not None
    assert shed.reason is Reason.DEADLINE
    waits = let_in(policy, turn(5_000, timeout_s=11.0))
    assert policy.due(6.1)[1][0][0] is waits


def test_more_answers_than_there_are_seats_are_no_reason_to_refuse_the_first() -> None:
    policy = admission(prefill(), decode(max_seqs=4))
    assert let_in(policy, turn(num_seqs=16)).released_s == 0.0


def test_long_answers_of_others_do_not_refuse_a_short_deadline_where_nobody_waits() -> None:
    policy = admission(prefill(), decode(step_s=0.05))
    for number in range(50):
        call = let_in(policy, turn(max_tokens=10_000, since_s=100.0 * number), 100.0 * number)
        policy.began(call, 100.0 * number + 0.1)
        policy.charge(call, 1_000)
        policy.leave(call, 100.0 * number + 50.0)
    assert let_in(policy, turn(max_tokens=10_000, timeout_s=10.0, since_s=9_000.0), 9_000.0).released_s is not None


def test_a_target_for_the_whole_answer_is_one_for_its_first_token_less_the_answers_steps() -> None:
    policy = admission(prefill(), decode(step_s=0.05))
    for _ in range(10):
        let_in(policy, turn(100))
    taken = let_in(policy, turn(ttft_s=60.0, e2e_s=7.0, min_tokens=100))  # 5 s of steps, 1 s of 1.9 may be waited
    assert taken.latest_s == pytest.approx(7.0 - 0.1 - 99 * 0.05)
    shed = policy.arrive(turn(ttft_s=60.0, e2e_s=6.5, min_tokens=100), 0.0)
    assert shed is not None
    assert (shed.reason, shed.retry_after_s > 0) == (Reason.E2E, True)
    assert "whole answer" in shed.message
    _, gone = policy.due(taken.latest_s + 0.01)
    assert (taken, Reason.E2E) in [(call, why.reason) for call, why in gone]


def test_an_answer_that_would_be_late_on_an_idle_fleet_waits_behind_those_that_can_be_in_time() -> None:
    policy = admission(prefill(), decode(step_s=0.05))
    let_in(policy, turn(100))
    late, timely = let_in(policy, turn(e2e_s=3.0, min_tokens=100)), let_in(policy, turn())
    assert policy.due(0.1)[0] == [timely]
    assert late.latest_s == late.deadline_s - 0.1


def test_targets_do_not_shed_where_that_is_switched_off() -> None:
    policy = Admission(bounds(by_forecast=False))
    policy.observe((prefill(), decode()), 0.0)
    for _ in range(100):
        let_in(policy, turn(1_000))
    assert policy.due(50.0)[1] == []


def test_a_call_that_waits_in_vain_is_shed_as_soon_as_that_is_known() -> None:
    policy = admission()
    let_in(policy, turn(100))
    late = let_in(policy, turn(100, ttft_s=1.0))
    released, shed = policy.due(0.95)  # the first one has not come out: 0.1 s are needed, 0.05 left
    assert released == []
    assert [(who, why.reason) for who, why in shed] == [(late, Reason.TTFT)]
    assert (len(policy.queue), policy.num_seqs) == (0, 1)


def test_a_deadline_that_cannot_be_met_is_refused_at_the_door() -> None:
    policy = admission()
    let_in(policy, turn(100))
    shed = policy.arrive(turn(100, timeout_s=0.15), 0.0)
    assert shed is not None
    assert (shed.reason, shed.retry_after_s > 0) == (Reason.DEADLINE, True)
    hopeless = policy.arrive(turn(1_000, timeout_s=0.5), 0.0)
    assert hopeless is not None
    assert (hopeless.reason, hopeless.retry_after_s) == (Reason.DEADLINE, 0.0)


def test_answers_that_must_be_long_count_against_the_deadline() -> None:
    policy = admission(prefill(), decode(step_s=0.05))
    assert policy.arrive(turn(100, timeout_s=3.0, min_tokens=100), 0.0) is not None
    assert policy.arrive(turn(100, timeout_s=30.0, min_tokens=100), 0.0) is None


@pytest.mark.parametrize("num_seqs", [1, 4])
def test_sequences_are_counted_not_calls(num_seqs: int) -> None:
    policy = admission(prefill(rate=math.inf), decode(), max_inflight=8)
    inside = [let_in(policy, turn(num_seqs=num_seqs)) for _ in range(8 // num_seqs)]
    shed = policy.arrive(turn(num_seqs=num_seqs), 0.0)
    assert shed is not None
    assert (shed.reason, policy.num_seqs) == (Reason.INFLIGHT, 8)
    assert "8 sequences are in flight; the limit is 8" in shed.message
    policy.leave(inside[0], 1.0)
    policy.leave(inside[0], 1.0)
    assert policy.num_seqs == 8 - num_seqs
    let_in(policy, turn(num_seqs=num_seqs))


def test_the_hint_of_a_full_router_follows_the_length_of_recent_calls() -> None:
    policy = admission(prefill(rate=math.inf), decode(), max_inflight=1)
    for number in range(200):
        policy.leave(let_in(policy, turn(since_s=number)), number + 4.0)
    let_in(policy, turn())
    shed = policy.arrive(turn(), 0.0)
    assert shed is not None
    assert shed.retry_after_s == pytest.approx(4.0, rel=0.01)


def test_a_full_queue_makes_room_for_whoever_takes_less() -> None:
    heavy, light = Tenant("heavy"), Tenant("light")
    policy = admission(max_queued=4)
    waiting = [let_in(policy, turn(100, heavy)) for _ in range(5)][1:]
    shed = policy.arrive(turn(100, heavy), 0.0)
    assert shed is not None
    assert (shed.reason, shed.retry_after_s >= MIN_RETRY_AFTER_S) == (Reason.QUEUE_FULL, True)
    let_in(policy, turn(100, light))
    assert [(who, why.reason) for who, why in policy.due(0.0)[1]] == [(waiting[-1], Reason.DISPLACED)]
    assert len(policy.queue) == 4


def test_nobody_is_displaced_for_a_call_that_is_refused_nevertheless() -> None:
    heavy, light = Tenant("heavy"), Tenant("light")
    policy = admission(max_inflight=3)
    for _ in range(3):
        let_in(policy, turn(100, heavy))
    assert policy.arrive(turn(50, light, num_seqs=3), 0.0) is not None
    assert policy.due(0.0) == ([], [])
    assert (policy.num_seqs, len(policy.queue)) == (3, 2)


def test_running_streams_keep_their_time_per_token() -> None:
    policy = admission(prefill(rate=math.inf), decode(num_seqs=7, step_s=0.077, per_seq_s=0.012))
    waits = let_in(policy, turn())  # an eighth would make it 89 ms; of the 95 ms beyond one alone 85 % may be used
    assert waits.released_s is None
    policy.observe((prefill(rate=math.inf), decode(num_seqs=6, step_s=0.065, per_seq_s=0.012)), 0.1)
    assert policy.due(0.1)[0] == [waits]


def test_a_batch_call_does_not_slow_interactive_streams_down() -> None:
    slow = decode(num_seqs=7, step_s=0.077, per_seq_s=0.012)
    policy = admission(prefill(rate=math.inf), slow)
    batch = turn(tpot_s=1.0, class_tpot_s=1.0)
    assert let_in(policy, batch).released_s == 0.0  # among its like
    policy = admission(prefill(rate=math.inf), decode(num_seqs=6, step_s=0.067, per_seq_s=0.01))
    let_in(policy, turn())
    policy.observe((prefill(rate=math.inf), slow), 0.1)
    assert let_in(policy, turn(tpot_s=1.0, class_tpot_s=1.0), 0.1).released_s is None


def test_a_target_that_nobody_could_keep_is_no_reason_to_wait() -> None:
    policy = admission(prefill(rate=math.inf), decode(num_seqs=3, step_s=0.2, per_seq_s=0.001))
    assert let_in(policy, turn()).released_s == 0.0


def test_a_class_whose_target_nobody_could_keep_lifts_no_limit_of_others_and_goes_behind_them() -> None:
    busy = decode(num_seqs=7, step_s=0.077, per_seq_s=0.012)  # 5 ms alone; of 100 ms a step may take 85.75
    policy = admission(prefill(rate=math.inf), busy)
    hopeless = let_in(policy, turn(tpot_s=0.004, class_tpot_s=0.004))
    assert hopeless.released_s == 0.0
    first = let_in(policy, turn(ttft_s=3.0))
    assert first.released_s is None, "its own target and that of who runs still hold"
    behind = let_in(policy, turn(tpot_s=0.004, class_tpot_s=0.004))
    policy.observe((prefill(rate=math.inf), replace(busy, num_seqs=6, step_s=0.065)), 0.1)
    assert policy.due(0.1)[0] == [first]
    assert behind.band < first.band


@pytest.mark.parametrize("tight_s", [0.004, 0.0049, 0.0051, 0.006, 0.01, 0.017])
def test_whatever_a_class_asks_for_nobody_else_is_kept_waiting_where_that_would_cost_more_than_it_brings(
    tight_s: float,
) -> None:
    """One worker, 5 ms a step alone and 12 ms for each further sequence; nine calls of ten are content with 100 ms."""
    policy, now_s, running = Admission(bounds()), 0.0, list[Turn]()
    shed = {tight_s: 0, 0.1: 0}
    for number in range(300):  # ten a second, each 0.6 s long: six at once
        now_s += 0.1
        target_s = tight_s if number % 10 == 0 else 0.1
        for done in [call for call in running if call.released_s is not None and call.released_s < now_s - 0.6]:
            running.remove(done)
            policy.charge(done, 10)
            policy.leave(done, now_s)
        num_seqs = sum(call.released_s is not None for call in running)
        step_s = 0.005 + 0.012 * max(0, num_seqs - 1)
        policy.observe((prefill(rate=math.inf), decode(num_seqs=num_seqs, step_s=step_s, per_seq_s=0.012)), now_s)
        _, late = policy.due(now_s)
        call = turn(since_s=now_s, tpot_s=target_s, class_tpot_s=target_s, ttft_s=0.5, max_tokens=10)
        refused = [call] if policy.arrive(call, now_s) else []
        for gone in [*refused, *(who for who, _ in late)]:
            shed[gone.class_tpot_s] += now_s > 2 * MEMORY_S
            running = [one for one in running if one is not gone]
        if call not in refused:
            running.append(call)
        for call in running:
            if call.released_s is not None and call.began_s is None:
                policy.began(call, now_s)
    assert shed[0.1] <= 5, "of ninety"


def test_seats_come_one_by_one_from_a_lone_sequence_s_step_on() -> None:
    busy = decode(num_seqs=1, step_s=0.02, per_seq_s=0.001)
    found = [Seats([busy], tpot_s=1e-4 * tenths, seq_tokens=1_000.0).num_free for tenths in range(150, 400)]
    assert found == sorted(found)
    assert max(later - earlier for earlier, later in pairwise(found)) <= 1
    assert (found[0], found[51], found[-1]) == (0, 0, 16)


def test_who_has_no_seat_is_told_how_many_must_end_before_there_is_one() -> None:
    too_slow = decode(num_seqs=30, step_s=0.049, per_seq_s=0.001)  # 20 ms alone
    seats = Seats([too_slow], tpot_s=0.03, seq_tokens=1_000.0)  # room for nine
    assert (seats.num_free, seats.num_seats, seats.num_lacking) == (0, 10, 21)
    idle = decode("idle", step_s=0.02, per_seq_s=0.001)
    assert Seats([too_slow, idle], tpot_s=0.03, seq_tokens=1_000.0).num_lacking <= 0


def test_where_nothing_decodes_yet_the_wait_is_that_of_a_full_worker_not_of_one_sequence_after_the_other() -> None:
    policy = admission(prefill(rate=math.inf), decode(max_seqs=50))
    for _ in range(50):
        assert let_in(policy, turn()).released_s == 0.0
    waits = let_in(policy, turn())  # 5 s until one ends, if they were alone; a tenth of that with fifty
    assert waits.released_s is None
    for _ in range(12):
        let_in(policy, turn())
    shed = policy.arrive(turn(), 0.0)
    assert shed is not None
    assert shed.reason is Reason.TTFT
    assert "the wait for a decode worker would be 1.4 s" in shed.message
    assert shed.retry_after_s == MIN_RETRY_AFTER_S


@pytest.mark.parametrize(("ready", "missing"), [((prefill(),), "decode"), ((decode(),), "prefill"), ((), "prefill")])
def test_who_waits_in_vain_for_a_kind_of_worker_that_is_away_is_told_which_and_for_how_long(
    ready: tuple[WorkerLoad, ...], missing: str
) -> None:
    policy = admission()
    _, waits = (let_in(policy, turn(1_500, ttft_s=4.0)) for _ in range(2))
    policy.observe(ready, 3.0)
    [(who, shed)] = policy.due(3.0)[1]
    assert who is waits
    assert f"no {missing} worker has been ready for 3 s" in shed.message
    assert MIN_RETRY_AFTER_S <= shed.retry_after_s <= MAX_RETRY_AFTER_S
    assert shed.retry_after_s >= HOLD_S - 3.0


def test_no_forecast_turns_a_call_away_where_nothing_decodes_at_all() -> None:
    policy = Admission(bounds())
    policy.observe((prefill(waiting_tokens=100_000),), 0.0)
    assert let_in(policy, turn()).released_s == 0.0, "placement waits for a decode worker, or says why there is none"


def test_slack_is_what_targets_leave_that_can_be_kept() -> None:
    policy = admission(prefill(rate=math.inf), decode(num_seqs=2, step_s=0.017, per_seq_s=0.012))  # 5 ms alone
    assert policy.slack("batch", (0.004, 0.1), 0, 0.0).num_free == policy.slack("batch", (0.1,), 0, 0.0).num_free == 5
    policy.observe((prefill(),), 0.1)
    assert policy.slack("batch", (0.1,), 0, 0.1).num_free == 0, "nothing decodes"


def test_a_call_that_wants_quicker_tokens_than_there_are_is_shed_and_holds_nobody_up() -> None:
    policy = admission(prefill(rate=math.inf), decode(num_seqs=7, step_s=0.057, per_seq_s=0.005))
    shed = policy.arrive(turn(tpot_s=0.05), 0.0)
    assert shed is not None
    assert shed.reason is Reason.TPOT
    assert let_in(policy, turn()).released_s == 0.0


def test_what_was_accepted_before_goes_on_whatever_the_forecast() -> None:
    policy = admission()
    for _ in range(14):
        let_in(policy, turn(100))
    resumed = turn(5_000)
    resumed.was_accepted = True
    assert let_in(policy, resumed).released_s == 0.0


def test_a_call_that_its_client_takes_up_again_is_asked_for_once() -> None:
    policy = admission()
    let_in(policy, turn())
    once = policy._wants.rates({}, 0.0)
    resumed = turn()
    resumed.was_accepted = True
    let_in(policy, resumed)
    assert policy._wants.rates({}, 0.0) == once


def test_lanes_that_are_slower_than_they_say_are_found_out() -> None:
    policy = admission()
    now_s = 0.0
    for _ in range(100):
        calls = [let_in(policy, turn(100, since_s=now_s), now_s) for _ in range(2)]
        policy.due(now_s + 0.19)
        for call in calls:
            now_s += 0.2  # twice as long as 100 tokens should take
            call.worker = "p0"
            policy.began(call, now_s)
            policy.leave(call, now_s)
        policy.observe((prefill(), decode()), now_s)
    assert policy.pace == pytest.approx(0.5, abs=0.1)


def test_lanes_that_were_slow_once_are_found_out_by_prompts_that_wait_behind_nobody() -> None:
    policy = admission()
    policy._pace_sums, policy.pace = (1.0, 4.0), 0.33
    now_s = 10.0
    for _ in range(100):
        call = let_in(policy, turn(100, since_s=now_s), now_s)
        call.worker = "p0"
        now_s += 0.11  # a tenth more than 100 tokens should take
        policy.began(call, now_s)
        policy.leave(call, now_s)
        now_s += 1.0
        policy.observe((prefill(), decode()), now_s)
    assert policy.pace == pytest.approx(0.9, abs=0.1)


def test_lanes_forecast_when_a_prompt_starts() -> None:
    lanes = Lanes([(1.0, 100.0, WINDOW_S), (3.0, 100.0, WINDOW_S)])
    assert lanes.start_s(0.0, 0.5) == 1.0
    assert lanes.start_s(600.0, 1.0) == pytest.approx(5.0)  # 200 and 600 tokens on two lanes
    lanes.add(50.0, 2.0)
    assert lanes.free_s == 2.5
    assert lanes.own_s(100.0) == 1.0


def test_seats_are_what_time_memory_and_the_worker_allow() -> None:
    loads = [
        decode("by time", num_seqs=2, step_s=0.02, per_seq_s=0.01),
        decode("by memory", num_seqs=2, step_s=0.02, used=897_000),
        decode("by its own word", num_seqs=2, step_s=0.02, max_seqs=6),
        decode("full", num_seqs=2, step_s=0.1, per_seq_s=0.04),
    ]
    assert Seats(loads, tpot_s=0.1, seq_tokens=1_000.0).num_free == 6 + 3 + 4 + 0
    assert Seats([decode("idle", step_s=9.0)], tpot_s=0.1, seq_tokens=1_000.0).num_free == 1
