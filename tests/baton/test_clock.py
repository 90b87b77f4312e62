"""The cluster's clock: all that waits or measures is slowed alike, and nobody reads another one."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton import clock

SCALE = 10.0
HERE_S = 0.01
ROOT = Path(__file__).parents[2]
CLUSTER = ("engine", "kv_transfer", "worker", "prefill_worker", "decode_worker", "router")
OTHER_CLOCKS = {
    *("time.monotonic", "time.monotonic_ns", "time.perf_counter", "time.perf_counter_ns", "time.sleep"),
    *("asyncio.run", "asyncio.new_event_loop", "asyncio.Runner", "uvloop.run", "uvloop.install"),
}
TELL_DATES = {  # what clients or operators read, and other processes' files
    *("router/openai_replies.py", "router/openai_api.py", "router/controller/main.py", "router/controller/planner.py"),
    *("router/batch/service.py", "router/batch/contents.py"),
    *("router/controller/kube/lease.py", "router/controller/kube/platform.py", "router/controller/kube/status.py"),
    "router/controller/kube/care.py",
}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_scale", SCALE)


def took_s(began_s: float) -> float:
    return time.monotonic() - began_s


def test_a_second_here_lasts_as_many_of_the_machine_s_as_the_scale_says(slow: None) -> None:
    here_s, real_s = clock.now_s(), time.monotonic()
    clock.sleep(HERE_S)
    assert took_s(real_s) >= SCALE * HERE_S
    assert clock.now_s() - here_s == pytest.approx(took_s(real_s) / SCALE, abs=HERE_S)
    assert (clock.real_s(3.0), clock.here_s(30.0)) == (30.0, 3.0)
    assert clock.unix_s() == pytest.approx(time.time() / SCALE, abs=1.0)


@pytest.mark.parametrize("wait", ["sleep", "timeout", "call_later", "wait"])
def test_whatever_waits_on_a_loop_waits_by_this_clock(slow: None, wait: str) -> None:
    async def waits() -> float:
        began_s, loop = time.monotonic(), asyncio.get_running_loop()
        match wait:
            case "sleep":
                await asyncio.sleep(HERE_S)
            case "timeout":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(HERE_S):
                        await asyncio.Event().wait()
            case "call_later":
                over = asyncio.Event()
                loop.call_later(HERE_S, over.set)
                await over.wait()
            case "wait":
                forever = asyncio.create_task(asyncio.Event().wait())
                await asyncio.wait([forever], timeout=HERE_S)
                forever.cancel()
        assert loop.time() == pytest.approx(clock.now_s(), abs=1.0)
        return took_s(began_s)

    assert clock.run(waits()) >= 0.99 * SCALE * HERE_S  # epoll counts whole milliseconds


@pytest.mark.parametrize("wait_s", [100_000.0, 1e9])
def test_a_wait_of_more_days_than_the_system_counts_is_one_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, wait_s: float
) -> None:
    async def waits() -> bool:
        for_days = asyncio.get_running_loop().call_later(wait_s, lambda: None)
        await asyncio.sleep(0.0)
        asyncio.get_running_loop().run_in_executor(None, time.sleep, 0.01).add_done_callback(lambda _: over.set())
        over = asyncio.Event()
        await over.wait()  # on the selector, with nothing sooner to do
        for_days.cancel()
        return over.is_set()

    monkeypatch.setattr(clock, "_scale", 30.0)
    assert clock.run(waits())


def test_a_loop_is_as_awake_as_ever_for_what_comes_from_outside(slow: None) -> None:
    async def woken() -> float:
        over, began_s = asyncio.Event(), time.monotonic()
        asyncio.get_running_loop().run_in_executor(None, asyncio.get_running_loop().call_soon_threadsafe, over.set)
        async with asyncio.timeout(60):
            await over.wait()
        return took_s(began_s)

    assert clock.run(woken()) < 60 * SCALE


def test_a_real_clock_takes_the_loop_that_it_is_given() -> None:
    made: list[asyncio.AbstractEventLoop] = []

    def fast() -> asyncio.AbstractEventLoop:
        made.append(asyncio.new_event_loop())
        return made[-1]

    async def running() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    assert [clock.run(running(), fast)] == made


def test_processes_of_one_scale_agree_on_the_time(slow: None) -> None:
    tell = f"from baton import clock; clock.slow_down({SCALE}); print(clock.now_s())"
    before_s = clock.now_s()
    told = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert before_s < float(told) < clock.now_s()


# -- nobody reads another one ------------------------------------------------------------------------------------------


def names_in(source: str) -> Iterator[str]:
    """module.name of whatever is imported or used."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_no_process_of_a_cluster_reads_another_clock_or_makes_another_loop() -> None:
    files = [file for package in CLUSTER for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    found = [
        f"{file.relative_to(ROOT)}: {name}; use baton/clock.py"
        for file in files
        for name in names_in(file.read_text(encoding="utf-8"))
        if name in OTHER_CLOCKS or (name == "time.time" and str(file.relative_to(ROOT)) not in TELL_DATES)
    ]
    assert found == []


@pytest.mark.parametrize(
    "source", ["import time\ntime.sleep(1)", "from time import monotonic", "import asyncio\nasyncio.run(f())"]
)
def test_the_rule_finds_what_it_is_to_find(source: str) -> None:
    assert OTHER_CLOCKS & set(names_in(source))
