"""The calls of a soak and the answers that must come: of the scripted model, whose answers follow from the prompt, and of a
random torch model, whose answers a colocated worker gave beforehand."""

from __future__ import annotations

from collections.abc import Callable

from baton.request import SamplingParams
from baton.v1 import serving_pb2
from bench.workload import Lengths, Workload
from engine.scripted_runner import answer
from tests.soak.soak_load import Asked
from tests.tiny_models import VOCAB_SIZE

WORKLOAD = Workload(
    seed=0,
    input_lengths=Lengths(8, 600),  # up to 38 blocks, 10 chunks
    output_lengths=Lengths(2, 24),
    shared_prefix_ratio=0.3,
    vocabulary=range(3, VOCAB_SIZE),  # no special tokens
)


def scripted_calls(seed: int) -> Callable[[int], Asked]:
    """Half of them are sampled, with a seed."""
    workload = Workload(seed, WORKLOAD.input_lengths, WORKLOAD.output_lengths, 0.3, vocabulary=WORKLOAD.vocabulary)

    def asked(index: int) -> Asked:
        call = workload.call(index)
        params = SamplingParams(max_tokens=call.max_tokens, temperature=float(index % 2), seed=call.seed)
        sampling = serving_pb2.Sampling(
            max_tokens=call.max_tokens, temperature=params.temperature, seed=call.seed, ignore_eos=True
        )
        return Asked(call.token_ids, sampling, answer(call.token_ids, params, call.max_tokens, VOCAB_SIZE))

    return asked
