"""OpenAI's files and batches over HTTP.

    POST /v1/files  (multipart: purpose=batch, file)      GET /v1/files   GET, DELETE /v1/files/ID   GET /v1/files/ID/content
    POST /v1/batches {input_file_id, endpoint, completion_window: "24h", metadata}
    GET  /v1/batches   GET /v1/batches/ID   POST /v1/batches/ID/cancel

What is another tenant's does not exist. An upload goes to the disk as it comes, its lines judged on the way; nothing of one that
is refused stays. Disk and store are asked in threads; everything else is the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError, InvalidRequest, NotFound, Overloaded
from baton.log import get_log
from router.asgi import READ_S, headers, refuse_unread, send_json
from router.batch.line_server import Tools
from router.batch.lines import ENDPOINTS, LineCheck
from router.batch.multipart import Form
from router.batch.records import INPUT, WINDOW, WINDOW_S, Batch, FileInfo, Status, new_id
from router.http_protocol import exchange_of
from router.labels import REQUEST_ID
from router.openai_schemas import parse
from router.service_tiers import BATCH
from router.tenants import Tenant
from router.validate import check_metadata

log = get_log("router.batch")

MAX_UPLOADS = 4  # at once in one router: each keeps one chunk, one line and the custom_ids seen, 10 MB at 50,000 lines
UPLOAD_S = 600.0  # 200 MB at 3 Mbit/s; a slower client holds a place for nothing
FORM_BYTES = 64 << 10  # around the file
MAX_FILES_PAGE = 10_000  # as OpenAI
MAX_BATCHES_PAGE = 100
BATCHES_PAGE = 20


class CreateBatch(BaseModel):
    """POST /v1/batches"""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class Row(Protocol):
    """What is listed."""

    @property
    def id(self) -> str: ...

    def to_openai(self) -> dict[str, object]: ...


AnyRow = TypeVar("AnyRow", bound=Row)
Found = TypeVar("Found")


class BatchApi:
    """One router's."""

    def __init__(
        self,
        tools: Tools,
        tenant_of: Callable[[Mapping[str, str]], Tenant],
        on_new_batch: Callable[[], None],
    ) -> None:
        self._tools = tools
        self._tenant_of = tenant_of
        self._on_new_batch = on_new_batch
        self._num_uploads = 0

    def routes(self) -> list[Route]:
        """All but POST /v1/files, which is `upload`, and POST /v1/batches, which is `create`."""
        pages = (
            ("/v1/files", "GET", self._list_files),
            ("/v1/files/{file_id}", "GET", self._get_file),
            ("/v1/files/{file_id}", "DELETE", self._delete_file),
            ("/v1/files/{file_id}/content", "GET", self._get_content),
            ("/v1/batches", "GET", self._list_batches),
            ("/v1/batches/{batch_id}", "GET", self._get_batch),
            ("/v1/batches/{batch_id}/cancel", "POST", self._cancel_batch),
        )
        return [Route(path, page, methods=[method]) for path, method, page in pages]

    # -- files -------------------------------------------------------------------------------------------------------

    async def upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """POST /v1/files, an ASGI application."""
        exchange, request = exchange_of(scope), Request(scope, receive)
        try:
            info = await self._take_upload(request)
        except BatonError as error:
            await refuse_unread(exchange, receive, error, headers(scope)[REQUEST_ID])
        except (ClientDisconnect, ConnectionError):
            return
        else:
            log.info("file_added", file_id=info.id, tenant=info.tenant, num_bytes=info.num_bytes)
            send_json(exchange, 200, info.to_openai())

    async def _take_upload(self, request: Request) -> FileInfo:
        tenant = self._tenant_of(headers(request.scope))
        tenant.check(BATCH, 0)
        limit = self._tools.config.max_file_bytes
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit + FORM_BYTES:
            raise _too_large(limit)
        if self._num_uploads >= MAX_UPLOADS:
            raise Overloaded(f"{MAX_UPLOADS} files are being sent; the limit is {MAX_UPLOADS}", retry_after_s=1.0)
        self._num_uploads += 1
        try:
            async with asyncio.timeout(UPLOAD_S):
                return await self._store_upload(request, tenant)
        except TimeoutError:
            raise InvalidRequest(f"body is not complete; the limit is {UPLOAD_S:g} s", field="body") from None
        finally:
            self._num_uploads -= 1

    async def _store_upload(self, request: Request, tenant: Tenant) -> FileInfo:
        file_id, tools = new_id("file"), self._tools
        with contextlib.ExitStack() as stack:
            file = await asyncio.to_thread(stack.enter_context, tools.contents.new(file_id))
            upload = Upload(file, LineCheck(tools.config.max_lines), tools.config.max_file_bytes)
            form = Form(request.headers.get("content-type", ""), upload.take)
            stream = aiter(request.stream())
            while True:
                async with asyncio.timeout(READ_S):
                    chunk = await anext(stream, None)
                if chunk is None:
                    break
                if chunk:
                    await asyncio.to_thread(form.feed, chunk)
            form.end()
            _check_fields(form)
            await asyncio.to_thread(upload.end)
            await asyncio.to_thread(stack.close)
        now_s = tools.now_unix_s()
        filename = form.filename or "file"
        info = FileInfo(file_id, tenant.name, INPUT, filename, upload.num_bytes, now_s, now_s + tools.config.keep_s)
        try:
            await asyncio.to_thread(tools.store.add_file, info)
        except BatonError:
            await asyncio.to_thread(tools.contents.drop, file_id)
            raise
        return info

    async def _list_files(self, request: Request) -> Response:
        tenant = self._tenant_of(request.headers)
        files = await asyncio.to_thread(self._tools.store.files, tenant.name)
        purpose = request.query_params.get("purpose")
        wanted = [info for info in files if purpose in (None, info.purpose)]
        return _page(request, wanted, MAX_FILES_PAGE, MAX_FILES_PAGE)

    async def _get_file(self, request: Request) -> Response:
        return JSONResponse((await self._file(request)).to_openai())

    async def _get_content(self, request: Request) -> Response:
        info = await self._file(request)
        path = self._tools.contents.path(info.id)
        if not await asyncio.to_thread(path.exists):  # it was deleted a moment ago
            raise NotFound("no such file", field="file_id")
        return FileResponse(path, media_type="application/jsonl", filename=info.filename)

    async def _delete_file(self, request: Request) -> Response:
        tenant, file_id = self._tenant_of(request.headers), request.path_params["file_id"]
        await asyncio.to_thread(self._tools.store.drop_file, tenant.name, file_id)
        await asyncio.to_thread(self._tools.contents.drop, file_id)
        return JSONResponse({"id": file_id, "object": "file", "deleted": True})

    async def _file(self, request: Request) -> FileInfo:
        tenant = self._tenant_of(request.headers)
        return await asyncio.to_thread(self._tools.store.file, tenant.name, request.path_params["file_id"])

    # -- batches -----------------------------------------------------------------------------------------------------

    async def create(self, tenant: Tenant, data: object) -> dict[str, object]:
        """POST /v1/batches with this body. Raises: BatonError."""
        body = parse(CreateBatch, data)
        if body.endpoint not in ENDPOINTS:
            raise InvalidRequest(
                f"endpoint is not run in batches; the limit is one of {', '.join(ENDPOINTS)}", field="endpoint"
            )
        if body.completion_window != WINDOW:
            raise InvalidRequest(f"completion_window is not known; the limit is {WINDOW}", field="completion_window")
        check_metadata(body.metadata or {})
        tenant.check(BATCH, 0)
        now_s = self._tools.now_unix_s()
        batch = Batch(
            new_id("batch"),
            tenant.name,
            body.endpoint,
            body.input_file_id,
            now_s,
            now_s + WINDOW_S,
            metadata=body.metadata or {},
        )
        await asyncio.to_thread(self._tools.store.add_batch, batch)
        log.info("batch_created", batch_id=batch.id, tenant=tenant.name)
        self._on_new_batch()
        return batch.to_openai()

    async def _list_batches(self, request: Request) -> Response:
        tenant = self._tenant_of(request.headers)
        batches = await asyncio.to_thread(self._tools.store.batches, tenant.name)
        return _page(request, batches, BATCHES_PAGE, MAX_BATCHES_PAGE)

    async def _get_batch(self, request: Request) -> Response:
        tenant = self._tenant_of(request.headers)
        batch = await asyncio.to_thread(self._tools.store.batch, tenant.name, request.path_params["batch_id"])
        return JSONResponse(batch.to_openai())

    async def _cancel_batch(self, request: Request) -> Response:
        tenant, batch_id = self._tenant_of(request.headers), request.path_params["batch_id"]
        batch = await asyncio.to_thread(self._tools.store.cancel, tenant.name, batch_id, self._tools.now_unix_s())
        log.info("batch_cancelled", batch_id=batch.id, was_running=batch.status is Status.CANCELLING)
        return JSONResponse(batch.to_openai())


