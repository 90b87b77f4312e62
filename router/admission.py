"""Whether a call may enter, when its turn comes, and when trying again helps. Pure: instants and WorkerLoads in, plans out.

    1 arrives    shed at once where a bound is full or the forecast misses its target or deadline      -> 2, or gone
    2 waits      here, not in the workers' queues, so that the order can still change (router/fair_queue.py);
                 shed as soon as it can no longer make it, or to make room for a tenant that takes less  -> 3, or gone
    3 released   there is a decode seat under its TPOT target, and a prefill lane is open for more, or a decode worker
                 would compute its prompt sooner (local prefill), one prompt after the other            -> 4
    4 began      its first token came: the lane has moved on                                           -> gone when it ends

A seat is one under the call's own target and those of the calls that run, as far as they are kept. Which are is decided by what
they are worth (router/kept_targets.py): one that no worker keeps, or only at the price of more calls than it brings, binds
nobody, and calls of such a class are served behind all that can be in time.

A target for the whole answer counts as one for its first token: less the steps that an answer of its class usually takes.
Forecast TTFT = when a lane is free for it, behind what is ahead in the fair order, and not before a seat is; plus its own
prefill; what decode workers may take off a queue is not foreseen. Rates are the workers' measured ones, corrected by the
pace at which released prompts really come out. A call is taken where it waits for MARGIN of what its target has to spare at
most, LEAST_S being no wait. One whose own prefill alone misses its class's target would miss it on an idle fleet, too, so that
is no overload: it waits as long as its deadline allows, behind all that can be served in time. Where the call itself asked for
that target it is taken where it need not wait. Nothing learned here can shut the door for good: where nobody waits and a lane
is free, only a deadline that its own prefill misses turns a call away.

A retry hint is an appointment: the moment at which the queue of now is short enough, behind the tenant's calls that were given
an appointment before.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from router.capacity import Lanes, Seats, WorkerLoad
from router.fair_queue import FairQueue, Waiting
from router.kept_targets import Kept, Kind, Want, Wants, kept_targets
from router.lane_window import LEAST_S, window_s
from router.placement import Demand
from router.tenants import Tenant

MIN_RETRY_AFTER_S = 1.0  # HTTP's Retry-After counts whole seconds
MAX_RETRY_AFTER_S = 60.0  # of an appointment: nobody knows the load of the minute after
SLACK = 1_000  # by which bands of calls that no load makes late lie below all others; priorities are in [-100, 100]
FIRST_GUESS_S = 5.0  # of a call's length before any has ended: 50 tokens at the interactive class's 100 ms
SMOOTHING = 0.1  # of exponential means: about the last 20 calls
MARGIN = 0.7  # of the spare time that a forecast wait may use; the rest is for its error. measured: docs/overload.md
PACE_S = 5.0  # of lanes' busy time, in which what was learned of their pace fades
PACE_BOUNDS = (0.1, 10.0)  # of real to reported rate: beyond them one of the two is a fault, not a measurement
REVIEW_S = 0.5  # how often it is asked which TPOT targets are kept: each heartbeat; what was asked for fades in 10 s
SWEEP_S = 0.05  # how often the queue is searched for calls that can no longer make it: half of the 100 ms of case O1
# How long those who wait stay here while no worker is ready, in place of all going to the first that returns. A killed worker
# answers again after 9 s (DESIGN section 10); for longer, placement waits, or says why it does not.
HOLD_S = 10.0
CREDIT_S = 5.0  # of its share that a tenant may have left unused and take later. measured: docs/overload.md
OUTPUT_WEIGHT = 2.0  # of an output token against a prompt token; VTC section 5, after common prices


class Reason(enum.StrEnum):
    """Why a call was shed; a metric's label."""

    INFLIGHT = "inflight"  # max_inflight
    QUEUE_FULL = "queue_full"
    TTFT = "ttft"  # its target cannot be met any more
    TPOT = "tpot"  # likewise
    E2E = "e2e"
    DEADLINE = "deadline"
    DISPLACED = "displaced"  # by a call of a tenant that takes less, or of a higher priority


