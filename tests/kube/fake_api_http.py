"""The fake API server's HTTP: paths and queries to verbs, errors to Status objects, a watch to a chunked stream of lines.

One thread per connection. The order of the checks is the real one's: who (401), may they (403), is it there and right.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.kube import fake_api_discovery as discovery
from tests.kube.fake_api_faults import Fault, Faults
from tests.kube.fake_api_patches import APPLY
from tests.kube.fake_api_rbac import Access, User, authorize
from tests.kube.fake_api_resources import SERVICE_ACCOUNTS, ApiError, Json, Resource, bad_request
from tests.kube.fake_api_verbs import Selection, Verbs, Write

WATCH_S = 1800.0  # of a watch that names no timeoutSeconds; the real one: 30-60 min
BODY_METHODS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, slots=True)
class Call:
    """One call as it was answered. `code` is 0 where the connection was closed before anything was done."""

    user: str
    access: Access
    code: int


class Backend(Protocol):
    """What the handlers need of the server that they answer for."""

    @property
    def verbs(self) -> Verbs: ...
    @property
    def faults(self) -> Faults: ...
    @property
    def resources(self) -> tuple[Resource, ...]: ...
    def user_of(self, token: str) -> User | None: ...
    def token_for(self, namespace: str, name: str) -> str: ...
    def begin(self, access: Access) -> None: ...
    def note(self, call: Call) -> None: ...


class Dropped(Exception):
    """The connection is to be closed without an answer."""


class Listener(ThreadingHTTPServer):
    """One life of the server on its port; `end` breaks every connection, watches in flight too."""

    daemon_threads = True
    block_on_close = True
    request_queue_size = 128

    def __init__(self, backend: Backend, port: int) -> None:
        self.backend = backend
        self.going = True
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), Handler)
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, name="fake-api")
        self._thread.start()

    def end(self) -> None:
        self.going = False
        self.shutdown()
        self._thread.join()
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        with self.backend.verbs.store.changed:
            self.backend.verbs.store.changed.notify_all()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._sockets.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no error; anything else is a bug here and is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Listener
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Calls are noted by the backend."""

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _answer(self) -> None:
        url = urlsplit(self.path)
        self._query = dict(parse_qsl(url.query))
        self._body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            self._serve(url.path)
        except Dropped:
            self.close_connection = True
        except ApiError as error:
            self._send(error.code, error.status(), error.retry_after_s)

    def _serve(self, path: str) -> None:
        backend = self.server.backend
        user = self._user()
        if (document := discovery.document(path, backend.resources)) is not None:
            self._send(200, document)
        elif path == discovery.MY_ACCESS:
            self._send(201, discovery.review(backend.verbs.store, user, self._json(), backend.resources))
        else:
            self._serve_objects(user, self._access(path))

    def _user(self) -> User:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        user = self.server.backend.user_of(token) if scheme == "Bearer" else None
        if user is None:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return user

    def _access(self, path: str) -> Access:
        target = discovery.parse(path, self.server.backend.resources)
        verb, name = BODY_METHODS.get(self.command, ""), target.name
        if self.command == "GET":
            verb = "get" if name else "watch" if self._query.get("watch") in ("true", "1") else "list"
        elif self.command == "DELETE":
            verb = "delete" if name else "deletecollection"
        if not name:
            fields = dict(part.split("=", 1) for part in self._query.get("fieldSelector", "").split(",") if "=" in part)
            name = fields.get("metadata.name", "")
        return Access(verb, target.resource, target.namespace, name, target.subresource)

    def _serve_objects(self, user: User, access: Access) -> None:
        backend = self.server.backend
        backend.begin(access)
        fault = backend.faults.meet(access)
        code = 0
        try:
            self._suffer(fault)
            authorize(backend.verbs.store, user, access)
            if access.verb == "watch":
                code = 200
                return self._watch(access, fault)
            code, body = self._act(access, user)
        except ApiError as error:
            code = error.code
            raise
        finally:
            backend.note(Call(user.name, access, code))
        if fault is not None and fault.drop_answer:
            raise Dropped
        return self._send(code, body)

    def _suffer(self, fault: Fault | None) -> None:
        if fault is None:
            return
        if fault.delay_s:
            fault.released.wait(fault.delay_s)
        if fault.drop or not self.server.going:
            raise Dropped
        if (error := fault.error()) is not None:
            raise error

    def _act(self, access: Access, user: User) -> tuple[int, Json]:
        verbs, resource, where = self.server.backend.verbs, access.resource, access.namespace
        name, sub = access.name, access.subresource
        write = self._write()
        match access.verb:
            case "get":
                return 200, verbs.get(resource, where, name, sub)
            case "list":
                limit, token = int(self._query.get("limit", 0)), self._query.get("continue", "")
                return 200, verbs.listing(resource, where, self._selects(), limit, token)
            case "create" if sub == "eviction":
                return 201, verbs.evict(where, name, self._json(), write)
            case "create" if sub == "token":
                verbs.get(SERVICE_ACCOUNTS, where, name)
                return 201, self._json() | {"status": {"token": self.server.backend.token_for(where, name)}}
            case "create" if not sub:
                return 201, verbs.create(resource, where, self._json(), write)
            case "update":
                return 200, verbs.update(resource, where, name, self._json(), sub, write)
            case "patch":
                return 200, self._patch(access, user, write)
            case "delete" if not sub:
                return 200, verbs.delete(resource, where, name, self._delete_options(), write)
            case "deletecollection":
                return 200, verbs.delete_all(resource, where, self._selects(), self._delete_options())
            case _:
                raise ApiError(
                    405, "MethodNotAllowed", "the server does not allow this method on the requested resource"
                )

    def _patch(self, access: Access, user: User, write: Write) -> Json:
        """An apply of what is not there creates it, and needs that right too."""
        verbs, resource, where = self.server.backend.verbs, access.resource, access.namespace
        content_type = self.headers.get("Content-Type", "").split(";")[0].strip()
        body = yaml.safe_load(self._body) if content_type == APPLY else self._json()
        if content_type == APPLY:
            if not write.manager:
                raise bad_request("fieldManager is required for apply patch")
            if verbs.find(resource, where, access.name) is None:
                authorize(verbs.store, user, Access("create", resource, where, access.name, access.subresource))
        elif write.force:
            raise bad_request("PatchOptions.force may not be specified for non-apply patch")
        return verbs.patch(resource, where, access.name, content_type, body, access.subresource, write)

    def _write(self) -> Write:
        """What a call says about its write. An apply must name its manager, others are known by their agent."""
        if (dry_run := self._query.get("dryRun", "")) not in ("", "All"):
            raise bad_request(f"Unsupported value: {dry_run}: dryRun")
        applies = self.headers.get("Content-Type", "").startswith(APPLY)
        agent = "" if applies else self.headers.get("User-Agent", "unknown").split("/")[0]
        manager = self._query.get("fieldManager", agent)
        return Write(manager, dry_run == "All", self._query.get("force", "").lower() == "true")

    def _selects(self) -> Selection:
        return Selection(self._query.get("labelSelector", ""), self._query.get("fieldSelector", ""))

    def _delete_options(self) -> Json:
        """Of the body, and of the query where it says more."""
        options: Json = dict(self._json())
        if "gracePeriodSeconds" in self._query:
            options["gracePeriodSeconds"] = int(self._query["gracePeriodSeconds"])
        if "propagationPolicy" in self._query:
            options["propagationPolicy"] = self._query["propagationPolicy"]
        return options

    def _json(self) -> Any:
        try:
            return json.loads(self._body or b"{}")
        except json.JSONDecodeError as error:
            raise bad_request(f"the body is not JSON: {error}") from error

    def _watch(self, access: Access, fault: Fault | None) -> None:
        verbs, query = self.server.backend.verbs, self._query
        ends_s = time.monotonic() + float(query.get("timeoutSeconds", WATCH_S))
        events = verbs.watch(
            access.resource,
            access.namespace,
            self._selects(),
            query.get("resourceVersion", ""),
            ends_s,
            lambda: self.server.going,
            bookmarks=query.get("allowWatchBookmarks") in ("true", "1", "True"),
            initial_end=query.get("sendInitialEvents") in ("true", "1", "True"),
        )
        self._head(200, "Transfer-Encoding: chunked")
        self._stream(events, fault)

    def _stream(self, events: Iterator[Json], fault: Fault | None) -> None:
        for number, event in enumerate(events):
            line = json.dumps(event).encode() + b"\n"
            if fault is not None and fault.cut_after == number:
                self.wfile.write(b"%x\r\n%b" % (len(line), line[: len(line) // 2]))
                raise Dropped
            self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
        if not self.server.going:  # a server that goes away says no goodbye
            raise Dropped
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, code: int, body: Any, retry_after_s: int | None = None) -> None:
        content = json.dumps(body).encode()
        more = [f"Retry-After: {retry_after_s}"] if retry_after_s is not None else []
        self._head(code, f"Content-Length: {len(content)}", *more, content=content)

    def _head(self, code: int, *headers: str, content: bytes = b"") -> None:
        reason = self.responses[code][0] if code in self.responses else ""
        lines = [f"HTTP/1.1 {code} {reason}", "Content-Type: application/json", *headers, "", ""]
        self.wfile.write("\r\n".join(lines).encode() + content)
