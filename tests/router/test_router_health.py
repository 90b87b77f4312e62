"""The breaker of one worker, the bound on ejections and the comparison with peers: pure."""

from __future__ import annotations

import pytest

from baton.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    Overloaded,
    PeerRefused,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from router.health import (
    DEMOTED_S,
    EJECT_RATIO,
    FIRST_BACKOFF_S,
    FORGIVEN_S,
    LOSSES,
    MAX_BACKOFF_S,
    Health,
    judge,
    judge_pace,
)

CRASH = WorkerLost("p0 fell over")


class Pool:
    """Workers of one role whose breakers are judged as they open, as a Fleet does."""

    def __init__(self, size: int) -> None:
        self.workers = [Health(self.judge) for _ in range(size)]

    def judge(self) -> None:
        judge([self.workers])

    def crash(self, worker: int, now_s: float, times: int = 3) -> None:
        for _ in range(times):
            self.workers[worker].failed(CRASH, now_s)

    @property
    def ejected(self) -> list[int]:
        return [index for index, worker in enumerate(self.workers) if worker.ejected]


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("bad", field="n"),
        Cancelled("left"),
        DeadlineExceeded("late"),
        Overloaded("full"),
        PeerRefused("differs", field="dtype"),
    ],
)
def test_what_clients_bring_upon_themselves_and_full_queues_never_open_a_breaker(error: BatonError) -> None:
    pool = Pool(2)
    for now_s in range(100):
        pool.workers[0].failed(error, now_s)
    assert pool.ejected == []
    assert not pool.workers[0].is_open


@pytest.mark.parametrize("error", [CRASH, TransferFailed("cut"), Internal("defect"), Unavailable("gave it up")])
def test_a_worker_that_fails_every_call_is_ejected_within_three_and_says_why(error: BatonError) -> None:
    pool = Pool(2)
    for _ in range(2):
        pool.workers[0].failed(error, 1.0)
    assert pool.ejected == []
    pool.workers[0].failed(error, 1.0)
    assert pool.ejected == [0]
    assert error.message in pool.workers[0].reason


def test_a_probe_closes_or_opens_for_twice_as_long_up_to_a_limit() -> None:
    pool = Pool(2)
    worker, now_s = pool.workers[0], 10.0
    pool.crash(0, now_s)
    backoff_s = FIRST_BACKOFF_S
    for _ in range(10):
        assert not worker.takes_calls(0, now_s + 0.9 * backoff_s)
        now_s += backoff_s
        assert worker.takes_calls(0, now_s)
        assert not worker.takes_calls(1, now_s), "one probe at a time"
        worker.failed(CRASH, now_s)
        backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
    now_s += MAX_BACKOFF_S
    worker.succeeded(now_s)
    assert pool.ejected == []
    assert worker.takes_calls(100, now_s)


def test_late_outcomes_of_calls_from_before_the_ejection_change_nothing() -> None:
    pool = Pool(2)
    pool.crash(0, 10.0)
    left_s = pool.workers[0].left_s(10.1)
    pool.workers[0].succeeded(10.1)
    pool.crash(0, 10.2, times=50)
    assert pool.ejected == [0]
    assert pool.workers[0].left_s(10.1) == left_s


def test_half_failing_opens_but_a_rare_failure_does_not() -> None:
    pool = Pool(4)
    for call in range(40):
        for worker, every in ((0, 2), (1, 10)):
            if call % every == 0:
                pool.workers[worker].failed(CRASH, call)
            else:
                pool.workers[worker].succeeded(call)
        if 0 in pool.ejected:
            break
    assert pool.ejected == [0]
    assert "of its last" in pool.workers[0].reason


def test_a_worker_that_was_healthy_for_long_starts_with_a_short_backoff_again() -> None:
    pool = Pool(2)
    worker = pool.workers[0]
    pool.crash(0, 0.0)
    worker.failed(CRASH, 1.0)
    worker.succeeded(3.0)
    pool.crash(0, 4.0)
    assert worker.left_s(4.0) == 4 * FIRST_BACKOFF_S
    worker.succeeded(8.0)
    pool.crash(0, 8.1 + FORGIVEN_S)
    assert worker.left_s(8.1 + FORGIVEN_S) == FIRST_BACKOFF_S


def test_at_most_half_of_a_pool_is_ejected_and_those_that_opened_first_stay_out() -> None:
    pool = Pool(5)
    for worker in (4, 1, 0, 2):
        pool.crash(worker, 10.0 + worker % 4)
    assert pool.ejected == [0, 4]
    pool.workers[4].succeeded(60.0)
    pool.judge()
    assert pool.ejected == [0, 1], "a place became free"


def test_the_last_worker_of_a_pool_stays_also_where_it_is_in_two() -> None:
    pool = Pool(2)
    both, decode = pool.workers
    pool.crash(0, 1.0)
    judge([[both], [both, decode]])
    assert pool.ejected == [], "nobody else prefills"
    judge([[], [decode]])
    assert pool.ejected == []


def test_a_spared_worker_that_serves_again_is_closed() -> None:
    pool = Pool(1)
    pool.crash(0, 1.0)
    assert pool.workers[0].is_open
    assert pool.workers[0].takes_calls(30, 1.0)
    pool.workers[0].succeeded(1.0 + FIRST_BACKOFF_S)
    assert not pool.workers[0].is_open


