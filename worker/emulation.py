"""A worker on GPUs that are not here: its runner, its network card, its start and its deaths (docs/emulator.md).

Called while the worker starts; deaths come from a thread of their own.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import replace

from baton import clock
from baton.config import EmulationConfig, WorkerConfig
from baton.log import get_log
from baton.model_files import load_model_files
from engine.emulated_model import emulated_model
from engine.emulated_runner import EmulatedRunner
from engine.pace import Pace
from kv_transfer.channel import Transport
from kv_transfer.emulated_link import EmulatedTransport, LinkTime
from worker.loading import Allocate, LoadedModel

log = get_log("worker.emulation")


def load_emulated_model(config: WorkerConfig, allocate: Allocate) -> LoadedModel:
    """Take the tokenizer's vocabulary of `model.path`, and everything else from `emulation`.

    Raises:
        ConfigError: an unknown name, or a model that does not fit.
    """
    emulation, block_size = config.emulation, config.engine.block_size
    files, model, pace = load_model_files(config.model.path), emulated_model(emulation), Pace()
    spec = replace(
        files.spec, max_model_len=emulation.max_model_len, numerics=f"emulated {model.shape.name} {emulation.kv_dtype}"
    )
    runner = EmulatedRunner(
        model.layout(block_size),
        config.engine.num_blocks or model.num_blocks(block_size),
        model.step_time(),
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        pace=pace,
        allocate=allocate,
    )
    clock.sleep(emulation.start_s)
    if emulation.failure_mean_s:
        _die_later(next_death_s(config.worker_id, emulation, clock.now_s()))
    return LoadedModel(spec, runner, lambda: pace.p99_lateness)


def emulated_link(config: WorkerConfig, transport: Transport) -> EmulatedTransport:
    """Put the GPUs' network cards before `transport`, which is owned from now on. Raises: ConfigError: an unknown name."""
    block_size, model = config.engine.block_size, emulated_model(config.emulation)
    num_layers = model.layout(block_size).num_layers
    return EmulatedTransport(transport, LinkTime(model.block_wire_s(block_size) / num_layers))


def next_death_s(worker_id: str, emulation: EmulationConfig, now_s: float) -> float:
    """Return the instant at which this worker next dies: of a Poisson process that seed, name and origin fix.

    So a worker that was started again dies at its next instant, and two runs of one seed see the same deaths.
    """
    draw = random.Random(f"{emulation.failure_seed}/{worker_id}")
    death_s = emulation.origin or now_s
    while death_s <= now_s:
        death_s += draw.expovariate(1 / emulation.failure_mean_s)
    return death_s


def _die_later(death_s: float) -> None:
    def die() -> None:
        log.warning("emulated_death")
        os.kill(os.getpid(), signal.SIGKILL)

    timer = threading.Timer(clock.real_s(death_s - clock.now_s()), die)
    timer.daemon = True
    timer.start()
