"""Any order of commands and steps on one engine: every answer equals the reference, nothing leaks, nothing hangs."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from baton.config import EngineConfig
from baton.request import Request
from engine.ports import Batch
from tests.engine.engine_rig import EOS, Rig, draw_tokens, expected, make_request

NUM_BLOCKS = 24
MAX_LEN = NUM_BLOCKS * 16 + 1  # what such a pool can carry
SHARED = draw_tokens(
    0, 200
)  # prompts begin with a part of this and end in one of three ways, so that they meet in the cache

requests = st.fixed_dictionaries(
    {
        "num_shared": st.sampled_from([0, 15, 16, 17, 48, 100, 160]),
        "num_own": st.sampled_from([1, 2, 15, 16, 17, 31, 32, 40]),
        "max_tokens": st.integers(1, 60),
        "priority": st.integers(-1, 1),
        "num_output_tokens": st.sampled_from([0, 0, 1]),
        "ignore_eos": st.booleans(),
        "temperature": st.sampled_from([0.0, 0.7]),
        "stop_token_ids": st.sampled_from([(), tuple(range(10, 60))]),
        "min_tokens": st.sampled_from([0, 5]),
        "tenant_salt": st.sampled_from([b"", b"a"]),
    }
)


class EngineMachine(RuleBasedStateMachine):
    """One engine that serves, prefills for others and adopts; `failing` seqs break the model whenever they are run."""

    config = EngineConfig(max_num_seqs=6, max_num_batched_tokens=48, chunk_tokens=20)

    def __init__(self) -> None:
        super().__init__()
        self.rig = Rig(num_blocks=NUM_BLOCKS, config=self.config, before_run=self.maybe_fail)
        self.requests: dict[int, Request] = {}
        self.dropped: set[int] = set()
        self.failing: set[int] = set()
        self.kinds: dict[int, str] = {}

    def maybe_fail(self, batch: Batch) -> None:
        if any(entry.seq in self.failing for entry in batch.entries):
            raise RuntimeError

    def make(self, draw: dict[str, object], kind: str) -> Request:
        seq = len(self.requests) + 1
        options = dict(draw)
        num_shared, num_own = int(str(options.pop("num_shared"))), int(str(options.pop("num_own")))
        sent = int(str(options["num_output_tokens"]))
        options["max_tokens"] = int(str(options["max_tokens"])) + sent
        request = make_request(seq, SHARED[:num_shared] + draw_tokens(1 + seq % 3, num_own + sent), **options)  # type: ignore[arg-type]
        self.requests[seq], self.kinds[seq] = request, kind
        return request

    @rule(draw=requests)
    def add(self, draw: dict[str, object]) -> None:
        self.rig.engine.add(self.make(draw, "local"), 0.0)

    @rule(draw=requests)
    def prefill(self, draw: dict[str, object]) -> None:
        self.rig.engine.add(self.make(draw, "prefill"), 0.0, prefill_only=True)

    @rule(draw=requests)
    def reserve(self, draw: dict[str, object]) -> None:
        self.rig.engine.reserve(self.make(draw, "reserved"), 0.0)

    def granted(self) -> list[int]:
        return [s for s in self.rig.reserved if self.kinds[s] == "reserved" and s not in self.dropped]

    @precondition(lambda self: self.granted())
    @rule(data=st.data())
    def adopt(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(self.granted()))
        request = self.requests[seq]
        self.rig.receive(request)
        self.rig.engine.adopt(seq, expected(request, MAX_LEN)[0][0], 0.0)
        self.kinds[seq] = "adopted"
        self.rig.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.drop_seq(data.draw(st.sampled_from(sorted(self.requests))))

    def drop_seq(self, seq: int) -> None:
        if seq not in self.rig.ended:
            self.dropped.add(seq)
        self.rig.engine.drop(seq)
        self.rig.check()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def break_one(self, data: st.DataObject) -> None:
        self.failing.add(data.draw(st.sampled_from(sorted(self.requests))))

    @rule(num_steps=st.integers(1, 12))
    def steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.rig.step()

    def teardown(self) -> None:
        """Take away what only its owner can end; then everything else must end by itself."""
        for seq, kind in self.kinds.items():
            if kind in ("prefill", "reserved"):
                self.drop_seq(seq)
        self.rig.run()
        assert self.rig.is_idle()
        for seq, request in self.requests.items():
            self.judge(seq, request)
        assert self.rig.engine.load().cached_blocks == len(self.rig.cached_hashes)

    def judge(self, seq: int, request: Request) -> None:
        tokens, finish = expected(request, MAX_LEN)
        kind, ended = self.kinds[seq], self.rig.ended.get(seq)
        emitted = self.rig.output(seq)
        if kind == "prefill":
            assert emitted == []
            prefilled = self.rig.prefilled.get(seq)
            if prefilled is not None:
                assert prefilled.first.token == tokens[0]
                assert bool(prefilled.first.finish) is (len(tokens) == 1)
                assert prefilled.stats.num_computed_tokens + prefilled.stats.num_cached_tokens == len(request.token_ids)
            return
        first = 1 if kind == "adopted" else 0
        assert emitted == tokens[first : first + len(emitted)]
        assert seq not in self.rig.tokens or self.rig.tokens[seq][0].index == request.num_output_tokens + first
        if seq in self.dropped:
            assert ended is None
        elif ended is not None and ended.error is not None:
            assert seq in self.failing
        else:
            assert ended is not None, "it never ended"
            assert (emitted, ended.finish) == (tokens[first:], finish)


class UncachedEngineMachine(EngineMachine):
    config = EngineConfig(max_num_seqs=6, max_num_batched_tokens=48, chunk_tokens=20, prefix_cache=False)


class RoomyEngineMachine(EngineMachine):
    """Seats are short instead of budget."""

    config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=512, chunk_tokens=64)


SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)  # 2-3 s each; thousands were run by hand

TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = SETTINGS
TestUncachedEngineMachine = UncachedEngineMachine.TestCase
TestUncachedEngineMachine.settings = SETTINGS
TestRoomyEngineMachine = RoomyEngineMachine.TestCase
TestRoomyEngineMachine.settings = SETTINGS


def test_the_scripted_answers_that_the_machine_compares_are_of_every_kind() -> None:
    """A guard on the strategy: some answers stop early, some run to their limit, some to the pool's."""
    stopping = make_request(1, 20, 60, ignore_eos=False, stop_token_ids=tuple(range(10, 60)))
    assert len(expected(stopping)[0]) < 60
    assert len(expected(make_request(1, 20, 60))[0]) == 60
    assert len(expected(make_request(1, 360, 60), MAX_LEN)[0]) == MAX_LEN - 360
    assert EOS not in SHARED
