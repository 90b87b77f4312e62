"""Files and batches in the OpenAPI document: shapes of answers, and the paths. router/openapi.py puts them in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from router.batch.lines import ENDPOINTS
from router.batch.records import INPUT, WINDOW, Status

Schema = dict[str, Any]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class File(_Closed):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class DeletedFile(_Closed):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class LineError(_Closed):
    code: str
    line: int
    message: str
    param: str


class LineErrors(_Closed):
    object: Literal["list"]
    data: list[LineError]


class RequestCounts(_Closed):
    total: int
    completed: int
    failed: int


class BatchObject(_Closed):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: LineErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    expired_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class _Page(_Closed):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Files(_Page):
    data: list[File]


class Batches(_Page):
    data: list[BatchObject]


ANSWERS = (File, DeletedFile, BatchObject, Files, Batches)
CREATE_LIMITS: Mapping[str, Schema] = {
    "endpoint": {"enum": list(ENDPOINTS)},
    "completion_window": {"enum": [WINDOW]},
}


def paths(ref: Callable[[str], Schema], errors: Schema) -> Schema:
    """`ref`: of a schema by its name; `errors`: the responses that every path may give."""

    def answer(name: str, content: str, **more: object) -> Schema:
        ok = {"description": "OK", "content": {"application/json": ref(content)}}
        return {"operationId": name, "responses": {"200": ok, **errors}, **more}

    form = {
        "type": "object",
        "required": ["purpose", "file"],
        "additionalProperties": False,
        "properties": {"purpose": {"enum": [INPUT]}, "file": {"type": "string", "format": "binary"}},
    }
    upload = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    create = {"required": True, "content": {"application/json": ref("CreateBatch")}}
    content = answer("get_file_content", "File")
    content["responses"]["200"] = {"description": "as it was sent, or made", "content": {"application/jsonl": {}}}
    by_file, by_batch, paged = [_in_path("file_id")], [_in_path("batch_id")], _page_parameters()
    return {
        "/v1/files": {
            "post": answer("create_file", "File", requestBody=upload),
            "get": answer("list_files", "Files", parameters=[*paged, _in_query("purpose", {"type": "string"})]),
        },
        "/v1/files/{file_id}": {
            "parameters": by_file,
            "get": answer("get_file", "File"),
            "delete": answer("delete_file", "DeletedFile"),
        },
        "/v1/files/{file_id}/content": {"parameters": by_file, "get": content},
        "/v1/batches": {
            "post": answer("create_batch", "BatchObject", requestBody=create),
            "get": answer("list_batches", "Batches", parameters=paged),
        },
        "/v1/batches/{batch_id}": {"parameters": by_batch, "get": answer("get_batch", "BatchObject")},
        "/v1/batches/{batch_id}/cancel": {"parameters": by_batch, "post": answer("cancel_batch", "BatchObject")},
    }


def _page_parameters() -> list[Schema]:
    return [
        _in_query("after", {"type": "string"}),
        _in_query("limit", {"type": "integer", "minimum": 1, "maximum": 100}),
        _in_query("order", {"enum": ["asc", "desc"]}),
    ]


def _in_query(name: str, schema: Schema) -> Schema:
    return {"in": "query", "name": name, "required": False, "schema": schema}


def _in_path(name: str) -> Schema:
    return {"in": "path", "name": name, "required": True, "schema": {"type": "string", "minLength": 1}}