def test_one_restart_costs_no_trust_and_many_cost_ever_more() -> None:
    pool = Pool(2)
    worker, backoffs = pool.workers[0], []
    for restart in range(LOSSES + 3):
        now_s = 10.0 * restart
        worker.lost(now_s)
        worker.returned(now_s + 5.0)
        backoffs.append(worker.left_s(now_s + 5.0) if worker.is_open else 0.0)
    assert backoffs == [0.0] * (LOSSES - 1) + [FIRST_BACKOFF_S * 2**n for n in range(4)]
    assert "was lost" in worker.reason


def test_a_death_is_one_event_however_many_calls_it_ends() -> None:
    pool = Pool(2)
    pool.workers[0].lost(1.0)
    pool.crash(0, 1.0, times=50)
    pool.workers[0].returned(6.0)
    assert not pool.workers[0].is_open


def test_a_dead_peer_is_one_event_for_those_that_were_sending_to_it_but_one_that_always_fails_is_not_spared() -> None:
    pool = Pool(2)
    for call in range(50):
        pool.workers[0].failed(TransferFailed("d0 is gone"), 1.0 + 0.001 * call, peer="d0")
    assert not pool.workers[0].is_open
    for now_s in (2.0, 3.0):
        pool.workers[0].failed(TransferFailed("no answer"), now_s, peer="d1")
    assert pool.ejected == [0]


def test_what_failed_before_a_restart_is_forgotten_with_it() -> None:
    pool = Pool(2)
    pool.crash(0, 1.0, times=2)
    pool.workers[0].lost(1.0)
    pool.workers[0].returned(2.0)
    pool.crash(0, 3.0, times=2)
    assert pool.ejected == []


def windows(pool: Pool, seconds: list[float], num: int, start_s: float = 100.0) -> None:
    """`num` windows in which worker i takes seconds[i] for a step of 8."""
    for window in range(num):
        for worker, step_s in zip(pool.workers, seconds, strict=True):
            for _ in range(5):
                worker.stepped(8, step_s)
        judge_pace(pool.workers, start_s + 5.0 * window)


def test_a_slow_worker_is_demoted_then_ejected() -> None:
    pool = Pool(4)
    windows(pool, [0.02, 0.02, 0.021, 0.02 * EJECT_RATIO * 1.1], 1)
    assert [worker.is_demoted(101.0) for worker in pool.workers] == [False, False, False, True]
    assert pool.ejected == []
    windows(pool, [0.02, 0.02, 0.021, 0.02 * EJECT_RATIO * 1.1], 1, 105.0)
    assert pool.ejected == [3]
    assert "its step takes" in pool.workers[3].reason


def test_a_worker_that_is_merely_slower_is_demoted_for_a_while_and_never_ejected() -> None:
    pool = Pool(3)
    windows(pool, [0.02, 0.02, 0.08], 10)
    assert pool.ejected == []
    assert pool.workers[2].is_demoted(146.0)
    judge_pace(pool.workers, 150.0)  # no work, no news
    assert pool.workers[2].is_demoted(150.0)
    assert not pool.workers[2].is_demoted(146.0 + DEMOTED_S)
    windows(pool, [0.02, 0.02, 0.02], 1, 155.0)
    assert not pool.workers[2].is_demoted(155.0)


def test_of_two_workers_the_slower_one_is_demoted_but_not_ejected() -> None:
    pool = Pool(2)
    windows(pool, [0.02, 1.0], 5)
    assert pool.workers[1].is_demoted(121.0)
    assert pool.ejected == []


def test_only_like_is_compared_with_like() -> None:
    pool = Pool(3)
    for _ in range(5):
        for worker in pool.workers[:2]:
            worker.stepped(1, 0.01)
            worker.first_token(64, 0.1)
        pool.workers[2].stepped(64, 0.2)
        pool.workers[2].first_token(4096, 4.0)
    judge_pace(pool.workers, 1.0)
    assert not any(worker.is_demoted(1.0) for worker in pool.workers)


def test_a_single_slow_event_is_no_pace() -> None:
    pool = Pool(3)
    for worker in pool.workers[:2]:
        for _ in range(5):
            worker.first_token(64, 0.1)
    pool.workers[2].first_token(64, 9.0)
    judge_pace(pool.workers, 1.0)
    assert not pool.workers[2].is_demoted(1.0)


@pytest.mark.parametrize("calls_per_s", [2, 20, 500])
def test_a_pair_that_fails_all_its_calls_is_noticed_however_many_there_are(calls_per_s: int) -> None:
    pool = Pool(2)
    for call in range(2 * calls_per_s):
        pool.workers[0].failed(TransferFailed("no Ack"), call / calls_per_s, peer="d0")
    assert pool.workers[0].is_open


def test_steps_that_took_no_time_are_compared_with_nothing() -> None:
    pool = [Health(lambda: None) for _ in range(3)]
    for health in pool:
        for _ in range(100):
            health.stepped(1, 0.0)
    judge_pace(pool, 10.0)
    assert not any(health.is_demoted(10.0) for health in pool)
