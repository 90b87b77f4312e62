"""A prefill worker that mixes up its tickets: it sends frames and Commits of the past again, as if they belonged to today.

What it sends is well formed: the header's checksum is right, its lane had a credit, the link is ready. Only epoch, seq and
generation are those of the past. So what stands between an old prompt's KV and a new prompt's answer is what the protocol
says about them, and nothing else: the transport's own protection against late copies does not help here.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from baton.v1 import kv_pb2
from kv_transfer.frame import HEADER_BYTES, FrameHeader, Kind, read_header, write_header
from kv_transfer.pair import Pair, PairState
from tests.handoff.handoff_rig import Cluster, RigWorker


@dataclass(frozen=True, slots=True)
class OldFrame:
    header: FrameHeader
    payload: bytes


class Adversary:
    """Records while `recording`, replays as turns of its own while `replaying`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.recording = True
        self.replaying = False
        self.with_commits = cluster.rng.random() < 0.5  # one of them may end a call before old frames could harm it
        self.frames: list[OldFrame] = []
        self.commits: list[kv_pb2.Commit] = []
        self.num_replayed = 0
        cluster.network.on_send = self._on_send
        cluster.on_wire = self._on_wire
        others = cluster.extra_turns
        cluster.extra_turns = lambda: others() + self._turns()

    def _on_send(self, data: bytes) -> None:
        header = read_header(memoryview(data))
        if self.recording and header is not None and header.kind is not Kind.PROBE:
            self.frames.append(OldFrame(header, data[HEADER_BYTES : HEADER_BYTES + header.nbytes]))

    def _on_wire(self, worker: RigWorker, peer: str, message: kv_pb2.LinkMessage) -> None:
        if self.recording and message.HasField("commit"):
            self.commits.append(message.commit)

    def _turns(self) -> list[Callable[[], None]]:
        if not self.replaying:
            return []
        turns: list[Callable[[], None]] = []
        for worker in self._cluster.workers.values():
            for pair in worker.core._pairs.values():
                seqs = pair.sender._transfers  # what it ships now: old frames of these seqs are the dangerous ones
                frames = [frame for frame in self.frames if frame.header.seq in seqs]
                commits = [commit for commit in self.commits if commit.seq in seqs and self.with_commits]
                if frames and pair.state is PairState.READY:
                    turns.append(partial(self._replay_frame, worker, pair, frames))
                if commits:
                    turns.append(partial(self._replay_commit, worker, pair, commits))
        return turns

    def _replay_frame(self, worker: RigWorker, pair: Pair, frames: list[OldFrame]) -> None:
        """Put an old frame into a lane that has credit, as a Sender would."""
        self.num_replayed += send_frame(pair, self._cluster.rng.choice(frames), worker.now_s())

    def _replay_commit(self, worker: RigWorker, pair: Pair, commits: list[kv_pb2.Commit]) -> None:
        commit = self._cluster.rng.choice(commits)
        self.num_replayed += worker.links.send(pair.peer, kv_pb2.LinkMessage(commit=commit))


def send_frame(pair: Pair, frame: OldFrame, now_s: float) -> bool:
    """Send a frame with a header of our choice over a pair; False without a free lane."""
    slot = pair.sender.take_lane(now_s)
    if slot is None:
        return False
    lane = pair.sender._lanes[slot]
    memory = pair.channel.send_slot(slot)
    memory[HEADER_BYTES : HEADER_BYTES + len(frame.payload)] = frame.payload
    write_header(memory, replace(frame.header, turn=lane.turn))
    lane.turn += 1
    pair._send(slot, HEADER_BYTES + len(frame.payload))
    return True


def changed_prompt(rng: random.Random, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Another prompt of the same length, so that every old frame would fit it."""
    return tuple(rng.randrange(100, 900) for _ in prompt)
