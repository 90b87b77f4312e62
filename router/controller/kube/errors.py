"""What the API server answers, as far as a caller does something about it. All but these two are BatonErrors for operators."""

from __future__ import annotations


class Conflict(Exception):
    """409: somebody else wrote meanwhile. Read again and decide again."""


class Expired(Exception):
    """410: so old a version is not known any more. List again."""