_MISSED = {Reason.DEADLINE: "deadline", Reason.TTFT: "TTFT target", Reason.E2E: "target for its whole answer"}


@dataclass(frozen=True, slots=True)
class Shed:
    reason: Reason
    message: str
    retry_after_s: float  # 0 = trying again does not help


@dataclass(frozen=True, slots=True)
class Slack:
    """What calls of other classes leave, as one router sees it."""

    num_waiting: int  # their calls in its queue
    num_shed: int  # of theirs, since the start
    has_lane: bool  # a prefill worker is free
    num_free: int  # seats under a TPOT target; below 0: it is missed
    num_decoding: int  # sequences on all decode workers


@dataclass(frozen=True, slots=True)
class Bounds:
    """Hard ones. Defaults and their sources: baton/config.py."""

    max_inflight: int  # sequences, queued ones too
    max_queued: int  # calls
    max_queued_tokens: int
    window_s: float | None = None  # of work that a lane may have before it is given more; None: router/lane_window.py
    by_forecast: bool = True  # False: only bounds and deadlines turn calls away


@dataclass(slots=True, eq=False)
class Turn(Waiting):
    """One call on its way through. `since_s` is its arrival at the router."""

    slo_class: str
    ttft_s: float  # targets
    tpot_s: float
    class_tpot_s: float  # its class's own, which protects it while it runs
    deadline_s: float
    num_seqs: int
    prompt_tokens: int
    max_tokens: int  # of output, each
    min_tokens: int = 0
    asks_ttft: bool = False  # its TTFT target is its own, not its class's
    value: float = 1.0  # beside other calls: its class's weight
    was_accepted: bool = False  # by a router before: it goes on, whatever the forecast
    e2e_s: float = math.inf  # target for the whole answer
    demand: Demand | None = None  # of its first sequence, where placement may be asked about it
    worker: str = ""  # whom it was given to prefill
    is_helped: bool = False  # released while no lane was open, since a decode worker would compute it
    latest_s: float = math.inf  # by when it must be released, or else misses
    misses: Reason = Reason.DEADLINE
    released_s: float | None = None
    began_s: float | None = None
    num_output: int = 0  # tokens that its tenant was charged
    is_gone: bool = False


