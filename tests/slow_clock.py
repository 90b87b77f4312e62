"""A test's own event loop, with the router and whatever else of a cluster is in it, by the clock of emulated GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import pytest

from baton import clock

P = ParamSpec("P")


class Slowed:
    """A decorator of async tests: a second of theirs lasts `scale` seconds. What they read of `time` is the machine's."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(clock, "_scale", self._scale)
                clock.run(test(*args, **kwargs))

        return run
