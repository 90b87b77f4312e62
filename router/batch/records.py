"""What is kept of files and batches, and how OpenAI words it. Pure, immutable.

A batch's life; each state keeps the moment it was entered:

    1 VALIDATING ── lines counted, endpoint fits ──> 2 IN_PROGRESS ── every line has an outcome ──> 3 FINALIZING ──> COMPLETED
        └── a line does not fit ──> FAILED               │  └── 24 h are over ─────────────────────────────────────> EXPIRED
        └───────────── cancel ──────────> 4 CANCELLING <─┘ ── both files written ───────────────────────────────> CANCELLED
"""

from __future__ import annotations

import enum
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

WINDOW_S = 86_400.0  # the one completion window that OpenAI has, and its word for it
WINDOW = "24h"
_ID = re.compile(r"[a-z_]{4,9}[-_][0-9a-f]{24}")
INPUT, OUTPUT = "batch", "batch_output"  # purposes of files, OpenAI's words


class Status(enum.StrEnum):
    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


OPEN_STATUSES = (Status.VALIDATING, Status.IN_PROGRESS, Status.FINALIZING, Status.CANCELLING)  # somebody works on it


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file; its content lies in `Contents` under its id."""

    id: str
    tenant: str  # by name
    purpose: str
    filename: str
    num_bytes: int
    created_unix_s: float
    expires_unix_s: float

    def to_openai(self) -> dict[str, object]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": int(self.created_unix_s),
            "expires_at": int(self.expires_unix_s),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(frozen=True, slots=True)
class LineFault:
    """Why a batch failed before it began."""

    line: int  # from 1
    message: str
    param: str

    def to_openai(self) -> dict[str, object]:
        return {"code": "invalid_request", "line": self.line, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    id: str
    tenant: str
    endpoint: str  # path
    input_file_id: str
    created_unix_s: float
    expires_unix_s: float
    status: Status = Status.VALIDATING
    metadata: Mapping[str, str] = field(default_factory=dict)
    counts: Counts = Counts()
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: tuple[LineFault, ...] = ()
    entered_unix_s: Mapping[str, float] = field(default_factory=dict)  # by status

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_STATUSES

    def enter(self, status: Status, now_unix_s: float) -> Batch:
        """In another status; entering the one it is in changes nothing."""
        if status == self.status:
            return self
        return replace(self, status=status, entered_unix_s={**self.entered_unix_s, status.value: now_unix_s})

    def to_openai(self) -> dict[str, object]:
        times = {f"{s}_at": _whole(self.entered_unix_s.get(s)) for s in Status if s is not Status.VALIDATING}
        faults = {"object": "list", "data": [fault.to_openai() for fault in self.faults]} if self.faults else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": faults,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": int(self.created_unix_s),
            "expires_at": int(self.expires_unix_s),
            "request_counts": asdict(self.counts),
            "metadata": dict(self.metadata) or None,
            **times,
        }

    def to_text(self) -> str:
        """For a store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Batch:
        """What `to_text` wrote."""
        data = json.loads(text)
        data["status"] = Status(data["status"])
        data["counts"] = Counts(**data["counts"])
        data["faults"] = tuple(LineFault(**fault) for fault in data["faults"])
        return cls(**data)


def new_id(kind: str) -> str:
    """`kind`: file, batch, batch_req. 96 random bits: nobody guesses another tenant's."""
    separator = "-" if kind == "file" else "_"
    return f"{kind}{separator}{secrets.token_hex(12)}"


def is_id(text: str) -> bool:
    """Whether `new_id` may have made it."""
    return _ID.fullmatch(text) is not None


def _whole(instant_s: float | None) -> int | None:
    return None if instant_s is None else int(instant_s)
