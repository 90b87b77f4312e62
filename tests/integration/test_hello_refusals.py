"""Workers that do not fit each other, as real processes: the pair is refused by name and nothing else suffers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from baton.config import EngineConfig, KVTransferConfig, WorkerConfig
from baton.request import SamplingParams
from engine.scripted_runner import answer
from tests.integration.fleet_rig import Fleet, WorkerProcess, fleet, stopping
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

NUM_TOKENS = 6
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
FIELDS: dict[str, object] = {
    "protocol_version": 99,
    "weights_hash": "f" * 64,
    "tokenizer_hash": "0" * 64,
    "rope": "theta=1;scaling=none",
    "quantization": "Q4_1",
    "speculation": "draft=tiny;k=4",
    "numerics": "0123456789abcdef",
    "fingerprint": "e" * 32,
    "layout.num_layers": 3,
    "layout.num_kv_heads": 16,
    "layout.head_dim": 8,
    "layout.block_size": 32,
}
_salt = itertools.count()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def start(folder: Path, worker_id: str, role: str, **odd: object) -> WorkerProcess:
    """A worker whose Hello differs in `odd`."""
    config = WorkerConfig(
        worker_id,
        role=role,
        engine=EngineConfig(num_blocks=256, chunk_tokens=64),
        kv=KVTransferConfig(frame_bytes=64 << 10, num_slots=4),
        log_level="warning",
    )
    return WorkerProcess(config, folder, "tests.integration.odd_worker", {"ODD_HELLO": json.dumps(odd)})


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[WorkerProcess, WorkerProcess]]:
    """A prefill and a decode worker that fit; no test may harm them."""
    folder = tmp_path_factory.mktemp("pair")
    with stopping(start(folder, "prefill-0", "prefill"), start(folder, "decode-0", "decode")) as (prefill, decode):
        yield prefill, decode
        assert prefill.alive
        assert decode.alive


async def serves(made: Fleet, num_calls: int) -> list[tuple[str, str, int]]:
    """Make plain calls, all of which must be answered right; returns (prefill, decode, bytes shipped) of each."""
    salts = [next(_salt) for _ in range(num_calls)]
    prompts = [[(31 * i + 7 * salt) % 400 + 20 for i in range(20 + salt % 60)] for salt in salts]
    answers = await asyncio.gather(*(made.generate(prompt, NUM_TOKENS) for prompt in prompts))
    for prompt, got in zip(prompts, answers, strict=True):
        assert got.code is grpc.StatusCode.OK, got.details
        assert got.tokens == answer(prompt, GREEDY, NUM_TOKENS, VOCAB_SIZE)
    timings = [got.done.timings for got in answers if got.done is not None]
    return [(timing.prefill_worker, timing.decode_worker, timing.kv_bytes) for timing in timings]


@pytest.mark.parametrize("field", FIELDS)
async def test_a_decode_worker_that_differs_is_refused_by_the_field_s_name_and_costs_no_call(
    field: str, pair: tuple[WorkerProcess, WorkerProcess], model_dir: Path, tmp_path: Path
) -> None:
    with stopping(start(tmp_path, "decode-odd", "decode", **{field: FIELDS[field]})) as (odd,):
        async with fleet(model_dir, tmp_path, *pair) as made:
            await made.until_ready()
            meanwhile = asyncio.create_task(serves(made, 10))
            made.add(odd)
            await made.until_link("prefill-0", "decode-odd", "refused")
            places = [*await meanwhile, *await serves(made, 10)]
            assert {decode for _, decode, _ in places} == {"decode-0"}
            assert all(nbytes for _, _, nbytes in places)
            plain, kv = await made.status(), await made.status("--kv")
            assert f"refused: prefill-0 to decode-odd: {field} does not fit: mine " in plain
            assert f"yours {str(FIELDS[field])[:32]}" in plain
            assert f"refused: prefill-0 to decode-odd: {field} does not fit" in kv
            said = json.loads(await made.status("--json"))
            (link,) = [
                link
                for worker in said["workers"]
                for link in worker["links"]
                if (worker["worker_id"], link["peer"]) == ("prefill-0", "decode-odd")
            ]
            assert (link["state"], link["field"], link["yours"]) == ("refused", field, str(FIELDS[field]))
            assert all(worker.alive for worker in (*pair, odd))


async def test_a_prefill_worker_that_differs_gets_no_calls_and_the_other_one_all(
    pair: tuple[WorkerProcess, WorkerProcess], model_dir: Path, tmp_path: Path
) -> None:
    with stopping(start(tmp_path, "prefill-odd", "prefill", rope="other")) as (odd,):
        async with fleet(model_dir, tmp_path, *pair, odd) as made:
            await made.until_link("prefill-odd", "decode-0", "refused")
            assert {prefill for prefill, _, _ in await serves(made, 12)} == {"prefill-0"}
            assert "refused: prefill-odd to decode-0: rope does not fit" in await made.status()
            assert odd.alive


async def test_where_no_pair_fits_the_decode_worker_prefills_for_itself(
    pair: tuple[WorkerProcess, WorkerProcess], model_dir: Path, tmp_path: Path
) -> None:
    with stopping(start(tmp_path, "decode-odd", "decode", rope="other")) as (odd,):
        async with fleet(model_dir, tmp_path, pair[0], odd) as made:
            await made.until_link("prefill-0", "decode-odd", "refused")
            assert set(await serves(made, 8)) == {("decode-odd", "decode-odd", 0)}


async def test_a_pair_without_the_rdma_that_one_end_requires_is_refused_with_what_was_found(
    pair: tuple[WorkerProcess, WorkerProcess], model_dir: Path, tmp_path: Path
) -> None:
    with stopping(start(tmp_path, "decode-odd", "decode", require_rdma=True)) as (odd,):
        async with fleet(model_dir, tmp_path, *pair, odd) as made:
            await made.until_link("prefill-0", "decode-odd", "refused")
            assert {decode for _, decode, _ in await serves(made, 12)} == {"decode-0"}
            (line,) = [line for line in (await made.status()).splitlines() if line.startswith("refused: ")]
            assert "require_rdma does not fit: mine not required, yours required; the pair's live transport is" in line
            assert any(f"transport is {found}" in line for found in ("posix/", "sysv/", "tcp/"))
            assert "bring RDMA up on both hosts" in line
            assert odd.alive


@pytest.mark.parametrize(
    ("kv", "words"),
    [
        (KVTransferConfig(require_rdma=True), ["kv.require_rdma is set, but UCX offers only", "has no InfiniBand"]),
        (
            KVTransferConfig(require_rdma=True, ucx_tls="tcp"),
            ["offers only tcp/lo", "kv.ucx_tls = tcp leaves RDMA out"],
        ),
        (KVTransferConfig(ucx={"RNDV_TRESH": "1"}), ["kv.ucx.RNDV_TRESH = '1' is refused by UCX"]),
    ],
)
def test_a_worker_that_cannot_have_the_transport_it_needs_does_not_start_and_says_why_in_one_line(
    kv: KVTransferConfig, words: list[str], tmp_path: Path
) -> None:
    config = WorkerConfig("w", engine=EngineConfig(num_blocks=16), kv=kv, log_level="error")
    worker = WorkerProcess(config, tmp_path, "tests.integration.odd_worker")
    said = worker.wait_ended()
    assert worker.process.returncode == 1
    (line,) = [line for line in said.splitlines() if "worker: " in line]
    assert all(word in line for word in words), line


async def test_status_shows_transports_options_pairs_and_what_they_moved(
    pair: tuple[WorkerProcess, WorkerProcess], model_dir: Path, tmp_path: Path
) -> None:
    async with fleet(model_dir, tmp_path, *pair) as made:
        await made.until_ready()
        places = await serves(made, 8)
        moved = sum(nbytes for _, _, nbytes in places)
        await made.until_kv(lambda status: status.pairs[0].bytes_sent >= moved, "prefill-0")
        await made.until_kv(lambda status: bool(status.version), "decode-0")
        said = json.loads(await made.status("--json"))["workers"]
        kv = {worker["worker_id"]: worker["kv"] for worker in said}
        (shown,) = kv["prefill-0"]["pairs"]
        assert (shown["peer"], shown["state"]) == ("decode-0", "ready")
        assert shown["transport"].split("/")[0] in ("posix", "sysv", "tcp")
        assert shown["mode"] in ("direct", "staged")
        assert shown["sending_s"] > 0
        assert kv["decode-0"]["pairs"] == []  # it sends to nobody
        assert kv["prefill-0"]["transport"] == "ucx"
        assert kv["prefill-0"]["options"]["KEEPALIVE_INTERVAL"].startswith("1")
        text = await made.status("--kv")
    for part in ("decode-0", shown["transport"], shown["mode"], kv["prefill-0"]["version"], "none"):
        assert part in text
    assert "UCX options of decode-0, prefill-0: " in text
