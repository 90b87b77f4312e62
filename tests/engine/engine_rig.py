"""Drives one LocalEngine over a ScriptedRunner and keeps what comes out; after every step it checks what must always hold.

After each step: has_work told the truth; integrity of pool, queues and cache; gauges that sum to the pool; indices without
hole or repeat; no token after an end; prefills that only advance, in the same blocks; and every free block poisoned, so
that whoever still reads one is found out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from baton.config import EngineConfig
from baton.kv_layout import KVLayout
from baton.request import FinishReason, Request, SampledToken, SamplingParams
from engine.engine import LocalEngine
from engine.ports import Batch, BatchEntry, ChunkDone, PrefillEnded, Reservation, SequenceEnded, StepResult
from engine.scripted_runner import ScriptedRunner, answer

EOS = 2
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", block_size=16)
EDGE_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 200, 700)  # public case C4


class Rig:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_model_len: int = 4_096,
        script: Mapping[int, Sequence[int]] | None = None,
        before_run: Callable[[Batch], None] | None = None,
        clock_s: Callable[[], float] = lambda: 0.0,
        layout: KVLayout = LAYOUT,
        config: EngineConfig | None = None,
    ) -> None:
        self.runner = ScriptedRunner(layout, num_blocks, script=script, before_run=before_run)
        self.engine = LocalEngine(
            config or EngineConfig(chunk_tokens=64),
            self.runner,
            fingerprint="scripted",
            eos_token_ids=(EOS,),
            max_model_len=max_model_len,
            clock_s=clock_s,
            check_integrity=True,
        )
        self.results: list[StepResult] = []
        self.tokens: dict[int, list[SampledToken]] = {}
        self.ended: dict[int, SequenceEnded] = {}
        self.prefilled: dict[int, PrefillEnded] = {}
        self.chunks: dict[int, list[ChunkDone]] = {}
        self.reserved: dict[int, Reservation] = {}
        self.cached_hashes: set[bytes] = set()

    def step(self, now_s: float = 0.0) -> StepResult:
        had_work, before = self.engine.has_work(), self.engine.load()
        result = self.engine.step(now_s)
        is_empty = replace(result, step=0) == StepResult(step=0)
        assert had_work is not (is_empty and self.engine.load() == before), "has_work is wrong: it spins, or it sleeps"
        self.results.append(result)
        for token in result.tokens:
            assert token.seq not in self.ended, "a token after the end"
            self.tokens.setdefault(token.seq, []).append(token)
        for ended in result.ended:
            assert ended.seq not in self.ended, "ended twice"
            self.ended[ended.seq] = ended
        for chunk in result.chunks:
            earlier = self.chunks.setdefault(chunk.seq, [])
            assert not earlier or chunk.block_ids == earlier[-1].block_ids, "a prefill's blocks moved"
            assert not earlier or chunk.num_computed_tokens > earlier[-1].num_computed_tokens, "a prefill went back"
            earlier.append(chunk)
        self.prefilled |= {prefilled.seq: prefilled for prefilled in result.prefilled}
        self.reserved |= {reservation.seq: reservation for reservation in result.reserved}
        assert not set(result.cache_added) & set(result.cache_removed)
        assert set(result.cache_removed) <= self.cached_hashes
        self.cached_hashes = (self.cached_hashes - set(result.cache_removed)) | set(result.cache_added)
        self.check()
        return result

    def check(self) -> None:
        load = self.engine.load()
        gauges = (load.active_blocks, load.reserved_blocks, load.cached_blocks, load.free_blocks)
        assert min(gauges) >= 0
        assert sum(gauges) == self.runner.kv_cache.num_blocks
        assert self.runner.faults == []
        for tokens in self.tokens.values():
            assert [token.index - tokens[0].index for token in tokens] == list(range(len(tokens)))
        self.engine.check_integrity()
        self.runner.kv_cache.poison(self.engine.free_block_ids())

    def run(self, max_steps: int = 5_000) -> int:
        """Step until the engine would sleep; returns the number of steps."""
        for num_steps in range(max_steps):
            if not self.engine.has_work():
                return num_steps
            self.step()
        raise AssertionError(f"still at work after {max_steps} steps")

    def receive(self, request: Request) -> None:
        """Write the KV that a prefill worker would ship into a reservation's blocks, all but its leading ones."""
        reservation = self.reserved[request.seq]
        start = reservation.num_leading_blocks * self.runner.kv_cache.layout.block_size
        lacking = BatchEntry(
            request.seq, request.token_ids[start:], start, reservation.block_ids, False, request.sampling
        )
        self.runner.compute([lacking])

    def output(self, seq: int) -> list[int]:
        return [token.token for token in self.tokens.get(seq, [])]

    def is_idle(self) -> bool:
        load = self.engine.load()
        return (load.active_blocks, load.reserved_blocks, load.num_running, load.num_waiting) == (0, 0, 0, 0)


def make_request(
    seq: int,
    prompt: int | Sequence[int],
    max_tokens: int = 8,
    *,
    priority: int = 0,
    num_output_tokens: int = 0,
    tenant_salt: bytes = b"",
    ignore_eos: bool = True,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    temperature: float = 0.0,
) -> Request:
    """A request whose prompt is given, or is `prompt` tokens drawn from the seq."""
    return Request(
        seq=seq,
        token_ids=tuple(draw_tokens(seq, prompt) if isinstance(prompt, int) else prompt),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
            stop_token_ids=stop_token_ids,
        ),
        num_output_tokens=num_output_tokens,
        priority=priority,
        tenant_salt=tenant_salt,
        request_id=f"r{seq}",
    )


def draw_tokens(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000) for _ in range(num_tokens)]


def expected(request: Request, max_len: int = 4_096) -> tuple[list[int], FinishReason]:
    """The reference: all output tokens of a request and how it ends, straight from the scripted model."""
    sampling = request.sampling
    sent = list(request.token_ids[request.num_prompt_tokens :])
    for token in answer(request.token_ids, sampling, request.num_tokens_left):
        sent.append(token)
        is_stop = (token == EOS and not sampling.ignore_eos) or token in sampling.stop_token_ids
        if is_stop and len(sent) >= sampling.min_tokens:
            return sent[request.num_output_tokens :], FinishReason.STOP
        if request.num_prompt_tokens + len(sent) >= max_len:
            break
    return sent[request.num_output_tokens :], FinishReason.LENGTH
