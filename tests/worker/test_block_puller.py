"""What a pull tells the owner of its prompt."""

from __future__ import annotations

from baton.request import Request, SamplingParams
from baton.v1 import kv_pb2
from engine.ports import Room, StepResult
from kv_transfer.events import Committed
from tests.worker.noting_ports import Notes
from worker.block_puller import BlockPuller, Pulled
from worker.role import PullSource

SEQ, HOLDER = 5, "holder"


def answer(num_blocks: int) -> kv_pb2.LinkMessage:
    return kv_pb2.LinkMessage(pull_answer=kv_pb2.PullAnswer(seq=SEQ, generation=1, num_blocks=num_blocks))


def asking(notes: Notes) -> tuple[BlockPuller, list[Pulled]]:
    """A pull of two blocks for which a busy engine has made room after a second."""
    done: list[Pulled] = []
    puller = BlockPuller(notes, timeout_s=5.0, lease_s=5.0, on_done=lambda _, pulled: done.append(pulled))
    puller.start(
        Request(seq=SEQ, token_ids=(7,) * 40, sampling=SamplingParams(max_tokens=5)),
        PullSource(HOLDER, 2),
        deadline_s=100.0,
    )
    notes.now += 1.0
    puller.on_step(StepResult(1, rooms=[Room(SEQ, (b"a", b"b"), (3, 4))]))
    return puller, done


def test_the_time_of_a_pull_is_that_of_its_bytes_and_not_of_the_engines_steps() -> None:
    notes = Notes()
    puller, done = asking(notes)
    notes.now += 1.0  # the holder's step
    puller.on_link(HOLDER, answer(2))
    notes.now += 0.25
    puller.on_kv(Committed(SEQ, 1, 2_000))
    assert done == [Pulled(2, 2_000, 0.25)]
    assert puller.num_open() == 0


def test_a_pull_that_the_holder_has_nothing_for_says_nothing_of_the_wire() -> None:
    notes = Notes()
    puller, done = asking(notes)
    notes.now += 1.0
    puller.on_link(HOLDER, answer(0))
    assert done == [Pulled()]


def test_a_pull_that_is_given_up_took_as_long_as_its_bytes_could_have_moved() -> None:
    notes = Notes()
    puller, done = asking(notes)
    puller.on_link(HOLDER, answer(2))
    notes.now += 4.5
    puller.on_tick()
    assert done == [Pulled(0, 0, 4.5)]
    assert (puller.num_open(), notes.closed_incoming) == (1, [SEQ])
