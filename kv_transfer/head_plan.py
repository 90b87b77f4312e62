"""Which kv heads go from which sender rank to which receiver rank when tensor-parallel degrees differ. Pure arithmetic.

A model has H kv heads. Rank r of T tensor-parallel ranks holds (source: `QKVParallelLinear` of vLLM, layers/linear.py)

    H >= T, H % T == 0     heads [r * H/T, (r + 1) * H/T)
    H <  T, T % H == 0     head r * H // T, so T/H ranks in a row hold a copy of each head
    anything else          refused, as engines do: the query heads of some rank would need a kv head that it does not hold

so what two ranks have in common is one range of heads, in the same order on both: a pair has at most one `HeadMove`. Every
receiver rank gets each of its heads from exactly one sender rank. Where several sender ranks hold a head, the receiver ranks
that want it are dealt out among them in order, as evenly as whole ranks allow; equal degrees pair rank r with rank r.

    H = 6:  2 -> 3   sender 0 [0 1 2]  ->  receiver 0 [0 1], receiver 1 [2 .]
                     sender 1 [3 4 5]  ->  receiver 1 [. 3], receiver 2 [4 5]
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import PeerRefused

MAX_TP_SIZE = 256  # sanity of what a peer says of itself: the widest NVLink domain has 72 GPUs (NVIDIA GB200 NVL72)


@dataclass(frozen=True, slots=True)
class HeadMove:
    """What one sender rank gives to one receiver rank. Both ranges count a rank's own heads from 0 and are equally long."""

    sender_rank: int
    receiver_rank: int
    sender_heads: range
    receiver_heads: range


def check_tp_size(num_kv_heads: int, tp_size: int) -> None:
    """Refuse a degree that cannot share the model's kv heads.

    Raises:
        PeerRefused: its field is "tp_size".
    """
    if not 1 <= tp_size <= MAX_TP_SIZE:
        raise PeerRefused(f"tp_size is {tp_size}; the limits are 1 and {MAX_TP_SIZE}", field="tp_size")
    if num_kv_heads % tp_size and tp_size % num_kv_heads:
        raise PeerRefused(
            f"tp_size is {tp_size}, which neither divides the model's {num_kv_heads} kv heads nor is a multiple of them",
            field="tp_size",
        )


def heads_of_rank(num_kv_heads: int, tp_size: int, rank: int) -> range:
    """The model's kv heads that `rank` holds. `tp_size` was checked."""
    start = rank * num_kv_heads // tp_size
    return range(start, start + max(1, num_kv_heads // tp_size))


def plan_heads(num_kv_heads: int, sender_tp_size: int, receiver_tp_size: int) -> list[HeadMove]:
    """Every pair of ranks that must talk, and what it moves, ordered by receiver and the heads it holds.

    Raises:
        PeerRefused: see check_tp_size.
    """
    check_tp_size(num_kv_heads, sender_tp_size)
    check_tp_size(num_kv_heads, receiver_tp_size)
    held = [heads_of_rank(num_kv_heads, sender_tp_size, rank) for rank in range(sender_tp_size)]
    wanted = [heads_of_rank(num_kv_heads, receiver_tp_size, rank) for rank in range(receiver_tp_size)]
    num_copies = max(1, sender_tp_size // num_kv_heads)  # sender ranks that hold the same heads, in a row
    num_takers = max(1, receiver_tp_size // num_kv_heads)  # receiver ranks that want the same heads, in a row
    moves: list[HeadMove] = []
    for receiver_rank, wants in enumerate(wanted):
        turn = receiver_rank % num_takers * num_copies // num_takers
        for sender_rank in range(turn, sender_tp_size, num_copies):
            holds = held[sender_rank]
            common = range(max(holds.start, wants.start), min(holds.stop, wants.stop))
            if common:
                moves.append(HeadMove(sender_rank, receiver_rank, _local(common, holds), _local(common, wants)))
    return moves


def _local(heads: range, of_rank: range) -> range:
    return range(heads.start - of_rank.start, heads.stop - of_rank.start)
