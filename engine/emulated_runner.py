"""A Runner on GPUs that are not there: a step lasts what `StepTime` says for its batch, and nothing is computed.

- Time: one sleep per step (engine/pace.py). An entry of one token counts as a decode.
- Tokens: `emulated_token`, a function of the sequence alone, whatever worker or batch makes it: streams can be checked, and go
  on after a worker's death as they would have. It costs the same for any length, and never ends a sequence.
- KV: every slot names its token and position in its first 8 bytes. Each sampled step checks one earlier slot of its sequence,
  so blocks that are stale, or another's, end that sequence with Internal. `kv_scale` makes a slot smaller than the GPU's.

Runs on the engine thread; the KV cache's `gather` and `scatter` also on the KV thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from baton.errors import Internal
from baton.kv_layout import KVLayout
from baton.request import Logprobs, SamplingParams
from engine.pace import Pace
from engine.ports import Batch, BatchEntry, Sample
from engine.scripted_runner import ScriptedKVCache
from engine.timing import step_time

_Ints: TypeAlias = Sequence[int] | npt.NDArray[np.int64]


def emulated_token(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    sampling: SamplingParams,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
) -> int:
    """The token after these: of their number, the first, the middle and the last one, and where not greedy of the seed."""
    num_prompt, position = len(prompt_ids), len(prompt_ids) + len(output_ids)

    def token_at(index: int) -> int:
        return prompt_ids[index] if index < num_prompt else output_ids[index - num_prompt]

    state = _mix(position)
    for index in (0, position // 2, position - 1):
        state = _mix(state ^ token_at(index))
    if sampling.temperature > 0:
        state = _mix(_mix(state ^ sampling.seed) ^ sampling.sample_index)
    token = state % vocab_size
    while token in eos_token_ids:
        token = (token + 1) % vocab_size
    return token


def emulated_answer(
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    num_tokens: int,
    vocab_size: int,
    eos_token_ids: Sequence[int] = (),
) -> list[int]:
    """Return the first tokens after a prompt: what a stream is compared with."""
    output_ids: list[int] = []
    for _ in range(num_tokens):
        output_ids.append(emulated_token(prompt_ids, output_ids, sampling, vocab_size, eos_token_ids))
    return output_ids


def timed_batch(entries: Sequence[BatchEntry]) -> step_time.Batch:
    """Return what the timing module has to know of a step."""
    prefills = tuple((len(entry.token_ids), entry.start) for entry in entries if len(entry.token_ids) > 1)
    contexts = [entry.start + 1 for entry in entries if len(entry.token_ids) == 1]
    return step_time.Batch(prefills, len(contexts), sum(contexts))


class EmulatedRunner:
    """The Runner Protocol; owns the memory of its blocks."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        step_time: step_time.StepTime,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        pace: Pace | None = None,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> None:
        buffer = None if allocate is None else allocate(num_blocks * layout.block_bytes)
        self.kv_cache = ScriptedKVCache(layout, num_blocks, buffer)
        self._tags: npt.NDArray[np.uint32] = self.kv_cache.slots[0, 0].view("<u4")  # [N, S, words of a slot]
        self._step_time = step_time
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._pace = pace or Pace()

    def run(self, batch: Batch) -> list[Sample | None]:
        entries = batch.entries
        self._pace.begin({entry.seq for entry in entries})
        self._check([entry for entry in entries if entry.sample and entry.start])
        self._write(entries)
        samples = [self._sample(entry) if entry.sample else None for entry in entries]
        self._pace.finish(self._step_time.step_s(timed_batch(entries)))
        return samples

    def _check(self, entries: Sequence[BatchEntry]) -> None:
        """One earlier position of each entry, another one each step. Raises: Internal: it is of another sequence."""
        if not entries:
            return
        block_size = self.kv_cache.layout.block_size
        positions = [_mix(entry.start) % entry.start for entry in entries]
        blocks = [entry.block_table[at // block_size] for entry, at in zip(entries, positions, strict=True)]
        found = self._tags[blocks, [at % block_size for at in positions], :2].tolist()
        for entry, position, tag in zip(entries, positions, found, strict=True):
            ids = entry.prompt_ids if position < len(entry.prompt_ids) else entry.output_ids
            token = ids[position if ids is entry.prompt_ids else position - len(entry.prompt_ids)]
            if tag != [token, position]:
                raise Internal(f"seq {entry.seq:#x} reads wrong KV at position {position} of {entry.start}")

    def _write(self, entries: Sequence[BatchEntry]) -> None:
        block_size = self.kv_cache.layout.block_size
        ones = [entry for entry in entries if len(entry.token_ids) == 1]
        starts = [entry.start for entry in ones]
        blocks = [entry.block_table[entry.start // block_size] for entry in ones]
        self._tag(blocks, [start % block_size for start in starts], [entry.token_ids[0] for entry in ones], starts)
        for entry in entries:
            if len(entry.token_ids) > 1:
                positions = np.arange(entry.start, entry.start + len(entry.token_ids))
                table = np.asarray(entry.block_table, np.int64)
                self._tag(table[positions // block_size], positions % block_size, entry.token_ids, positions)

    def _tag(self, blocks: _Ints, offsets: _Ints, tokens: _Ints, positions: _Ints) -> None:
        """Name tokens in their slots; the four run in parallel."""
        if len(blocks):
            self._tags[blocks, offsets, 0] = tokens
            self._tags[blocks, offsets, 1] = positions

    def _sample(self, entry: BatchEntry) -> Sample:
        token = emulated_token(
            entry.prompt_ids, entry.output_ids, entry.sampling, self._vocab_size, self._eos_token_ids
        )
        return Sample(token, self._logprobs(token, entry.sampling.num_logprobs))

    def _logprobs(self, token: int, num_top: int | None) -> Logprobs | None:
        """Made up, and of the token alone."""
        if num_top is None:
            return None
        top_ids = tuple((token + rank) % self._vocab_size for rank in range(num_top))
        return Logprobs(-1.0, top_ids, tuple(-1.0 - rank for rank in range(num_top)))


def _mix(word: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return word ^ (word >> 31)
