"""A Runner without a model, for tests: it knows what every byte of KV must be, and checks all of them.

The content of one KV slot is a function of (token, position, layer, component), and `run` verifies before it writes that the
block table holds exactly that content for every earlier position. So a block that is stale, half-written, damaged or in the
wrong place anywhere between two engines fails the very step that would have read it, with Internal; the text below is also
kept in `faults`, because an engine turns the error into the end of a sequence.

- The next token is `script[seq][output index]` where a script has it, else `next_token(all tokens so far)`: a test computes
  the same answer with `answer()`, without an engine.
- Each layer's slot names its token in the first 4 bytes, so chunks that sample nothing (and so carry no earlier tokens) are
  verified against the tokens that layer 0 names; the sampled chunk verifies the tokens themselves.

Runs where the engine runs; `gather` and `scatter` also on the KV thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from baton import kv_copy
from baton.errors import Internal
from baton.kv_copy import KVMemory
from baton.kv_layout import KVLayout
from baton.request import Logprobs, SamplingParams
from engine.ports import Batch, BatchEntry, Sample

POISON = 0xA5  # arbitrary, non-zero: a fresh pool is zeros, and the two should look different in a dump
DEFAULT_VOCAB_SIZE = 1_000  # arbitrary; large enough that unequal texts hardly ever agree by luck

Bytes = npt.NDArray[np.uint8]


class ScriptedKVCache:
    """The KVCache Protocol over real bytes: array [L, component, N, S, slot bytes]."""

    def __init__(self, layout: KVLayout, num_blocks: int, buffer: memoryview | None = None) -> None:
        """Lay the pool into `buffer`, of num_blocks * block_bytes, or into memory of our own; zeros either way."""
        self.layout = layout
        self.num_blocks = num_blocks
        slot_bytes = layout.run_bytes // layout.block_size
        assert slot_bytes >= 8, "a slot has no room for its token and a check: use a larger head_dim"
        flat = (
            np.empty(num_blocks * layout.block_bytes, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
        )
        self.slots: Bytes = flat.reshape(
            layout.num_layers, layout.num_components, num_blocks, layout.block_size, slot_bytes
        )
        self.slots[:] = 0
        self.memory = KVMemory.dense(self.slots.ctypes.data, layout, num_blocks)

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> int:
        return kv_copy.gather(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers, out)

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> int:
        return kv_copy.scatter(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers, data)

    def clear(self, block_ids: Sequence[int], layer_start: int, num_layers: int) -> None:
        kv_copy.clear(self.layout, self.memory, self.num_blocks, block_ids, layer_start, num_layers)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Destroy blocks that nobody owns; whoever still reads them is found out."""
        self.slots[:, :, list(block_ids)] = POISON


