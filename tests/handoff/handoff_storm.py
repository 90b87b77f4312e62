"""Random scenarios from a seed: a cluster of some shape, a handful of calls, and trouble between them.

`calm`     injects nothing: every call must be whole.
`storm`    may lose, damage, copy, reorder and delay frames, cut links, restart workers, kill the router, cancel at any
           moment, let a deadline pass or the model fail: every call must end, and never with a wrong token.
`impatient` lets clients leave while frames are on a slow wire or KV thread, or a worker hears late of it: what they held is free
           at once, and soon another's.
`hostile`  reuses seqs for other prompts, perhaps after decode's restart, while an adversary sends what it recorded of the
           first ones: a call may fail, but no text of another prompt may come.

`ring`     fills the pools of workers that prefill for each other: nobody may wait for ever.

All end with a drain (nothing may be left anywhere) and plain calls between every pair of workers, equal to the reference.
"""

from __future__ import annotations

import random
from dataclasses import replace

from baton.request import Role, SamplingParams
from kv_transfer.loopback import Faults
from tests.handoff.handoff_adversary import Adversary, changed_prompt
from tests.handoff.handoff_calls import Call, Rig, random_prompt
from tests.handoff.handoff_links import cut
from tests.handoff.handoff_rig import EOS, Cluster, RigConfig
from worker.links import State

CALM_S = 0.5  # long enough for links to be ready
TROUBLES = ("cancel", "cut", "restart", "model", "router", "time", "stop", "slow")
MODES = ("auto", "staged")
MAX_PROMPT = 60  # tokens: 15 blocks, 4 chunks


def random_config(rng: random.Random) -> RigConfig:
    return RigConfig(
        num_prefill=rng.choice((1, 1, 2)),
        num_decode=rng.choice((1, 1, 2)),
        prefill_blocks=rng.choice((20, 40, 64)),
        decode_blocks=rng.choice((20, 24, 40, 64)),
        chunk_tokens=rng.choice((4, 16, 64)),
        step_tokens=rng.choice((16, 32, 64)),
        max_num_seqs=rng.choice((1, 3, 8)),
        prefix_cache=rng.random() < 0.6,
        blocks_per_frame=rng.choice((1, 2, 5)),
        num_slots=rng.choice((1, 2, 4)),
        mode=rng.choice(MODES),
    )


def random_faults(rng: random.Random) -> Faults:
    """Each kind of fault in half of the storms; rates as on a network that is nearly unusable."""

    def sometimes(most: float) -> float:
        return most * rng.random() if rng.random() < 0.5 else 0.0

    return Faults(
        seed=rng.getrandbits(32),
        delay_s=sometimes(0.05),
        jitter_s=sometimes(0.2),
        loss=sometimes(0.1),
        corrupt=sometimes(0.2),
        duplicate=sometimes(0.3),
        reorder=sometimes(0.5),
        credit_loss=sometimes(0.02),
    )


