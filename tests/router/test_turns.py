"""Places live: who is let go is told at once, and whoever leaves at any moment leaves nothing behind."""

from __future__ import annotations

import asyncio
import math

import pytest

from baton.config import RouterConfig
from baton.errors import Overloaded
from baton.model_files import ModelFiles
from baton.v1 import control_pb2
from router import turns as live
from router.admission import Turn
from router.admission_metrics import AdmissionMetrics
from router.capacity import WorkerLoad
from router.fleet import Fleet
from router.sequence import SequenceReport
from router.series import Registry
from router.session import Liveness, SessionIdentity
from router.tenants import Tenant
from router.turns import Place, Turns
from tests.router.router_rig import running_rig

IDLE = [
    WorkerLoad("p0", True, False, 100.0, 0, 0, 0.0, 64, 100_000, 0),
    WorkerLoad("d0", False, True, math.inf, 0, 0, 0.0, 64, 100_000, 0),
]


async def arrived(turns: Turns, tenant: Tenant) -> Place:
    now_s = asyncio.get_running_loop().time()
    place = turns.knock(tenant, 1, "batch")
    place.arrive(Turn(tenant, 0, 100, now_s, "batch", 60.0, 1.0, 1.0, now_s + 600.0, 1, 100, 10), [SequenceReport()])
    return place


async def test_who_went_for_another_one_hears_of_it_at_once_and_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "worker_loads", lambda fleet: IDLE)
    fleet = Fleet(SessionIdentity("r", 1), Liveness(), 0, 16)
    turns = Turns(RouterConfig(max_inflight=2), fleet, AdmissionMetrics(Registry()))
    heavy, light = Tenant("heavy"), Tenant("light")
    first, waits = await arrived(turns, heavy), await arrived(turns, heavy)
    assert waits.waits is not None
    first._began()  # its lane is free, and nobody has looked since
    turns.admission.observe(IDLE, asyncio.get_running_loop().time())
    monkeypatch.setattr(turns, "_look", lambda now_s: None)
    monkeypatch.setattr(turns.admission, "_seats", {})
    last = await arrived(turns, light)
    assert last.waits is None
    for place in (waits, first, last):
        place.close()
    with pytest.raises(Overloaded):
        await waits.wait()
    assert (turns.admission.num_seqs, len(turns.admission.queue)) == (0, 0)
    assert not turns._places


async def test_prompts_that_wait_to_be_tokenised_are_bounded_and_leave_the_door_however_they_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "worker_loads", lambda fleet: IDLE)
    fleet = Fleet(SessionIdentity("r", 1), Liveness(), 0, 16)
    turns = Turns(RouterConfig(max_queued=2), fleet, AdmissionMetrics(Registry()))
    tenant = Tenant("a")
    places = [turns.knock(tenant, 1, "batch") for _ in range(2)]
    with pytest.raises(Overloaded, match="2 prompts wait to be tokenised; the limit is 2"):
        turns.knock(tenant, 1, "batch")
    assert turns.quotas.num_seqs(tenant) == 2
    places[0].close()
    inside = await arrived(turns, tenant)
    places.append(turns.knock(tenant, 1, "batch"))
    for place in (*places, inside):
        place.close()
    assert (turns._num_at_door, turns.quotas.num_seqs(tenant)) == (0, 0)


async def test_who_waited_in_vain_has_its_tokens_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "worker_loads", lambda fleet: IDLE)
    fleet = Fleet(SessionIdentity("r", 1), Liveness(), 0, 16)
    turns = Turns(RouterConfig(), fleet, AdmissionMetrics(Registry()))
    tenant = Tenant("a", tokens_per_min=150)
    released, waits = await arrived(turns, tenant), await arrived(turns, tenant)  # of 100 tokens each
    with pytest.raises(Overloaded, match="tokens_per_min"):
        turns.knock(tenant, 1, "batch")
    waits.close()
    turns.knock(tenant, 1, "batch").close()
    released.close()


async def test_a_class_that_is_gone_once_the_prompt_is_tokenised_fails_nobody(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = control_pb2.SloSet(version=1, classes=[control_pb2.SloClass(name="new", ttft_ms=1e3, tpot_ms=100.0)])
    async with running_rig(files) as rig:
        calls = rig.front_end.calls
        encode = calls._tokenizer.encode

        async def slowly(*args: object, **options: object) -> tuple[int, ...]:
            calls._slo_watch.apply(others)
            return await encode(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(calls._tokenizer, "encode", slowly)
        response = await rig.post("/v1/completions", {"prompt": "hello", "max_tokens": 3})
        assert response.status_code == 200, response.text