class ScriptedRunner:
    """The Runner Protocol over ScriptedKVCache."""

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        vocab_size: int = DEFAULT_VOCAB_SIZE,
        script: Mapping[int, Sequence[int]] | None = None,
        before_run: Callable[[Batch], None] | None = None,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> None:
        """`script` maps a seq to its whole output; `before_run` sees each batch first and may raise."""
        buffer = None if allocate is None else allocate(num_blocks * layout.block_bytes)
        self.kv_cache = ScriptedKVCache(layout, num_blocks, buffer)
        self.vocab_size = vocab_size
        self.script = dict(script or {})
        self.before_run = before_run
        self.faults: list[str] = []  # every violation ever seen
        self.num_tokens_run = 0

    def run(self, batch: Batch) -> list[Sample | None]:
        if self.before_run is not None:
            self.before_run(batch)
        self.compute(batch.entries)
        return [self._sample(entry) if entry.sample else None for entry in batch.entries]

    def compute(self, entries: Sequence[BatchEntry]) -> None:
        """Verify what the entries read, then write what they compute; tests fill blocks with it, too."""
        for entry in entries:
            self._verify(entry)
        for entry in entries:
            self._write(entry)

    def _verify(self, entry: BatchEntry) -> None:
        """Check the entry against its contract and the KV of all earlier positions against what it must be."""
        layout, end = self.kv_cache.layout, entry.start + len(entry.token_ids)
        self._require(bool(entry.token_ids), entry, "computes nothing")
        self._require(layout.num_blocks_for(end) <= len(entry.block_table), entry, "has too few blocks")
        self._require(len(set(entry.block_table)) == len(entry.block_table), entry, "owns a block twice")
        earlier = self._read(entry, entry.start)
        tokens = _tokens_named(earlier)
        if entry.sample:
            all_ids = [*entry.prompt_ids, *entry.output_ids]
            self._require(all_ids[entry.start :] == list(entry.token_ids), entry, "samples before its last token")
            tokens = np.asarray(all_ids[: entry.start], dtype=np.uint64)
        wrong = (earlier != self._content(tokens, 0)).any(axis=(0, 1, 3))
        if wrong.any():
            self._require(False, entry, f"reads wrong KV at position {int(wrong.argmax())} of {entry.start}")

    def _require(self, holds: bool, entry: BatchEntry, fault: str) -> None:
        if not holds:
            self.faults.append(f"seq {entry.seq:#x} {fault}")
            raise Internal(self.faults[-1])

    def _read(self, entry: BatchEntry, num_tokens: int) -> Bytes:
        """KV of positions [0, num_tokens); shape [L, component, num_tokens, slot bytes]."""
        blocks, offsets = self._slots_of(entry, 0, num_tokens)
        return self.kv_cache.slots[:, :, blocks, offsets]

    def _write(self, entry: BatchEntry) -> None:
        blocks, offsets = self._slots_of(entry, entry.start, entry.start + len(entry.token_ids))
        tokens = np.asarray(entry.token_ids, dtype=np.uint64)
        self.kv_cache.slots[:, :, blocks, offsets] = self._content(tokens, entry.start)
        self.num_tokens_run += len(entry.token_ids)

    def _slots_of(self, entry: BatchEntry, start: int, end: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        positions = np.arange(start, end)
        table = np.asarray(entry.block_table, dtype=np.int64)
        block_size = self.kv_cache.layout.block_size
        return table[positions // block_size], positions % block_size

    def _content(self, tokens: npt.NDArray[np.uint64], start: int) -> Bytes:
        """What the slots of tokens at positions start... must hold; shape [L, component, len(tokens), slot bytes]."""
        num_layers, num_components, _, _, slot_bytes = self.kv_cache.slots.shape
        layer, component, position, word = np.ogrid[
            :num_layers, :num_components, start : start + len(tokens), : -(-slot_bytes // 8)
        ]
        place = (layer * num_components + component) << 48 | position << 16 | word
        words = _mix(_mix(place.astype(np.uint64)) ^ tokens[None, None, :, None])
        content = words.view(np.uint8)[..., :slot_bytes].copy()
        content[..., :4] = tokens.astype("<u4").view(np.uint8).reshape(len(tokens), 4)
        return content

    def _sample(self, entry: BatchEntry) -> Sample:
        script = self.script.get(entry.seq, ())
        index = len(entry.output_ids)
        if index < len(script):
            return Sample(script[index], _logprobs(script[index], entry.sampling))
        token = next_token([*entry.prompt_ids, *entry.output_ids], entry.sampling, self.vocab_size)
        return Sample(token, _logprobs(token, entry.sampling))


def next_token(token_ids: Sequence[int], sampling: SamplingParams, vocab_size: int = DEFAULT_VOCAB_SIZE) -> int:
    """The scripted model: a hash of all tokens so far and, unless greedy, of the seed and the sample's index."""
    digest = hashlib.blake2b(np.asarray(token_ids, dtype="<u4").tobytes(), digest_size=8)
    if sampling.temperature > 0:
        digest.update(f"{sampling.seed}/{sampling.sample_index}".encode())
    return int.from_bytes(digest.digest(), "little") % vocab_size


def answer(
    prompt_ids: Sequence[int], sampling: SamplingParams, num_tokens: int, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> list[int]:
    """The first `num_tokens` output tokens after a prompt, without an engine and without any stop rule."""
    token_ids = list(prompt_ids)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids, sampling, vocab_size))
    return token_ids[len(prompt_ids) :]


def _logprobs(token: int, sampling: SamplingParams) -> Logprobs | None:
    """Made up, but a function of the token alone: what arrives can be compared with what left."""
    if sampling.num_logprobs is None:
        return None
    top_ids = tuple(token + rank for rank in range(sampling.num_logprobs))
    return Logprobs(_logprob(token), top_ids, tuple(_logprob(top_id) for top_id in top_ids))


def _logprob(token: int) -> float:
    return -(token % 64) / 64  # exact in float32, which the wire uses


def _tokens_named(slots: Bytes) -> npt.NDArray[np.uint64]:
    """The tokens that layer 0 says are at these positions."""
    return np.ascontiguousarray(slots[0, 0, :, :4]).view("<u4").reshape(-1).astype(np.uint64)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
