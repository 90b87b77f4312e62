"""The whole handoff, in random order and under random trouble; a failing seed is named in the message.

To look into one: `Scenario(seed).storm()` repeats it turn by turn.
"""

from __future__ import annotations

import pytest

from tests.handoff.handoff_chats import Chats
from tests.handoff.handoff_storm import Scenario

BLOCK = 25  # seeds per test: a second or two


@pytest.mark.parametrize("start", range(0, 100, BLOCK))
def test_without_faults_every_call_is_whole_and_equals_the_reference(start: int) -> None:
    for seed in range(start, start + BLOCK):
        Scenario(seed).calm()


@pytest.mark.parametrize("start", range(0, 100, BLOCK))
def test_clients_that_leave_in_the_middle_of_a_transfer_disturb_nobody(start: int) -> None:
    for seed in range(start, start + BLOCK):
        Scenario(seed).impatient()


@pytest.mark.parametrize("start", range(0, 100, BLOCK))
def test_under_faults_every_call_ends_nothing_leaks_and_no_token_is_wrong(start: int) -> None:
    for seed in range(start, start + BLOCK):
        Scenario(seed).storm()


@pytest.mark.parametrize("start", range(0, 100, BLOCK))
def test_what_an_adversary_replays_never_becomes_text_of_another_prompt(start: int) -> None:
    for seed in range(start, start + BLOCK):
        Scenario(seed).hostile()


@pytest.mark.parametrize("start", range(0, 50, BLOCK))
def test_conversations_whose_kv_flows_back_are_whole_and_under_trouble_never_wrong(start: int) -> None:
    for seed in range(start, start + BLOCK):
        Chats(seed).calm()
        Chats(seed).impatient()
        Chats(seed).storm()
        Chats(seed).hostile()


@pytest.mark.parametrize("start", range(0, 100, BLOCK))
def test_workers_that_fill_each_others_pools_never_wait_in_a_circle(start: int) -> None:
    for seed in range(start, start + BLOCK):
        Scenario.ring(seed)


@pytest.mark.parametrize("seed", [1043, 1083, 1236, 3306])
def test_a_reroute_to_nobody_of_what_has_ended_is_not_answered(seed: int) -> None:
    """It crossed the end; a word after it would be taken for one of the next attempt's. In the last one a link breaks."""
    Scenario(seed).storm()


@pytest.mark.slow
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("start", range(1_000, 6_000, 1_000))
def test_thousands_of_other_seeds_find_nothing_either(start: int) -> None:
    for seed in range(start, start + 1_000):
        for scenario in (Scenario, Chats):
            scenario(seed).calm()
            scenario(seed).impatient()
            scenario(seed).storm()
            scenario(seed).hostile()
