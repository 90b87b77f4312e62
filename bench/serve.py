"""One measured load against one target: prepare, warm up, run, summarise. What `bench serve` and `bench compare` share.

Runs on the caller's event loop; opens one Client and closes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from baton.slo import DEFAULT_CLASSES, SLO
from bench.client import Client, TargetInfo
from bench.client_grpc import GrpcClient
from bench.client_openai import OpenAIClient, PromptForm
from bench.loadgen import Load, LoadResult, run_load
from bench.measure import Outcome, Record, Summary, summarise
from bench.report import Generator
from bench.traces import load_trace, scale
from bench.workload import (
    SAFE_VOCABULARY,
    Lengths,
    PlannedCall,
    Workload,
    limited,
    poisson_arrivals,
    trace_calls,
    uniform_arrivals,
)

OPEN_LOOP_CAP = 512  # calls in flight where nothing is said: RouterConfig.max_inflight
DEFAULT_INPUT = Lengths(256, 256)  # a short question with some context; 16 blocks
DEFAULT_OUTPUT = Lengths(64, 64)
DEFAULT_REQUESTS = 200  # nearest-rank p99 is then the third largest, no longer the maximum
# Warm-up prompts differ from the measured ones, so they do not fill the prefix cache for them
WARMUP_SEED_SHIFT = 1_000_003


class UsageError(Exception):
    """Options that do not fit together."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """All of `baton bench serve` but where the result goes."""

    target: str  # http(s)://... or grpc://host:port
    model: str = ""  # "" = the first that the target lists
    prompt_form: PromptForm | None = None  # HTTP only; None = the first that the target takes
    api_key_file: Path | None = None
    slo_class: str = ""  # as the target knows it; "" = its default
    rate_per_s: float | None = None
    uniform: bool = False  # evenly spaced arrivals instead of Poisson
    trace: Path | None = None
    trace_speed: float = 1.0
    concurrency: int | None = None  # closed loop: clients; open loop: cap on calls in flight
    num_requests: int | None = None
    duration_s: float | None = None
    num_warmup: int = 4
    call_timeout_s: float = 600.0  # RouterConfig.request_timeout_s
    input_lengths: Lengths = DEFAULT_INPUT
    output_lengths: Lengths = DEFAULT_OUTPUT
    shared_prefix_ratio: float = 0.0
    cancel_ratio: float = 0.0
    max_context_tokens: int = 0  # 0 = what the target says
    vocab_size: int = 0  # 0 = what the target says
    ignore_eos: bool = True
    seed: int = 0
    slo: SLO = DEFAULT_CLASSES[0]

    @property
    def open_loop(self) -> bool:
        return self.rate_per_s is not None or self.trace is not None

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            UsageError: naming the options.
        """
        if self.rate_per_s is not None and self.trace is not None:
            raise UsageError(
                "--rate and --trace both say when calls leave; give one (--trace-speed changes a trace's pace)"
            )
        if not self.open_loop and self.concurrency is None:
            raise UsageError("give --rate or --trace for an open loop, or --concurrency for a closed one")
        if not self.target.startswith(("http://", "https://", "grpc://")):
            raise UsageError(f"--target {self.target} starts with none of http://, https://, grpc://")


@dataclass(frozen=True, slots=True)
class ServeResult:
    target: TargetInfo
    summary: Summary
    generator: Generator
    records: list[Record]
    started_s: float
    trace_factor: float  # what a trace's lengths were multiplied by; 1 without a trace

    @property
    def all_failed(self) -> bool:
        return self.summary.num_failed + self.summary.num_shed == self.summary.num_calls


