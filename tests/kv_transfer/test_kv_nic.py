"""Whose frame a network card serves, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.nic import Nic, Served


def drain(nic: Nic[str], now_s: float = 1e9) -> list[Served[str]]:
    served: list[Served[str]] = []
    while (next_one := nic.start_next(now_s)) is not None:
        served.append(next_one)
    return served


def test_flows_take_turns_frame_by_frame() -> None:
    nic: Nic[str] = Nic()
    for name in ("a1", "a2", "a3"):
        nic.put(1, name, 1.0, 10.0)
    nic.put(2, "b1", 1.0, 10.0)
    assert [(one.item, one.start_s, one.end_s) for one in drain(nic)] == [
        ("a1", 10.0, 11.0),
        ("b1", 11.0, 12.0),
        ("a2", 12.0, 13.0),
        ("a3", 13.0, 14.0),
    ]


def test_an_idle_card_starts_a_frame_when_it_comes_and_not_before() -> None:
    nic: Nic[str] = Nic()
    nic.put(1, "early", 2.0, 10.0)
    nic.put(2, "late", 2.0, 20.0)
    assert nic.start_next(9.9) is None
    assert [one.start_s for one in drain(nic)] == [10.0, 20.0]


def test_a_flow_that_is_forgotten_gives_its_turns_to_the_others() -> None:
    nic: Nic[str] = Nic()
    nic.put(1, "gone", 1.0, 10.0)
    nic.put(2, "stays", 1.0, 10.0)
    nic.forget(1)
    assert [(one.item, one.start_s) for one in drain(nic)] == [("stays", 10.0)]


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0.0, 3.0), st.floats(0.01, 2.0)), max_size=40))
def test_a_card_carries_one_frame_at_a_time_keeps_each_flow_s_order_and_never_idles_while_one_waits(
    frames: list[tuple[int, float, float]],
) -> None:
    nic: Nic[tuple[int, int, float]] = Nic()
    now_s = 0.0
    for number, (flow, gap_s, length_s) in enumerate(frames):
        now_s += gap_s
        nic.put(flow, (flow, number, now_s), length_s, now_s)
    served: list[Served[tuple[int, int, float]]] = []
    while (one := nic.start_next(1e9)) is not None:
        served.append(one)
    assert sorted(one.item[1] for one in served) == list(range(len(frames)))
    free_s = 0.0
    waiting = {one.item[1]: one.item[2] for one in served}
    for one in served:
        earliest_s = max(free_s, min(waiting.values()))
        assert one.start_s == earliest_s
        del waiting[one.item[1]]
        free_s = one.end_s
    for flow in range(1, 5):
        numbers = [one.item[1] for one in served if one.item[0] == flow]
        assert numbers == sorted(numbers)
