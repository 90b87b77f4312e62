"""What `C` clients that always have one request each see of a worker: the shape of published serving runs. Pure.

Every request is `input_tokens` long and answers `output_tokens`. In steady state as many prompts start as answers end, so
during one answer each of the other running requests has its prompt prefilled once, in steps that decode as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from engine.timing.batch import Batch
from engine.timing.hardware import DTYPE_BYTES
from engine.timing.roofline import Efficiency, Number, Roofline, Terms, common_dtype, price_s

MEMORY_SHARE = 0.9  # of a GPU's memory that serves weights and KV: vLLM's --gpu-memory-utilization default
ACTIVATION_BYTES = (
    2e9  # per GPU: activations, graphs, communication buffers; vLLM's start-up log at 8,192 tokens a step
)


def kv_capacity_tokens(roofline: Roofline) -> float:
    """Return the tokens whose KV fits beside the weights; 0 where the weights alone do not fit."""
    shape, replicas = roofline.shape, roofline.attention_replicas
    experts = shape.mixture_layers * shape.num_experts * shape.expert_params
    common_bytes = (shape.params - experts) * replicas * DTYPE_BYTES[common_dtype(shape, roofline.weight_dtype)]
    expert_bytes = experts * DTYPE_BYTES[roofline.weight_dtype]
    room = roofline.tp * (MEMORY_SHARE * roofline.gpu.memory_bytes - ACTIVATION_BYTES) - common_bytes - expert_bytes
    return max(0.0, room * roofline.kv_ways / roofline.tp / shape.kv_bytes_per_token(roofline.kv_dtype))


@dataclass(frozen=True, slots=True)
class Harness(Generic[Number]):
    """How one benchmark campaign arrives and counts: no property of the GPU."""

    start_s: Number  # network, tokeniser, queue hand-overs before the prompt's step
    own: Number  # prefills of this length a request waits for by itself: its own, and steps under way
    burst: Number  # and of each other request's: the first wave arrives at once
    lost_slots: Number  # of the running ones, between an answer's end and the next prompt


@dataclass(frozen=True, slots=True)
class Loop:
    prefill: Roofline
    decode: Roofline  # the same worker where not disaggregated
    disaggregated: bool
    decode_per_prefill: float  # decode workers per prefill worker
    num_clients: int  # per decode worker
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LoopTerms(Generic[Number]):
    """A run's steps at datasheet rates. Where prompts are computed elsewhere, `mixed` is `decode`."""

    decode: Terms[Number]  # a step of all that run
    mixed: Terms[Number]  # the same step with one prompt in it
    prompt: Terms[Number]  # a prompt alone
    num_clients: Number
    num_running: Number  # of the clients' requests, as many as KV fits
    num_rivals: Number  # other requests whose prompts go to the same worker
    output_tokens: Number


def loop_terms(run: Loop) -> LoopTerms[float]:
    held_tokens = run.input_tokens + run.output_tokens / 2  # of a request, halfway
    running = min(float(run.num_clients), max(1.0, kv_capacity_tokens(run.decode) / held_tokens))
    decodes, context = round(running), round(running * held_tokens)
    prompt = (run.input_tokens, 0)
    decode = run.decode.terms(Batch((), decodes, context))
    return LoopTerms(
        decode=decode,
        mixed=decode if run.disaggregated else run.decode.terms(Batch((prompt,), decodes, context)),
        prompt=run.prefill.terms(Batch((prompt,))),
        num_clients=run.num_clients,
        num_running=running,
        num_rivals=run.num_clients * run.decode_per_prefill - 1 if run.disaggregated else running - 1,
        output_tokens=run.output_tokens,
    )


def tpot_s(loop: LoopTerms[Number], by: Efficiency[Number]) -> Number:
    decode_s, mixed_s = price_s(loop.decode, by), price_s(loop.mixed, by)
    return decode_s + (loop.num_running - 1) / loop.output_tokens * (mixed_s - decode_s)


def ttft_s(loop: LoopTerms[Number], by: Efficiency[Number], harness: Harness[Number], token_s: Number) -> Number:
    """Return prefill and the waits before it; `token_s` is the TPOT, which decides when a slot comes free."""
    prefill_s = price_s(loop.prompt, by) * (harness.own + harness.burst * loop.num_rivals)
    lost_share = harness.lost_slots / loop.num_running
    slot_s = token_s * loop.output_tokens * (loop.num_clients / loop.num_running * (1 + lost_share) - 1)  # Little's law
    return harness.start_s + prefill_s + slot_s
