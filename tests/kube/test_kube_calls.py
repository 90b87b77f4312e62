"""How calls under load are judged."""

from __future__ import annotations

from tests.kube.checked_calls import Called, Calls


def test_the_goodput_of_a_while_is_that_of_its_worst_calls_in_a_row() -> None:
    def called(ttft_s: float = 1.0, tpot_s: float = 0.1, wrong: str = "") -> Called:
        return Called(0, 0.0, ttft_s, tpot_s, wrong, "d")

    good = [called()] * 200
    assert Calls([*good, called(ttft_s=9.0), called(tpot_s=0.9), called(wrong="lost"), *good]).goodput(2.0, 0.2) == 0.85
    assert Calls([called(), called(ttft_s=9.0)]).goodput(2.0, 0.2) == 0.5
    assert Calls(good).goodput(2.0, 0.2) == 1.0
