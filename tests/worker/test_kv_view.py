"""What a worker counts and shows of its transfers: as much as was moved, and each failure once, by its reason."""

from __future__ import annotations

import pytest

from baton.v1 import kv_pb2, worker_pb2
from kv_transfer import receiver, sender
from kv_transfer.events import Committed, IncomingClosed, OutgoingClosed, TransportSettings
from kv_transfer.failure import FailureReason, failure_reason
from kv_transfer.pair import PairState, PairStatus
from tests.worker.scripted_worker import ScriptedWorker, running, worker_config
from tests.worker.session_client import SessionClient, request
from worker.hello import Refusal
from worker.kv_view import TransferFailures, kv_status
from worker.links import PeerLink, State

EPOCH = 0xABD


def seq(n: int) -> int:
    return EPOCH << 32 | n


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(31 * i + salt) % 900 + 20 for i in range(length)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("peer lost: no credit for 10 s", FailureReason.PEER_LOST),
        ("peer lost: not connected", FailureReason.PEER_LOST),
        (sender.LEASE_EXPIRED, FailureReason.EXPIRED),
        (receiver.EXPIRED, FailureReason.EXPIRED),
        (receiver.DAMAGED, FailureReason.DAMAGED),
        ("replaced", FailureReason.REPLACED),
        ("the ticket is of another epoch than the peer's", FailureReason.STALE_TICKET),
        ("something new", FailureReason.OTHER),
        *((reason.value, reason) for reason in FailureReason),
    ],
)
def test_every_reason_of_the_plane_and_the_roles_is_one_of_a_closed_set(text: str, reason: FailureReason) -> None:
    assert failure_reason(text) is reason


def test_only_failures_are_counted_and_each_once() -> None:
    failures = TransferFailures()
    for event in (
        OutgoingClosed(1, ""),
        OutgoingClosed(2, "no_ack"),
        OutgoingClosed(3, "peer lost: it died"),
        IncomingClosed(4, "peer lost: it died"),
        IncomingClosed(5, ""),
        Committed(6, 1, 10),
    ):
        failures.note(event)
    assert failures.totals() == {"no_ack": 1, "peer_lost": 2}


def test_each_link_is_shown_with_its_pair_and_a_refused_one_with_what_differs() -> None:
    peers = [worker_pb2.Peer(worker_id=name, epoch=n) for n, name in enumerate("ab")]
    good = PeerLink(">a", peers[0], opener=True, nonce=1, state=State.READY, transport="tcp/lo")
    bad = PeerLink(">b", peers[1], opener=True, nonce=2, state=State.REFUSED)
    bad.refuse(Refusal("rope", "x", "y"))
    pair = PairStatus(">a", 1, PairState.READY, "tcp/lo", "staged", 100, 7, 3, 1, 0.5, 0.0, 0.25)
    status = kv_status(TransportSettings("ucx", "1.2.3", {"TLS": "tcp"}), [good, bad], {">a": pair})
    assert (status.transport, status.version, dict(status.options)) == ("ucx", "1.2.3", {"TLS": "tcp"})
    first, second = status.pairs
    assert (first.link.peer.worker_id, first.mode, first.bytes_sent, first.num_sent) == ("a", "staged", 100, 3)
    assert first.sending_s == 0.25
    assert (second.link.state, second.link.field, second.link.mine, second.link.yours) == ("refused", "rope", "x", "y")
    assert second.bytes_sent == 0


async def test_bytes_counted_on_both_sides_are_those_of_the_handoffs_and_nothing_failed() -> None:
    p, d = ScriptedWorker(worker_config("p", "prefill")), ScriptedWorker(worker_config("d", "decode"))
    async with (
        running(p, d),
        SessionClient(p.server.address, EPOCH) as prefill,
        SessionClient(d.server.address, EPOCH) as decode,
    ):
        for n in range(6):
            prefill.submit(request(seq(n), prompt(50 + 40 * n, n), 4, ignore_eos=True), d.peer)
        await prefill.until(lambda: len(prefill.ended) == 6)
        await decode.until(lambda: len(decode.ended) == 6)
        assert {ended.outcome for ended in prefill.ended.values()} == {worker_pb2.OUTCOME_HANDED_OFF}
        assert all(ended.stats.exposed_transfer_ms > 0 for ended in prefill.ended.values())
        moved = sum(ended.stats.kv_bytes for ended in prefill.ended.values())
        assert moved > 0
        await prefill.until(lambda: prefill.load.num_leases == 0)
        await prefill.until(lambda: prefill.load.kv_bytes_sent == moved)
        await decode.until(lambda: decode.load.kv_bytes_received == moved)
        assert dict(prefill.load.kv_failures) == dict(decode.load.kv_failures) == {}
        assert prefill.load.num_slots == p.config.kv.num_slots  # of one pair


@pytest.mark.parametrize("reason", [FailureReason.NO_ACK, FailureReason.DEADLINE, FailureReason.PEER_LOST])
async def test_a_transfer_that_is_never_acknowledged_is_one_failure_with_its_reason(reason: FailureReason) -> None:
    patience_s = 0.3 if reason is FailureReason.NO_ACK else 60.0
    p = ScriptedWorker(worker_config("p", "prefill", transfer_timeout_s=patience_s))
    d = ScriptedWorker(worker_config("d", "decode"))
    async with running(p):
        d.server.start()
        try:
            swallowed = _swallow_commits(d)
            async with SessionClient(p.server.address, EPOCH) as prefill, SessionClient(d.server.address, EPOCH):
                ttl_ms = 1_000 if reason is FailureReason.DEADLINE else 60_000
                prefill.submit(request(seq(1), prompt(100), 8, ignore_eos=True), d.peer, ttl_ms)
                await prefill.until(lambda: bool(swallowed))
                if reason is FailureReason.PEER_LOST:
                    d.server.stop()
                await prefill.until(lambda: seq(1) in prefill.ended)
                assert prefill.ended[seq(1)].outcome == worker_pb2.OUTCOME_FAILED
                await prefill.until(lambda: dict(prefill.load.kv_failures) == {reason: 1})
                assert prefill.load.kv_transfers_failed == 1
                await prefill.until(lambda: prefill.load.active_blocks == prefill.load.num_leases == 0)
        finally:
            d.server.stop()


def _swallow_commits(worker: ScriptedWorker) -> list[int]:
    """Let Commit messages to a worker get lost; returns where their seqs are noted."""
    swallowed: list[int] = []
    role = worker.server._host._decode
    handle = role.on_link

    def on_link(peer: str, message: kv_pb2.LinkMessage) -> bool:
        if message.WhichOneof("message") == "commit":
            swallowed.append(message.commit.seq)
            return True
        return handle(peer, message)

    role.on_link = on_link  # type: ignore[method-assign]
    return swallowed