class Admission:
    """One router's. `observe` tells it of the fleet, every other method of one call."""

    def __init__(self, bounds: Bounds, helps: Callable[[Turn], bool] = lambda turn: False) -> None:
        """`helps`: whether a decode worker that has no prompt to compute would be sooner than a lane, and harm nobody."""
        self.bounds = bounds
        self._helps = helps
        self._helped: Turn | None = None  # the last one: until it is placed nobody knows who could help the next
        self.queue: FairQueue[Turn] = FairQueue()
        self.num_seqs = 0  # inside: queued, released, running
        self.mean_call_s = FIRST_GUESS_S
        self.pace = 1.0  # real rate of prompts by the reported one
        self._pace_sums = (0.0, 0.0)  # lane seconds as reported rates say, as they were
        self._overhead_s = 0.0  # of a prompt on an idle lane, beyond computing it
        self._released: dict[int, Turn] = {}  # by id(), without a first token yet, in order
        self._began_s: dict[str, float] = {}  # by worker: when its last first token came
        self._rates: dict[str, float] = {}  # by prefill worker, as reported
        self._lanes = Lanes()
        self._decodes: list[WorkerLoad] = []
        self._ready_s = -math.inf  # when a worker of each kind was last ready
        self._num_decoding = 0
        self._wants = Wants()
        self._kept = Kept()  # TPOT targets, as of the last review
        self._next_review_s, self._num_reviewed = -math.inf, 0
        self._seats: dict[float, Seats] = {}  # by TPOT target; since the last `observe`
        self._num_taken = 0  # seats, likewise
        self._targets: Counter[float] = Counter()  # TPOT targets of the classes that run, in sequences, kept or not
        self._step_s = 0.0  # of an average decode worker; 0 = not known
        self._outputs: dict[str, float] = {}  # by class: mean output tokens of a sequence
        self._seq_tokens = 0.0  # that a sequence comes to hold, on average
        self._mean_stream_s = FIRST_GUESS_S
        self._appointments: dict[str, float] = {}  # by tenant: when the last one given is over
        self._displaced: list[tuple[Turn, Shed]] = []
        self._next_sweep_s = 0.0

    @property
    def has_news(self) -> bool:
        """Whether `due` may have something to say."""
        return bool(self.queue or self._displaced)

    # -- the fleet ---------------------------------------------------------------------------------------------------

    def observe(self, workers: Iterable[WorkerLoad], now_s: float) -> None:
        """Take over what the ready workers say."""
        loads = list(workers)
        prefills = [load for load in loads if load.prefills]
        measured = [load.tokens_per_s for load in prefills if math.isfinite(load.tokens_per_s)]
        typical = sum(measured) / len(measured) if measured else math.inf
        self._rates = {p.worker_id: p.tokens_per_s if math.isfinite(p.tokens_per_s) else typical for p in prefills}
        for gone in self._began_s.keys() - self._rates.keys():
            del self._began_s[gone]
        ours = self._given(now_s)
        lanes = []
        for load in prefills:
            rate = self.pace * self._rates[load.worker_id]
            free_s, num_tokens = ours.get(load.worker_id, (now_s, 0.0))
            lanes.append((free_s + max(0.0, load.waiting_tokens - num_tokens) / rate, rate, self._window_s(load)))
        self._lanes = Lanes(lanes)
        self._decodes = [load for load in loads if load.decodes]
        helping = {load.worker_id for load in self._decodes} - self._rates.keys()
        for turn in self._released.values():
            is_helped = turn.worker in helping or (turn.is_helped and not turn.worker)
            if lanes and turn.worker not in self._rates and not is_helped:
                self._lanes.add(turn.tokens, now_s)
        self._step_s = sum(load.step_s for load in self._decodes) / max(1, len(self._decodes))
        self._num_decoding = sum(load.num_seqs for load in self._decodes)
        self._seats, self._num_taken = {}, 0
        if self._is_ready:
            self._ready_s = now_s
        if now_s >= self._next_review_s or len(self._decodes) != self._num_reviewed:
            self._next_review_s, self._num_reviewed = now_s + REVIEW_S, len(self._decodes)
            self._kept = kept_targets(self._decodes, self._wanted(now_s), self._mean_tokens)

    def _wanted(self, now_s: float) -> list[Want]:
        """Of decode workers, by the calls of all routers, as far as prefill workers can compute their prompts."""
        wants = self._wants.rates(self._outputs, now_s)
        # This router has as large a part of the fleet's calls as of those that run
        part = min(1.0, self._targets.total() / self._num_decoding) if self._num_decoding else 1.0
        num_tokens = sum(want.prompt_tokens for want in wants)
        computed = min(1.0, part * self._rate() / num_tokens) if num_tokens else 1.0
        return [want.scaled(computed / part) for want in wants] if part else []

    def _window_s(self, load: WorkerLoad) -> float:
        return window_s(load.grant_s) if self.bounds.window_s is None else self.bounds.window_s

    @property
    def _is_ready(self) -> bool:
        return bool(len(self._lanes) and self._decodes)

    def _given(self, now_s: float) -> dict[str, tuple[float, float]]:
        """By worker: when it is done with what this router gave it, one after the other since it could begin, and how many
        tokens that is."""
        given: dict[str, tuple[float, float]] = {}
        for turn in self._released.values():
            rate = self.pace * self._rates.get(turn.worker, 0.0)
            if rate and turn.released_s is not None:
                if turn.worker in given:
                    free_s, num_tokens = given[turn.worker]
                else:
                    began_s = max(turn.released_s, self._began_s.get(turn.worker, 0.0))
                    free_s, num_tokens = max(began_s, now_s - turn.tokens / rate), 0.0
                given[turn.worker] = (free_s + turn.tokens / rate, num_tokens + turn.tokens)
        return given

    @property
    def _mean_tokens(self) -> float:
        """Of a sequence."""
        return max(1.0, self._seq_tokens)

    def _seats_for(self, *targets_s: float) -> Seats:
        """Under these TPOT targets and those of the classes that run, as far as they are kept."""
        return self._seats_under(self._tightest(*targets_s))

    def _tightest(self, *targets_s: float) -> float:
        return min((one_s for one_s in (*targets_s, *self._targets) if one_s in self._kept), default=math.inf)

    def _seats_under(self, target_s: float) -> Seats:
        seats = self._seats.get(target_s)
        if seats is None:
            seats = self._seats[target_s] = Seats(self._decodes, target_s, self._mean_tokens)
            seats.take(self._num_taken)
        return seats

    def _expected_output(self, turn: Turn) -> float:
        """Tokens of one sequence; the least possible where the class has no history."""
        return min(turn.max_tokens, max(self._least_output(turn), self._outputs.get(turn.slo_class, 0.0)))

    @staticmethod
    def _least_output(turn: Turn) -> int:
        return max(1, turn.min_tokens)

    # -- 1: arrives --------------------------------------------------------------------------------------------------

    def arrive(self, turn: Turn, now_s: float) -> Shed | None:
        """Take a call in (it waits, or is released if `released_s` says so) or shed it. Call `due` afterwards."""
        turn.latest_s = turn.deadline_s
        if turn.was_accepted:  # and counted among what is asked for when it was
            self.num_seqs += turn.num_seqs
            self.queue.pass_by(turn, self._credit(turn.tenant))
            self._release(turn, now_s)
            return None
        kind = Kind(turn.band, turn.class_tpot_s, turn.slo_class)
        self._wants.add(kind, turn.value, turn.tokens, turn.num_seqs, now_s)
        if self._is_ready and (shed := self._forecast(turn, now_s)):
            return shed
        if not self.queue and (shed := self._too_slow(turn, now_s)):
            return shed
        if not self._has_room(turn) and (shed := self._make_room(turn, now_s)):
            return shed
        self.num_seqs += turn.num_seqs
        credit = self._credit(turn.tenant)
        if not self._is_ready or (not self.queue and self._may_go(turn, now_s)):
            self._appointments.clear()  # who was told a time did not come: there is room now
            self.queue.pass_by(turn, credit)
            self._release(turn, now_s)
        else:
            self.queue.push(turn, credit)
        return None

    def _forecast(self, turn: Turn, now_s: float) -> Shed | None:
        """Judge the time it would take; sets `latest_s`, and the band of a call that would be late on an idle fleet."""
        own_s = self._overhead_s + self._lanes.own_s(turn.tokens)
        first_s, target = self._first_token_target(turn)
        spare_s = turn.since_s + first_s - now_s - own_s if self.bounds.by_forecast else math.inf
        if own_s > self._latest_first_s(turn) and not turn.asks_ttft:
            turn.band -= SLACK
            spare_s = math.inf
        elif turn.class_tpot_s not in self._kept:
            turn.band -= SLACK
        wait_s, of = self._wait(turn, now_s)
        turn.latest_s = turn.deadline_s - own_s
        if 0 < spare_s < turn.latest_s - now_s:
            turn.latest_s, turn.misses = now_s + spare_s, target
        output = self._expected_output(turn) if wait_s > LEAST_S else self._least_output(turn)
        left_s = turn.deadline_s - now_s - own_s - (output - 1) * self._step_s
        if wait_s > left_s:
            message = f"the call has {turn.deadline_s - now_s:.3g} s left; the forecast is {wait_s - left_s:.3g} s more"
            retry_after_s = self._appointment(turn, wait_s - left_s, now_s) if left_s > 0 else 0.0
            return Shed(Reason.DEADLINE, message, retry_after_s)
        allowed_s = max(LEAST_S, MARGIN * spare_s)
        if wait_s > allowed_s:
            message = (
                f"the wait for {of} would be {wait_s:.3g} s; for its {_MISSED[target]} the limit is {allowed_s:.3g} s"
            )
            return Shed(target, message, self._appointment(turn, wait_s - allowed_s, now_s))
        return None

    def _first_token_target(self, turn: Turn) -> tuple[float, Reason]:
        """After its arrival, when the first token is wanted, so that an answer as long as its class's usually is ends in time."""
        first_s = turn.e2e_s - (self._expected_output(turn) - 1) * self._step_s
        return (first_s, Reason.E2E) if first_s < turn.ttft_s else (turn.ttft_s, Reason.TTFT)

    def _latest_first_s(self, turn: Turn) -> float:
        """Likewise for the shortest possible answer: what is later than that is late on an idle fleet, too."""
        return min(turn.ttft_s, turn.e2e_s - (self._least_output(turn) - 1) * self._step_s)

    def _wait(self, turn: Turn, now_s: float) -> tuple[float, str]:
        """Seconds until a lane is free for it behind whoever is ahead, and a seat; and for which of the two."""
        queue = self.queue
        ahead = queue.ahead(turn.tenant, turn.band, self._credit(turn.tenant)) if queue else 0.0
        lane_s = self._lanes.start_s(ahead, now_s) - now_s
        if lane_s > LEAST_S and not queue and self._can_help(turn):
            lane_s = 0.0
        seats = self._seats_for(turn.class_tpot_s)  # as `_may_go` judges
        num_lacking = seats.num_lacking
        if queue:
            num_lacking += len(queue) * min(1.0, ahead / max(1.0, queue.tokens))
        seat_s = max(0.0, num_lacking) * self._seat_s(seats)
        return max((lane_s, "a prefill worker"), (seat_s, "a decode worker"))

    def _has_room(self, turn: Turn, without: Turn | None = None) -> bool:
        """Also once `without`, who waits, has gone."""
        bounds, num_seqs, num_queued, tokens = self.bounds, self.num_seqs, len(self.queue), self.queue.tokens
        if without is not None:
            num_seqs, num_queued, tokens = num_seqs - without.num_seqs, num_queued - 1, tokens - without.tokens
        fits_queue = num_queued < bounds.max_queued and tokens + turn.tokens <= bounds.max_queued_tokens
        return num_seqs + turn.num_seqs <= bounds.max_inflight and (fits_queue or not num_queued)

    def _make_room(self, turn: Turn, now_s: float) -> Shed | None:
        """Turn another one away for it, where that is enough, or say why not: nobody goes for a call that is refused, too."""
        other = self.queue.to_displace(turn.tenant, turn.band)
        if other is None or not self._has_room(turn, without=other):
            return self._full(turn, now_s)
        self.leave(other, now_s)
        message = "its place in the queue went to a tenant that takes less, or to a higher priority"
        retry_after_s = self._appointment(other, self.queue.tokens / self._rate(), now_s)
        self._displaced.append((other, Shed(Reason.DISPLACED, message, retry_after_s)))
        return None

    def _full(self, turn: Turn, now_s: float) -> Shed:
        bounds = self.bounds
        if self.num_seqs + turn.num_seqs > bounds.max_inflight:
            message = f"{self.num_seqs} sequences are in flight; the limit is {bounds.max_inflight}"
            # With M in flight that last T on average one leaves every T / M (Little's law): the earliest time that helps.
            return Shed(
                Reason.INFLIGHT, message, max(MIN_RETRY_AFTER_S, turn.num_seqs * self.mean_call_s / bounds.max_inflight)
            )
        message = (
            f"{len(self.queue)} calls with {self.queue.tokens:.0f} prompt tokens wait; the limits are {bounds.max_queued} "
            f"and {bounds.max_queued_tokens}"
        )
        return Shed(Reason.QUEUE_FULL, message, self._appointment(turn, turn.tokens / self._rate(), now_s))

    def _rate(self) -> float:
        return self._lanes.tokens_per_s or math.inf

    def _share(self, tenant: Tenant) -> float:
        """Of the fleet, that is due to a tenant among those that wait."""
        return tenant.weight / self.queue.weight_with(tenant)

    def _credit(self, tenant: Tenant) -> float:
        """In tokens by weight."""
        rate = self._lanes.tokens_per_s
        return CREDIT_S * rate * self._share(tenant) / tenant.weight if math.isfinite(rate) else 0.0

    def _appointment(self, turn: Turn, excess_s: float, now_s: float) -> float:
        """When to come back: once as much as it needs is done of what is too much now. The next of its tenant is told later."""
        name = turn.tenant.name
        begin_s = max(self._appointments.get(name, 0.0), now_s + excess_s)
        end_s = begin_s + turn.tokens / (self._rate() * self._share(turn.tenant))
        self._appointments[name] = min(end_s, now_s + MAX_RETRY_AFTER_S)
        return min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, end_s - now_s))

    # -- 2 -> 3 ------------------------------------------------------------------------------------------------------

    def due(self, now_s: float) -> tuple[list[Turn], list[tuple[Turn, Shed]]]:
        """Whose turn has come (`released_s` is set), and who waits in vain."""
        shed, self._displaced = self._displaced, []
        if self.queue and now_s >= self._next_sweep_s:
            self._next_sweep_s = now_s + SWEEP_S
            late = [turn for turn in self.queue.calls if now_s > turn.latest_s]
            shed += [(turn, self._too_late(turn, now_s)) for turn in late]
        released: list[Turn] = []
        while (turn := self.queue.head(now_s)) is not None:
            if now_s > turn.latest_s:
                shed.append((turn, self._too_late(turn, now_s)))
            elif slow := self._too_slow(turn, now_s):
                self.leave(turn, now_s)
                shed.append((turn, slow))
            elif self._may_go(turn, now_s):
                self.queue.take(turn)
                self._release(turn, now_s)
                released.append(turn)
            else:
                break
        return released, shed

    def _may_go(self, turn: Turn, now_s: float) -> bool:
        """Whether a seat is there, and a lane or who helps; in that case `is_helped` says so."""
        if not self._is_ready:
            return now_s - self._ready_s > HOLD_S
        if self._seats_for(turn.class_tpot_s).num_free < 1:  # of n answers the others may wait for theirs
            return False
        turn.is_helped = self._lanes.open_s > now_s and self._can_help(turn)
        return turn.is_helped or self._lanes.open_s <= now_s

    def _can_help(self, turn: Turn) -> bool:
        last = self._helped
        is_on_its_way = last is not None and not last.worker and id(last) in self._released
        return not is_on_its_way and self._helps(turn)

    def _too_slow(self, turn: Turn, now_s: float) -> Shed | None:
        """A call that wants quicker tokens than its class is not waited for where its turn has come: others could go."""
        is_quicker = self._kept.floor_s <= turn.tpot_s < turn.class_tpot_s
        if not is_quicker or not self.bounds.by_forecast or not self._decodes:
            return None
        seats = self._seats_under(min(turn.tpot_s, self._tightest()))
        if seats.num_free >= 1:
            return None
        message = f"tokens come each {1e3 * self._step_s:.3g} ms now; its TPOT target is {1e3 * turn.tpot_s:.3g} ms"
        return Shed(Reason.TPOT, message, self._appointment(turn, seats.num_lacking * self._seat_s(seats), now_s))

    def _seat_s(self, seats: Seats) -> float:
        """Until one more sequence ends. Where fewer run than there are seats for, who is ahead will be among those that end."""
        return self._mean_stream_s / max(1, self._num_decoding, seats.num_seats)

    def _release(self, turn: Turn, now_s: float) -> None:
        turn.released_s = now_s
        self._released[id(turn)] = turn
        self._targets[turn.class_tpot_s] += turn.num_seqs
        if turn.is_helped:
            self._helped = turn
        elif len(self._lanes):
            self._lanes.add(turn.tokens, now_s)
        self._num_taken += turn.num_seqs
        for seats in self._seats.values():
            seats.take(turn.num_seqs)

    def _too_late(self, turn: Turn, now_s: float) -> Shed:
        self.leave(turn, now_s)
        message = f"the call waited {now_s - turn.since_s:.3g} s and can no longer meet its {_MISSED[turn.misses]}"
        away_s = 0.0
        if not self._is_ready:
            missing, away_s = "decode" if len(self._lanes) else "prefill", now_s - self._ready_s
            message = f"{message}; no {missing} worker has been ready for {away_s:.3g} s"
        if turn.misses is Reason.DEADLINE:
            return Shed(turn.misses, message, 0.0)
        excess_s = HOLD_S - away_s if away_s else self.queue.tokens / self._rate()
        return Shed(turn.misses, message, self._appointment(turn, excess_s, now_s))

    # -- what is left ------------------------------------------------------------------------------------------------

    def slack(self, slo_class: str, targets_s: Iterable[float], num_shed: int, now_s: float) -> Slack:
        """What the others leave to `slo_class`, whose TPOT targets these are."""
        num_waiting = sum(turn.slo_class != slo_class for turn in self.queue.calls) if self.queue else 0
        has_lane = self._is_ready and self._lanes.open_s <= now_s
        num_free = self._seats_for(*targets_s).num_free if self._is_ready else 0
        num_free = min(num_free, self.bounds.max_inflight - self.num_seqs)
        return Slack(num_waiting, num_shed, has_lane, num_free, self._num_decoding)

    # -- 4 and gone --------------------------------------------------------------------------------------------------

    def began(self, turn: Turn, now_s: float) -> None:
        """Its first token came."""
        if self._released.pop(id(turn), None) is None or turn.released_s is None:
            return
        turn.began_s = now_s
        before_s = self._began_s.get(turn.worker, 0.0)
        self._began_s[turn.worker] = now_s
        rate = self._rates.get(turn.worker, math.inf)
        if math.isfinite(rate):
            self._learn_pace(turn.tokens / rate, now_s - max(turn.released_s, before_s), before_s > turn.released_s)

    def _learn_pace(self, nominal_s: float, real_s: float, was_queued: bool) -> None:
        """A prompt that came out right behind another one shows the lane's pace; one on an idle lane what it costs besides, or,
        where it came sooner than such a pace allows, that the lane is quicker: else a pace that once was low would let no prompt
        wait behind another, and nobody would ever hear that it is over."""
        if not was_queued:
            self._overhead_s += SMOOTHING * (max(0.0, real_s - nominal_s / self.pace) - self._overhead_s)
            if real_s >= nominal_s / self.pace:
                return
        fade = math.exp(-real_s / PACE_S)
        nominal, real = self._pace_sums
        self._pace_sums = nominal, real = fade * nominal + nominal_s, fade * real + real_s
        # As reported until a fade's worth of seconds says otherwise.
        low, high = PACE_BOUNDS
        self.pace = min(high, max(low, (nominal + PACE_S / 10) / (real + PACE_S / 10)))

    def charge(self, turn: Turn, num_output: int) -> None:
        """Its sequences have made so many tokens by now."""
        if num_output > turn.num_output:
            self.queue.charge(turn.tenant, OUTPUT_WEIGHT * (num_output - turn.num_output))
            turn.num_output = num_output

    def leave(self, turn: Turn, now_s: float) -> None:
        """It is over, in whatever state it was; saying so again changes nothing."""
        if turn.is_gone:
            return
        turn.is_gone = True
        self.num_seqs -= turn.num_seqs
        if turn.released_s is None:
            self.queue.remove(turn)
            return
        self._released.pop(id(turn), None)
        self._targets[turn.class_tpot_s] -= turn.num_seqs
        if not self._targets[turn.class_tpot_s]:
            del self._targets[turn.class_tpot_s]
        self.mean_call_s += SMOOTHING * (now_s - turn.since_s - self.mean_call_s)
        if turn.began_s is not None:
            self._mean_stream_s += SMOOTHING * (now_s - turn.began_s - self._mean_stream_s)
            num_output = turn.num_output / turn.num_seqs
            mean = self._outputs.setdefault(turn.slo_class, num_output)
            self._outputs[turn.slo_class] = mean + SMOOTHING * (num_output - mean)
            seq_tokens = turn.prompt_tokens + num_output
            self._seq_tokens += (SMOOTHING if self._seq_tokens else 1.0) * (seq_tokens - self._seq_tokens)
