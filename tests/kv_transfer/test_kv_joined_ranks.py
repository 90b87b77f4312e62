"""Ranks of unequal tensor-parallel degree: every byte of every head arrives where a reference re-slice puts it, once.

The whole path with real planes: plan, slices, a core per rank, joined tickets; over loopback with its faults, and over UCX.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config import KVTransferConfig
from baton.kv_fp8 import quantise
from baton.kv_layout import KVLayout
from kv_transfer.events import Committed, IncomingClosed, OutgoingClosed
from kv_transfer.frame import HEADER_BYTES
from kv_transfer.loopback import Faults, LoopbackNetwork
from kv_transfer.ucx import UcxTransport
from tests.kv_transfer.kv_ranks import GENERATION, SEQS_PER_PROMPT, Prompt, TensorParallel, random_kv

POOL_BLOCKS = 24
SEQ = 7 * SEQS_PER_PROMPT
DEGREES = [  # kv heads, sender tp size, receiver tp size
    (4, 1, 1), (4, 1, 2), (4, 2, 1), (8, 2, 4), (8, 4, 2), (3, 1, 3), (3, 3, 1), (6, 2, 3), (6, 3, 2),
    (1, 1, 2), (1, 2, 3), (2, 2, 4), (2, 4, 2), (2, 4, 1), (2, 1, 4), (3, 1, 6), (3, 6, 1),
]  # fmt: skip


def model_of(num_kv_heads: int, dtype: str = "float32") -> KVLayout:
    return KVLayout(num_layers=3, num_kv_heads=num_kv_heads, head_dim=4, dtype=dtype, block_size=4)


def prompt_of(model: KVLayout, tp_sizes: tuple[int, int], num_blocks: int, num_leading: int, seed: int) -> Prompt:
    """Random KV in blocks that lie in another order on each rank."""
    draw = random.Random(seed)
    tables = [[draw.sample(range(POOL_BLOCKS), num_blocks) for _ in range(tp_size)] for tp_size in tp_sizes]
    return Prompt(SEQ, random_kv(model, num_blocks, seed), num_leading, *tables)


def prompts_of(model: KVLayout, tp_sizes: tuple[int, int], blocks_each: int) -> list[Prompt]:
    """As many prompts as the pools hold."""
    whole = prompt_of(model, tp_sizes, POOL_BLOCKS, num_leading=0, seed=1)
    parts = [slice(start, start + blocks_each) for start in range(0, POOL_BLOCKS, blocks_each)]
    return [
        Prompt(
            SEQ + number * SEQS_PER_PROMPT, whole.kv[:, :, part], 1,
            [table[part] for table in whole.sources], [table[part] for table in whole.targets],
        )
        for number, part in enumerate(parts)
    ]  # fmt: skip


def loopback_ranks(
    model: KVLayout, tp_sizes: tuple[int, int], num_slots: int = 3, frame_layers: int = 4, receiver_dtype: str = ""
) -> tuple[TensorParallel, LoopbackNetwork]:
    """Ranks over a network without faults yet, each frame with room for so many layers of the widest rank's blocks."""
    network = LoopbackNetwork()
    frame_bytes = HEADER_BYTES + frame_layers * model.layer_block_bytes
    config = KVTransferConfig(transport="loopback", frame_bytes=frame_bytes, num_slots=num_slots)
    clock = itertools.count(100.0, 0.001)  # a millisecond later at every look
    ranks = TensorParallel(model, tp_sizes, POOL_BLOCKS, config, network.transport, clock.__next__, receiver_dtype)
    ranks.connect()
    return ranks, network


