"""`baton slo` and `baton mode` against a real admin endpoint on a port of its own."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fastapi import FastAPI

from baton.config import ClusterConfig, ControllerConfig
from cli.main import main
from router.controller.admin_api import make_app
from router.controller.admin_tokens import Token
from router.controller.control_store import ControlStore
from router.controller.controller import Controller
from router.controller.database import SQLite
from tests.cli.admin_rig import Admin, admin_endpoint

ANN = Token.of("ann", "operator", "ann-secret")


@pytest.fixture
def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    @asynccontextmanager
    async def serve(tokens: Sequence[Token]) -> AsyncIterator[FastAPI]:
        controller = Controller(ControllerConfig(), ControlStore(SQLite(tmp_path / "slo.sqlite"), lambda: 1e9))
        yield make_app(controller, ClusterConfig(), lambda: (*tokens, ANN))
        await controller.close()

    with admin_endpoint(tmp_path, monkeypatch, serve) as endpoint:
        yield endpoint


def test_targets_are_read_changed_tried_and_rolled_back(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    assert admin.baton("slo", "get") == 0
    assert "SLO classes, version 1" in capsys.readouterr().out

    assert admin.baton("slo", "set", "interactive", "ttft_ms=900", "--dry-run") == 0
    tried = capsys.readouterr().out
    assert "interactive.ttft_ms: 2000 -> 900" in tried
    assert "no prediction is available" in tried
    assert "version 1 is in force" in tried

    targets = ("ttft_ms=500", "tpot_ms=62.5", "e2e_ms=9000")
    assert admin.baton("slo", "set", "gold", *targets, "--reason", "a customer") == 0
    assert "Version 2 is in force" in capsys.readouterr().out
    assert admin.baton("slo", "set", "gold", "e2e_ms=none", "--reason", "too hard", "--version", "2") == 0
    capsys.readouterr()
    assert admin.baton("slo", "get", "gold", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["version"], list(told["classes"])) == (3, ["gold"])
    assert (told["classes"]["gold"]["tpot_ms"], told["classes"]["gold"]["e2e_ms"]) == (62.5, None)

    assert admin.baton("slo", "rollback", "1") == 0
    assert "Version 4 is in force, with the classes of version 1" in capsys.readouterr().out
    assert admin.baton("slo", "history") == 0
    history = capsys.readouterr().out
    for words in ("back to version 1", "a customer", "gold.e2e_ms: 9000 -> -", "2001-09-09 01:46:40 UTC", "operator"):
        assert words in history


REFUSED = (
    (("set", "batch", "ttft_ms=5"), "--reason"),
    (("set", "batch", "ttft=5", "--reason", "x"), "nearest known is ttft_ms"),
    (("set", "batch", "ttft_ms=nan", "--reason", "x"), "not a finite number"),
    (("set", "batch", "ttft_ms=soon", "--reason", "x"), "not a number"),
    (("set", "batch", "ttft_ms", "--reason", "x"), "not FIELD=VALUE"),
    (("set", "bach", "ttft_ms=5", "--reason", "x"), "nearest is 'batch'"),
    (("set", "batch", "ttft_ms=-5", "--reason", "x"), "greater than or equal to 0.1"),
    (("set", "batch", "ttft_ms=5", "--reason", "x", "--version", "9"), "version 1 is in force, set by baton"),
    (("remove", "interactive", "--reason", "x"), "must stay"),
    (("get", "bach"), "nearest is 'batch'"),
    (("rollback", "9"), "no slo version 9"),
)


def test_what_is_refused_is_one_line_and_changes_nothing(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in REFUSED:
        assert admin.baton("slo", *words) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert says in line
        assert admin.baton("slo", "get", "--json") == 0
        assert json.loads(capsys.readouterr().out)["version"] == 1


def test_classes_are_exported_and_imported(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    assert admin.baton("slo", "set", "gold", "ttft_ms=5", "tpot_ms=1", "--reason", "x") == 0
    capsys.readouterr()
    assert admin.baton("slo", "export") == 0
    file = admin.folder / "classes.json"
    file.write_text(capsys.readouterr().out)
    assert admin.baton("slo", "remove", "gold", "--reason", "over") == 0
    assert admin.baton("slo", "import", str(file), "--reason", "back") == 0
    capsys.readouterr()
    assert admin.baton("slo", "get", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["version"], "gold" in told["classes"]) == (4, True)
    file.write_text("{")
    assert admin.baton("slo", "import", str(file), "--reason", "x") == 1


def test_the_mode_is_shown_and_changed_by_a_named_token(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    assert admin.baton("mode") == 0
    assert "advisory: it decides, and only says what it would do" in capsys.readouterr().out
    assert admin.baton("mode", "frozen") == 1
    assert "--reason" in capsys.readouterr().err
    token = admin.folder / "token"
    token.write_text("ann-secret\n")
    assert admin.baton("mode", "frozen", "--reason", "an audit", "--token-file", str(token)) == 0
    said = capsys.readouterr().out
    assert "frozen: it does nothing" in said
    assert "set by ann: an audit" in said
    assert admin.baton("mode", "--token-file", str(admin.folder / "none")) == 1
    assert "cannot read a token" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("slo",), ("slo", "set"), ("slo", "history"), ("slo", "rollback"), ("mode",)])
def test_help_says_what_it_is_for(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    assert "usage: baton" in capsys.readouterr().out
