"""A runner on GPUs that are not there: steps of the right length, tokens of the sequence alone, KV that is checked."""

from __future__ import annotations

import numpy as np
import pytest

from baton.config import EmulationConfig, EngineConfig
from baton.errors import Internal
from baton.kv_layout import KVLayout
from baton.request import Request, SamplingParams
from engine.emulated_model import emulated_model
from engine.emulated_runner import EmulatedRunner, emulated_answer, emulated_token, timed_batch
from engine.engine import LocalEngine
from engine.pace import Pace
from engine.ports import Batch, BatchEntry
from engine.timing import step_time

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="bfloat16")
VOCAB_SIZE = 1_000
EOS = (7, 8)
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
STEP_S = 0.25


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.slept_s: list[float] = []

    def clock(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self.now_s += duration_s


class StepsOf:
    """A StepTime that notes what it was asked."""

    def __init__(self, step_s: float = STEP_S) -> None:
        self._step_s = step_s
        self.batches: list[step_time.Batch] = []

    def step_s(self, batch: step_time.Batch) -> float:
        self.batches.append(batch)
        return self._step_s

    def decode_steps_s(self, num_decodes: int, context_tokens: int, num_steps: int) -> float:
        return num_steps * self._step_s


def runner(time: FakeTime, steps: StepsOf) -> EmulatedRunner:
    pace = Pace(time.clock, time.sleep)
    return EmulatedRunner(LAYOUT, 64, steps, vocab_size=VOCAB_SIZE, eos_token_ids=EOS, pace=pace)


def prompt_entry(seq: int, prompt: list[int], blocks: list[int], start: int = 0, end: int | None = None) -> BatchEntry:
    """Prefill tokens [start, end) of `prompt`; its last token is sampled."""
    end = len(prompt) if end is None else end
    last = end == len(prompt)
    return BatchEntry(seq, prompt[start:end], start, blocks, last, GREEDY, tuple(prompt) if last else ())


def decode_entry(seq: int, prompt: list[int], output: list[int], blocks: list[int]) -> BatchEntry:
    return BatchEntry(
        seq, output[-1:], len(prompt) + len(output) - 1, blocks, True, GREEDY, tuple(prompt), tuple(output)
    )


def test_a_step_lasts_what_the_timing_module_says() -> None:
    time, steps = FakeTime(), StepsOf()
    runner(time, steps).run(Batch([prompt_entry(1, list(range(20)), [0, 1])]))
    assert time.slept_s == [pytest.approx(STEP_S)]


def test_the_timing_module_is_asked_about_the_very_batch() -> None:
    prompt = list(range(40))
    batch = timed_batch(
        [
            prompt_entry(1, prompt, [0, 1, 2], 0, 16),
            prompt_entry(2, prompt, [3, 4, 5], 16),
            decode_entry(3, prompt, [1, 2, 3], [6, 7, 8]),
            decode_entry(4, prompt, [1], [9, 10, 11]),
        ]
    )
    assert batch == step_time.Batch(((16, 0), (24, 16)), 2, (40 + 3) + (40 + 1))


def test_a_stream_is_the_same_whatever_engine_batch_or_chunk_made_it() -> None:
    prompt = [11, 12, 13, 14, 15] * 9
    wanted = emulated_answer(prompt, GREEDY, 8, VOCAB_SIZE, EOS)
    for chunk_tokens in (16, 64):
        config = EngineConfig(chunk_tokens=chunk_tokens, max_num_batched_tokens=128)
        engine = LocalEngine(
            config, runner(FakeTime(), StepsOf()), fingerprint="f", eos_token_ids=EOS, max_model_len=512
        )
        for seq in range(3):
            engine.add(Request(seq, (*prompt, *([] if seq else [1])), GREEDY), 0.0)
        tokens: list[int] = []
        while engine.has_work():
            tokens += [token.token for token in engine.step(0.0).tokens if token.seq == 1]
        assert tokens == wanted


def test_a_continued_sequence_goes_on_as_it_would_have() -> None:
    prompt = [5, 6, 7]
    whole = emulated_answer(prompt, GREEDY, 10, VOCAB_SIZE)
    assert emulated_answer(prompt + whole[:4], GREEDY, 6, VOCAB_SIZE) == whole[4:]


def test_no_answer_ends_by_itself() -> None:
    answers = {emulated_token([n], [], GREEDY, 12, EOS) for n in range(500)}
    assert answers == set(range(12)) - set(EOS)


def test_samples_of_one_prompt_differ_and_repeat_by_their_seed() -> None:
    drawn = [SamplingParams(max_tokens=5, temperature=1.0, seed=3, sample_index=n) for n in (0, 1, 0)]
    first, second, again = (emulated_answer([1, 2], params, 5, VOCAB_SIZE) for params in drawn)
    assert first == again != second


def test_a_step_that_reads_another_sequence_s_blocks_fails() -> None:
    made = runner(FakeTime(), StepsOf())
    mine, other = list(range(100, 120)), list(range(200, 220))
    made.run(Batch([prompt_entry(1, mine, [0, 1]), prompt_entry(2, other, [2, 3])]))
    made.run(Batch([decode_entry(1, mine, [9], [0, 1])]))
    with pytest.raises(Internal, match="wrong KV at position"):
        made.run(Batch([decode_entry(1, mine, [9], [2, 3])]))


def test_every_slot_names_its_token_and_position() -> None:
    made = runner(FakeTime(), StepsOf())
    prompt = list(range(300, 320))
    made.run(Batch([prompt_entry(1, prompt, [4, 2], 0, 10)]))
    made.run(Batch([prompt_entry(1, prompt, [4, 2], 10)]))
    made.run(Batch([decode_entry(1, prompt, [77], [4, 2])]))
    tags = made.kv_cache.slots[0, 0].view("<u4")[[4, 2], :, :2].reshape(-1, 2)
    assert np.array_equal(tags[:21], [[token, at] for at, token in enumerate([*prompt, 77])])


def test_the_kv_that_is_moved_is_a_scaled_down_part_of_what_is_timed() -> None:
    model = emulated_model(EmulationConfig(gpu="h100", model="llama-3.1-70b", tp=4, kv_scale=1_024))
    assert model.kv_bytes_per_token == 2 * 80 * 8 * 128 * 2
    assert model.layout(16).token_bytes == model.kv_bytes_per_token / 1_024
