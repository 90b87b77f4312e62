"""The order in which a set's pods come, go and change; pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.kube.fake_kubelet_sets import Pod, Step, Wanted, steps

SICK = Pod(0, "new", available=False, ready=False)


def wanted(size: int, *, ordered: bool = False, **more: object) -> Wanted:
    return replace(Wanted(range(size), ordered, current="new", update="new"), **more)  # type: ignore[arg-type]


def pods(*states: str, revision: str = "new") -> list[Pod]:
    """By ordinal: up, sick, going, over, or nothing."""
    made = {
        "up": Pod(0, revision),
        "sick": replace(SICK, revision=revision),
        "going": replace(SICK, terminating=True),
        "over": replace(SICK, over=True),
    }
    return [replace(made[state], ordinal=i) for i, state in enumerate(states) if state]


def done(want: Wanted, there: list[Pod]) -> str:
    """`+1 -3`: pods made and deleted."""
    return " ".join(f"{'+' if step.verb == 'create' else '-'}{step.ordinal}" for step in steps(want, there))


@pytest.mark.parametrize(
    ("there", "ordered", "parallel"),
    [
        (pods(), "+0", "+0 +1 +2"),
        (pods("up"), "+1", "+1 +2"),
        (pods("sick"), "", "+1 +2"),
        (pods("up", "", "up"), "+1", "+1"),
        (pods("up", "going", "up"), "", ""),
        (pods("up", "over", "up"), "-1", "-1"),
        (pods("up", "up", "up"), "", ""),
        (pods("up", "up", "up", "up", "up"), "-4", "-4 -3"),
        (pods("up", "up", "up", "up", "going"), "", "-3"),
        (pods("up", "sick", "up", "up"), "", "-3"),
        (pods("up", "up", "up", "sick"), "-3", "-3"),
        (pods("up", "up", "up", "sick", "sick"), "", "-4 -3"),
        (pods("up", "up", "up", "sick", "up"), "-4", "-4 -3"),
        (pods("up", "up", "", "up"), "+2", "+2 -3"),
    ],
)
def test_a_set_of_three_comes_to_its_size(there: list[Pod], ordered: str, parallel: str) -> None:
    assert done(wanted(3, ordered=True), there) == ordered
    assert done(wanted(3), there) == parallel


@pytest.mark.parametrize(
    ("states", "partition", "max_unavailable", "deleted"),
    [
        ("up up up", 0, 1, "-2"),
        ("up up up", 0, 2, "-2 -1"),
        ("up up up", 1, 3, "-2 -1"),
        ("up up up", 3, 3, ""),
        ("up sick up", 0, 1, ""),
        ("up sick up", 0, 2, "-2"),
        ("up up going", 0, 1, ""),
        ("up up going", 0, 2, "-1"),
    ],
)
def test_an_update_takes_the_last_old_pods_and_no_more_than_may_be_missing(
    states: str, partition: int, max_unavailable: int, deleted: str
) -> None:
    want = wanted(3, update="next", partition=partition, max_unavailable=max_unavailable)
    assert done(want, pods(*states.split())) == deleted


def test_pods_of_the_new_revision_are_left_and_on_delete_leaves_all() -> None:
    there = [*pods("up", "up"), Pod(2, "next")]
    assert done(wanted(3, update="next"), there) == "-1"
    assert done(wanted(3, update="next", rolling=False), there) == ""


def test_an_update_that_is_ordered_waits_until_the_set_has_its_size() -> None:
    there = pods("up", "up", "up", "going")
    assert done(wanted(3, update="next", ordered=True), there) == ""
    assert done(wanted(3, update="next"), there) == "-2"


def test_a_pod_that_is_made_in_an_update_has_the_revision_of_its_place() -> None:
    want = wanted(3, current="old", update="next", partition=1)
    assert list(steps(want, [])) == [Step("create", 0, "old"), Step("create", 1, "next"), Step("create", 2, "next")]
    whole = wanted(3, current="old", update="next", num_current=2)
    assert [step.revision for step in steps(whole, [])] == ["old", "old", "next"]
    assert [step.revision for step in steps(replace(whole, rolling=False), [])] == ["next"] * 3
