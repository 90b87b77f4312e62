"""Who may do what on the admin endpoint: bearer tokens, and the refusals that are this endpoint's alone."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Annotated

from fastapi import Header


@dataclass(frozen=True, slots=True)
class Token:
    """Who may do what. `secret` is compared in constant time and never logged."""

    name: str
    role: str  # viewer | operator
    secret: str


class Refusal(Exception):
    """An answer of this endpoint alone, such as 412."""

    def __init__(self, status: int, code: str, message: str, *, field: str = "", etag: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field
        self.etag = etag


class Doors:
    """Checks a request's token; each method is a FastAPI dependency that yields the caller's name."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens

    def view(self, authorization: Annotated[str, Header()] = "") -> str:
        return self._caller(authorization).name

    def operate(self, authorization: Annotated[str, Header()] = "") -> str:
        caller = self._caller(authorization)
        if caller.role != "operator":
            raise Refusal(403, "forbidden", f"token {caller.name!r} is a {caller.role}; this needs an operator")
        return caller.name

    def _caller(self, authorization: str) -> Token:
        scheme, _, secret = authorization.partition(" ")
        given = secret.strip().encode()
        if scheme.lower() == "bearer":
            for token in self._tokens:
                if hmac.compare_digest(token.secret.encode(), given):
                    return token
        raise Refusal(401, "unauthorized", "send 'Authorization: Bearer <token>'; tokens are in the run folder")
