"""What `baton sim` and `baton plan` ask alike: a model, lengths, classes of calls. Their flags, and what these become."""

from __future__ import annotations

import argparse
import math

from baton.errors import ConfigError
from baton.slo import MIN_TARGET_MS, SLO
from bench.serve_cli import lengths
from bench.sim.simulation import Mix

INTERRUPTED = 130  # exit status after Ctrl-C, as shells say it


def add_dtypes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--weight-dtype", default="fp8", help="(%(default)s)")
    group.add_argument("--kv-cache-dtype", default="bf16", help="(%(default)s)")


def add_lengths(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--input-len", type=lengths, default="1024", help="drawn: N, LOW:HIGH or lognormal:P50,P95 (%(default)s)")
    add("--output-len", type=lengths, default="128", help="likewise (%(default)s)")


def add_classes(group: argparse._ArgumentGroup, *, default: SLO) -> None:
    group.add_argument(
        "--slo",
        type=slo_class,
        action="append",
        metavar="NAME:TTFT_MS:TPOT_MS[:ITL_P99_MS[:E2E_MS]][@SHARE]",
        help=f"a class of calls; may be repeated ({default.name}:{default.ttft_ms:g}:{default.tpot_ms:g})",
    )


def slo_class(text: str) -> tuple[SLO, float]:
    body, _, part = text.partition("@")
    name, *targets = body.split(":")
    try:
        values, weight = [float(target) for target in targets], float(part) if part else 1.0
    except ValueError:
        values, weight = [], 0.0
    good = name and 2 <= len(values) <= 4 and all(MIN_TARGET_MS <= value < math.inf for value in values)
    if not good or not 0 < weight < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no class: give NAME:TTFT_MS:TPOT_MS[:ITL_P99_MS[:E2E_MS]][@SHARE], targets of at least "
            f"{MIN_TARGET_MS} ms and a share above 0"
        )
    ttft_ms, tpot_ms, itl_p99_ms, e2e_ms = (*values, None, None)[:4]
    assert ttft_ms is not None, "two targets at least"
    assert tpot_ms is not None, "two targets at least"
    return SLO(name, ttft_ms, tpot_ms, itl_p99_ms, e2e_ms), weight


def mix_of(found: list[tuple[SLO, float]] | None) -> Mix:
    """Raises: ConfigError: a class twice."""
    if not found:
        return Mix()
    names = [slo.name for slo, _ in found]
    if len(set(names)) < len(names):
        raise ConfigError(f"--slo names a class twice: {', '.join(names)}")
    return Mix(tuple(slo for slo, _ in found), tuple(part for _, part in found))
