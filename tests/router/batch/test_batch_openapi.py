"""The document names files and batches where they are served, and every answer is as it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from baton.model_files import ModelFiles
from router.batch.openapi import Batches, BatchObject, DeletedFile, File, Files
from tests.router.batch.batch_rig import batch_rig, ended, line, send
from tests.router.router_rig import Rig


async def test_every_answer_is_as_the_document_says(files: ModelFiles, tmp_path: Path) -> None:
    async with batch_rig(files, tmp_path) as (rig, client):
        batch = await ended(client, (await send(client, [line("a"), line("b", temperature=9)])).id)
        document = (await rig.http.get("/openapi.json")).json()
        file_url, batch_url = f"/v1/files/{batch.input_file_id}", f"/v1/batches/{batch.id}"
        for url, kind in (("/v1/files", Files), (file_url, File), ("/v1/batches", Batches), (batch_url, BatchObject)):
            kind.model_validate_json((await rig.http.get(url)).content)
        DeletedFile.model_validate_json((await rig.http.delete(file_url)).content)
    paths = {"/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"}
    paths |= {"/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"}
    assert paths <= document["paths"].keys()
    assert refs(document["paths"]) <= document["components"]["schemas"].keys()
    assert document["components"]["schemas"]["CreateBatch"]["properties"]["completion_window"]["enum"] == ["24h"]


async def test_a_router_without_a_folder_serves_none_and_says_none(rig: Rig) -> None:
    assert (await rig.http.get("/v1/batches")).status_code == 404
    assert not any(
        "batches" in path or "files" in path for path in (await rig.http.get("/openapi.json")).json()["paths"]
    )


def refs(schema: Any) -> set[str]:
    """Names of the schemas that it refers to."""
    if isinstance(schema, list):
        return set().union(*(refs(part) for part in schema))
    if not isinstance(schema, dict):
        return set()
    own = {schema["$ref"].rsplit("/", 1)[1]} if isinstance(schema.get("$ref"), str) else set()
    return own.union(*(refs(part) for part in schema.values()))