def hand_off(ranks: TensorParallel, prompt: Prompt) -> None:
    """One prompt in two chunks, to the end of both sides."""
    ranks.place(prompt)
    ranks.open(prompt)
    ranks.ship(prompt, prompt.kv.shape[2] // 2)
    ranks.poll()
    ranks.ship(prompt, prompt.kv.shape[2])
    ranks.run_until(lambda: bool(ranks.ends and ranks.freed))


def assert_arrived(ranks: TensorParallel, prompt: Prompt) -> None:
    """Every byte is right, none is elsewhere, and as many were written as are lacking: so each exactly once."""
    assert ranks.ends == [Committed(SEQ, GENERATION, ranks.nbytes(prompt))]
    assert ranks.freed == [OutgoingClosed(SEQ, "")]
    for rank, receiver in enumerate(ranks.receivers):
        assert np.array_equal(receiver.pool.kv, ranks.expected([prompt], rank)), f"rank {rank}"


def assert_idle(ranks: TensorParallel) -> None:
    assert (ranks.tickets.num_open, ranks.leases.num_open) == (0, 0)
    for rank in ranks.ranks:
        load = rank.core.load()
        assert (load.num_outgoing, load.num_incoming, load.quarantined_slots) == (0, 0, 0)


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3"])
@pytest.mark.parametrize(("num_kv_heads", "sender_tp_size", "receiver_tp_size"), DEGREES)
def test_every_head_arrives_where_a_reference_reslice_puts_it(
    num_kv_heads: int, sender_tp_size: int, receiver_tp_size: int, dtype: str
) -> None:
    model, tp_sizes = model_of(num_kv_heads, dtype), (sender_tp_size, receiver_tp_size)
    ranks, _ = loopback_ranks(model, tp_sizes)
    prompt = prompt_of(model, tp_sizes, num_blocks=9, num_leading=2, seed=1)
    hand_off(ranks, prompt)
    assert_arrived(ranks, prompt)
    assert_idle(ranks)


def test_each_pair_of_one_rank_reads_only_the_heads_it_sends() -> None:
    model = model_of(6)
    ranks, _ = loopback_ranks(model, (2, 3))
    prompt = prompt_of(model, (2, 3), num_blocks=5, num_leading=0, seed=1)
    hand_off(ranks, prompt)
    sent = [rank.core.load().bytes_sent for rank in ranks.senders]
    assert sent == [5 * rank.pool.layout.block_bytes for rank in ranks.senders]
    assert sum(sent) == 5 * model.block_bytes


@pytest.mark.parametrize("tp_sizes", [(1, 2), (3, 2), (12, 1)])
def test_heads_are_narrowed_to_8_bits_on_the_way_as_the_whole_would_be(tp_sizes: tuple[int, int]) -> None:
    model = model_of(6, "bfloat16")
    ranks, _ = loopback_ranks(model, tp_sizes, receiver_dtype="float8_e4m3")
    prompt = prompt_of(model, tp_sizes, num_blocks=7, num_leading=1, seed=1)
    wide = torch.randn(*prompt.kv.shape[:-1], model.head_dim, dtype=torch.bfloat16)
    prompt.kv = wide.view(torch.uint8).numpy()
    hand_off(ranks, prompt)
    assert_arrived(ranks, replace(prompt, kv=quantise(wide).numpy()))


@pytest.mark.parametrize("tp_sizes", [(2, 1), (1, 2), (2, 3)])
def test_many_prompts_at_once_arrive_each_in_its_own_blocks(tp_sizes: tuple[int, int]) -> None:
    model = model_of(6)
    ranks, network = loopback_ranks(model, tp_sizes, num_slots=2)
    network.faults = Faults(seed=1, jitter_s=0.05, corrupt=0.02, duplicate=0.1, reorder=0.3)
    prompts = prompts_of(model, tp_sizes, blocks_each=3)
    for prompt in prompts:
        ranks.place(prompt)
        ranks.open(prompt)
    for num_ready_blocks in (2, 3):
        for prompt in reversed(prompts):
            ranks.ship(prompt, num_ready_blocks)
            ranks.poll()
    ranks.run_until(lambda: len(ranks.ends) == len(ranks.freed) == len(prompts))
    committed = [Committed(prompt.seq, GENERATION, ranks.nbytes(prompt)) for prompt in prompts]
    assert sorted(ranks.ends, key=lambda end: end.seq) == committed
    for rank, receiver in enumerate(ranks.receivers):
        assert np.array_equal(receiver.pool.kv, ranks.expected(prompts, rank)), f"rank {rank}"
    assert_idle(ranks)


RATES = st.sampled_from([0.0, 0.0, 0.05, 0.3])
FAULTS = st.builds(
    Faults,
    seed=st.integers(0, 2**32),
    delay_s=st.sampled_from([0.0, 0.02]),
    jitter_s=st.sampled_from([0.0, 0.1]),
    loss=RATES,
    corrupt=RATES,
    duplicate=RATES,
    reorder=RATES,
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DEGREES),
    FAULTS,
    st.integers(1, 3),
    st.integers(1, 7),
    st.integers(1, 8),
    st.integers(0, 3),
    st.sampled_from([None, None, 3, 30]),
)
def test_whatever_the_network_does_the_ranks_get_all_heads_or_the_whole_ticket_closes(
    degrees: tuple[int, int, int],
    faults: Faults,
    num_slots: int,
    frame_layers: int,
    num_blocks: int,
    num_leading: int,
    cancel_after: int | None,
) -> None:
    model, tp_sizes = model_of(degrees[0]), degrees[1:]
    ranks, network = loopback_ranks(model, tp_sizes, num_slots, frame_layers)
    network.faults = faults
    prompt = prompt_of(model, tp_sizes, num_blocks, min(num_leading, num_blocks), faults.seed)
    ranks.place(prompt)
    ranks.open(prompt)
    ranks.ship(prompt, num_blocks)
    if cancel_after is not None:
        for _ in range(cancel_after):
            ranks.poll()
        ranks.tickets.close(SEQ)
    ranks.run_until(lambda: bool(ranks.ends and ranks.freed))
    if isinstance(ranks.ends[0], Committed):
        assert_arrived(ranks, prompt)
    at_end = [rank.pool.kv.copy() for rank in ranks.receivers]
    for _ in range(200):  # late copies
        ranks.poll()
    assert (len(ranks.ends), len(ranks.freed)) == (1, 1)
    assert all(np.array_equal(rank.pool.kv, kv) for rank, kv in zip(ranks.receivers, at_end, strict=True))
    assert_idle(ranks)
    assert ranks.lost == []


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(DEGREES), st.integers(0, 2**32))
def test_a_network_that_damages_copies_and_reorders_is_outlasted_and_no_head_of_another_rank_suffers(
    degrees: tuple[int, int, int], seed: int
) -> None:
    model, tp_sizes = model_of(degrees[0]), degrees[1:]
    ranks, network = loopback_ranks(model, tp_sizes)
    network.faults = Faults(seed=seed, jitter_s=0.01, corrupt=0.5, duplicate=0.3, reorder=0.3)
    prompt = prompt_of(model, tp_sizes, num_blocks=8, num_leading=1, seed=seed)
    ranks.place(prompt)
    ranks.open(prompt)
    ranks.ship(prompt, 8)
    for _ in range(20):
        ranks.poll()
    network.faults = Faults()
    ranks.run_until(lambda: bool(ranks.ends and ranks.freed))
    assert_arrived(ranks, prompt)


