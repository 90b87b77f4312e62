"""Who may do what on the admin endpoint: bearer tokens, ETags, and the refusals that are this endpoint's alone."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from typing import Annotated

from fastapi import Header, Request

from router.controller.admin_tokens import OPERATOR, Token, digest_of

IfMatch = Annotated[str | None, Header(alias="if-match")]


class Refusal(Exception):
    """An answer of this endpoint alone, such as 412."""

    def __init__(self, status: int, code: str, message: str, *, field: str = "", etag: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field
        self.etag = etag


class Doors:
    """Checks a request's token; each method is a FastAPI dependency that yields the caller's name and notes it for the audit."""

    def __init__(self, tokens: Callable[[], Sequence[Token]]) -> None:
        """`tokens`: those in force now; hashes are compared in constant time, secrets are never kept or logged."""
        self._tokens = tokens

    def view(self, request: Request, authorization: Annotated[str, Header()] = "") -> str:
        return self._caller(request, authorization).name

    def operate(self, request: Request, authorization: Annotated[str, Header()] = "") -> str:
        caller = self._caller(request, authorization)
        if caller.role != OPERATOR:
            raise Refusal(403, "forbidden", f"token {caller.name!r} is a {caller.role}; this needs an operator")
        return caller.name

    def _caller(self, request: Request, authorization: str) -> Token:
        scheme, _, secret = authorization.partition(" ")
        given = digest_of(secret.strip())
        if scheme.lower() == "bearer":
            for token in self._tokens():
                if hmac.compare_digest(token.digest, given):
                    request.state.caller = token.name
                    return token
        raise Refusal(401, "unauthorized", "send 'Authorization: Bearer <token>'; tokens are in the run folder")


def etag(version: int) -> str:
    return f'"{version}"'


def require_match(if_match: str | None, version: int, who: str) -> None:
    """Raises: Refusal: 428 without If-Match, 412 where another version is in force than those it names."""
    if if_match is None:
        raise Refusal(428, "precondition_required", "send If-Match with the ETag of a GET", field="if-match")
    tags = {tag.strip() for tag in if_match.split(",")}
    if not tags & {"*", etag(version)}:
        raise stale(version, who)


def stale(version: int, who: str) -> Refusal:
    message = f"version {version} is in force, set by {who}; read it and try again"
    return Refusal(412, "stale", message, field="if-match", etag=etag(version))
