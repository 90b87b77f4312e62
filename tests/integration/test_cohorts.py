"""A rolling upgrade: workers of two models behind one router under one name. Pairs form within a cohort, answers never mix."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from baton.config import EngineConfig, KVTransferConfig, ModelConfig, WorkerConfig
from baton.model_files import load_model_files
from baton.request import SamplingParams
from tests.exactness.transformers_reference import Reference
from tests.integration.cluster_rig import until
from tests.integration.fleet_rig import Fleet, WorkerProcess, fleet, stopping
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
PROMPTS = [[(37 * i * i + 11 * i + n) % (VOCAB_SIZE - 10) + 5 for i in range(n)] for n in range(20, 120, 5)]
COHORTS = ("old", "new")
MOST_ROUNDS = 8  # a worker that was slow for a moment gets few calls of one round: where they go follows measured times


@dataclass(frozen=True, slots=True)
class Cohort:
    """One model, its two workers, and the answers it must give; None where its reference was undecided."""

    name: str
    fingerprint: str
    prefill: WorkerProcess
    decode: WorkerProcess
    answers: list[list[int] | None]


def start(cohort: str, role: str, model_dir: Path, folder: Path) -> WorkerProcess:
    config = WorkerConfig(
        f"{role}-{cohort}",
        role=role,
        model=ModelConfig(path=str(model_dir), served_name="tiny"),
        engine=EngineConfig(num_blocks=256, num_threads=1),
        kv=KVTransferConfig(frame_bytes=64 << 10, num_slots=4),
        log_level="warning",
    )
    return WorkerProcess(config, folder)


def fingerprint_of(model_dir: Path) -> str:
    return load_model_files(str(model_dir)).spec.fingerprint


def expected(model_dir: Path) -> list[list[int] | None]:
    reference = Reference(model_dir)
    answers = [reference.answer(prompt, GREEDY) for prompt in PROMPTS]
    return [None if any(found.undecided) else found.tokens for found in answers]


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_tiny_model(folder / name / "tiny", seed=seed) for seed, name in enumerate(COHORTS)}


@pytest.fixture(scope="module")
def cohorts(model_dirs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cohort]]:
    folder = tmp_path_factory.mktemp("workers")
    workers = [start(name, role, model_dirs[name], folder) for name in COHORTS for role in ("prefill", "decode")]
    with stopping(*workers):
        yield [
            Cohort(name, fingerprint_of(model_dirs[name]), prefill, decode, expected(model_dirs[name]))
            for name, prefill, decode in zip(COHORTS, workers[::2], workers[1::2], strict=True)
        ]


async def ask_all(made: Fleet, cohorts: list[Cohort]) -> dict[str, int]:
    """Make every call at once; each answer is one cohort's, from its own two workers. Returns calls per cohort."""
    by_prefill = {cohort.prefill.worker_id: cohort for cohort in cohorts}
    answers = await asyncio.gather(*(made.generate(prompt, NUM_TOKENS) for prompt in PROMPTS))
    used = dict.fromkeys(COHORTS, 0)
    for n, got in enumerate(answers):
        assert got.code is grpc.StatusCode.OK, got.details
        assert got.done is not None
        cohort = by_prefill[got.done.timings.prefill_worker]
        assert got.done.timings.decode_worker == cohort.decode.worker_id
        assert got.done.timings.kv_bytes > 0
        if cohort.answers[n] is not None:
            assert got.tokens == cohort.answers[n]
        used[cohort.name] += 1
    return used


async def test_two_cohorts_serve_side_by_side_and_one_takes_over_when_the_other_leaves(
    cohorts: list[Cohort], model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    old, new = cohorts
    both_clear = [n for n in range(len(PROMPTS)) if old.answers[n] is not None and new.answers[n] is not None]
    assert sum(old.answers[n] != new.answers[n] for n in both_clear) > len(PROMPTS) / 2, "the models must differ"
    async with fleet(model_dirs["old"], tmp_path) as made:
        for cohort in cohorts:
            for worker in (cohort.prefill, cohort.decode):
                made.add(worker, cohort.fingerprint)
        for one, other in ((old, new), (new, old)):
            await made.until_link(one.prefill.worker_id, one.decode.worker_id, "ready")
            await made.until_link(one.prefill.worker_id, other.decode.worker_id, "refused")
        used = dict.fromkeys(COHORTS, 0)
        for asked in range(MOST_ROUNDS):  # from the second on from prefix caches, which are a cohort's own too
            if asked >= 2 and min(used.values()) >= len(PROMPTS) / 4:
                break
            for name, num_calls in (await ask_all(made, cohorts)).items():
                used[name] += num_calls
        assert min(used.values()) >= len(PROMPTS) / 4, used
        status = await made.status()
        assert "refused: prefill-new to decode-old: weights_hash does not fit" in status
        assert "refused: prefill-old to decode-new: weights_hash does not fit" in status
        assert await made.controller.drain(old.prefill.worker_id, True)
        await until(
            lambda: {s.worker_id: s.state for s in made.front_end.fleet.snapshots()}["prefill-old"] == "draining",
            "the router knows of the drain",
        )
        assert await ask_all(made, cohorts) == {"old": 0, "new": len(PROMPTS)}
        await made.controller.drain(old.prefill.worker_id, False)
    assert all(worker.alive for cohort in cohorts for worker in (cohort.prefill, cohort.decode))
