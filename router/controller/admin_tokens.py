"""Who may use the admin endpoint: named tokens of two files, of which only hashes stay in memory.

    tokens.json               in the run folder, drawn by `baton up`, mode 0600: {name: {"role", "secret"}}; not
                              needed where there is the other one
    controller.admin_tokens_file   YAML or JSON, a file or a folder of them as a secret is mounted:
        tokens:
        - name: ann           as history and audit lines have it; several entries of one name and role are one person's tokens
          role: operator      viewer | operator
          sha256: 0a1b...     of the token, from `baton keys admin ann`; the token itself is written down nowhere

The second one is looked at when a request comes, at most once a second: a token that was taken out is refused then. A file that
became bad changes nothing; one log line says so. Tokens are 256 random bits, so a plain hash hides them (router/tenants.py).
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from baton import clock
from baton.errors import ConfigError
from baton.log import get_log

log = get_log("controller.tokens")

TOKEN_PREFIX = "ba-"  # so that scanners for leaked secrets can be told what to look for
VIEWER, OPERATOR = "viewer", "operator"
CHECK_S = 1.0  # as router/key_file.py
FIELD = "controller.admin_tokens_file"
MAX_FILE_BYTES = 1 << 20  # 5,000 tokens
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")  # it stands in history and logs
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIELDS = ("name", "role", "sha256")


@dataclass(frozen=True, slots=True)
class Token:
    """Who it lets in as what."""

    name: str
    role: str  # VIEWER | OPERATOR
    digest: bytes  # SHA-256 of the secret

    @classmethod
    def of(cls, name: str, role: str, secret: str) -> Token:
        return cls(name, role, digest_of(secret))


def new_token() -> str:
    return TOKEN_PREFIX + secrets.token_urlsafe(32)  # 256 bits: no guessing


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class TokenFiles:
    """`current()` is what is in force now."""

    def __init__(self, drawn: Path, more: str, now_s: Callable[[], float] = clock.now_s) -> None:
        """`drawn`: tokens.json; `more`: the setting, "" = none.

        Raises:
            ConfigError: missing or wrong.
        """
        self._drawn = read_drawn(drawn) if drawn.exists() or not more else ()  # a pod draws none
        self._more = Path(more) if more else None
        self._now_s = now_s
        self._checked_s = now_s()
        self._state: _State = ()
        self._tokens = self._drawn
        if self._more is not None:
            self._state = _state(self._more)
            self._tokens = _joined(self._drawn, _load(self._more))

    def current(self) -> tuple[Token, ...]:
        if self._more is not None and self._now_s() - self._checked_s >= CHECK_S:
            self._checked_s = self._now_s()
            state = _state(self._more)
            if state != self._state:
                self._state = state
                self._read_again(self._more)
        return self._tokens

    def _read_again(self, path: Path) -> None:
        try:
            self._tokens = _joined(self._drawn, _load(path))
        except ConfigError as error:
            log.error("admin_tokens_refused", reason=error.message)
        else:
            log.info("admin_tokens_loaded", num_tokens=len(self._tokens))


def read_drawn(file: Path) -> tuple[Token, ...]:
    """Raises: ConfigError: missing or damaged."""
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        return tuple(Token.of(name, str(entry["role"]), str(entry["secret"])) for name, entry in entries.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"cannot read the admin tokens in {file}: {error}", field="controller.run_dir") from error


def parse_tokens(texts: Iterable[str]) -> tuple[Token, ...]:
    """Read token files as one.

    Raises:
        ConfigError: it is not what the module's docstring says; the message names the entry and its field, never a value.
    """
    entries = [entry for text in texts for entry in _entries(text)]
    return _joined(_parsed(f"admin token {number}", entry) for number, entry in enumerate(entries, 1))


def _entries(text: str) -> list[object]:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:  # its message quotes the file
        raise ConfigError(f"{FIELD}: not YAML", field=FIELD) from None
    if not isinstance(data, dict) or set(data) != {"tokens"} or not isinstance(data["tokens"], list):
        raise ConfigError(f"{FIELD}: must hold `tokens:` and a list of entries, nothing else", field=FIELD)
    return data["tokens"]


def _parsed(where: str, entry: object) -> Token:
    if not isinstance(entry, Mapping):
        raise _wrong(where, "entry", f"must have {', '.join(_FIELDS)}")
    for name in entry:
        if name not in _FIELDS:
            near = difflib.get_close_matches(str(name), _FIELDS, n=1, cutoff=0.0)[0]
            raise _wrong(where, "an unknown field", f"is there; the nearest known is {near}")
    name, role, sha256 = (entry.get(field) for field in _FIELDS)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(where, "name", f"must match {_NAME.pattern}")
    if role not in (VIEWER, OPERATOR):
        raise _wrong(where, "role", f"must be {VIEWER} or {OPERATOR}")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise _wrong(where, "sha256", "must be 64 hexadecimal digits in lower case")
    return Token(name, role, bytes.fromhex(sha256))


def _joined(*groups: Iterable[Token]) -> tuple[Token, ...]:
    """All of them. Raises: ConfigError: a token twice, or one name with two roles."""
    tokens = [token for group in groups for token in group]
    roles: dict[str, str] = {}
    digests: set[bytes] = set()
    for token in tokens:
        if token.digest in digests:
            raise _wrong(f"admin token of {token.name}", "sha256", "is that of another one")
        digests.add(token.digest)
        if roles.setdefault(token.name, token.role) != token.role:
            raise _wrong(f"admin token of {token.name}", "role", "differs from that of another one of this name")
    return tuple(tokens)


def _wrong(where: str, field: str, what: str) -> ConfigError:
    return ConfigError(f"{FIELD}: {where}: {field} {what}", field=FIELD)


_State = tuple[tuple[str, int, int], ...]  # name, size, mtime_ns of each file


def _state(path: Path) -> _State:
    """Empty where nothing is there."""
    try:
        stats = [(file, file.stat()) for file in _files(path)]
    except OSError:
        return ()
    return tuple((str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats)


def _files(path: Path) -> list[Path]:
    """Visible ones: Kubernetes mounts a secret as links into a hidden folder."""
    return sorted(file for file in path.iterdir() if not file.name.startswith(".")) if path.is_dir() else [path]


def _load(path: Path) -> tuple[Token, ...]:
    try:
        files = _files(path)
        if sum(file.stat().st_size for file in files) > MAX_FILE_BYTES:
            raise ConfigError(f"{FIELD}: {path} is larger than {MAX_FILE_BYTES} bytes", field=FIELD)
        return parse_tokens(file.read_text(encoding="utf-8") for file in files)
    except OSError as error:
        raise ConfigError(f"{FIELD}: {path} cannot be read: {error.strerror}", field=FIELD) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{FIELD}: {path} is not UTF-8", field=FIELD) from None
