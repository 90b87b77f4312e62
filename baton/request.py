"""A Request as every process sees it: immutable, tokenised, with every default resolved.

The router makes it once; workers never see text. `seq` is the only identity that crosses the wire (client ids are labels).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from baton.tracing import NO_TRACE, Trace

MAX_LOGPROBS = 20  # OpenAI chat API: top_logprobs is at most 20


class FinishReason(enum.IntEnum):
    """serving.proto FinishReason; NONE while the sequence goes on."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3


class Role(enum.IntEnum):
    """worker.proto Role."""

    PREFILL = 1
    DECODE = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Greedy where temperature is 0.

    seed, sample_index and the token's absolute position are all the randomness there is.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    seed: int = 0  # u64
    sample_index: int = 0  # which of the n answers
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # besides the model's EOS ids
    min_tokens: int = 0
    ignore_eos: bool = False
    num_logprobs: int | None = None  # None = off, 0 = the sampled token's only


@dataclass(frozen=True, slots=True)
class Resumption:
    """Of a call that its client may resume: what workers keep of it goes by `key` and lasts for `window_s`."""

    key: bytes  # made by routers of tenant and request_id (router/resume.py); opaque to workers
    window_s: float  # after the sequence ended or lost its router
    router_state: bytes = b""  # the router's own; opaque to workers
    generation: int = 0  # how often the call was resumed


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to be generated."""

    seq: int  # router epoch (32 bit) << 32 | counter
    token_ids: tuple[int, ...]  # prompt, then `num_output_tokens` tokens already sent to the client
    sampling: SamplingParams
    num_output_tokens: int = 0
    priority: int = 0  # higher first
    slo_class: str = "interactive"
    tenant_salt: bytes = b""
    request_id: str = ""
    resumption: Resumption | None = None  # None: nothing is kept for a client that comes back
    trace: Trace = NO_TRACE  # what its workers' spans are below

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.token_ids) - self.num_output_tokens

    @property
    def num_tokens_left(self) -> int:
        """Tokens that may still be generated."""
        return self.sampling.max_tokens - self.num_output_tokens

    @property
    def router_epoch(self) -> int:
        return self.seq >> 32


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one sampled token: natural logs of the model's distribution before penalties and temperature."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One token of one sequence, as it leaves an engine."""

    seq: int
    index: int  # output index, 0 = the first token after the prompt
    token: int
    finish: FinishReason = FinishReason.NONE
    logprobs: Logprobs | None = None
