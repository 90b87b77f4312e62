"""What a process can do that knows a worker's UCX address and has neither a pair nor a ticket. docs/security.md, "KV plane"."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from baton.config import KVTransferConfig
from kv_transfer.channel import Credit
from kv_transfer.ucx.channel import UcxChannel
from kv_transfer.ucx.memory import Region, RemoteRegion
from kv_transfer.ucx.transport import UcxTransport

PATIENCE_S = 30.0
FRAME_BYTES, NUM_SLOTS = 4096, 3
PAIR, GUESSED = 0x5EC0_0001, 0x5EC0_0002  # nonces


class Scene:
    """A pair, and a stranger who has opened an endpoint to one of its ends."""

    def __init__(self, tls: str) -> None:
        self.transports = [UcxTransport(KVTransferConfig(ucx_tls=tls)) for _ in range(3)]
        self.victim, self.friend, self.stranger = self.transports
        self.ring = self.open(self.victim, self.friend, PAIR, 0)
        self.friends = self.open(self.friend, self.victim, PAIR, 1)
        self.strangers = self.open(self.stranger, self.victim, GUESSED, 1)

    def open(self, mine: UcxTransport, theirs: UcxTransport, nonce: int, lane: int) -> UcxChannel:
        return mine.open_channel(theirs.address, nonce, lane, FRAME_BYTES, NUM_SLOTS)

    def run_until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, "it never came"
            for transport in self.transports:
                transport.progress(1_000.0)

    def close(self) -> None:
        for transport in self.transports:
            for channel in list(transport._open):
                channel.close()
            while transport._closing:
                transport.progress(0.0)
            transport.close()


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    made = Scene(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("scene", ["tcp", "posix"], indirect=True)
def test_messages_under_a_nonce_that_is_not_the_pairs_reach_no_slot_and_nobody(scene: Scene) -> None:
    scene.ring.post_frame(0)
    scene.ring.post_credit(0)
    before = bytes(scene.ring.ring_slot(0))
    scene.strangers.send_slot(0)[:6] = b"forged"
    scene.strangers.send_frame(0, 6)
    scene.strangers.send_credit(Credit(0, 1, accepted=True))
    scene.friends.send_credit(Credit(0, 7, accepted=True))  # comes after them
    heard: list[object] = []

    def heard_all() -> bool:
        heard.extend(scene.ring.poll())
        return bool(heard)

    scene.run_until(heard_all)
    for _ in range(1_000):
        scene.victim.progress(1_000.0)
    heard.extend(scene.ring.poll())
    assert heard == [Credit(0, 7, accepted=True)]
    assert bytes(scene.ring.ring_slot(0)) == before


@pytest.mark.parametrize("scene", ["tcp"], indirect=True)
def test_ucx_itself_checks_no_key_of_a_put_over_tcp_so_the_network_has_to_keep_strangers_out(scene: Scene) -> None:
    """The day this fails, UCX has learnt to: then the warning in docs/security.md can go."""
    memory, key = scene.victim.allocate(4096), scene.stranger.allocate(4096)
    target, own = scene.victim._regions[-1], scene.stranger._regions[-1]
    forged = RemoteRegion(scene.strangers._endpoint.handle, Region(target.address, target.nbytes, own.rkey))
    key[:6] = b"forged"
    put = forged.put(key[:6], 0)
    scene.run_until(lambda: bytes(memory[:6]) == b"forged")
    assert put is not None


@pytest.mark.parametrize(("tls", "listens"), [("posix,sysv,cma,self", False), ("tcp", True)])
def test_only_a_network_transport_opens_a_port_for_strangers(tls: str, listens: bool) -> None:
    before = listening_ports()
    transport = UcxTransport(KVTransferConfig(ucx_tls=tls))
    try:
        assert bool(listening_ports() - before) is listens
    finally:
        transport.close()


def listening_ports() -> set[int]:
    return {c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}
