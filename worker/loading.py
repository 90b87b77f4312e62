"""How a worker gets its model: the seam between the server and what computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from baton.config import WorkerConfig
from baton.model_files import load_model_files
from baton.model_spec import ModelSpec
from engine.ports import Runner


def on_time() -> float:
    """The lateness of a real GPU, which takes the time it takes."""
    return 0.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what is known of it."""

    spec: ModelSpec
    runner: Runner
    lateness: Callable[[], float] = (
        on_time  # of an emulated step, p99 of the last ones as a share of it; from any thread
    )


Allocate: TypeAlias = Callable[
    [int], memoryview
]  # bytes wanted -> zeroed memory that peers may map, if the transport can
LoadModel: TypeAlias = Callable[[WorkerConfig, Allocate], LoadedModel]


def load_torch_model(config: WorkerConfig, allocate: Allocate) -> LoadedModel:
    """Read the model's files and weights; the KV cache lies in memory of `allocate`.

    Raises:
        ConfigError: missing or damaged files, too little memory.
    """
    from engine.torch_runner import load_torch_runner  # loads torch: only in processes that compute

    files = load_model_files(config.model.path)
    runner = load_torch_runner(files, config.engine, config.model.dtype, allocate=allocate)
    return LoadedModel(replace(files.spec, numerics=runner.numerics), runner)
