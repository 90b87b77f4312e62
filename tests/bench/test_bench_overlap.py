"""What `baton bench overlap` judges and refuses; no process."""

from __future__ import annotations

import argparse

import pytest

from bench.kv_plan import spread
from bench.overlap import ALLOWANCE_MS, Exposed, add_parser

LONE_MS = 5.0


def exposed(ms: float, num_late: int = 0) -> Exposed:
    return Exposed(512, spread([ms]), spread([LONE_MS]), 3, num_late)


def test_what_is_exposed_may_be_the_last_chunk_and_the_allowance_and_no_chunk_may_be_late() -> None:
    assert exposed(LONE_MS + ALLOWANCE_MS).holds
    assert not exposed(LONE_MS + ALLOWANCE_MS + 0.01).holds
    assert not exposed(LONE_MS, num_late=1).holds


def test_a_mode_that_a_transport_does_not_have_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["overlap", "--transport", "tcp", "--mode", "direct"])
    assert args.run(args) == 2
    assert "--mode direct is not to be had over tcp" in capsys.readouterr().err
