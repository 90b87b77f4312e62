"""Whole workers under mTLS: handoffs as ever between parts of the cluster, and nothing for anybody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import grpc
import grpc.aio
import pytest

from baton.errors import ConfigError
from baton.peer_trust import PLAIN, Part, PeerTrust
from baton.request import SamplingParams
from baton.v1 import kv_pb2, kv_pb2_grpc, worker_pb2, worker_pb2_grpc
from baton.wire import PROTOCOL_VERSION
from engine.scripted_runner import answer
from tests.cluster_certificates import Authority, needs_openssl
from tests.worker.scripted_worker import ScriptedWorker, running, worker_config
from tests.worker.session_client import SessionClient, request

pytestmark = needs_openssl
EPOCH = 0xABC
SEQ = EPOCH << 32 | 1
PROMPT = [(31 * i) % 900 + 20 for i in range(200)]
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def secured(worker_id: str, role: str, authority: Authority) -> ScriptedWorker:
    return ScriptedWorker(worker_config(worker_id, role, tls_dir=str(authority.of(Part.WORKER))))


@pytest.mark.parametrize("opener", [Part.ROUTER, Part.CONTROLLER])
async def test_a_prompt_is_handed_over_as_without_tls(authority: Authority, opener: Part) -> None:
    p, d = secured("p", "prefill", authority), secured("d", "decode", authority)
    trust = authority.trust(opener)
    async with (
        running(p, d),
        SessionClient(p.server.address, EPOCH, trust) as prefill,
        SessionClient(d.server.address, EPOCH, trust) as decode,
    ):
        prefill.submit(request(SEQ, PROMPT, 12, ignore_eos=True), d.peer)
        await decode.until(lambda: SEQ in decode.ended)
        await prefill.until(lambda: SEQ in prefill.ended)
        assert prefill.ended[SEQ].outcome == worker_pb2.OUTCOME_HANDED_OFF
        tokens = prefill.tokens[SEQ] | decode.tokens[SEQ]
        assert [tokens[i] for i in range(12)] == answer(PROMPT, GREEDY, 12)
        assert p.runner.faults == d.runner.faults == []


@pytest.mark.parametrize("secures", ["nobody", "another cluster"])
async def test_nothing_is_handed_to_or_by_a_worker_of_no_cluster_or_another_and_the_reason_is_told(
    authority: Authority, stranger: Authority, secures: str
) -> None:
    p = secured("p", "prefill", authority)
    if secures == "nobody":
        d, trust, reason = ScriptedWorker(worker_config("d", "decode")), PLAIN, "it speaks plain text, this side TLS"
    else:
        d, trust, reason = (
            secured("d", "decode", stranger),
            stranger.trust(Part.ROUTER),
            "not of this cluster's authority",
        )
    async with (
        running(p, d),
        SessionClient(p.server.address, EPOCH, authority.trust(Part.ROUTER)) as prefill,
        SessionClient(d.server.address, EPOCH, trust) as decode,
    ):
        prefill.send(peers=worker_pb2.Peers(decode=[d.peer]))
        decode.send(peers=worker_pb2.Peers(decode=[p.peer]))  # the other way round it is refused just the same
        await prefill.until(lambda: "d" in prefill.links and prefill.links["d"].state == "lost")
        await decode.until(lambda: "p" in decode.links and decode.links["p"].state == "lost")
        assert reason in prefill.links["d"].reason
        prefill.submit(request(SEQ, PROMPT, 12), d.peer)
        await prefill.until(lambda: SEQ in prefill.refused or SEQ in prefill.ended)
        assert SEQ not in decode.tokens


Message = TypeVar("Message")


async def once(message: Message, is_said: bool) -> AsyncIterator[Message]:
    """The message, or silence: who is refused hears so before it has said anything."""
    if not is_said:
        await asyncio.Event().wait()
    yield message
    await asyncio.Event().wait()


async def code_of(address: str, trust: PeerTrust, service: str, *, admitted: bool) -> grpc.StatusCode:
    """What comes of opening a Session, or a Link."""
    async with trust.channel(address, Part.WORKER, (("grpc.use_local_subchannel_pool", 1),)) as channel:
        opened = worker_pb2.Open(router_id="x", router_epoch=1, protocol_version=PROTOCOL_VERSION)
        hello = kv_pb2.LinkMessage(hello=kv_pb2.Hello(worker_id="x", epoch=1))
        try:
            if service == "Session":
                first = worker_pb2.SessionRequest(open=opened)
                await anext(aiter(worker_pb2_grpc.WorkerStub(channel).Session(once(first, admitted))))
            else:
                await anext(aiter(kv_pb2_grpc.KvLinkStub(channel).Link(once(hello, admitted))))
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_sessions_are_for_routers_and_controllers_and_links_for_workers(
    authority: Authority, stranger: Authority
) -> None:
    worker = secured("w", "both", authority)
    async with running(worker):
        for part in Part:
            for service, admitted in (("Session", part is not Part.WORKER), ("Link", part is Part.WORKER)):
                code = await code_of(worker.server.address, authority.trust(part), service, admitted=admitted)
                assert code is (grpc.StatusCode.OK if admitted else grpc.StatusCode.PERMISSION_DENIED), (part, service)
                for other in (stranger.trust(part), PLAIN):
                    code = await code_of(worker.server.address, other, service, admitted=False)
                    assert code is grpc.StatusCode.UNAVAILABLE, (part, service)


def test_a_worker_without_its_certificate_does_not_start(authority: Authority) -> None:
    (authority.of(Part.WORKER) / "tls.crt").unlink()
    worker = secured("w", "both", authority)
    with pytest.raises(ConfigError, match=r"tls\.crt cannot be used: No such file"):
        worker.server.start()
    worker.server.stop()


@pytest.mark.parametrize(("devices", "warns"), [("lo", False), ("all", True)])
async def test_a_worker_whose_kv_goes_over_a_network_says_that_it_must_be_closed(
    devices: str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = worker_config("w", "both", transport="ucx", ucx_tls="posix,sysv,self", ucx_net_devices=devices)
    async with running(ScriptedWorker(config)):
        assert ("kv_network_must_be_closed" in caplog.text) is warns
