"""What a controller has found out outlives it; a file that is of no use costs what was in it and nothing else."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baton.config import ClusterConfig
from engine.timing.step_time import step_time
from router.controller.autoscaler.autoscaler import Autoscaler, Times
from router.controller.autoscaler.kept import Kept, KeptPool
from router.controller.live_times import LiveTimes
from router.controller.measures import Measures
from router.controller.memory import SAVED, Memory, Saved, kind_of_workers
from router.controller.step_model import MIN_SAMPLES, StepModel, StepWork, terms_of

WORKERS = "4 x h100"
ROOFLINE = terms_of(step_time("h100", "llama-3.1-8b", 1))
SLOWER = 3.0  # than the roofline
WORK = StepWork(32.0, 40_000.0)


class Found:
    """What one controller finds out."""

    def __init__(self) -> None:
        self.times, self.measures, self.sizes = LiveTimes(Times()), Measures(ROOFLINE, 0.0), Autoscaler()

    def memory(self, file: Path, workers: str = WORKERS) -> Memory:
        return Memory(file, workers, self.times, self.measures, self.sizes)

    def is_nothing(self) -> bool:
        fresh = Found()
        return (self.times.kept(), self.measures.steps, self.sizes.kept()) == (
            fresh.times.kept(), fresh.measures.steps, fresh.sizes.kept()
        )  # fmt: skip


async def kept(file: Path) -> Found:
    """By a controller that has learned something of everything."""
    found = Found()
    model = found.measures.steps["decode"] = StepModel(ROOFLINE)
    for number in range(2 * MIN_SAMPLES):
        work = replace(WORK, tokens=WORK.tokens + number % 5)
        model.observe(work, SLOWER * ROOFLINE.step_s(work))
    found.times.restore(((12.0, "files"), (14.0, "files"), (13.0, "files")))
    found.sizes.restore(Kept({"decode": KeptPool(2, ((5.0, 3),), 1.2)}, {"batch": 60.0}), 0.0)
    await found.memory(file).save()
    return found


async def test_a_successor_knows_start_ups_steps_regrets_and_lessons(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    before, after = await kept(file), Found()
    after.memory(file)
    assert after.times.times.start_up_s == 13.0
    assert after.measures.steps["decode"].step_s(WORK) == pytest.approx(before.measures.steps["decode"].step_s(WORK))
    assert after.measures.steps["decode"].step_s(WORK) == pytest.approx(SLOWER * ROOFLINE.step_s(WORK), rel=0.02)
    pool = after.sizes.kept().pools["decode"]
    assert (pool.num_regrets, pool.lesson, [num for _, num in pool.wanted]) == (2, 1.2, [3])
    assert 59.0 < after.sizes.kept().counted_s["batch"] <= 60.0
    assert after.sizes.kept().pools["prefill"] == KeptPool()


async def test_a_save_under_way_as_the_controller_stops_is_over_before_the_last_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory.json"
    found = Found()
    memory = found.memory(file)
    began, go_on, rename = threading.Event(), threading.Event(), Path.replace
    num_begun = 0

    def slowly(new: Path, target: Path) -> Path:
        nonlocal num_begun
        num_begun += 1
        began.set()
        assert go_on.wait(10)
        return rename(new, target)

    monkeypatch.setattr(Path, "replace", slowly)
    under_way = asyncio.create_task(memory.save())
    await asyncio.to_thread(began.wait, 10)
    under_way.cancel()
    found.times.restore(((21.0, ""),) * 3)
    last = asyncio.create_task(memory.save())
    await asyncio.sleep(0.1)
    assert num_begun == 1
    go_on.set()
    await last
    after = Found()
    after.memory(file)
    assert after.times.times.start_up_s == 21.0


async def test_the_first_controller_of_a_run_knows_nothing_and_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = Found()
    found.memory(tmp_path / "memory.json")
    assert found.is_nothing()
    assert caplog.text == ""


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[str], str]:
    def edit(text: str) -> str:
        said = json.loads(text)
        change(said)
        return json.dumps(said)

    return edit


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda text: text[:-20], "line 1 column"),
        (lambda text: "[]", "not of version 1"),
        (lambda text: "[" * 100_000, "recursion"),
        (changed(lambda said: said.update(version=2)), "not of version 1"),
        (changed(lambda said: said.update(start_ups_s=["soon"])), "start_ups_s.0"),
        (changed(lambda said: said["steps"]["decode"].update(right=[1.0])), "five terms"),
        (changed(lambda said: said["steps"]["decode"]["roofline"].__setitem__(0, -1.0)), "not positive"),
        (changed(lambda said: said["sizes"].update(pools={"decode": {"num_regrets": "many"}})), "num_regrets"),
        (lambda text: text.replace("12.0", "NaN"), "NaN is no number"),
    ],
)
async def test_a_file_that_cannot_be_understood_is_left_out_whole_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, edit: Callable[[str], str], says: str
) -> None:
    file = tmp_path / "memory.json"
    await kept(file)
    file.write_text(edit(file.read_text()))
    found = Found()
    memory = found.memory(file)
    assert found.is_nothing()
    (told,) = [record for record in caplog.records if record.message == "memory_unreadable"]
    assert says in str(vars(told))
    await memory.save()
    assert SAVED.validate_json(file.read_text()).start_ups_s == ()


async def test_what_was_found_out_of_other_workers_is_not_believed(tmp_path: Path) -> None:
    await kept(tmp_path / "memory.json")
    found = Found()
    found.memory(tmp_path / "memory.json", "8 x h200")
    assert found.is_nothing()


def test_workers_are_others_where_their_model_gpu_or_limits_are_and_the_same_after_a_restart() -> None:
    cluster = ClusterConfig()
    kind = kind_of_workers(cluster)
    assert kind_of_workers(replace(cluster, prefill=5, emulation=replace(cluster.emulation, origin=7.0))) == kind
    assert kind_of_workers(replace(cluster, emulation=replace(cluster.emulation, gpu="h200"))) != kind
    assert kind_of_workers(replace(cluster, engine=replace(cluster.engine, max_num_seqs=3))) != kind


async def test_a_full_disk_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Found().memory(tmp_path / "gone" / "memory.json")
    for _ in range(3):
        await memory.save()
    assert caplog.text.count("memory_not_saved") == 1
    (tmp_path / "gone").mkdir()
    await memory.save()
    assert SAVED.validate_json((tmp_path / "gone" / "memory.json").read_text()).workers == Saved(WORKERS).workers
