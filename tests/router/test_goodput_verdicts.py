"""Verdicts as clients' times have them: every kind of target is honoured, each class by its own, and found in every count."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.errors import Internal
from baton.model_files import ModelFiles
from baton.slo import SLO, Verdict
from baton.v1 import control_pb2
from router.ring import SHORT_S
from router.windows import ClassWindow
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.test_router_metrics import scraped

LOOSE_MS = 60_000.0
STALL_S = 0.05  # of each call that `stalled` makes, at least; targets that it must miss are a fifth of it
TIGHT_MS = 10.0


def put(rig: Rig, *classes: SLO) -> None:
    told = [
        control_pb2.SloClass(
            name=slo.name, ttft_ms=slo.ttft_ms, tpot_ms=slo.tpot_ms, itl_p99_ms=slo.itl_p99_ms, e2e_ms=slo.e2e_ms,
            percentile=slo.percentile,
        )
        for slo in classes
    ]  # fmt: skip
    rig.front_end.slo_watch.apply(control_pb2.SloSet(version=2, classes=told))


async def stalled(rig: Rig, *slo_classes: str) -> None:
    """One call of six tokens in each class, all at once; each pauses once, before its fourth, for STALL_S at least."""
    gate = rig.decode.script.decode_gate
    gate.clear()
    rig.decode.script.pause_at = 3
    calls = [request(max_tokens=6) for _ in slo_classes]
    for call, name in zip(calls, slo_classes, strict=True):
        call.slo.class_name = name
    answers = asyncio.gather(*(rig.generate(call) for call in calls))
    running = rig.front_end.calls._running
    await until(lambda: [call.reports[0].num_tokens for call in running] == [3] * len(calls), "all have three tokens")
    await asyncio.sleep(STALL_S)
    gate.set()
    assert all(answer.done is not None for answer in await answers)


def windows(rig: Rig) -> dict[str, ClassWindow]:
    now_s = time.monotonic()
    return {w.class_name: w for w in rig.front_end.calls.goodput.class_windows(now_s) if w.window_s == SHORT_S}


async def test_three_classes_with_conflicting_targets_on_one_pair_are_each_judged_by_their_own(
    files: ModelFiles,
) -> None:
    async with running_rig(files) as rig:
        put(
            rig,
            SLO("gaps", LOOSE_MS, LOOSE_MS, itl_p99_ms=TIGHT_MS),
            SLO("whole", LOOSE_MS, LOOSE_MS, e2e_ms=TIGHT_MS),
            SLO("pace", LOOSE_MS, STALL_S * 1e3 / 6),  # five gaps, of which one is the stall
            SLO("loose", LOOSE_MS, LOOSE_MS, itl_p99_ms=LOOSE_MS, e2e_ms=LOOSE_MS),
        )
        await stalled(rig, "gaps", "whole", "pace", "loose")
        await rig.idle()
        verdicts, said, seen = rig.front_end.slo_watch.verdicts, await scraped(rig), windows(rig)
    assert {name: dict(counts) for name, counts in verdicts.items()} == {
        "gaps": {Verdict.ITL: 1}, "whole": {Verdict.E2E: 1}, "pace": {Verdict.TPOT: 1}, "loose": {Verdict.MET: 1},
    }  # fmt: skip
    for name, kind in (("gaps", "itl"), ("whole", "e2e"), ("pace", "tpot")):
        assert said[f'baton_request_slo_violation_total{{slo_class="{name}",type="{kind}"}}'] == 1
        assert said[f'baton_slo_attainment_ratio{{slo_class="{name}",window="30s"}}'] == 0
    assert said['baton_slo_attainment_ratio{slo_class="loose",window="300s"}'] == 1
    assert said['baton_goodput_per_second{slo_class="loose",window="30s"}'] > 0
    missed = (seen["gaps"].num_missed_itl, seen["whole"].num_missed_e2e, seen["pace"].num_missed_tpot)
    assert missed == (1, 1, 1)


async def test_a_pool_answers_for_its_own_targets_only(files: ModelFiles) -> None:
    async with running_rig(files) as rig:
        put(rig, SLO("gaps", LOOSE_MS, LOOSE_MS, itl_p99_ms=TIGHT_MS))
        await stalled(rig, "gaps")
        await rig.idle()
        workers = {w.role: w for w in rig.front_end.calls.goodput.worker_windows(time.monotonic())}
    assert (workers["prefill"].attainment, workers["decode"].attainment) == (1.0, 0.0)
    assert workers["prefill"].worker_id != workers["decode"].worker_id
    assert workers["prefill"].num_met == workers["decode"].num_met == 0


async def test_arrivals_are_seen_when_they_come_and_outputs_when_they_end(files: ModelFiles) -> None:
    async with running_rig(files) as rig:
        rig.decode.script.decode_gate.clear()
        running = asyncio.create_task(rig.generate(request("hello there, how are you", max_tokens=4, n=2)))
        await until(lambda: any(window.num_prompts for window in windows(rig).values()), "its prompt was read")
        early = windows(rig)["interactive"]
        rig.decode.script.decode_gate.set()
        answer = await running
        await rig.idle()
        late = windows(rig)["interactive"]
    assert answer.done is not None
    assert (early.num_arrived, early.num_sequences, early.num_outputs, early.num_judged) == (1, 2, 0, 0)
    assert early.prompt_tokens == sum(early.prompt_lengths) * answer.done.usage.prompt_tokens
    assert (late.num_arrived, late.num_outputs, late.output_tokens, late.num_judged) == (1, 2, 8, 1)


async def test_calls_that_are_turned_away_arrived_all_the_same_and_nonsense_did_not(files: ModelFiles) -> None:
    async with running_rig(files, max_inflight=1) as rig:
        assert (await rig.generate(request(max_tokens=2, n=3))).status is not None
        assert (await rig.generate(request(max_tokens=2, temperature=-1.0))).status is not None
        await rig.idle()
        window, said = windows(rig)["interactive"], await scraped(rig)
    assert (window.num_arrived, window.num_failed, window.attainment) == (1, 1, 0.0)
    assert said['baton_request_slo_violation_total{slo_class="interactive",type="failed"}'] == 1


async def test_a_call_that_failed_after_its_first_token_is_decode_s_miss(files: ModelFiles) -> None:
    async with running_rig(files) as rig:
        rig.decode.script.fail_after = (2, Internal("the model failed"))
        await rig.generate(request(max_tokens=6))
        await rig.idle()
        workers = {w.role: w for w in rig.front_end.calls.goodput.worker_windows(time.monotonic())}
        window = windows(rig)["interactive"]
    assert (workers["prefill"].attainment, workers["decode"].attainment, window.num_failed) == (1.0, 0.0, 1)
    assert window.num_outputs == 0, "a cut answer says nothing of how long answers are"


async def test_where_ttft_went_is_told_in_parts_that_sum_to_it(files: ModelFiles) -> None:
    async with running_rig(files) as rig:
        gate = rig.prefill.script.prefill_gate
        gate.clear()
        running = asyncio.create_task(rig.generate(request(max_tokens=2)))
        await until(lambda: bool(rig.prefill.submits), "it is at the worker")
        await asyncio.sleep(STALL_S)
        gate.set()
        await running
        await rig.idle()
        window, said = windows(rig)["interactive"], await scraped(rig)
    parts = window.parts
    assert (parts.num_calls, parts.queue_s, parts.prefill_s) == (1, 0.001, 0.002), "what the stub says of itself"
    assert parts.admission_s + parts.queue_s + parts.prefill_s + parts.network_s == pytest.approx(window.ttft_s)
    assert parts.network_s > STALL_S / 2
    for part in ("admission", "queue", "prefill", "network"):
        name = f'baton_time_to_first_token_part_seconds_count{{slo_class="interactive",part="{part}"}}'
        assert said[name] == 1
