"""A router process answers whatever its OpenAPI document allows or forbids, with what the document says, and with no 5xx."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton.config import BatchConfig, RouterConfig
from baton.config_load import to_json
from tests.router.stub_worker import start_pair

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "unsupported_method",
    "allow_header_conformance",
)
BATCHES = "^/v1/(files|batches)"
# Targets that no call could meet would be refused by forecast (429), a timeout that is over at once be told so (504).
# Headers that nobody knows are no fault.
CONFIG = """
[generation]
allow-extra-parameters = false
[parameters]
"header.x-request-timeout-ms" = "30000"
"header.x-slo-ttft-ms" = "60000"
"header.x-slo-tpot-ms" = "1000"
"""


def with_batches(folder: Path) -> str:
    """A router's configuration, as a file in the folder."""
    folder.mkdir()
    file = folder / "router.json"
    file.write_text(to_json(RouterConfig(batch=BatchConfig(folder=str(folder)))))
    return str(file)


@asynccontextmanager
async def router_process(model_dir: Path, batch_folder: Path | None = None) -> AsyncIterator[int]:
    """Yields the HTTP port of a router over a pair of stubs; `batch_folder`: where it keeps files and batches."""
    workers = await start_pair()
    addresses = ",".join(worker.address for worker in workers)
    command = [sys.executable, "-m", "router.main", "--model", str(model_dir), "--workers", addresses]
    if batch_folder is not None:
        command += ["--config", with_batches(batch_folder)]
    process = await asyncio.create_subprocess_exec(
        *command, "--http-port", "0", "--grpc-port", "0", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        yield int(json.loads(await process.stdout.readline())["http_port"])
        assert process.returncode is None, "the router lives"
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for worker in workers:
            await worker.kill()


async def run(
    port: int, folder: Path, max_time_s: int, max_examples: int, seed: int | None = None, paths: str = ""
) -> str:
    """Returns what schemathesis says; fails where it found anything. `paths`: a pattern of those to ask; "" = all."""
    (folder / "schemathesis.toml").write_text(CONFIG)
    command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"http://127.0.0.1:{port}/openapi.json"]
    options = ["--phases", "coverage,fuzzing", "--checks", ",".join(CHECKS), "--max-time", str(max_time_s)]
    options += [
        "--max-examples",
        str(max_examples),
        "--request-timeout",
        "30",
        "--generation-database",
        "none",
        "--no-color",
    ]
    options += ["--include-path-regex", paths] if paths else []
    options += [] if seed is None else ["--seed", str(seed)]
    process = await asyncio.create_subprocess_exec(
        *command, *options, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    said = (await process.stdout.read()).decode()
    assert await process.wait() == 0, said
    return said


async def test_no_request_that_schemathesis_makes_gets_a_5xx_or_an_undocumented_answer(
    model_dir: Path, tmp_path: Path
) -> None:
    async with router_process(model_dir) as port:
        said = await run(port, tmp_path, max_time_s=12, max_examples=12, seed=1)
    assert "8 selected / 8 total" in said, said


async def test_nor_does_one_about_files_and_batches(model_dir: Path, tmp_path: Path) -> None:
    async with router_process(model_dir, tmp_path / "batches") as port:
        said = await run(port, tmp_path, max_time_s=3, max_examples=3, seed=1, paths=BATCHES)
    assert "9 selected / 17 total" in said, said


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_nor_does_one_of_many_more_about_files_and_batches(model_dir: Path, tmp_path: Path) -> None:
    async with router_process(model_dir, tmp_path / "batches") as port:
        await run(port, tmp_path, max_time_s=300, max_examples=500, paths=BATCHES)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_nor_does_one_of_many_more(model_dir: Path, tmp_path: Path) -> None:
    async with router_process(model_dir) as port:
        await run(port, tmp_path, max_time_s=600, max_examples=1_000)
