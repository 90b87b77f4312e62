"""Workers that come, go, restart and fall silent; where sequences are placed; what health says meanwhile."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.errors import PeerRefused
from baton.model_files import ModelFiles
from baton.request import Role
from baton.v1 import control_pb2, serving_pb2, serving_pb2_grpc, worker_pb2
from router.placement import Choice, Demand, NoPlace, place
from router.worker_table import LinkView, WorkerSnapshot, table_of
from tests.router.router_rig import Rig, request, running_rig, until
from tests.router.stub_worker import StubWorker, start_pair

SMALL = Demand(prompt_tokens=100, max_total_tokens=200)


def snapshot(worker_id: str, role: Role, **changes: object) -> WorkerSnapshot:
    plain = WorkerSnapshot(worker_id, 1, role, "ready", "f", pool_tokens=1_024)
    return replace(plain, **changes)  # type: ignore[arg-type]


def linked(worker_id: str, *peers: str, state: str = "ready", **changes: object) -> WorkerSnapshot:
    links = {peer: LinkView(1, state) for peer in peers}
    return snapshot(worker_id, Role.PREFILL, links=links, **changes)


def chosen(*workers: WorkerSnapshot, demand: Demand = SMALL, **options: object) -> tuple[str, str]:
    found = place(table_of(workers), demand, **options)  # type: ignore[arg-type]
    assert isinstance(found, Choice), found
    return found.prefill, found.decode


def test_the_prefill_worker_with_least_queued_and_the_decode_worker_with_most_room_are_chosen() -> None:
    workers = (
        linked("p0", "d0", "d1", waiting_tokens=500),
        linked("p1", "d0", "d1", waiting_tokens=20),
        snapshot("d0", Role.DECODE, used_tokens=900),
        snapshot("d1", Role.DECODE, used_tokens=100),
    )
    assert chosen(*workers) == ("p1", "d1")


def test_a_pair_whose_link_is_down_is_not_chosen_and_waited_for() -> None:
    bad, decode = linked("p0", "d0", state="lost"), snapshot("d0", Role.DECODE)
    found = place(table_of((bad, decode)), SMALL)
    assert isinstance(found, NoPlace)
    assert not found.hopeless
    assert chosen(bad, linked("p1", "d0", waiting_tokens=900), decode) == ("p1", "d0")


def test_a_refused_pair_is_not_chosen_whichever_end_has_another_partner() -> None:
    p0 = linked("p0", "d0", state="refused")
    assert chosen(p0, linked("p1", "d0", waiting_tokens=900), snapshot("d0", Role.DECODE)) == ("p1", "d0")
    both = replace(p0, links={"d0": LinkView(1, "refused"), "d1": LinkView(1, "ready")})
    room, full = snapshot("d0", Role.DECODE), snapshot("d1", Role.DECODE, used_tokens=900)
    assert chosen(both, room, full) == ("p0", "d1")


def test_a_decode_worker_that_fits_no_prefill_worker_prefills_for_itself_where_nobody_else_can_serve() -> None:
    p0, decode = linked("p0", "d0", state="refused"), snapshot("d0", Role.DECODE)
    assert chosen(p0, decode) == ("d0", "d0")
    assert chosen(p0, decode, linked("p1", "d1"), snapshot("d1", Role.DECODE)) == ("p1", "d1")
    large = Demand(prompt_tokens=600, max_total_tokens=2_000)
    assert isinstance(place(table_of((p0, decode)), large), NoPlace)


def test_a_prefill_worker_that_may_come_back_is_waited_for_instead() -> None:
    p0, decode = linked("p0", "d0", state="refused"), snapshot("d0", Role.DECODE)
    for away in (snapshot("p1", Role.PREFILL, state="connecting"), linked("p1", "d0", state="lost")):
        assert isinstance(place(table_of((p0, away, decode)), SMALL), NoPlace)


def test_a_link_of_an_earlier_epoch_counts_as_unproved() -> None:
    decode = snapshot("d0", Role.DECODE, epoch=2)
    found = place(table_of((linked("p0", "d0"), decode)), SMALL)
    assert isinstance(found, Choice)
    assert found.score.unproved_link


def test_pairs_form_only_within_one_fingerprint() -> None:
    workers = (
        linked("p0", "d0", "d1"),
        snapshot("d0", Role.DECODE, fingerprint="other"),
        snapshot("d1", Role.DECODE, used_tokens=900),
    )
    assert chosen(*workers) == ("p0", "d1")
    waiting = place(table_of((linked("p0", "d0"), workers[1], snapshot("p1", Role.PREFILL, state="connecting"))), SMALL)
    assert isinstance(waiting, NoPlace)
    assert "p0 to d0 is refused (fingerprint)" in waiting.reason


def test_a_worker_that_does_both_needs_nobody() -> None:
    assert chosen(snapshot("b0", Role.BOTH)) == ("b0", "b0")


def test_short_prompts_are_prefilled_on_decode_only_where_that_is_allowed() -> None:
    decode = snapshot("d0", Role.DECODE)
    assert isinstance(place(table_of((decode,)), SMALL), NoPlace)
    assert chosen(decode, local_prefill_tokens=100) == ("d0", "d0")


def test_sequences_go_only_where_they_fit() -> None:
    large = Demand(prompt_tokens=600, max_total_tokens=1_100)
    small, big = snapshot("d0", Role.DECODE), snapshot("d1", Role.DECODE, pool_tokens=4_096, used_tokens=4_000)
    assert chosen(linked("p0", "d0", "d1"), small, big, demand=large) == ("p0", "d1")


def test_a_worker_to_avoid_is_taken_only_where_nobody_else_is_left() -> None:
    workers = (linked("p0", "d0"), linked("p1", "d0", waiting_tokens=900), snapshot("d0", Role.DECODE))
    assert chosen(*workers, avoid=frozenset({"p0"})) == ("p1", "d0")
    assert chosen(workers[0], workers[2], avoid=frozenset({"p0"})) == ("p0", "d0")


def test_a_prefill_worker_that_knows_the_prompt_goes_before_a_less_busy_one_but_not_before_one_to_avoid() -> None:
    workers = (linked("p0", "d0"), linked("p1", "d0", waiting_tokens=900), snapshot("d0", Role.DECODE))
    assert chosen(*workers, prefer="p1") == ("p1", "d0")
    assert chosen(*workers, prefer="p1", avoid=frozenset({"p1"})) == ("p0", "d0")
    assert chosen(*workers, prefer="gone") == ("p0", "d0")


def test_a_missing_role_is_hopeless_and_a_lost_worker_is_not() -> None:
    nobody = place(table_of((snapshot("d0", Role.DECODE),)), SMALL)
    lost = place(table_of((snapshot("p0", Role.PREFILL, state="connecting"), snapshot("d0", Role.DECODE))), SMALL)
    assert isinstance(nobody, NoPlace)
    assert isinstance(lost, NoPlace)
    assert (nobody.hopeless, lost.hopeless) == (True, False)
    assert "no prefill worker is part of the fleet" in nobody.reason


# -- over real Sessions ------------------------------------------------------------------------------------------------


async def test_prefill_workers_are_told_whom_they_may_hand_over_to(rig: Rig) -> None:
    assert [(p.worker_id, p.epoch, p.address) for p in rig.prefill.told_peers] == [
        ("d0", rig.decode.epoch, rig.decode.address)
    ]
    assert rig.decode.told_peers == []


async def test_prefill_workers_hear_of_decode_workers_of_another_fingerprint_so_that_hello_names_the_difference(
    files: ModelFiles,
) -> None:
    workers = [
        await StubWorker("p0", worker_pb2.ROLE_PREFILL).start(),
        await StubWorker("d0", worker_pb2.ROLE_DECODE, fingerprint="0" * 32).start(),
    ]
    async with running_rig(files, workers) as rig:
        await until(lambda: [peer.worker_id for peer in rig.prefill.told_peers] == ["d0"], "p0 is told of d0")


async def test_a_pair_that_turns_out_not_to_fit_costs_no_call(files: ModelFiles) -> None:
    workers = [*await start_pair(), await StubWorker("d1", worker_pb2.ROLE_DECODE).start()]
    prefill, _, other = workers
    prefill.peers["d1"] = other
    async with running_rig(files, workers) as rig:
        prefill.script.fail_prefill = PeerRefused("rope does not fit: mine a, yours b", field="rope")
        call = asyncio.create_task(rig.generate(request(max_tokens=3)))
        await until(lambda: bool(prefill.submits), "the call was placed on the pair")
        prefill.script.fail_prefill = None
        answer = await call
        assert answer.token_ids == [300, 301, 302]
        await rig.idle()


async def test_a_call_waits_for_a_restarted_worker_and_is_served_by_it(rig: Rig) -> None:
    port = int(rig.decode.address.rpartition(":")[2])
    await rig.decode.kill()
    await until(lambda: bool(rig.front_end.fleet.unready_reason()), "the loss is noticed")
    call = asyncio.create_task(rig.generate(request(max_tokens=4)))
    await until(lambda: rig.front_end.calls.num_inflight == 1, "the call waits")
    reborn = await StubWorker("d0", worker_pb2.ROLE_DECODE, port=port).start()
    rig.workers[-1] = rig.prefill.peers["d0"] = reborn
    answer = await call
    assert answer.token_ids == [300, 301, 302, 303]
    assert rig.prefill.told_peers[0].epoch == reborn.epoch


async def test_a_worker_that_was_silent_for_a_while_is_told_its_peers_again(rig: Rig) -> None:
    rig.prefill.script.silent = True
    await until(lambda: bool(rig.front_end.fleet.unready_reason()), "the silence is noticed")
    rig.prefill.told_peers = []  # a worker forgets them with the Session that named them
    rig.prefill.script.silent = False
    await until(lambda: not rig.front_end.fleet.unready_reason(), "the pair is linked again")
    assert [peer.worker_id for peer in rig.prefill.told_peers] == ["d0"]


async def test_a_lost_session_leaves_no_task_behind(rig: Rig) -> None:
    def readers() -> int:
        names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
        return sum("_consume_request_iterator" in name for name in names)

    before = readers()
    port = int(rig.decode.address.rpartition(":")[2])
    for _ in range(3):
        await rig.decode.kill()
        await until(lambda: bool(rig.front_end.fleet.unready_reason()), "the loss is noticed")
        rig.workers[-1] = rig.prefill.peers["d0"] = await StubWorker("d0", worker_pb2.ROLE_DECODE, port=port).start()
        await until(lambda: not rig.front_end.fleet.unready_reason(), "it is back")
    await until(lambda: readers() == before, "the readers of lost sessions have ended")


async def test_a_call_that_waits_too_long_is_unavailable_with_a_hint_and_the_reason(files: ModelFiles) -> None:
    async with running_rig(files, unavailable_wait_s=0.2) as rig:
        await rig.decode.kill()
        await until(lambda: bool(rig.front_end.fleet.unready_reason()), "the loss is noticed")
        reply = await rig.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        answer = await rig.generate(request(max_tokens=2))
        ready = await rig.http.get("/readyz")
        live = await rig.http.get("/healthz")
    assert reply.status_code == 503
    assert int(reply.headers["retry-after"]) >= 1
    assert "no decode worker is ready" in reply.json()["error"]["message"]
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.UNAVAILABLE
    assert (ready.status_code, live.status_code) == (503, 200)
    assert "d0" in ready.text


async def test_a_fleet_without_a_role_refuses_at_once_and_says_so(files: ModelFiles) -> None:
    decode = await StubWorker("d0", worker_pb2.ROLE_DECODE).start()
    async with running_rig(files, [decode], wait_ready=False, unavailable_wait_s=60.0) as rig:
        await until(lambda: rig.front_end.fleet.endpoints[0].session.view is not None, "decode is connected")
        answer = await rig.generate(request(max_tokens=2))
    assert answer.error is not None
    assert "no prefill worker is part of the fleet" in answer.error.message


async def test_a_silent_worker_counts_as_lost_after_its_heartbeats(rig_without_retries: Rig) -> None:
    rig = rig_without_retries
    rig.decode.script.decode_gate.clear()
    call = asyncio.create_task(rig.generate(request(max_tokens=4)))
    await until(lambda: bool(rig.decode.adopted), "decode has the sequence")
    rig.decode.script.silent = True
    answer = await call
    assert answer.error is not None
    assert answer.error.code == "worker_lost"
    assert "heartbeats" in answer.error.message


async def test_time_in_which_the_router_itself_stood_still_is_no_silence_of_its_workers(rig: Rig) -> None:
    rig.decode.script.decode_gate.clear()
    call = asyncio.create_task(rig.generate(request(max_tokens=4)))
    await until(lambda: bool(rig.decode.adopted), "decode has the sequence")
    time.sleep(1.0)  # noqa: ASYNC251  # ten heartbeats in which nothing of this process runs
    await asyncio.sleep(0.2)
    rig.decode.script.decode_gate.set()
    answer = await call
    assert answer.status is None
    assert answer.token_ids == [300, 301, 302, 303]


async def test_another_worker_behind_a_known_address_is_refused(files: ModelFiles) -> None:
    stranger = await StubWorker("stranger").start()
    async with running_rig(files, [], wait_ready=False) as rig:
        rig.workers.append(stranger)
        record = control_pb2.WorkerRecord(worker_id="w0", address=stranger.address, role=worker_pb2.ROLE_BOTH)
        rig.front_end.fleet.apply([record])
        session = rig.front_end.fleet.endpoints[0].session
        await until(lambda: "another worker" in session.reason, "the stranger is refused")
        assert session.view is None
        rig.front_end.fleet.apply([])
        assert rig.front_end.fleet.endpoints == []


async def test_a_draining_worker_takes_nothing_new_and_finishes_what_it_has(files: ModelFiles) -> None:
    workers = [await StubWorker(f"w{number}").start() for number in range(2)]
    async with running_rig(files, [], wait_ready=False) as rig:
        rig.workers += workers

        def records(state: str) -> list[control_pb2.WorkerRecord]:
            return [
                control_pb2.WorkerRecord(
                    worker_id=w.worker_id, address=w.address, state=state if w is workers[0] else "ready"
                )
                for w in workers
            ]

        rig.front_end.fleet.apply(records("ready"))
        await until(lambda: all(e.state == "ready" for e in rig.front_end.fleet.endpoints), "both are ready")
        workers[0].script.decode_gate.clear()
        workers[1].script.decode_gate.clear()
        running = [asyncio.create_task(rig.generate(request(max_tokens=3))) for _ in range(2)]
        await until(lambda: all(worker.num_open == 1 for worker in workers), "each has one")
        rig.front_end.fleet.apply(records("draining"))
        for worker in workers:
            worker.script.decode_gate.set()
        later = [await rig.generate(request(max_tokens=3)) for _ in range(4)]
        finished = await asyncio.gather(*running)
    assert all(answer.status is None for answer in [*later, *finished])
    assert [len(worker.submits) for worker in workers] == [1, 5]


async def test_loads_and_model_are_told(rig: Rig) -> None:
    loads = await rig.stub.GetLoads(serving_pb2.GetLoadsRequest())
    info = await rig.stub.GetModelInfo(serving_pb2.GetModelInfoRequest())
    assert {(w.worker, w.role, w.state) for w in loads.workers} == {
        ("p0", "prefill", "ready"),
        ("d0", "decode", "ready"),
    }
    assert loads.num_inflight == 0
    assert (info.model, info.vocab_size, info.max_model_len) == ("tiny", 512, 2048)


async def test_grpc_health_follows_readiness_and_reflection_lists_the_service(rig: Rig) -> None:
    health = health_pb2_grpc.HealthStub(rig.channel)

    async def status(service: str) -> int:
        return int((await health.Check(health_pb2.HealthCheckRequest(service=service))).status)

    async def becomes(wanted: int) -> None:
        watch = health.Watch(health_pb2.HealthCheckRequest(service="baton.v1.Serving"))
        async for reply in watch:
            if reply.status == wanted:
                break
        watch.cancel()

    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    await becomes(serving)
    stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = [service.name async for reply in call for service in reply.list_services_response.service]
    await rig.decode.kill()
    await becomes(not_serving)
    assert await status("") == serving
    assert "baton.v1.Serving" in names
    assert "grpc.health.v1.Health" in names


async def test_a_client_that_pings_each_second_keeps_its_channel(rig: Rig) -> None:
    options = [
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.keepalive_timeout_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    rig.decode.script.decode_gate.clear()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{rig.front_end.grpc_port}", options=options) as channel:
        rig.stub = serving_pb2_grpc.ServingStub(channel)
        calls = [asyncio.create_task(rig.generate(request(max_tokens=3))) for _ in range(5)]
        await asyncio.sleep(5)  # five pings without any data in between
        rig.decode.script.decode_gate.set()
        answers = await asyncio.gather(*calls)
    assert all(answer.token_ids == [300, 301, 302] for answer in answers)


async def test_pair_with_a_link_that_is_not_up_yet_is_not_ready_but_usable(files: ModelFiles) -> None:
    prefill, decode = await start_pair()
    prefill.link_state = "connecting"
    async with running_rig(files, [prefill, decode], wait_ready=False) as rig:
        answer = await rig.generate(request(max_tokens=2))
        ready = await rig.http.get("/readyz")
    assert answer.token_ids == [300, 301]
    assert ready.status_code == 503
    assert "connecting" in ready.text


async def test_a_call_waits_for_workers_that_the_controller_is_still_starting(files: ModelFiles) -> None:
    worker = await StubWorker("b0").start()
    async with running_rig(files, [], wait_ready=False) as rig:
        rig.workers.append(worker)
        fleet = rig.front_end.fleet
        fleet.apply([control_pb2.WorkerRecord(worker_id="b0", role=worker_pb2.ROLE_BOTH, state="starting")])
        call = asyncio.create_task(rig.generate(request(max_tokens=2)))
        await until(lambda: rig.front_end.calls.num_inflight == 1, "the call waits")
        assert "b0 is starting" in (await rig.http.get("/readyz")).text
        fleet.apply([control_pb2.WorkerRecord(worker_id="b0", role=worker_pb2.ROLE_BOTH, address=worker.address)])
        assert (await call).token_ids == [300, 301]


async def test_a_router_that_stops_ends_its_calls_with_an_error_that_says_so(files: ModelFiles) -> None:
    async with running_rig(files) as rig:
        rig.decode.script.decode_gate.clear()
        over_grpc = asyncio.create_task(rig.generate(request(max_tokens=9)))
        body = {"prompt": "a", "max_tokens": 9, "stream": True}
        async with rig.http.stream("POST", "/v1/completions", json=body) as over_http:  # its first bytes are here
            await until(lambda: rig.decode.num_open == 2, "both calls are being decoded")
            await rig.front_end.stop()
            events = [line async for line in over_http.aiter_lines() if line]
        answer = await over_grpc
    assert answer.error is not None
    assert answer.error.code == "unavailable"
    assert answer.status is not None
    assert answer.status.code() is grpc.StatusCode.UNAVAILABLE
    assert '"code":"unavailable"' in events[-1]
