"""What a client asked for, in words common to both APIs: None where the client left it out. Immutable, not yet checked.

gRPC and HTTP parse into a CallSpec; router/validate.py turns it into what workers need, naming fields as the client did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from baton.tracing import NO_TRACE, Trace
from router.tenants import OPEN, Tenant


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    field: str = "prompt"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, str]]  # {"role": ..., "content": ...}
    field: str = "messages"


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]
    field: str = "token_ids"


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """serving.proto Sampling; limits and defaults are in router/validate.py."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: Sequence[int] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int | None = None


@dataclass(frozen=True, slots=True)
class CallLabels:
    """Who asks and what for: from headers, metadata or the request itself."""

    request_id: str = ""
    session_id: str = ""
    slo_class: str = ""
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    timeout_s: float | None = None
    explain: bool = False  # say with the answer why it was made where it was
    trace: Trace = NO_TRACE  # of the caller's own, unchecked: what is malformed begins a new one


@dataclass(frozen=True, slots=True)
class CallSpec:
    model: str
    prompt: Prompt
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    stop: Sequence[str] = ()
    priority: int = 0
    labels: CallLabels = field(default_factory=CallLabels)
    echo: bool = False  # the answer begins with the prompt
    api: str = "grpc"  # for metrics: grpc | chat | completions
    tenant: Tenant = OPEN  # whose key came with it
    resumable: bool = False  # workers keep what they know of it for a while: router/resume.py
    resume_window_s: float = 0.0  # how long; 0 = the default