async def serve(options: ServeOptions, on_record: Callable[[Record], None] = lambda _record: None) -> ServeResult:
    """Run one load.

    Raises:
        UsageError, TraceError: the options or the trace.
        CallFailed: the target is not there or takes no prompts.
    """
    options.check()
    client = connect(options)
    try:
        target = await client.prepare()
        plan = Plan.make(options, target)
        warmup = await warm_up(client, options, plan)
        load = Load(
            max_concurrency=options.concurrency or OPEN_LOOP_CAP,
            open_loop=options.open_loop,
            call_timeout_s=options.call_timeout_s,
            duration_s=options.duration_s,
        )
        calls = limited(plan.calls(options.seed), num_requests(options), options.duration_s)
        result = await run_load(client, calls, load, on_record)
    finally:
        await client.close()
    return ServeResult(
        target=target,
        summary=summarise(result.records, started_s=result.started_s, slo=options.slo),
        generator=generator_of(result, warmup),
        records=result.records,
        started_s=result.started_s,
        trace_factor=plan.trace_factor,
    )


def connect(options: ServeOptions) -> Client:
    address = options.target.removeprefix("grpc://")
    if address != options.target:
        return GrpcClient(address, model=options.model, ignore_eos=options.ignore_eos, slo_class=options.slo_class)
    key = options.api_key_file.read_text().strip() if options.api_key_file else ""
    url = options.target.rstrip("/").removesuffix("/v1")
    return OpenAIClient(
        url,
        model=options.model,
        form=options.prompt_form,
        ignore_eos=options.ignore_eos,
        api_key=key,
        slo_class=options.slo_class,
    )


def num_requests(options: ServeOptions) -> int | None:
    """How many calls at most; a trace is played whole where nothing is said."""
    if options.num_requests is None and options.duration_s is None and options.trace is None:
        return DEFAULT_REQUESTS
    return options.num_requests


@dataclass(frozen=True, slots=True)
class Plan:
    """Where calls come from, for any seed: the measured load and its warm-up use two."""

    calls: Callable[[int], Iterator[PlannedCall]]
    trace_factor: float = 1.0

    @classmethod
    def make(cls, options: ServeOptions, target: TargetInfo) -> Plan:
        vocabulary = vocabulary_of(options.vocab_size or target.vocab_size)
        max_context = options.max_context_tokens or target.max_model_len
        if options.trace is not None:
            rows = load_trace(options.trace, seed=options.seed)
            trace = scale(rows, max_context_tokens=max_context, speed=options.trace_speed)

            def replay(seed: int) -> Iterator[PlannedCall]:
                cancels = options.cancel_ratio
                return trace_calls(
                    trace.rows, trace.block_tokens, seed=seed, vocabulary=vocabulary, cancel_ratio=cancels
                )

            return cls(replay, trace.factor)

        def synthetic(seed: int) -> Iterator[PlannedCall]:
            workload = Workload(
                seed=seed,
                input_lengths=options.input_lengths,
                output_lengths=options.output_lengths,
                shared_prefix_ratio=options.shared_prefix_ratio,
                cancel_ratio=options.cancel_ratio,
                vocabulary=vocabulary,
                max_context_tokens=max_context,
            )
            return workload.calls(arrivals(options))

        return cls(synthetic)


def arrivals(options: ServeOptions) -> Iterator[float] | None:
    if options.rate_per_s is None:
        return None
    if options.uniform:
        return uniform_arrivals(options.rate_per_s)
    return poisson_arrivals(options.rate_per_s, options.seed)


def vocabulary_of(vocab_size: int) -> range:
    """Ids that are ordinary tokens: a known vocabulary without its low end, where specials are."""
    if not vocab_size:
        return SAFE_VOCABULARY
    return range(min(SAFE_VOCABULARY.start, vocab_size // 4), vocab_size)


async def warm_up(client: Client, options: ServeOptions, plan: Plan) -> LoadResult:
    """A few calls, closed loop, other prompts; not measured but not forgotten either."""
    calls = (replace(call, at_s=0.0) for call in plan.calls(options.seed + WARMUP_SEED_SHIFT))
    load = Load(max_concurrency=max(1, options.num_warmup), open_loop=False, call_timeout_s=options.call_timeout_s)
    return await run_load(client, islice(calls, options.num_warmup), load)


def generator_of(result: LoadResult, warmup: LoadResult) -> Generator:
    return Generator(
        cpu_share=result.cpu_share,
        num_waited_at_cap=result.num_waited_at_cap,
        num_warmup=len(warmup.records),
        num_warmup_failed=sum(record.outcome is Outcome.FAILED for record in warmup.records),
    )
