"""A sequence that goes on elsewhere with what was sent gives from there on what the undisturbed one gives.

Prompt and k output tokens are submitted with num_output_tokens = k, as a router does after a death: prefilled on one worker and
shipped, or wholly on the decode worker. All continuations of one answer run at once, so that no two share a batch twice. With
deterministic numerics tokens, finish and logprobs are the same bits; without, tokens differ at most where the best two logits
are within 1e-3 (DESIGN section 7).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from baton.config import EngineConfig, ModelConfig, WorkerConfig
from baton.request import FinishReason, Request, SamplingParams
from baton.v1 import worker_pb2
from tests.exactness.transformers_reference import GAP
from tests.tiny_models import VOCAB_SIZE, make_tiny_model
from tests.worker.session_client import SessionClient
from worker.server import WorkerServer

EPOCH = 0xE2
NUM_TOKENS = 24
CHUNK = 64
PROMPTS = [[(37 * i * i + 11 * i + 29 * n) % (VOCAB_SIZE - 10) + 5 for i in range(n)] for n in (1, 12, 60)]
NUM_SENT = (1, 2, 3, 4, 5, 15, 16, 17, 20, NUM_TOKENS - 1)  # with the prompts: both sides of block and chunk edges
PLAIN = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, num_logprobs=3)
SEEDED = dataclasses.replace(PLAIN, temperature=0.9, top_k=60, top_p=0.95, seed=77)
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": ((9, 2.0),)}
MODES = {
    "greedy": PLAIN,
    "seeded": SEEDED,
    "the second of n": dataclasses.replace(SEEDED, sample_index=1),
    "greedy, penalties": dataclasses.replace(PLAIN, **PENALTIES),  # type: ignore[arg-type]
    "seeded, penalties": dataclasses.replace(SEEDED, **PENALTIES),  # type: ignore[arg-type]
    "min_p": dataclasses.replace(SEEDED, min_p=0.05, top_k=0),
}
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Answer:
    """What came of one sequence, by output index."""

    tokens: dict[int, int]
    logprobs: dict[int, tuple[float, list[int]]]
    finish: int
    stats: worker_pb2.SeqStats


class Pair:
    """A prefill and a decode worker, and a router's Session to each."""

    def __init__(self, workers: dict[str, WorkerServer]) -> None:
        self._workers = workers
        self._sessions = {role: SessionClient(worker.address, EPOCH) for role, worker in workers.items()}

    async def __aenter__(self) -> Pair:
        for session in self._sessions.values():
            await session.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions.values():
            await session.__aexit__()

    def submit(self, request: Request, *, local: bool) -> None:
        decode = self._workers["decode"]
        peer = worker_pb2.Peer(worker_id="decode", epoch=decode.epoch, address=decode.address)
        self._sessions["decode" if local else "prefill"].submit(request, None if local else peer)

    async def answer(self, request: Request) -> Answer:
        prefill, decode, seq = self._sessions["prefill"], self._sessions["decode"], request.seq
        await prefill.until(lambda: seq in prefill.ended or seq in decode.ended or seq in prefill.refused)
        ended = prefill.ended.get(seq)
        assert ended is None or ended.outcome != worker_pb2.OUTCOME_FAILED, ended
        if ended is None or ended.outcome == worker_pb2.OUTCOME_HANDED_OFF:
            await decode.until(lambda: seq in decode.ended)
        last = decode.ended.get(seq, ended)
        assert last is not None
        assert last.outcome == worker_pb2.OUTCOME_FINISHED
        return Answer(
            prefill.tokens.get(seq, {}) | decode.tokens.get(seq, {}),
            prefill.logprobs.get(seq, {}) | decode.logprobs.get(seq, {}),
            last.finish_reason,
            (ended or last).stats,
        )

    async def run(self, prompt: list[int], sampling: SamplingParams) -> Answer:
        request = Request(EPOCH << 32 | next(_numbers), tuple(prompt), sampling)
        self.submit(request, local=False)
        return await self.answer(request)