class Scenario:
    """One seed's story."""

    def __init__(self, seed: int, config: RigConfig | None = None) -> None:
        rng = random.Random(seed)
        self.rng = rng
        self.rig = Rig(seed, Cluster(seed, config or random_config(rng)))
        self.cluster = self.rig.cluster
        self._troubles: tuple[str, ...] = ()
        self._stem = random_prompt(rng, MAX_PROMPT)  # prompts share a beginning of some length

    def prompt(self) -> tuple[int, ...]:
        shared = self.rng.choice((0, 0, 8, 17, 40))
        return (*self._stem[:shared], *random_prompt(self.rng, self.rng.randint(1, MAX_PROMPT - shared)))

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.rng.choice((1, 2, 3, 8, 20)),
            temperature=self.rng.choice((0.0, 1.0)),
            seed=self.rng.getrandbits(32),
            ignore_eos=self.rng.random() < 0.5,
        )

    def pull_from(self) -> str:
        """The decode worker that is said to cache more of the prompt than the prefill worker; "" = none."""
        return ""

    def call(self, **overrides: float) -> Call:
        rng = self.rng
        prompt = self.prompt()
        sampling = self.sampling()
        return self.rig.router.submit(
            prompt,
            prefill=rng.choice([name for name in self.cluster.workers if name.startswith("prefill")]),
            decode=rng.choice([name for name in self.cluster.workers if name.startswith("decode")]),
            local=rng.random() < 0.1,
            pull_from=self.pull_from(),
            num_sent=rng.randrange(sampling.max_tokens) if rng.random() < 0.2 and sampling.ignore_eos else 0,
            ttl_s=overrides.get("ttl_s", 60.0),
            sampling=sampling,
            script=(EOS,) if rng.random() < 0.1 and not sampling.ignore_eos else (),
        )

    def calm(self) -> Rig:
        self.cluster.run_for(CALM_S * self.rng.random())
        for _ in range(self.rng.randint(2, 7)):
            self.call()
            self.cluster.run_turns(self.rng.randrange(40))
        self.rig.finish_all()
        return self.rig

    def storm(self) -> Rig:
        self.cluster.run_for(CALM_S)
        self.cluster.network.faults = random_faults(self.rng)
        self.rig.router.on_handoff_lost = self._on_handoff_lost
        self._troubles = ("nothing", "nothing", *self.rng.sample(TROUBLES, self.rng.randint(0, 3)))
        for _ in range(self.rng.randint(3, 8)):
            self.call(ttl_s=self.rng.choice((0.05, 1.0, 60.0, 60.0, 60.0, 60.0, 60.0, 60.0)))
            for _ in range(self.rng.randint(0, 3)):
                self.cluster.run_turns(self.rng.randrange(30))
                self.trouble()
        self.calm_down()
        return self.rig

    def impatient(self) -> Rig:
        self.cluster.run_for(CALM_S)
        self.cluster.network.faults = Faults(seed=self.rng.getrandbits(32), jitter_s=0.1)
        for worker in self.cluster.workers.values():
            worker.has_slow_kv = self.rng.random() < 0.5
            worker.has_slow_sessions = self.rng.random() < 0.2
        for _ in range(10):
            self.call()
            self.cluster.run_turns(self.rng.randrange(60))
            if self.rng.random() < 0.6:
                self.rig.router.cancel(self.rng.choice(self.rig.router.calls[-3:]))
        self.rig.finish_all()
        return self.rig

    def hostile(self) -> Rig:
        adversary = Adversary(self.cluster)
        self.cluster.run_for(CALM_S)
        first = [self.call() for _ in range(self.rng.randint(1, 3))]
        self.rig.finish_all()
        if self.rng.random() < 0.5:
            self._restart("decode-0")
            self.cluster.run_for(CALM_S)
        self.cluster.run_for(self.cluster.config.lease_s + 1.0)  # before that a seq used twice is refused
        adversary.recording, adversary.replaying = False, True
        self.cluster.network.faults = Faults(jitter_s=0.01)  # frames and messages meet in every order
        for old in first:
            if old.prefill is not None:
                self.rig.router.submit(
                    changed_prompt(self.rng, old.request.token_ids),
                    old.request.num_tokens_left,  # a continuation's tokens are its prompt now: more would not fit the pool
                    prefill=old.prefill.worker.worker_id,
                    decode=old.decode.worker.worker_id,
                    seq=old.seq,
                )
        self.rig.drain()
        adversary.replaying = False
        self.calm_down()
        return self.rig

    @staticmethod
    def ring(seed: int) -> Rig:
        """Two or three workers of both roles, each prefilling for the next, with pools that hold one prompt and a half."""
        rng = random.Random(seed)
        names = ("a", "b", "c")[: rng.randint(2, 3)]
        config = RigConfig(num_prefill=0, num_decode=0, prefix_cache=rng.random() < 0.3, mode=rng.choice(MODES))
        rig = Rig(seed, Cluster(seed, config))
        for name in names:
            rig.cluster.start(name, Role.BOTH, num_blocks=16)
        rig.cluster.run_for(CALM_S)
        for _ in range(rng.randint(6, 12)):
            place = rng.randrange(len(names))
            call = rig.router.submit(
                random_prompt(rng, 40), 8, prefill=names[place], decode=names[(place + 1) % len(names)]
            )
            rig.cluster.run_turns(rng.randrange(20))
            if rng.random() < 0.2:
                rig.router.cancel(call)
        rig.finish_all()
        return rig

    def _restart(self, worker_id: str) -> None:
        dead = self.cluster.workers[worker_id]
        self.cluster.restart(worker_id)
        for call in self.rig.router.calls:
            is_early = call.decode.worker is dead and not call.decode.indices and call.prefill is not None
            if is_early and not call.is_over and self.rng.random() < 0.5:
                self._reroute(call)
        self.rig.router.on_worker_lost(dead)

    def _on_handoff_lost(self, call: Call) -> None:
        """As a router does: another decode worker, unless this one has it and goes on. Some routers do nothing."""
        if call.decode.indices or call.cancelled or self.rng.random() < 0.2:
            return
        if call.num_lost > 3:
            self.rig.router.cancel(call)
        else:
            self._reroute(call)

    def _reroute(self, call: Call) -> None:
        self.rig.router.reroute(
            call, self.rng.choice([name for name in self.cluster.workers if name.startswith("decode")])
        )

    def calm_down(self) -> None:
        """Faults end; everything ends; plain calls work between every pair."""
        self.cluster.network.faults = replace(
            self.cluster.network.faults, loss=0, corrupt=0, duplicate=0, reorder=0, credit_loss=0
        )
        for worker in self.cluster.workers.values():
            worker.resume()
        self.rig.drain()
        self.plain_calls()

    def plain_calls(self) -> None:
        router = self.rig.router
        assert self.cluster.run_until(self._links_are_ready, limit_s=30.0), "links do not come back"
        calls = [
            router.submit(random_prompt(self.rng, 30), 5, prefill=prefill, decode=decode)
            for prefill in self.cluster.workers
            for decode in self.cluster.workers
            if prefill.startswith("prefill") and decode.startswith("decode")
        ]
        self.rig.drain()
        assert all(call.is_finished for call in calls), f"seed {self.rig.seed}: a plain call failed afterwards"

    def _links_are_ready(self) -> bool:
        states = [
            end.state
            for worker in self.cluster.workers.values()
            for key, end in worker.links.ends.items()
            if end.opener and any(key.endswith(f"{peer.epoch:016x}") for peer in self.cluster.workers.values())
        ]
        num_pairs = self.cluster.config.num_prefill * self.cluster.config.num_decode
        return states.count(State.READY) == num_pairs

    def trouble(self) -> None:
        """One thing goes wrong, perhaps."""
        rng, cluster, router = self.rng, self.cluster, self.rig.router
        worker = cluster.workers[rng.choice(sorted(cluster.workers))]
        match rng.choice(self._troubles):
            case "cancel" if router.calls:
                router.cancel(rng.choice(router.calls))
            case "cut" if worker.links.ends:
                cut(worker.links.ends[rng.choice(sorted(worker.links.ends))], rng)
            case "restart":
                self._restart(worker.worker_id)
            case "model" if router.calls:
                worker.fail_seqs.add(rng.choice(router.calls).seq)
            case "router":
                self.rig.replace_router()
            case "stop":  # a paused process: what it missed comes all at once when it goes on
                worker.resume() if worker.is_stopped else worker.stop()
            case "slow":
                worker.has_slow_engine = not worker.has_slow_engine
            case "time":
                cluster.run_for(rng.random())
