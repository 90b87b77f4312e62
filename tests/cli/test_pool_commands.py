"""`baton pools`, `scale`, `flip`, `standby` and `decisions` against a real controller; flags of `baton up` for the autoscaler."""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fastapi import FastAPI

from baton.errors import ConfigError
from cli.main import main
from cli.options import add_config_flags, load_config
from router.controller.admin_tokens import Token
from router.controller.settings import Budget, ControlSettings, Mode, began
from tests.cli.admin_rig import Admin, admin_endpoint
from tests.controller.control_rig import Machines, life


@pytest.fixture
def admin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Admin]:
    """One decode and one prefill worker, mode frozen."""

    @asynccontextmanager
    async def serve(tokens: Sequence[Token]) -> AsyncIterator[FastAPI]:
        machines = Machines()
        async with life(tmp_path, machines, Mode.FROZEN) as rig:
            await rig.worker("decode-0")
            await rig.worker("prefill-0", "prefill")
            yield rig.app(tokens)
        await machines.stop_all()

    with admin_endpoint(tmp_path, monkeypatch, serve) as endpoint:
        yield endpoint


def test_pools_are_shown_ordered_and_explained(admin: Admin, capsys: pytest.CaptureFixture[str]) -> None:
    assert admin.baton("scale", "decode", "2", "--reason", "a launch") == 0
    assert capsys.readouterr().out == "create decode-1\n"
    assert admin.baton("scale", "decode", "2") == 0
    assert capsys.readouterr().out == "nothing to do\n"
    assert admin.baton("flip", "prefill-0", "both") == 0
    assert admin.baton("standby", "prefill-0") == 0
    capsys.readouterr()

    assert admin.baton("pools", "--json") == 0
    pools = json.loads(capsys.readouterr().out)["pools"]
    assert (pools["decode"]["desired"], pools["both"]["desired"], pools["prefill"]["workers"]) == (2, 0, [])
    assert admin.baton("pools") == 0
    shown = capsys.readouterr().out
    assert "decode-0, decode-1" in shown
    assert "autoscaler: frozen, no bound on GPUs; 5 more workers fit on this machine" in shown

    assert admin.baton("flip", "decode-7", "both") == 1
    assert "no worker 'decode-7'" in capsys.readouterr().err
    assert admin.baton("decisions", "-n", "2") == 0
    last, failed = capsys.readouterr().out.splitlines()
    assert last.endswith("drain prefill-0, then keep it as a standby: asked for by operator")
    assert "flip decode-7 to both NOT DONE (no worker 'decode-7'" in failed


@pytest.mark.parametrize(
    "words", [["scale", "poets", "1"], ["scale", "decode", "many"], ["flip", "decode-0"], ["standby"], ["scale"]]
)
def test_what_makes_no_sense_is_a_usage_error(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


def config_of(*words: str) -> tuple[str, int, int]:
    parser = argparse.ArgumentParser()
    add_config_flags(parser)
    controller = load_config(parser.parse_args(words)).config.controller
    return controller.mode, controller.max_gpus, controller.standby


def test_a_plain_baton_up_asks_for_nothing_and_autoscale_for_mode_auto() -> None:
    assert config_of() == ("", 0, 0)
    assert config_of("--autoscale", "--max-gpus", "8", "--standby", "1") == ("auto", 8, 1)
    assert config_of("--mode", "frozen") == ("frozen", 0, 0)
    with pytest.raises(ConfigError, match="leave out one of it and --mode frozen"):
        config_of("--autoscale", "--mode", "frozen")
    with pytest.raises(ConfigError, match="auto, advisory, frozen"):
        config_of("--mode", "automatic")


def test_a_new_fleet_begins_as_it_is_asked_to_and_else_as_the_database_has_it() -> None:
    kept = ControlSettings(Mode.FROZEN, Budget(max_gpus=4))
    assert began(kept, "", 0) == kept
    assert began(kept, "auto", 0) == ControlSettings(Mode.AUTO, Budget(max_gpus=4))
    assert began(kept, "", 16).budget.max_gpus == 16
    assert ControlSettings().mode is Mode.ADVISORY