def continuations(prompt: list[int], whole: Answer, sampling: SamplingParams) -> list[tuple[Request, bool]]:
    """Every number of sent tokens, shipped and local."""
    output = [whole.tokens[index] for index in range(len(whole.tokens))]
    return [
        (Request(EPOCH << 32 | next(_numbers), (*prompt, *output[:sent]), sampling, sent), local)
        for sent in NUM_SENT
        for local in (False, True)
        if sent < len(output)
    ]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", ffn_size=1536)


def start(model_dir: Path, *, deterministic: bool, prefix_cache: bool = True) -> dict[str, WorkerServer]:
    engine = EngineConfig(
        num_blocks=256, chunk_tokens=CHUNK, num_threads=1, deterministic=deterministic, prefix_cache=prefix_cache
    )
    workers = {
        role: WorkerServer(WorkerConfig(role, role=role, model=ModelConfig(path=str(model_dir)), engine=engine))
        for role in ("prefill", "decode")
    }
    for worker in workers.values():
        worker.start()
    return workers


@pytest.fixture(scope="module", params=[True, False], ids=["prefix cache", "no prefix cache"])
def deterministic(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[dict[str, WorkerServer]]:
    workers = start(model_dir, deterministic=True, prefix_cache=request.param)
    yield workers
    for worker in workers.values():
        worker.stop()


@pytest.mark.parametrize("mode", MODES)
async def test_a_continuation_is_the_undisturbed_answer_bit_for_bit(
    deterministic: dict[str, WorkerServer], mode: str
) -> None:
    sampling = MODES[mode]
    async with Pair(deterministic) as pair:
        for prompt in PROMPTS:
            whole = await pair.run(prompt, sampling)
            assert len(whole.tokens) == NUM_TOKENS
            runs = continuations(prompt, whole, sampling)
            for request, local in runs:
                pair.submit(request, local=local)
            for request, local in runs:
                sent, rest = request.num_output_tokens, await pair.answer(request)
                context = f"{len(prompt)} + {sent} tokens, {'local' if local else 'shipped'}"
                assert rest.tokens == {i: whole.tokens[i] for i in range(sent, NUM_TOKENS)}, context
                assert rest.logprobs == {i: whole.logprobs[i] for i in range(sent, NUM_TOKENS)}, context
                assert rest.finish == FinishReason.LENGTH
                assert rest.stats.cached_tokens + rest.stats.computed_tokens == len(request.token_ids), context


@pytest.mark.parametrize("min_tokens", [0, 9])
async def test_it_ends_where_the_undisturbed_answer_ends(
    deterministic: dict[str, WorkerServer], min_tokens: int
) -> None:
    async with Pair(deterministic) as pair:
        free = await pair.run(PROMPTS[1], SEEDED)
        stop = free.tokens[14 if min_tokens else 6]
        stops = dataclasses.replace(SEEDED, stop_token_ids=(stop,), min_tokens=min_tokens)
        whole = await pair.run(PROMPTS[1], stops)
        assert whole.finish == FinishReason.STOP
        assert len(whole.tokens) >= min_tokens
        for request, local in continuations(PROMPTS[1], whole, stops):
            pair.submit(request, local=local)
            rest = await pair.answer(request)
            sent = request.num_output_tokens
            assert rest.tokens == {i: whole.tokens[i] for i in range(sent, len(whole.tokens))}
            assert rest.finish == FinishReason.STOP


async def test_without_deterministic_numerics_only_near_ties_may_differ(model_dir: Path) -> None:
    workers = start(model_dir, deterministic=False)
    try:
        async with Pair(workers) as pair:
            for prompt in PROMPTS:
                whole = await pair.run(prompt, PLAIN)
                for request, local in continuations(prompt, whole, PLAIN):
                    pair.submit(request, local=local)
                    rest = await pair.answer(request)
                    for index in sorted(rest.tokens):
                        if rest.tokens[index] != whole.tokens[index]:
                            top = rest.logprobs[index]
                            assert abs(top[0] - whole.logprobs[index][0]) < GAP, f"token {index} is another one"
                            break
    finally:
        for worker in workers.values():
            worker.stop()
