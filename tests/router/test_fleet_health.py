"""The fleet a router sees: no ghost endpoints, whatever the controller says or leaves out; ejected workers get no calls."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from baton.errors import InvalidRequest, WorkerLost
from baton.model_files import ModelFiles
from baton.request import Role
from baton.v1 import control_pb2, serving_pb2, worker_pb2
from router.fleet import Endpoint, Placed
from router.health import FAILURES_IN_A_ROW
from router.placement import Demand
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker


def record(worker: StubWorker, **changes: object) -> control_pb2.WorkerRecord:
    said = control_pb2.WorkerRecord(
        worker_id=worker.worker_id, epoch=worker.epoch, address=worker.address, role=worker.role, state="ready"
    )
    said.MergeFrom(control_pb2.WorkerRecord(**changes))  # type: ignore[arg-type]
    return said


@pytest.fixture
async def both_rig(files: ModelFiles) -> AsyncIterator[Rig]:
    """A router that was told of three workers, each of which does everything."""
    async with running_rig(files, [], wait_ready=False) as rig:
        for name in ("b0", "b1", "b2"):
            rig.workers.append(await StubWorker(name).start())
        rig.front_end.fleet.apply([record(worker) for worker in rig.workers])
        await until(lambda: states(rig) == ["ready"] * 3, "all are ready")
        yield rig


def states(rig: Rig) -> list[str]:
    return [endpoint.state for endpoint in rig.front_end.fleet.endpoints]


def endpoint(rig: Rig, worker_id: str) -> Endpoint:
    [found] = [endpoint for endpoint in rig.front_end.fleet.endpoints if endpoint.worker_id == worker_id]
    return found


async def served(rig: Rig, num_calls: int) -> Counter[str]:
    """Calls each worker got of `num_calls`, all of which must succeed."""
    before = {id(worker): len(worker.submits) for worker in rig.workers}
    answers = await asyncio.gather(*(rig.generate(request(f"call {n}", max_tokens=3)) for n in range(num_calls)))
    assert [answer.token_ids for answer in answers] == [[300, 301, 302]] * num_calls
    counts: Counter[str] = Counter()
    for worker in rig.workers:
        counts[f"{worker.worker_id}@{worker.address}"] += len(worker.submits) - before[id(worker)]
    return counts


async def test_a_worker_without_an_address_or_not_named_any_more_gets_no_call(both_rig: Rig) -> None:
    b0, b1, b2 = both_rig.workers
    nowhere = control_pb2.WorkerRecord(worker_id="b0", role=worker_pb2.ROLE_BOTH, state="starting")
    both_rig.front_end.fleet.apply([nowhere, record(b1)])
    assert [e.worker_id for e in both_rig.front_end.fleet.endpoints] == ["b1"]
    counts = await served(both_rig, 12)
    assert counts == {f"b1@{b1.address}": 12, f"b0@{b0.address}": 0, f"b2@{b2.address}": 0}


async def test_a_worker_that_is_not_named_any_more_is_not_chosen_in_the_same_turn_of_the_loop(both_rig: Rig) -> None:
    fleet, (_, b1, _) = both_rig.front_end.fleet, both_rig.workers
    fleet.apply([record(b1)])
    found = [fleet.find_place(Demand(prompt_tokens=1, max_total_tokens=2), frozenset()) for _ in range(3)]
    assert [placed.prefill.worker_id for placed in found if isinstance(placed, Placed)] == ["b1"] * 3


async def test_a_worker_that_moved_is_called_at_its_new_address_only(both_rig: Rig) -> None:
    old, b1, b2 = both_rig.workers
    new = await StubWorker("b0").start()  # the old process lives on: split brain
    both_rig.workers.append(new)
    both_rig.front_end.fleet.apply([record(new), record(b1), record(b2)])
    await until(lambda: states(both_rig) == ["ready"] * 3, "the new one is ready")
    counts = await served(both_rig, 12)
    assert counts[f"b0@{old.address}"] == 0
    assert counts[f"b0@{new.address}"] > 0


async def test_another_worker_at_a_known_address_is_never_taken_for_the_one_that_was_there(both_rig: Rig) -> None:
    b0, b1, b2 = both_rig.workers
    port = int(b0.address.rpartition(":")[2])
    await b0.kill()
    stranger = await StubWorker("b9", port=port).start()
    both_rig.workers.append(stranger)
    await until(lambda: "another worker" in endpoint(both_rig, "b0").session.reason, "the stranger is recognised")
    assert (await served(both_rig, 9))[f"b9@{stranger.address}"] == 0
    both_rig.front_end.fleet.apply([record(stranger), record(b1), record(b2)])
    await until(lambda: states(both_rig) == ["ready"] * 3, "under its own name it is welcome")
    assert (await served(both_rig, 9))[f"b9@{stranger.address}"] > 0


async def test_a_role_that_changes_is_followed_and_the_old_role_gets_no_call(both_rig: Rig) -> None:
    b0, b1, b2 = both_rig.workers
    b0.role = worker_pb2.ROLE_DECODE  # what its heartbeats say from now on
    await until(lambda: endpoint(both_rig, "b0").role is Role.DECODE, "the role is known")
    assert (await served(both_rig, 12))[f"b0@{b0.address}"] == 0, "it cannot prefill any more"
    assert b1.submits
    assert b2.submits


async def test_a_cache_that_was_emptied_by_a_restart_is_not_believed_in(both_rig: Rig) -> None:
    b0 = both_rig.workers[0]
    view = endpoint(both_rig, "b0").session.view
    assert view is not None
    view.prefixes.apply(1, [b"k" * 16], [], reset=False)
    port = int(b0.address.rpartition(":")[2])
    await b0.kill()
    again = await StubWorker("b0", port=port).start()
    both_rig.workers.append(again)
    await until(lambda: endpoint(both_rig, "b0").session.epoch == again.epoch, "its successor is connected")
    successor = endpoint(both_rig, "b0").session.view
    assert successor is not None
    assert len(successor.prefixes) == 0


async def test_an_ejected_worker_gets_no_call_and_everybody_can_see_why(both_rig: Rig) -> None:
    bad = endpoint(both_rig, "b0")
    now_s = asyncio.get_running_loop().time()
    for _ in range(FAILURES_IN_A_ROW):
        bad.health.failed(WorkerLost("b0 fell over"), now_s + 3600.0)
    assert bad.state == "ejected"
    assert both_rig.front_end.fleet.unready_reason() == ""
    counts = await served(both_rig, 12)
    assert counts[f"b0@{both_rig.workers[0].address}"] == 0
    metrics = (await both_rig.http.get("/metrics")).text
    assert 'baton_worker_up{role="both",state="ejected",worker="b0"} 1.0' in metrics
    [snapshot] = [s for s in both_rig.front_end.fleet.snapshots() if s.worker_id == "b0"]
    assert "b0 fell over" in snapshot.reason


async def test_readiness_is_of_the_least_of_all_calls_whatever_prompt_was_placed_before(both_rig: Rig) -> None:
    fleet = both_rig.front_end.fleet
    fleet.table.cached_tokens[:] = 1_000.0  # what a long cached prompt leaves behind
    assert fleet.unready_reason() == ""
    assert not fleet.table.cached_tokens.any()


async def test_the_last_worker_stays_in_use_and_client_faults_are_nobody_s(both_rig: Rig) -> None:
    for other in both_rig.workers[1:]:
        await other.kill()
    await until(lambda: states(both_rig).count("ready") == 1, "one is left")
    last = endpoint(both_rig, "b0")
    for _ in range(50):
        last.health.failed(InvalidRequest("bad", field="n"), 0.0)
    assert not last.health.is_open
    for _ in range(50):
        last.health.failed(WorkerLost("b0 fell over"), 0.0)
    assert last.state == "ready"
    assert (await served(both_rig, 3))[f"b0@{both_rig.workers[0].address}"] == 3


async def test_a_worker_that_comes_back_elsewhere_again_and_again_is_known_for_it(both_rig: Rig) -> None:
    b0, b1, b2 = both_rig.workers

    async def restart(old: StubWorker) -> StubWorker:
        await old.kill()
        new = await StubWorker("b0").start()
        both_rig.workers.append(new)
        both_rig.front_end.fleet.apply([record(new), record(b1), record(b2)])
        await until(lambda: endpoint(both_rig, "b0").session.epoch == new.epoch, "its successor is connected")
        return new

    for _ in range(3):
        b0 = await restart(b0)
    assert endpoint(both_rig, "b0").health.is_open
    assert "was lost" in endpoint(both_rig, "b0").health.reason


async def test_counts_are_back_at_zero_after_cancels_and_a_restarted_worker_gets_its_share_and_no_more(
    both_rig: Rig,
) -> None:
    rng = random.Random(3)

    async def call(number: int) -> None:
        stream = both_rig.stub.Generate(request(f"call {number}", max_tokens=20))
        if number % 2:
            await asyncio.sleep(0.02 * rng.random())
            stream.cancel()
            return
        async for _ in stream:
            pass

    for first in range(0, 200, 40):
        await asyncio.gather(*map(call, range(first, first + 40)))
    await both_rig.idle()
    b0, b1, b2 = both_rig.workers
    await b0.kill()
    b0 = await StubWorker("b0").start()
    both_rig.workers.append(b0)
    both_rig.front_end.fleet.apply([record(b0), record(b1), record(b2)])
    await until(lambda: states(both_rig) == ["ready"] * 3, "all are ready")
    counts: Counter[str] = Counter()
    for _ in range(6):
        counts += await served(both_rig, 10)
    shares = [counts[f"{worker.worker_id}@{worker.address}"] for worker in (b0, b1, b2)]
    assert sum(shares) == 60
    assert min(shares) >= 12, shares


async def test_a_router_that_takes_over_lists_and_uses_every_worker(files: ModelFiles) -> None:
    prefills = [await StubWorker(f"p{n}", worker_pb2.ROLE_PREFILL).start() for n in range(3)]
    decodes = [await StubWorker(f"d{n}", worker_pb2.ROLE_DECODE).start() for n in range(3)]
    for prefill in prefills:
        prefill.peers = {decode.worker_id: decode for decode in decodes}
        prefill.script.prefill_gate.clear()
    workers = [*prefills, *decodes]
    async with running_rig(files, [], wait_ready=False) as first:
        first.front_end.fleet.apply([record(worker) for worker in workers])
        await until(lambda: states(first) == ["ready"] * 6, "all are ready")
        calls = [asyncio.create_task(first.generate(request(f"call {n}", max_tokens=3))) for n in range(12)]
        await until(lambda: sum(prefill.num_open for prefill in prefills) == 12, "all calls are running")
        await first.front_end.stop()
        answers = await asyncio.gather(*calls)
        assert all(answer.status is not None for answer in answers), "they end with an error, none hangs"
    await until(lambda: not any(worker.num_open for worker in workers), "workers dropped what the first router had")
    for prefill in prefills:
        prefill.script.prefill_gate.set()
        prefill.submits.clear()
    async with running_rig(files, [], wait_ready=False) as second:
        second.workers = workers
        second.front_end.fleet.apply([record(worker) for worker in workers])
        await until(lambda: states(second) == ["ready"] * 6, "all are ready")
        for _ in range(6):
            await served(second, 10)
        assert len((await second.stub.GetLoads(serving_pb2.GetLoadsRequest())).workers) == 6
        assert all(prefill.submits for prefill in prefills)
        assert all(decode.adopted for decode in decodes)
