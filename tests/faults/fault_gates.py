"""Where a test worker can be stopped: between two messages of a link, in the middle of a frame, between two engine steps.

    loop     HeldLinks      a message of some kind and seq is kept, lost, said twice, late or out of order
    KV       HeldCache      a copy of blocks waits
    engine   before_step    a step that decodes waits, or any step fails

Nothing of this is in the product: WorkerConfig names the builders below instead of the roles' own, and the loader of the
model brings the store. A gate that is armed holds what comes until `release`; what it holds is counted in `held`.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from baton.config import WorkerConfig
from baton.kv_layout import KVLayout
from baton.v1 import kv_pb2
from decode_worker.decode_role import DecodeRole
from decode_worker.decode_role import build as build_decode_role
from engine.ports import Batch
from engine.scripted_runner import ScriptedKVCache, ScriptedRunner
from kv_transfer import receiver, sender
from prefill_worker.prefill_role import PrefillRole
from prefill_worker.prefill_role import build as build_prefill_role
from worker.role import LinkPort, Ports

LATE_S = 0.3  # of a delayed message: below the shortest lease of a test, above a link's round trip


class Gates:
    """What is armed, and what it holds. Armed over standard input, asked from any thread."""

    def __init__(self) -> None:
        self.held: Counter[str] = Counter()
        self.pace_s = 0.0  # of an engine step that decodes
        self.fails = False  # every engine step raises
        self.trouble: dict[str, float] = {}  # what happens to a link message, and how often
        self.random = random.Random(0)
        self._last_commit: Callable[[dict[str, int]], None] | None = None
        self._seqs: dict[str, set[int]] = {}  # armed message kinds
        self._skips: dict[str, int] = {}  # armed copies: how many pass before one waits
        self._kept: list[Callable[[], object]] = []
        self._open = threading.Event()
        self._open.set()

    def arm_message(self, kind: str, seq: int) -> None:
        self._seqs.setdefault(kind, set()).add(seq)

    def arm_copy(self, name: str, num_skipped: int) -> None:
        self._skips[name] = num_skipped
        self._open.clear()

    def release(self) -> None:
        """Everything held goes on, in order; nothing is armed any more."""
        self._seqs.clear()
        self._skips.clear()
        kept, self._kept = self._kept, []
        for say in kept:
            say()
        self._open.set()

    def holds_message(self, kind: str, seq: int) -> bool:
        held = seq in self._seqs.get(kind, ())
        self.held[kind] += held
        return held

    def keep(self, say: Callable[[], object]) -> None:
        """Called on the loop, which says it later."""
        self._kept.append(partial(asyncio.get_running_loop().call_soon_threadsafe, say))

    def note_commit(self, links: LinkPort, peer: str, commit: kv_pb2.Commit) -> None:
        """Called on the loop with what a prefill worker sends."""
        loop = asyncio.get_running_loop()

        def say(changes: dict[str, int]) -> None:
            forged = kv_pb2.Commit()
            forged.CopyFrom(commit)
            for name, value in changes.items():
                setattr(forged, name, value)
            loop.call_soon_threadsafe(links.send, peer, kv_pb2.LinkMessage(commit=forged))

        self._last_commit = say

    def say_commit_again(self, changes: dict[str, int]) -> None:
        """Send the last Commit once more, with some of its fields changed."""
        assert self._last_commit is not None
        self._last_commit(changes)

    def pass_copy(self, name: str) -> None:
        """Called on the KV thread before a copy; waits where it is armed."""
        if name not in self._skips:
            return
        self._skips[name] -= 1
        if self._skips[name] < 0:
            self.held[name] += 1
            self._open.wait()

    def before_step(self, batch: Batch) -> None:
        """Called on the engine thread."""
        if self.fails:
            raise RuntimeError("the model fails, as the test asked")
        if self.pace_s and any(entry.output_ids for entry in batch.entries):
            threading.Event().wait(self.pace_s)


GATES = Gates()


class HeldCache(ScriptedKVCache):
    """The scripted engine's blocks; copies of them wait where a gate is armed."""

    def gather(self, block_ids: Sequence[int], layer_start: int, num_layers: int, out: memoryview) -> int:
        GATES.pass_copy("gather")
        return super().gather(block_ids, layer_start, num_layers, out)

    def scatter(self, block_ids: Sequence[int], layer_start: int, num_layers: int, data: memoryview) -> int:
        GATES.pass_copy("scatter")
        return super().scatter(block_ids, layer_start, num_layers, data)