class Upload:
    """A file on its way to the disk, line by line under a LineCheck. Runs in whatever thread feeds it, one at a time."""

    def __init__(self, file: IO[bytes], check: LineCheck, max_bytes: int) -> None:
        self.num_bytes = 0
        self._file = file
        self._check = check
        self._max_bytes = max_bytes
        self._number = 0  # of lines whose end came
        self._begun: list[bytes] = []  # of the line whose end has not come

    def take(self, data: bytes) -> None:
        """Raises: InvalidRequest."""
        self.num_bytes += len(data)
        if self.num_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        self._file.write(data)
        *whole, rest = data.split(b"\n")
        for line in whole:
            self._judge(b"".join([*self._begun, line]))
            self._begun = []
        self._begun.append(rest)

    def end(self) -> None:
        """Raises: InvalidRequest."""
        self._judge(b"".join(self._begun))
        if not self._check.num_lines:
            raise InvalidRequest("file has no line; the limit is at least 1", field="file")

    def _judge(self, line: bytes) -> None:
        self._number += 1
        if text := line.strip():
            self._check.take(self._number, text)


def _check_fields(form: Form) -> None:
    purpose = form.fields.pop("purpose", None)
    if purpose != INPUT:
        raise InvalidRequest(f"purpose is missing or another one; the limit is {INPUT}", field="purpose")
    if form.filename is None:
        raise InvalidRequest("file is missing", field="file")
    if form.fields:
        name = ascii(min(form.fields)[:64])[1:-1]
        raise InvalidRequest(f"{name} is not a field that this server knows", field=name)


def _page(request: Request, rows: Sequence[Row], default: int, most: int) -> Response:
    """Newest first, or as `order` says, behind `after`."""
    query = request.query_params
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most):
        raise InvalidRequest(f"limit is no number within [1, {most}]", field="limit")
    if query.get("order", "desc") not in ("asc", "desc"):
        raise InvalidRequest("order is not known; the limit is one of asc, desc", field="order")
    ordered = list(rows) if query.get("order") == "asc" else list(reversed(rows))
    if after := query.get("after"):
        places = [place for place, row in enumerate(ordered) if row.id == after]
        if not places:
            raise NotFound("after names nothing that is in the list", field="after")
        ordered = ordered[places[0] + 1 :]
    data = [row.to_openai() for row in ordered[: int(limit)]]
    ids = [row.id for row in ordered[: int(limit)]]
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": len(ordered) > len(ids),
        }
    )


def _too_large(limit: int) -> InvalidRequest:
    return InvalidRequest(f"file is too large; the limit is {limit} bytes", field="file")
