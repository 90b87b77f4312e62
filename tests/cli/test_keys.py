"""`baton keys new`: what it prints is what a router takes, and the key itself is in no file."""

from __future__ import annotations

import json
import re

import pytest

from cli.main import main
from router.controller.admin_tokens import Token, parse_tokens
from router.tenants import parse_keys


def test_the_printed_line_lets_the_printed_key_in_with_its_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "search", "--weight", "2", "--max-concurrent", "8"]) == 0
    printed = capsys.readouterr().out
    key = re.search(r"bk-[\w-]{43}", printed)
    line = re.search(r"^- ({.*})$", printed, re.MULTILINE)
    assert key is not None
    assert line is not None
    assert key[0] not in line[1]
    tenant = parse_keys([f"keys:\n- {line[1]}"]).tenant({"x-api-key": key[0]})
    assert (tenant.name, tenant.weight, tenant.max_concurrent) == ("search", 2.0, 8.0)
    assert json.loads(line[1]).keys() == {"name", "sha256", "weight", "max_concurrent"}


def test_an_admin_token_is_printed_once_with_the_line_that_lets_it_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "admin", "ann", "--role", "operator"]) == 0
    printed = capsys.readouterr().out
    token = re.search(r"ba-[\w-]{43}", printed)
    line = re.search(r"^- ({.*})$", printed, re.MULTILINE)
    assert token is not None
    assert line is not None
    assert token[0] not in line[1]
    assert parse_tokens([f"tokens:\n- {line[1]}"]) == (Token.of("ann", "operator", token[0]),)


def test_a_name_that_a_router_would_refuse_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "a b"]) == 1
    assert "name must match" in capsys.readouterr().err
