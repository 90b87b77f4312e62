"""Who calls: API keys, each of a Tenant with its weight and limits. Pure but for drawing a key.

A key file lists entries, YAML or JSON; several with one name are one tenant with several keys, for rotation:

    keys:
    - name: search
      sha256: 0a1b...          of the key, from `baton keys new search`; the key itself is written down nowhere
      weight: 2                the tenant's share between tenants that wait
      max_concurrent: 64       answers at once, an n=4 call counts 4
      requests_per_min: 600
      tokens_per_min: 200000   prompt and output together
      max_priority: 0          a call may ask for no higher one
      slo_classes: [interactive, batch]
      share_cache: false       true: its prompts share cached prefixes with everybody who says the same
All but name and sha256 may be left out: weight 1, no limit, every class, a cache of its own. Without a file there is one
tenant, OPEN, and no key is asked for.

Keys are 256 random bits, so a plain hash hides them (NIST SP 800-63B asks for slow salted hashes for secrets that people
choose), and what the dictionary's timing could tell is about the hash of a guess, not about a key. Never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import yaml

from baton.errors import ConfigError, InvalidRequest, Unauthenticated

KEY_PREFIX = "bk-"  # so that scanners for leaked secrets can be told what to look for
KEY_BYTES = 32  # 256 bits: no guessing
MAX_KEY_CHARS = 256  # of what a caller sends; ours have 46
MAX_PRIORITY = 100  # router/validate.py
NO_LIMIT = math.inf
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")  # it becomes a metric's label
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SETTING = re.compile(r"[a-z_]{1,20}")
_BEARER = "bearer "


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whose call it is, and what its keys allow. Equal tenants have equal rights."""

    name: str
    weight: float = 1.0
    max_concurrent: float = NO_LIMIT  # sequences
    requests_per_min: float = NO_LIMIT
    tokens_per_min: float = NO_LIMIT
    max_priority: int = MAX_PRIORITY
    slo_classes: frozenset[str] = frozenset()  # empty = every class
    share_cache: bool = False

    @property
    def salt(self) -> bytes:
        """Part of every block hash (baton/hashing.py): tenants find each other's prefixes only where both agree to."""
        return b"" if self.share_cache else self.name.encode()

    def check(self, slo_class: str, priority: int) -> None:
        """Raises: InvalidRequest, where the key does not allow the class or the priority."""
        if self.slo_classes and slo_class not in self.slo_classes:
            allowed = ", ".join(sorted(self.slo_classes))
            raise InvalidRequest(
                f"slo.class_name is {slo_class!r}; the limit of this key is one of {allowed}", field="slo.class_name"
            )
        if priority > self.max_priority:
            raise InvalidRequest(
                f"priority is {priority}; the limit of this key is {self.max_priority}", field="priority"
            )


OPEN = Tenant("open", share_cache=True)


class KeyRing:
    """Finds the Tenant of a key. Immutable; a changed file makes another one."""

    def __init__(self, tenants_by_digest: Mapping[bytes, Tenant] | None = None) -> None:
        """None: no keys are asked for, every caller is OPEN."""
        self._by_digest = None if tenants_by_digest is None else {d: (d, t) for d, t in tenants_by_digest.items()}

    @property
    def tenants(self) -> dict[str, Tenant]:
        """By name."""
        return {OPEN.name: OPEN} if self._by_digest is None else {t.name: t for _, t in self._by_digest.values()}

    def tenant(self, fields: Mapping[str, str]) -> Tenant:
        """Of HTTP headers or gRPC metadata, names in lower case.

        Raises:
            Unauthenticated: no key, or an unknown one.
        """
        if self._by_digest is None:
            return OPEN
        key = _key(fields)
        if not key:
            raise Unauthenticated(
                "authorization is missing; send `Bearer <API key>`, or x-api-key", field="authorization"
            )
        digest = digest_of(key)
        found = self._by_digest.get(digest)
        if found is None or not hmac.compare_digest(found[0], digest):
            raise Unauthenticated("the API key is not known here", field="authorization")
        return found[1]


def _key(fields: Mapping[str, str]) -> str:
    authorization = fields.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return fields.get("x-api-key", "")


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key[:MAX_KEY_CHARS].encode("utf-8", "surrogateescape")).digest()


def new_key() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


# -- the file ----------------------------------------------------------------------------------------------------------


def parse_keys(texts: Sequence[str]) -> KeyRing:
    """Read key files as one.

    Raises:
        ConfigError: it is not what the module's docstring says; the message names the entry and its field.
    """
    by_digest: dict[bytes, Tenant] = {}
    by_name: dict[str, Tenant] = {}
    for number, entry in enumerate((entry for text in texts for entry in _entries(text)), 1):
        where = f"API key {number}"
        digest, tenant = _parsed(where, entry)
        if digest in by_digest:
            raise _wrong(where, "sha256", "is that of an earlier one")
        if by_name.setdefault(tenant.name, tenant) != tenant:
            raise _wrong(where, "name", f"is {tenant.name}, of which an earlier one has other limits")
        by_digest[digest] = tenant
    return KeyRing(by_digest)


def _entries(text: str) -> Sequence[object]:
    try:
        data = yaml.load(text, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError) as error:  # their own messages quote the file; a month 13 is a ValueError
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        raise ConfigError(
            f"the API key file is neither YAML nor JSON{f' in line {mark.line + 1}' if mark else ''}",
            field="api_keys_file",
        ) from None
    entries = data.get("keys") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise ConfigError("the API key file has no list `keys`", field="api_keys_file")
    return entries


def _parsed(where: str, entry: object) -> tuple[bytes, Tenant]:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is no map of settings", field="api_keys_file")
    settings = {str(name): value for name, value in entry.items()}
    name, sha256 = settings.pop("name", None), settings.pop("sha256", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == OPEN.name or name.startswith(KEY_PREFIX):
        raise _wrong(where, "name", f"must match {_NAME.pattern}, not be {OPEN.name!r} and not start like a key")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise _wrong(where, "sha256", "must be 64 hexadecimal digits in lower case")
    known = {field.name for field in fields(Tenant)} - {"name"}
    for setting in settings.keys() - known:
        shown = (
            setting if _SETTING.fullmatch(setting) else "something"
        )  # else: who mistakes a line may have put a key there
        raise _wrong(where, shown, f"is no setting; those are {', '.join(sorted(known))}")
    tenant = Tenant(name, max_priority=0)
    return bytes.fromhex(sha256), replace(tenant, **{key: _value(where, key, value) for key, value in settings.items()})


def _value(where: str, setting: str, value: object) -> Any:  # of the type that the field of Tenant has
    if setting == "share_cache":
        if not isinstance(value, bool):
            raise _wrong(where, setting, "must be true or false")
        return value
    if setting == "slo_classes":
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _wrong(where, setting, "must be a list of names")
        return frozenset(value)
    if setting == "max_priority":
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_PRIORITY:
            raise _wrong(where, setting, f"must be a whole number in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < NO_LIMIT:
        raise _wrong(where, setting, "must be a number above 0")
    return float(value)


def _wrong(where: str, setting: str, why: str) -> ConfigError:
    return ConfigError(f"{where}: {setting} {why}", field="api_keys_file")
