"""Files and batches through the official client: what is taken, what comes of it, what is refused and why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from baton.model_files import ModelFiles
from router.tenants import digest_of
from tests.router.batch.batch_rig import CHAT, TEXT, batch_rig, ended, jsonl, line, outcomes, send
from tests.router.router_rig import Rig

Client = openai.AsyncOpenAI


@pytest.fixture
async def running(files: ModelFiles, tmp_path: Path) -> AsyncIterator[tuple[Rig, Client]]:
    async with batch_rig(files, tmp_path / "batch") as pair:
        yield pair


@pytest.fixture
def client(running: tuple[Rig, Client]) -> Client:
    return running[1]


def suffixes(folder: Path) -> set[str]:
    return {path.suffix for path in folder.iterdir()}


async def refusal(client: Client, content: bytes, **fields: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.files.create(**{"file": ("a.jsonl", content), "purpose": "batch", **fields})
    return refused.value


# -- what comes of a batch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", [TEXT, CHAT])
async def test_each_line_is_answered_as_the_endpoint_would_have_answered_it(
    running: tuple[Rig, Client], url: str
) -> None:
    rig, client = running
    body = line("x", url)["body"]
    alone = (await rig.http.post(url, json=body)).json()
    batch = await send(client, [line(f"l{i}", url) for i in range(20)], endpoint=url, metadata={"job": "7"})
    assert (batch.status, batch.metadata, batch.completion_window) == ("validating", {"job": "7"}, "24h")
    batch = await ended(client, batch.id)
    assert batch.request_counts is not None
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at  # type: ignore[operator]
    assert batch.expires_at == batch.created_at + 86_400
    answers = await outcomes(client, batch.output_file_id)
    assert answers.keys() == {f"l{i}" for i in range(20)}
    for row in answers.values():
        assert (row["error"], row["response"]["status_code"]) == (None, 200)
        assert row["response"]["body"]["choices"] == alone["choices"]
        assert row["response"]["body"]["service_tier"] == "flex"
    await rig.idle()


async def test_lines_that_do_not_fit_are_outcomes_of_their_own(client: Client) -> None:
    lines = [line("good"), line("hot", temperature=9), line("who", model="gpt-4"), line("odd", tools=[])]
    batch = await ended(client, (await send(client, lines)).id)
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 1, "failed": 3}
    assert (await outcomes(client, batch.output_file_id)).keys() == {"good"}
    errors = await outcomes(client, batch.error_file_id)
    assert {name: row["response"]["status_code"] for name, row in errors.items()} == {
        "hot": 400,
        "who": 404,
        "odd": 400,
    }
    assert errors["hot"]["response"]["body"]["error"]["param"] == "temperature"


async def test_a_batch_for_another_endpoint_than_its_lines_fails_and_names_the_line(client: Client) -> None:
    batch = await ended(client, (await send(client, [line("a"), line("b", CHAT)])).id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.line, error.param) for error in batch.errors.data] == [(2, "url")]


async def test_a_cancelled_batch_keeps_what_was_done_and_names_the_rest(files: ModelFiles, tmp_path: Path) -> None:
    async with batch_rig(files, tmp_path) as (rig, client):
        rig.decode.script.decode_gate.clear()
        one = await send(client, [line("short", max_tokens=1), *(line(f"long{i}") for i in range(4))])
        while not (await client.batches.retrieve(one.id)).request_counts.completed:  # type: ignore[union-attr]
            pass
        assert (await client.batches.cancel(one.id)).status == "cancelling"
        batch = await ended(client, one.id)
        assert batch.status == "cancelled"
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 5, "completed": 1, "failed": 4}
        assert (await outcomes(client, batch.output_file_id)).keys() == {"short"}
        errors = await outcomes(client, batch.error_file_id)
        assert {row["error"]["code"] for row in errors.values()} == {"batch_cancelled"}
        with pytest.raises(openai.BadRequestError, match="cancelled already"):
            await client.batches.cancel(one.id)
        await rig.idle()


# -- files -------------------------------------------------------------------------------------------------------------


async def test_a_file_comes_back_as_it_was_sent_is_listed_and_deleted(client: Client) -> None:
    content = jsonl([line("a"), line("b", prompt="é\u2028 \r")])[:-1] + b"\r\n\r\n"
    sent = [await client.files.create(file=(f"{i}.jsonl", content), purpose="batch") for i in range(3)]
    assert [(file.bytes, file.purpose, file.status) for file in sent] == [(len(content), "batch", "processed")] * 3
    assert (await client.files.content(sent[0].id)).content == content
    assert [file.id async for file in client.files.list(limit=2)] == [file.id for file in reversed(sent)]
    assert [file.id async for file in client.files.list(order="asc", after=sent[0].id)] == [sent[1].id, sent[2].id]
    assert (await client.files.delete(sent[0].id)).deleted
    for gone in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            await gone(sent[0].id)
    assert [file.filename async for file in client.files.list(order="asc")] == ["1.jsonl", "2.jsonl"]


GOOD = line("a")


BAD_LINES = [
    (b"{not json", "line 2: it is not valid JSON"),
    (b"[]", "line 2: it is not a JSON object"),
    (jsonl([GOOD]).strip(), "line 2: its custom_id is that of an earlier line"),
    (jsonl([{**GOOD, "custom_id": ""}]), "line 2: custom_id must be text"),
    (jsonl([{**GOOD, "custom_id": "b", "method": "GET"}]), "line 2: method must be POST"),
    (jsonl([{**GOOD, "custom_id": "b", "url": "/v1/embeddings"}]), "line 2: url '/v1/embeddings' is not run"),
    (jsonl([{**GOOD, "custom_id": "b", "extra": 1}]), "line 2: 'extra' is not a field"),
    (jsonl([line("b", stream=True)]), "line 2: body.stream is true"),
    (jsonl([line("b", priority=5)]), "line 2: body.priority is set"),
    (jsonl([{**GOOD, "custom_id": "b", "body": "x"}]), "line 2: body must be"),
]


async def test_a_line_that_no_batch_can_run_is_named_when_the_file_comes(client: Client) -> None:
    for bad, why in BAD_LINES:
        assert why in (await refusal(client, jsonl([GOOD]) + bad)).message
    assert [file async for file in client.files.list()] == []


async def test_what_is_too_large_or_no_form_at_all_is_refused_and_leaves_nothing(
    files: ModelFiles, tmp_path: Path
) -> None:
    limits = {"max_file_bytes": 5_000, "max_lines": 3, "max_files": 1, "max_batches": 1}
    async with batch_rig(files, tmp_path, settings=limits) as (rig, client):
        assert "5000 bytes" in (await refusal(client, b" " * 5_001)).message
        assert "5000 bytes" in (await refusal(client, b" " * 500_000)).message
        assert "3 lines" in (await refusal(client, jsonl(line(str(i)) for i in range(4)))).message
        assert "no line" in (await refusal(client, b"\n\n")).message
        assert (await refusal(client, jsonl([GOOD]), purpose="vision")).param == "purpose"
        form = {"purpose": (None, "batch"), "what": (None, "x"), "file": ("a", jsonl([GOOD]))}
        wrong: list[dict[str, Any]] = [{"json": {}}, {"files": {"purpose": (None, "batch")}}, {"files": form}]
        for fields in wrong:
            assert (await rig.http.post("/v1/files", **fields)).status_code == 400
        assert suffixes(tmp_path) <= {".sqlite", ".sqlite-shm", ".sqlite-wal"}
        rig.prefill.script.prefill_gate.clear()
        batch = await send(client, [GOOD])
        assert "files: 2; the limit is 1" in (await refusal(client, jsonl([GOOD]))).message
        fields = {"endpoint": TEXT, "completion_window": "24h"}
        with pytest.raises(openai.BadRequestError, match="batches that are not over: 2"):
            await client.batches.create(input_file_id=batch.input_file_id, **fields)
        with pytest.raises(openai.BadRequestError, match="not over"):
            await client.files.delete(batch.input_file_id)
        rig.prefill.script.prefill_gate.set()
        await ended(client, batch.id)
        assert (await client.files.delete(batch.input_file_id)).deleted


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"endpoint": "/v1/embeddings"}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"metadata": {"k" * 65: "v"}}, "metadata"),
    ({"extra_body": {"wat": 1}}, "wat"),
]


async def test_a_batch_that_cannot_be_is_refused_by_the_name_of_the_field(client: Client) -> None:
    for fields, param in WRONG_FIELDS:
        with pytest.raises(openai.BadRequestError) as refused:
            await send(client, [GOOD], **fields)
        assert refused.value.param == param
    for unknown in ("file-0", "\x00", "file-" + "0" * 24):
        with pytest.raises(openai.NotFoundError):
            await client.batches.create(input_file_id=unknown, endpoint="/v1/completions", completion_window="24h")


async def test_nobody_sees_another_tenants_files_and_batches(files: ModelFiles, tmp_path: Path) -> None:
    keys = {name: f"bk-{name}" for name in ("ours", "theirs")}
    text = "".join(f"- {{name: {name}, sha256: {digest_of(key).hex()}}}\n" for name, key in keys.items())
    (tmp_path / "keys").write_text("keys:\n" + text)
    async with batch_rig(files, tmp_path / "batch", api_keys_file=str(tmp_path / "keys")) as (rig, anybody):
        ours, theirs = (anybody.with_options(api_key=keys[name]) for name in ("ours", "theirs"))
        batch = await send(ours, [GOOD])
        await ended(ours, batch.id)
        for asked in (
            theirs.files.retrieve(batch.input_file_id),
            theirs.files.content(batch.input_file_id),
            theirs.files.delete(batch.input_file_id),
            theirs.batches.retrieve(batch.id),
            theirs.batches.cancel(batch.id),
            theirs.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await asked
        assert [one async for one in theirs.files.list()] == []
        assert [one async for one in theirs.batches.list()] == []
        assert [one.id async for one in ours.batches.list()] == [batch.id]
        for path in ("/v1/files", "/v1/batches", f"/v1/files/{batch.input_file_id}/content"):
            assert (await rig.http.get(path)).status_code == 401
        assert (await rig.http.post("/v1/files", files={"file": b""})).status_code == 401
