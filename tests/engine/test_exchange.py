"""Sums and gathers between ranks: in their order, in pieces where they are larger than a slot, and with one that is lost."""

from __future__ import annotations

import mmap
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from engine.ports import RunnerLost
from engine.tensor_parallel import exchange
from engine.tensor_parallel.exchange import SharedExchange

SIZE = 3


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SharedExchange]]:
    monkeypatch.setattr(exchange, "SLOT_BYTES", 64)
    shared = mmap.mmap(-1, SharedExchange.nbytes(SIZE))
    pairs = [socket.socketpair() for _ in range(SIZE - 1)]
    lead = SharedExchange(0, SIZE, shared, [mine for mine, _ in pairs])
    yield [lead, *(SharedExchange(i, SIZE, shared, [theirs]) for i, (_, theirs) in enumerate(pairs, 1))]
    for end in (end for pair in pairs for end in pair):
        end.close()


def together(ranks: list[SharedExchange], act: Callable[[int, SharedExchange], Tensor]) -> list[Tensor]:
    """What each rank gets where all act at once."""
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(act, range(SIZE), ranks))


@pytest.mark.parametrize("shape", [(1,), (4, 4), (5, 7), (0, 8), (33, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_the_sum_in_the_order_of_ranks(
    ranks: list[SharedExchange], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = [torch.randn(shape).to(dtype) for _ in range(SIZE)]
    expected = ((parts[0].float() + parts[1].float()) + parts[2].float()).to(dtype)
    for _ in range(3):  # nothing of one exchange is left for the next
        for got in together(ranks, lambda i, rank: rank.sum(parts[i])):
            assert got.dtype == dtype
            assert torch.equal(got, expected)


def test_a_part_that_is_a_view_is_summed_as_it_looks(ranks: list[SharedExchange]) -> None:
    parts = [torch.randn(6, 5).t() for _ in range(SIZE)]
    assert torch.equal(together(ranks, lambda i, rank: rank.sum(parts[i]))[1], parts[0] + parts[1] + parts[2])


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (0, 9), (21, 17)])
def test_rank_0_gets_all_columns_in_the_order_of_ranks(ranks: list[SharedExchange], shape: tuple[int, int]) -> None:
    parts = [torch.randn(shape) for _ in range(SIZE)]
    assert torch.equal(together(ranks, lambda i, rank: rank.gather(parts[i]))[0], torch.cat(parts, 1))


def test_a_rank_that_ended_is_noticed(ranks: list[SharedExchange]) -> None:
    ranks[2]._signals[0].close()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ranks[1].sum, torch.ones(4))
        with pytest.raises(RunnerLost, match="ended"):
            ranks[0].sum(torch.ones(4))
        for mine in ranks[0]._signals:  # as a process that ends does
            mine.close()
        with pytest.raises(RunnerLost, match="ended"):
            other.result()


def test_a_rank_that_says_nothing_is_waited_for_no_longer_than_agreed(
    ranks: list[SharedExchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PATIENCE_S", 0.05)
    ranks[0]._signals[0].settimeout(0.05)
    with pytest.raises(RunnerLost, match=r"nothing for 0\.05 s"):
        ranks[0].sum(torch.ones(4))
