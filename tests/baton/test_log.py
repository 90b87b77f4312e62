"""What a log line holds of an exception: where and what, and nothing that the exception repeats."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator

import pytest

from baton.errors import WorkerLost
from baton.log import JsonLines, get_log

SECRET = "a prompt that nobody may read"


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, str]]]]:
    """What has been logged since, by Baton and by asyncio, as a process writes it."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(JsonLines("test"))
    loggers = [logging.getLogger(name) for name in ("baton", "asyncio")]
    for logger in loggers:
        logger.addHandler(handler)
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    for logger in loggers:
        logger.removeHandler(handler)


def raises() -> None:
    try:
        int(SECRET)
    except ValueError as error:
        raise KeyError(SECRET) from error


def test_a_traceback_names_lines_and_types_but_not_what_a_parser_quotes(
    lines: Callable[[], list[dict[str, str]]],
) -> None:
    try:
        raises()
    except KeyError:
        get_log("x").exception("failed", request_id="r")
    (line,) = lines()
    assert SECRET not in json.dumps(line)
    assert (line["event"], line["request_id"]) == ("failed", "r")
    assert "int(SECRET)" in line["traceback"]
    assert line["traceback"].count("\nValueError\n") == 1
    assert line["traceback"].endswith("\nKeyError")


def test_our_own_errors_and_those_of_the_system_are_told_whole(lines: Callable[[], list[dict[str, str]]]) -> None:
    get_log("x").exception("failed", WorkerLost("decode-0 is gone"))
    get_log("x").exception("failed", FileNotFoundError(2, "No such file", "/x"))
    assert [line["traceback"] for line in lines()] == [
        "WorkerLost: decode-0 is gone",
        "FileNotFoundError: [Errno 2] No such file: '/x'",
    ]


def test_asyncio_repeats_no_exception_either(lines: Callable[[], list[dict[str, str]]]) -> None:
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    future.set_exception(ValueError(SECRET))
    del future  # never retrieved
    loop.close()
    (line,) = lines()
    assert line["event"] == "Future exception was never retrieved"
    assert SECRET not in json.dumps(line)
