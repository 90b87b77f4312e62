"""A router with a batch folder, the official client, and what tests say and ask of batches."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
from openai.types import Batch

from baton.config import BatchConfig
from baton.model_files import ModelFiles
from tests.router.router_rig import POLL_S, Rig, running_rig
from tests.router.stub_worker import StubWorker

OVER = ("completed", "failed", "cancelled", "expired")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@asynccontextmanager
async def batch_rig(
    files: ModelFiles,
    folder: Path,
    workers: Sequence[StubWorker] | None = None,
    settings: dict[str, Any] | None = None,
    **of_router: Any,
) -> AsyncIterator[tuple[Rig, openai.AsyncOpenAI]]:
    """`settings`: of BatchConfig."""
    batch = BatchConfig(folder=str(folder), **{"lease_s": 0.6, **(settings or {})})
    async with (
        running_rig(files, workers, batch=batch, **of_router) as rig,
        openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield rig, client


def line(custom_id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    prompt = {"prompt": "hello"} if url == TEXT else {"messages": [{"role": "user", "content": "hello"}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**prompt, "max_tokens": 3, **body}}


def jsonl(lines: Iterable[object]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def send(client: openai.AsyncOpenAI, lines: Iterable[object], **fields: Any) -> Batch:
    """Upload the lines and create a batch of them."""
    file = await client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
    fields = {"endpoint": TEXT, "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, **fields)


async def ended(client: openai.AsyncOpenAI, batch_id: str, within_s: float = POLL_S) -> Batch:
    """Wait for a batch to be over."""
    deadline_s = time.monotonic() + within_s
    while (batch := await client.batches.retrieve(batch_id)).status not in OVER:
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {batch}"
        await asyncio.sleep(0.02)
    return batch


async def outcomes(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of an output or error file by custom_id; each is there once."""
    if file_id is None:
        return {}
    text = (await client.files.content(file_id)).text
    rows = [json.loads(row) for row in text.splitlines()]
    found = {row["custom_id"]: row for row in rows}
    assert len(found) == len(rows), "no custom_id is there twice"
    return found