@pytest.mark.parametrize("victim", ["sender1", "receiver2"])
@pytest.mark.parametrize("moment", [0, 3, 10])
def test_the_death_of_one_rank_closes_the_ticket_on_all_of_them_once(victim: str, moment: int) -> None:
    model = model_of(6)
    ranks, network = loopback_ranks(model, (2, 3), num_slots=1, frame_layers=1)
    prompt = prompt_of(model, (2, 3), num_blocks=20, num_leading=0, seed=1)
    ranks.place(prompt)
    ranks.open(prompt)
    ranks.ship(prompt, 20)
    for _ in range(moment):
        ranks.poll()
    network.remove(victim.encode())
    ranks.run_until(lambda: bool(ranks.ends and ranks.freed))
    (end,), (freed,) = ranks.ends, ranks.freed
    assert isinstance(end, IncomingClosed)
    assert end.reason.startswith("peer lost: ") or freed.reason.startswith("peer lost: ")
    at_end = [rank.pool.kv.copy() for rank in ranks.receivers]
    for _ in range(200):
        ranks.poll()
    assert (len(ranks.ends), len(ranks.freed)) == (1, 1)
    assert all(np.array_equal(rank.pool.kv, kv) for rank, kv in zip(ranks.receivers, at_end, strict=True))
    assert_idle(ranks)


@pytest.fixture(params=["tcp", "posix"])
def ucx_config(request: pytest.FixtureRequest) -> KVTransferConfig:
    return KVTransferConfig(ucx_tls=request.param, frame_bytes=40 << 10, num_slots=2)


@pytest.fixture
def ucx_transports() -> Iterator[list[UcxTransport]]:
    transports: list[UcxTransport] = []
    yield transports
    for transport in transports:
        transport.close()


@pytest.mark.parametrize(
    ("num_kv_heads", "sender_tp_size", "receiver_tp_size"), [(8, 1, 2), (8, 4, 2), (3, 3, 1), (6, 2, 3), (2, 2, 4)]
)
def test_every_head_arrives_over_ucx(
    ucx_config: KVTransferConfig,
    ucx_transports: list[UcxTransport],
    num_kv_heads: int,
    sender_tp_size: int,
    receiver_tp_size: int,
) -> None:
    model = KVLayout(num_layers=4, num_kv_heads=num_kv_heads, head_dim=64, dtype="bfloat16")
    tp_sizes = (sender_tp_size, receiver_tp_size)

    def make_transport(name: str) -> UcxTransport:
        ucx_transports.append(UcxTransport(ucx_config))
        return ucx_transports[-1]

    ranks = TensorParallel(model, tp_sizes, POOL_BLOCKS, ucx_config, make_transport, time.monotonic)
    ranks.connect()
    pairs = [pair for rank in ranks.ranks for pair in rank.core.peers().values()]
    assert {pair.mode for pair in pairs} == {"staged"}
    assert all(ucx_config.ucx_tls in pair.transport for pair in pairs)
    prompt = prompt_of(model, tp_sizes, num_blocks=20, num_leading=3, seed=1)
    hand_off(ranks, prompt)
    assert_arrived(ranks, prompt)
    for rank in ranks.ranks:
        rank.core.lose_all("the test ends")
    ranks.run_until(lambda: all(rank.core.num_closing == 0 for rank in ranks.ranks))
    assert_idle(ranks)
