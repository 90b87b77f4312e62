"""Of several runs the same one is the best whether hopeless ones are broken off or not."""

from __future__ import annotations

import pickle
from itertools import islice

import pytest

from bench.control import trial
from bench.control.baselines import Static
from bench.control.loads import catalogue
from bench.control.runs import Entry, digest, least_loss
from bench.control.trial import Hopeless
from bench.traces import TraceError
from tests.bench.control.test_control_command import short

MISS_GPU_S = 30.0
SIZES = [(2, 2), (4, 4), (3, 3), (1, 1)]


def test_breaking_off_what_is_hopeless_changes_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    load = short("constant from half", 120.0)
    whole = [trial.run(load, Static(), sizes, 0, MISS_GPU_S) for sizes in SIZES]
    losses = [one.figures.loss for one in whole]
    broken_off: list[object] = []

    def noted(*args: object, **kwargs: object) -> trial.Trial:
        try:
            return run(*args, **kwargs)  # type: ignore[arg-type]
        except Hopeless:
            broken_off.append(args[2])
            raise

    run = trial.run
    monkeypatch.setattr(trial, "run", noted)
    for least_gpus in (0, 2):
        entries = [Entry(Static, sizes, sum(sizes) if least_gpus else 0) for sizes in SIZES]
        number, best = least_loss(load, entries, 0, MISS_GPU_S)
        assert number == losses.index(min(losses))
        assert best == whole[number]
    assert broken_off  # or this has shown nothing


def test_the_first_of_equals_wins() -> None:
    load = short("mix swings", 60.0)
    number, _ = least_loss(load, [Entry(Static, (3, 3)), Entry(Static, (3, 3))], 0, MISS_GPU_S)
    assert number == 0


def test_a_run_is_broken_off_only_once_it_is_worse() -> None:
    load = short("mix swings", 120.0)
    loss = trial.run(load, Static(), (2, 2), 0, MISS_GPU_S).figures.loss
    assert trial.run(load, Static(), (2, 2), 0, MISS_GPU_S, worse_than=loss, least_gpus=4).figures.loss == loss
    with pytest.raises(Hopeless):
        trial.run(load, Static(), (2, 2), 0, MISS_GPU_S, worse_than=0.99 * loss)


@pytest.mark.parametrize("name", [load.name for load in catalogue() if load.name != "agentic"])
def test_a_load_is_the_same_in_another_process(name: str) -> None:
    load = short(name, 200.0)
    told = pickle.loads(pickle.dumps(load))
    try:
        rows = list(islice(load.rows(1), 100))
    except TraceError as error:
        pytest.skip(str(error))
    assert rows == list(islice(told.rows(1), 100))
    assert digest(told, [1]) == digest(load, [1]) != digest(load, [2])
