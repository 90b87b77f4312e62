"""Structured logs: one JSON object per line on stderr, one line per state change, prompts and output never.

    log = get_log("router.handoff")
    log.info("worker_lost", worker="prefill-0", reason="3 heartbeats missed")

Standard logging underneath, so levels and captures work as everywhere. Values are written with `str` where JSON has no
word for them. Safe from any thread.
"""

from __future__ import annotations

import json
import logging
import sys

_FIELDS = "baton_fields"


class Log:
    """Writes events of one part of a process; `fields` carry ids and numbers, never text of a call."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"baton.{name}")

    def debug(self, event: str, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """An error with the traceback of the exception being handled."""
        if self._logger.isEnabledFor(logging.ERROR):
            self._logger.error(event, extra={_FIELDS: fields}, exc_info=True)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields})


def get_log(name: str) -> Log:
    return Log(name)


class JsonLines(logging.Formatter):
    """{"ts", "level", "process", "logger", "event", ...fields} on one line; a traceback is one escaped string."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name.removeprefix("baton."),
            "event": record.getMessage(),
        }
        line.update(record.__dict__.get(_FIELDS, {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(process: str, level: str = "info") -> None:
    """Send this process's logs to stderr; called once by a process's entry. Levels: debug, info, warning, error.

    Warnings of libraries (uvicorn, asyncio, grpc) that nobody else handles come out in the same shape.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines(process))
    logging.lastResort = logging.StreamHandler(sys.stderr)
    logging.lastResort.setLevel(logging.WARNING)
    logging.lastResort.setFormatter(handler.formatter)
    root = logging.getLogger("baton")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
