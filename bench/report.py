"""Shows a Summary: a table for people, JSON for scripts. Nothing is computed here.

NaN (a percentile of nothing) is written as null, so the JSON is strict.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from bench.measure import Percentiles, Record, Summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

SCHEMA_VERSION = 1
MIN_P99_SAMPLES = 100  # below it the 99th percentile by nearest rank is the maximum


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    num_cores: int
    memory_gib: float
    system: str
    python: str

    def __str__(self) -> str:
        return f"{self.cpu}, {self.num_cores} cores, {self.memory_gib:.0f} GiB, {self.system}, Python {self.python}"


def this_machine() -> Machine:
    return Machine(
        cpu=cpu_name(),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
    )


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown CPU"
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown CPU")


@dataclass(frozen=True, slots=True)
class Generator:
    """What a reader needs to judge the load generator itself."""

    cpu_share: float  # of one core
    num_waited_at_cap: int
    num_warmup: int
    num_warmup_failed: int


def render(console: Console, summary: Summary, generator: Generator, *, title: str) -> None:
    """Print the table, then one line for each thing a reader must know to read it."""
    console.print(latency_table(summary, title))
    for line in notes(summary, generator):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def latency_table(summary: Summary, title: str) -> Table:
    from rich.table import Table  # loaded only where something is shown

    table = Table(title=title, title_justify="left")
    table.add_column("ms")
    for name in ("n", "mean", "p50", "p95", "p99", "max"):
        table.add_column(name, justify="right")
    for name, values in latency_rows(summary):
        cells = (values.mean, values.p50, values.p95, values.p99, values.max)
        table.add_row(name, str(values.n), *(format_ms(cell) for cell in cells))
    return table


def latency_rows(summary: Summary) -> Iterator[tuple[str, Percentiles]]:
    yield "TTFT", summary.ttft_ms
    yield f"handoff gap ({summary.handoff_gap_source})", summary.handoff_gap_ms
    yield "TPOT", summary.tpot_ms
    yield "ITL", summary.itl_ms
    yield "end to end", summary.e2e_ms
    yield "of it waiting in the client", summary.client_wait_ms


def format_ms(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def notes(summary: Summary, generator: Generator) -> Iterator[str]:
    slo = summary.slo
    yield (
        f"{summary.num_completed} completed, {summary.num_cancelled} cancelled as planned, {summary.num_shed} shed, "
        f"{summary.num_failed} failed "
        f"of {summary.num_calls} calls in {summary.duration_s:.1f} s"
    )
    yield (
        f"output {summary.output_tokens_per_s:.1f} tok/s, {summary.calls_per_s:.2f} calls/s; "
        f"prompt tokens {summary.prompt_tokens} ({summary.cached_tokens} cached), output tokens {summary.output_tokens}"
    )
    yield (
        f"goodput {slo.goodput_per_s:.2f} calls/s; {slo.attainment:.1%} of {slo.num_judged} met TTFT <= {slo.ttft_ms:g} ms "
        f"and TPOT <= {slo.tpot_ms:g} ms ({counted(slo.verdicts)})"
    )
    if summary.num_shipped:
        yield f"KV shipped between workers for {summary.num_shipped} calls, {summary.kv_bytes / 2**20:.1f} MiB"
    if generator.num_waited_at_cap:
        yield f"{generator.num_waited_at_cap} arrivals waited at the concurrency cap; the wait is in their latency"
    if summary.num_unseen_tokens:
        yield f"{summary.num_unseen_tokens} tokens came inside other tokens' chunks: ITL is per chunk, TPOT by the server's count"
    if 0 < summary.ttft_ms.n < MIN_P99_SAMPLES:
        yield f"p99 of fewer than {MIN_P99_SAMPLES} samples is their maximum"
    for kind, count in summary.errors.items():
        yield f"ERROR {kind} x {count}, e.g. {summary.error_examples[kind]}"
    if generator.num_warmup_failed:
        yield f"WARNING {generator.num_warmup_failed} of {generator.num_warmup} warm-up calls failed (not in the figures above)"
    yield f"load generator: {generator.cpu_share:.0%} of one core"


def counted(counts: Mapping[str, int]) -> str:
    """Verdicts in words; a call is counted under the first target that it missed."""
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "nothing to judge"


def to_document(
    config: Mapping[str, object],
    summary: Summary,
    generator: Generator,
    records: Sequence[Record] = (),
    *,
    started_s: float = 0.0,
) -> dict[str, object]:
    """Everything a script needs; `records` become rows with instants relative to `started_s`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "machine": asdict(this_machine()),
        "config": dict(config),
        "generator": asdict(generator),
        "summary": asdict(summary),
        "requests": [request_row(record, started_s) for record in records],
    }


def request_row(record: Record, started_s: float) -> dict[str, object]:
    seen = bool(record.token_times_s)
    return {
        "index": record.index,
        "outcome": record.outcome.value,
        "due_s": record.due_s - started_s,
        "sent_s": record.sent_s - started_s,
        "end_s": record.end_s - started_s,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.num_tokens,
        "ttft_ms": record.ttft_ms if seen else None,
        "tpot_ms": record.tpot_ms if seen else None,
        "e2e_ms": record.e2e_ms,
        "server": asdict(record.timings) if record.timings else None,
        "error_kind": record.error_kind,
    }


def dump(document: object) -> bytes:
    return orjson.dumps(document, default=str, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY) + b"\n"
