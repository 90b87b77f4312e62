"""One worker process of a soak: `worker.main` around a scripted engine, which verifies every byte of KV before each step.

What it finds wrong goes to stdout as one JSON line {"fault": ...} at once, whatever the engine makes of it.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from baton.config import WorkerConfig
from baton.errors import Internal
from engine.ports import Batch, Sample
from engine.scripted_runner import ScriptedRunner
from tests.tiny_models import VOCAB_SIZE
from tests.worker.scripted_worker import LAYOUT, SPEC
from worker.loading import Allocate, LoadedModel
from worker.main import main


class TellingRunner(ScriptedRunner):
    def run(self, batch: Batch) -> list[Sample | None]:
        try:
            return super().run(batch)
        except Internal as error:
            print(json.dumps({"fault": error.message}), flush=True)
            raise


def load_scripted_model(config: WorkerConfig, allocate: Allocate) -> LoadedModel:
    """The scripted model with the tiny models' vocabulary, since the router serves a tiny model's tokenizer."""
    runner = TellingRunner(LAYOUT, config.engine.num_blocks, vocab_size=VOCAB_SIZE, allocate=allocate)
    return LoadedModel(dataclasses.replace(SPEC, vocab_size=VOCAB_SIZE), runner)


if __name__ == "__main__":
    sys.exit(main(load_scripted_model))
