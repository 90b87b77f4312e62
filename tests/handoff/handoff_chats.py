"""Scenarios in which clients go on talking: a prompt is mostly what was said before and a little more, pulled from the worker
that decoded it, which may by now cache all of it, a part, or nothing. Memory is short, so that blocks change hands quickly."""

from __future__ import annotations

import random
from dataclasses import replace

from baton.request import SamplingParams
from tests.handoff.handoff_calls import random_prompt
from tests.handoff.handoff_rig import RigConfig
from tests.handoff.handoff_storm import MAX_PROMPT, Scenario, random_config

NUM_NEW = 5  # tokens of a new message


class Chats(Scenario):
    def __init__(self, seed: int, config: RigConfig | None = None) -> None:
        rng = random.Random(~seed)
        shape = replace(
            random_config(rng),
            prefill_blocks=rng.choice((20, 24)),
            prefix_cache=rng.random() < 0.95,
            mode=rng.choice(("auto", "staged")),
        )
        super().__init__(seed, config or shape)
        self._holder = ""
        self.cluster.run_for(1.0)  # every link is ready
        for _ in range(3):
            self.call()
        self.rig.finish_all()

    def prompt(self) -> tuple[int, ...]:
        """Go on with one of the last calls, or begin."""
        self._holder = ""
        if not self.rig.calls or self.rng.random() < 0.3:
            return super().prompt()[:30]
        before = self.rng.choice(self.rig.calls[-4:])
        holder = before.decode.worker
        self._holder = holder.worker_id if holder.alive else ""
        said = (*before.request.token_ids, *(before.tokens[index] for index in sorted(before.tokens)))
        return (*said[: MAX_PROMPT - NUM_NEW], *random_prompt(self.rng, NUM_NEW))

    def sampling(self) -> SamplingParams:
        return replace(super().sampling(), max_tokens=self.rng.choice((1, 8, 20)), ignore_eos=self.rng.random() < 0.9)

    def pull_from(self) -> str:
        return self._holder

    def num_pulled(self) -> int:
        """Blocks that flowed back, as far as prompts were told of."""
        return sum(call.prefill.stats.pulled_blocks for call in self.rig.calls if call.prefill is not None)