def held_runner(layout: KVLayout, num_blocks: int, allocate: Callable[[int], memoryview]) -> ScriptedRunner:
    runner = ScriptedRunner(layout, num_blocks, before_run=GATES.before_step)
    runner.kv_cache = HeldCache(layout, num_blocks, allocate(num_blocks * layout.block_bytes))
    return runner


def hold_direct_copies() -> None:
    """Direct mode copies without the store: the sender's and the receiver's own functions wait where a gate is armed."""
    of_sender, of_receiver = vars(sender), vars(receiver)
    of_sender["checksum"] = _held("gather", of_sender["checksum"])
    of_receiver["copy_blocks"] = _held("scatter", of_receiver["copy_blocks"])


def _held(name: str, copy: Callable[..., int]) -> Callable[..., int]:
    def held(*arguments: object) -> int:
        GATES.pass_copy(name)
        return copy(*arguments)

    return held


def seq_of(kind: str, message: kv_pb2.LinkMessage) -> int:
    if kind == "reserve":
        return message.reserve.request.seq
    if kind == "grant":
        return message.grant.ticket.seq
    return int(getattr(getattr(message, kind), "seq", 0))


class HeldLinks:
    """A LinkPort between a role and its links."""

    def __init__(self, links: LinkPort, gates: Gates) -> None:
        self._links = links
        self._gates = gates

    def transport(self, peer: str) -> str:
        return self._links.transport(peer)

    def send(self, peer: str, message: kv_pb2.LinkMessage) -> bool:
        kind = message.WhichOneof("message") or ""
        if kind == "commit":
            self._gates.note_commit(self._links, peer, message.commit)
        if self._gates.holds_message(kind, seq_of(kind, message)):
            if kind == "reserve":
                return False  # as where the link is not ready: the prompt stays queued
            self._gates.keep(partial(self._links.send, peer, message))
            return True
        return self._send_through_trouble(peer, message, kind)

    def _send_through_trouble(self, peer: str, message: kv_pb2.LinkMessage, kind: str) -> bool:
        trouble, draw = self._gates.trouble, self._gates.random.random
        later = asyncio.get_running_loop().call_later
        if draw() < max(trouble.get("lose", 0.0), trouble.get(f"lose {kind}", 0.0)):
            self._gates.held[f"lost {kind}"] += 1
            return True
        if draw() < trouble.get("delay", 0.0):  # those sent meanwhile overtake it
            later(LATE_S * draw(), self._links.send, peer, message)
            return True
        if draw() < max(trouble.get("repeat", 0.0), trouble.get(f"repeat {kind}", 0.0)):
            later(LATE_S * draw(), self._links.send, peer, message)
        return self._links.send(peer, message)


class HeldPorts:
    """The host's ports, but for the links."""

    def __init__(self, ports: Ports, gates: Gates) -> None:
        self._ports = ports
        self.links = HeldLinks(ports.links, gates)

    def __getattr__(self, name: str) -> object:
        return getattr(self._ports, name)


def held_ports(ports: Ports) -> Ports:
    return cast(Ports, HeldPorts(ports, GATES))


def build_prefill(ports: Ports, config: WorkerConfig) -> PrefillRole:
    return build_prefill_role(held_ports(ports), config)


def build_decode(ports: Ports, config: WorkerConfig) -> DecodeRole:
    return build_decode_role(held_ports(ports), config)
