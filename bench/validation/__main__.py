"""`python -m bench.validation`: tables of docs/validation.md, some of them or all. Exit status: 0; 2 for a wrong option."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from bench.validation.claims import Effort, Fleet, Pair, Setting, fleets, pair
from bench.validation.deepseek import bounds

CHAT_8B = Setting("llama-3.1-8b", 1, 1_024, 256, ttft_ms=500, tpot_ms=15)
CHAT_70B = Setting("llama-3.1-70b", 2, 1_024, 256, ttft_ms=2_000, tpot_ms=25)
PAIRS = (
    CHAT_8B,
    Setting("llama-3.1-8b", 1, 2_048, 256, ttft_ms=1_000, tpot_ms=25),
    CHAT_70B,
    Setting("llama-3.1-70b", 2, 2_048, 256, ttft_ms=2_000, tpot_ms=50),
    Setting("qwen3-32b", 1, 1_024, 512, ttft_ms=1_000, tpot_ms=25),
)
LONG_ANSWERS = Setting("llama-3.1-70b", 2, 512, 512, ttft_ms=2_000, tpot_ms=25)
FLEETS = ((CHAT_70B, (2, 3, 4, 5)), (LONG_ANSWERS, (2, 3, 4)))  # workers of 2 GPUs


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.validation", description=__doc__)
    parser.add_argument("tables", nargs="*", choices=[*TABLES, []], help=f"default: {' '.join(TABLES)}")
    parser.add_argument("--num-calls", type=int, default=Effort().num_calls, help="of a trial, at least (%(default)s)")
    parser.add_argument("--num-seeds", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args(arguments)
    effort = Effort(options.num_calls, range(1, 1 + options.num_seeds))
    rows: dict[str, list[object]] = {}
    for name in options.tables or TABLES:
        rows[name] = []
        for row, line in TABLES[name](effort):
            rows[name].append(row)
            print(line, flush=True)
        print()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


Lines = Iterator[tuple[object, str]]


def _pairs(effort: Effort) -> Lines:
    yield (
        "",
        "| setting | P/D pair | H100 | H200 | gain at equal GPUs | over one H200 | over no chunks |\n|---|"
        + "---:|" * 6,
    )
    for setting in PAIRS:
        found = pair(setting, effort)
        yield asdict(found), _pair_line(found)


def _pair_line(found: Pair) -> str:
    rates = (found.disaggregated, found.h100, found.h200)
    cells = [f"{rate:.2f} /s, {found.tokens_per_s(rate):,.0f} tok/s" for rate in rates]
    gains = (found.gain, found.gain_over_one, found.gain_over_whole_prompts)
    return "| " + " | ".join([found.setting.name, *cells, *(f"{gain:.2f}" for gain in gains)]) + " |"


def _fleets(effort: Effort) -> Lines:
    yield "", "| setting | H100s | P + D | P/D | colocated | gain |\n|---|" + "---:|" * 5
    for setting, sizes in FLEETS:
        for found in fleets(setting, sizes, effort):
            yield asdict(found), _fleet_line(found)


def _fleet_line(found: Fleet) -> str:
    division = f"{found.num_prefill} + {found.num_workers - found.num_prefill}"
    rates = f"{found.disaggregated:.2f} /s | {found.colocated:.2f} /s | {found.gain:.2f}"
    return f"| {found.setting.name} | {found.num_gpus} | {division} | {rates} |"


def _deepseek(_effort: Effort) -> Lines:
    yield (
        "",
        "| of a node | published | roofline, exchange hidden | reached | exchange exposed | reached |\n|---|"
        + "---:|" * 5,
    )
    for bound in bounds():
        hidden = f"{bound.hidden:,.0f} | {bound.reached:.0%}"
        exposed = f"{bound.exposed:,.0f} | {bound.reached_exposed:.0%}"
        yield asdict(bound), f"| {bound.name} | {bound.published:,.0f} | {hidden} | {exposed} |"


TABLES: dict[str, Callable[[Effort], Lines]] = {"deepseek": _deepseek, "pair": _pairs, "fleet": _fleets}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
