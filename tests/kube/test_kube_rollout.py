"""Upgrades step by step: whole calls can be served at every moment, within the budget, and it ends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from baton.request import Role
from router.controller.kube.rollout import Done, Pause, Progress, Replace, Shrink, Step, Surge, Wait, Worker, step

P, D = Role.PREFILL, Role.DECODE
HOMES = {"prefill": P, "decode": D}


def worker(name: str, *, old: bool = True, serves: bool = True, leaves: bool = False, model: str = "") -> Worker:
    home = name.rpartition("-")[0]
    return Worker(name, home, HOMES[home], old, serves, leaves, model or ("old" if old else "new"))


@dataclass
class Cluster:
    """Carries out steps; pods come up at the look after."""

    workers: dict[str, Worker]
    max_pods: int | None
    new_model: str = "new"
    surged: set[str] = field(default_factory=set)
    most: int = 0
    fewest_serving: int = 10**9

    def progress(self, goodput: float | None = None) -> Progress:
        spare = None if self.max_pods is None else self.max_pods - len(self.workers)
        return Progress(tuple(self.workers.values()), self.surged, spare, goodput)

    def take(self, wanted: Step) -> None:
        for name, one in self.workers.items():  # whatever was on its way is up by now
            if not one.serves:
                self.workers[name] = replace(one, serves=True)
        match wanted:
            case Replace(name):
                self.workers[name] = replace(self.workers[name], is_old=False, serves=False, fingerprint=self.new_model)
            case Surge(home):
                number = sum(one.home == home for one in self.workers.values())
                made = worker(f"{home}-{number}", old=False, serves=False, model=self.new_model)
                self.workers[made.name] = made
                self.surged.add(home)
            case Shrink(home):
                number = sum(one.home == home for one in self.workers.values())
                del self.workers[f"{home}-{number - 1}"]
                self.surged.remove(home)
            case _:
                pass
        serving = [one for one in self.workers.values() if one.serves]
        assert any({P, D} <= {one.role for one in serving if one.fingerprint == model} for model in ("old", "new")), (
            f"nobody serves a whole call after {wanted}"
        )
        self.most = max(self.most, len(self.workers))
        self.fewest_serving = min(self.fewest_serving, len(serving))


def cluster(num_prefill: int, num_decode: int, max_pods: int | None, new_model: str = "new") -> Cluster:
    names = [f"prefill-{n}" for n in range(num_prefill)] + [f"decode-{n}" for n in range(num_decode)]
    return Cluster({name: worker(name) for name in names}, max_pods, new_model)


@pytest.mark.parametrize("new_model", ["old", "new"])
@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "spare"), [(2, 2, 0), (1, 1, 2), (3, 5, 1), (2, 3, 2), (4, 4, None), (2, 6, 0)]
)
def test_every_pod_is_replaced_and_whole_calls_are_served_throughout(
    num_prefill: int, num_decode: int, spare: int | None, new_model: str
) -> None:
    size = num_prefill + num_decode
    there = cluster(num_prefill, num_decode, None if spare is None else size + spare, new_model)
    for _ in range(20 * size):
        wanted = step(there.progress())
        if isinstance(wanted, Done):
            break
        there.take(wanted)
    assert isinstance(wanted, Done)
    assert not [one for one in there.workers.values() if one.is_old]
    assert len(there.workers) == size  # what a surge added is taken back
    assert spare is None or there.most <= size + spare
    assert there.fewest_serving >= size - 1


def test_with_room_for_a_surge_in_each_pool_no_capacity_is_missing_at_any_time() -> None:
    there = cluster(2, 4, 8)
    while not isinstance(wanted := step(there.progress()), Done):
        there.take(wanted)
    assert there.fewest_serving >= 6


def test_a_pool_of_one_pod_without_room_is_left_alone_and_says_what_it_takes() -> None:
    wanted = step(cluster(1, 1, 2).progress())
    assert isinstance(wanted, Pause)
    assert "raise it by one worker" in wanted.why


def test_a_pool_that_can_have_no_more_is_done_without_and_says_why_where_it_cannot_be() -> None:
    refused = dict.fromkeys(HOMES, "the last one was given back: no node")
    assert step(replace(cluster(2, 2, None).progress(), refused=refused)) == Replace("decode-0")
    wanted = step(replace(cluster(1, 1, None).progress(), refused=refused))
    assert isinstance(wanted, Pause)
    assert wanted.why.endswith("and the last one was given back: no node")
    assert wanted.lacks in HOMES


def test_the_same_model_needs_no_second_cohort() -> None:
    """One more pod is enough where old and new workers may pair up."""
    there = cluster(1, 1, 3, new_model="old")
    while not isinstance(wanted := step(there.progress()), Done):
        assert not isinstance(wanted, Pause)
        there.take(wanted)
    assert there.most == 3


def test_nobody_leaves_while_too_many_calls_miss_their_targets() -> None:
    there = cluster(2, 2, 4)
    assert isinstance(step(there.progress(goodput=0.89)), Pause)
    assert isinstance(step(there.progress(goodput=0.91)), Replace)
    assert isinstance(step(there.progress(goodput=None)), Replace)  # no calls, no harm


def test_one_at_a_time() -> None:
    there = cluster(3, 3, 6)
    leaving = worker("decode-2", leaves=True)
    assert step(replace(there.progress(), workers=[*there.workers.values(), leaving])) == Replace("decode-2")
    coming = worker("decode-2", old=False, serves=False)
    there.workers["decode-2"] = coming
    assert step(there.progress()) == Wait("decode-2 is not up yet")


def test_who_is_ended_by_others_is_waited_for_and_not_brought_back() -> None:
    there = cluster(2, 2, 4)
    ending = replace(worker("decode-2"), is_old=False, leaves=True)
    assert step(replace(there.progress(), workers=[*there.workers.values(), ending])) == Wait("decode-2 leaves")


def test_a_release_that_does_not_come_up_takes_nobody_else_with_it_and_is_taken_back() -> None:
    there = cluster(2, 2, 4)
    there.workers["decode-1"] = worker("decode-1", old=False, serves=False)
    wanted = step(replace(there.progress(), stuck="decode-1: ImagePullBackOff"))
    assert wanted == Pause("a new worker does not come up: decode-1: ImagePullBackOff")
    there.workers = {name: replace(one, is_old=not one.is_old) for name, one in there.workers.items()}  # rolled back
    assert step(there.progress()) == Replace("decode-1")


def test_what_a_surge_added_stays_until_the_last_one_is_up() -> None:
    workers = [worker(name, old=False) for name in ("prefill-0", "decode-0", "decode-1")]
    late = replace(workers[1], serves=False)
    assert step(Progress([workers[0], late, workers[2]], {"decode"}, 0, None)) == Wait("decode-0 is not up yet")
    assert step(Progress(workers, {"decode"}, 0, None)) == Shrink("decode")


def test_nothing_old_is_nothing_to_do() -> None:
    assert step(Progress([worker("prefill-0", old=False), worker("decode-0", old=False)], {}, 0, 0.1)) == Done()
